"""An adopted model of transformers: tp=2 beside transformers' own, and what degree 1 costs.

*Step* (``tp``): a training step of a Llama, AdamW included, by ``MegatronStrategy(tp=2)`` in a
Trainer, beside the same model by transformers' own tensor parallelism (``tp_plan="auto"``, DTensor)
in a loop without any Trainer. Both take turns step by step in the same two processes, on the same
tokens. *Degree 1* (``one``): forward and backward of the adopted model beside the unmodified one,
and a step of it by the strategy beside plain Lightning's, in one process.

Figures are medians over rounds of the ratio of that round, by CPU time (of two ranks the slower).

    python -m benchmarks.adopted [--rounds 25] [--only tp] [--output benchmarks/results]
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import keep_freed_memory, parser, ratio, take_turns, write
from benchmarks.turns import Turn, runs_in_turns
from lightning_megatron import MegatronStrategy, adopt
from lightning_megatron.testing import WorkerPool

SIZES = {
    "h=64, 2 x 32 tokens": (64, 2, 32),
    "h=128, 2 x 64 tokens": (128, 2, 64),
    "h=256, 2 x 128 tokens": (256, 2, 128),
    "h=512, 2 x 256 tokens": (512, 2, 256),
}
"""Hidden size, samples, and tokens of each; the larger, the more of a step are products alike."""
LAYERS = 4


def _model(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class _Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model

    @override
    def training_step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=tokens, labels=tokens).loss
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _by_trainer(
    make: Callable[[], nn.Module], strategy: Any, devices: int, turn: Turn
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(make()), DataLoader(turn, batch_size=None))
    return trainer


def _by_transformers(path: str, turn: Turn) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_plan="auto", tp_size=2)
    model = LlamaForCausalLM.from_pretrained(path, distributed_config=config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for tokens in turn:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tp_job(path: str, size: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step of both runs on this rank."""
    torch.set_num_threads(1)
    hidden, samples, length = size
    tokens = torch.randint(0, 2048, (samples, length), generator=torch.Generator().manual_seed(0))

    def ours(turn: Turn) -> None:
        _by_trainer(lambda: adopt(_model(hidden)), MegatronStrategy(tp=2), 2, turn)

    runs = {"ours": ours, "transformers": lambda turn: _by_transformers(path, turn)}
    found = runs_in_turns(runs, tokens, rounds)
    return {name: by_clock["processor"] for name, by_clock in found.items()}


def tp_rows(rounds: int) -> list[dict[str, Any]]:
    """Lines of the table of steps under tp=2."""
    rows = []
    for label, size in SIZES.items():
        with tempfile.TemporaryDirectory() as path, WorkerPool(2, timeout=900) as pool:
            _model(size[0]).save_pretrained(path)  # type: ignore[operator]
            by_rank = pool.run(2, tp_job, path, size, rounds)
        slower = {
            name: [max(pair) for pair in zip(*(times[name] for times in by_rank), strict=True)]
            for name in by_rank[0]
        }
        rows.append(_row(f"step, tp=2, {label}", slower["ours"], slower["transformers"], "0.60"))
    return rows


def _row(what: str, ours: list[float], theirs: list[float], target: str) -> dict[str, Any]:
    return {
        "what": what,
        "ours": f"{statistics.median(ours) * 1e3:.1f} ms",
        "theirs": f"{statistics.median(theirs) * 1e3:.1f} ms",
        "ratio": ratio(ours, theirs),
        "target": target,
    }


def one_rows(rounds: int) -> list[dict[str, Any]]:
    """Lines of the table of degree 1."""
    rows = []
    for label, (hidden, samples, length) in SIZES.items():
        tokens = torch.randint(0, 2048, (samples, length))

        def step(model: nn.Module, tokens: Tensor = tokens) -> Callable[[], None]:
            def run() -> None:
                model(input_ids=tokens, labels=tokens).loss.backward()
                model.zero_grad()

            return run

        models = {"adopted": adopt(_model(hidden)), "unmodified": _model(hidden)}
        steps = {name: step(model) for name, model in models.items()}
        times = take_turns(steps, rounds, time.process_time)
        what = f"forward and backward, {label}"
        rows.append(_row(what, times["adopted"], times["unmodified"], "1.03"))

        def ours(turn: Turn, hidden: int = hidden) -> None:
            _by_trainer(lambda: adopt(_model(hidden)), MegatronStrategy(), 1, turn)

        def theirs(turn: Turn, hidden: int = hidden) -> None:
            _by_trainer(lambda: _model(hidden), "auto", 1, turn)

        found = runs_in_turns({"adopted": ours, "unmodified": theirs}, tokens, rounds)
        clocks = {name: by_clock["processor"] for name, by_clock in found.items()}
        rows.append(_row(f"step, {label}", clocks["adopted"], clocks["unmodified"], "1.03"))
    return rows


def main() -> None:
    """Take turns, print the tables and write them."""
    options = parser(__doc__, steps=1)
    options.add_argument("--rounds", type=int, default=25, help="turns of every variant")
    options.add_argument("--only", choices=["tp", "one"], help="one of the tables")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    tables = {
        "tp": ("An adopted model beside transformers' own tensor parallelism", tp_rows),
        "one": ("An adopted model at degree 1 beside the unmodified one", one_rows),
    }
    for name, (title, rows) in tables.items():
        if chosen.only in (None, name):
            print(write(f"adopted_{name}", title, rows(chosen.rounds), chosen.output))


if __name__ == "__main__":
    main()
