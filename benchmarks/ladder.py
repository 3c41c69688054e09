"""What each option brings on one device, one after the other: speed and memory of a training step.

The rungs add up: every one keeps the options of those before it, but for selective recomputation,
which is measured without compilation (a compiled block decides itself what to recompute). All train
the same model on the same tokens in ``bf16-mixed`` with fused AdamW, beside Lightning's own
single-device strategy.

    MFU = tokens/s * FLOPs per token / peak       (PaLM, arXiv 2204.02311, appendix B)

FLOPs per token are `models.flops.training_flops_per_token`: matrix products of forward and backward
(three forwards), with all scores of attention counted (``causal="full"``) and nothing for what is
recomputed. The peak is that of dense bfloat16 (`hardware.py`; 989 TFLOP/s on H100 and H200), for
the FP8 rung too, so that its MFU may be compared with the others'. Peak memory is the allocator's
on a GPU; on a CPU it is not counted.

    python -m benchmarks.ladder [--model 1b 8b] [--steps 20]
    python -m benchmarks.ladder --model tiny      # on a CPU, in seconds: that it runs, no figures

The 8B shape has as many of its 32 layers as fit at 16 bytes a parameter with the eager rung's
activations beside them. A rung whose option this version does not have is skipped by name, one that
fails says of what, and the table is written again after every rung, so that a run that is cut off
keeps what it had measured.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import WARMUP, Tokens, parser, report, write
from lightning_megatron import Fp8Precision, LanguageModel, MegatronStrategy
from lightning_megatron.hardware import peak_flops
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.flops import count_parameters, training_flops_per_token
from lightning_megatron.parallel.memory import MemoryConfig, Mode

BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in float32."""
STATE_SHARE = 0.6
"""Part of the device's memory that these may take; activations need the rest."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch."""

    config: TransformerConfig
    batch_size: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Options of one run, added to those of the rungs before."""

    name: str
    memory: Mapping[str, Any]
    chunked_loss: bool = False
    fp8: bool = False

    def lacks(self) -> str | None:
        """The option that this version does not have."""
        known = {field.name for field in fields(MemoryConfig)}
        for name, value in self.memory.items():
            modes = get_args(Mode) if name == "recompute" else (value,)
            if name not in known or value not in modes:
                return f"{name}={value}"
        return None


def rungs(tiny: bool) -> list[Rung]:
    """The ladder; a tiny one compiles without generating code, which takes longer than to train."""
    compiled = {"compile": "block"} | ({"compile_backend": "eager"} if tiny else {})
    selective = {"recompute": "selective"}
    steps: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("eager", {}, {}),
        ("+ selective recompute", selective, {}),
        ("+ compile, no recompute", compiled, {}),
        ("+ chunked loss", {}, {"chunked_loss": True}),
        ("+ FP8", {}, {"fp8": True}),
    ]
    memory: dict[str, Any] = {}
    others: dict[str, Any] = {}
    found = []
    for name, more_memory, more in steps:
        others = others | more
        memory = more_memory or memory
        found.append(Rung(name=name, memory=memory, **others))
    return found


def workload(name: str, memory: float) -> Workload:
    """The model of that name, of as many layers as ``memory`` bytes hold."""
    if name == "tiny":
        config = TransformerConfig(hidden_size=64, num_layers=3, num_heads=4)
        return Workload(config=config, batch_size=2, length=32)
    if name == "1b":
        config = TransformerConfig.preset(
            "llama3-8b", hidden_size=2048, num_layers=16, mlp_size=8192, tied_embeddings=True
        )
        return Workload(config=config, batch_size=2, length=4096)
    whole = TransformerConfig.preset("llama3-8b")
    count = count_parameters(whole)
    rest = STATE_SHARE * memory / BYTES_PER_PARAMETER - (count.embedding + count.head)
    layers = max(1, min(whole.num_layers, int(rest / count.block)))
    config = TransformerConfig.preset("llama3-8b", num_layers=layers)
    return Workload(config=config, batch_size=1, length=4096)


class Model(LanguageModel):
    """The recipes' module with fused AdamW."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Clock(pl.Callback):
    """Seconds of each step, to the end of its work on the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._last = _now()

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(_now() - self._last)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def climb(load: Workload, rung: Rung | None, steps: int) -> tuple[float, int, float]:
    """Train; median seconds of a step, peak bytes, last loss. None: plain Lightning."""
    gpu = torch.cuda.is_available()
    plain: dict[str, Any] = {"precision": "bf16-mixed", "strategy": "auto"}
    options = plain if rung is None else _options(rung)
    pl.seed_everything(0, verbose=False)  # of the strategy's own streams, too
    model = Model(load.config, chunked_loss=rung is not None and rung.chunked_loss)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    data = Tokens(load.batch_size * steps, load.length, load.config.vocab_size)
    trainer.fit(model, DataLoader(data, batch_size=load.batch_size))
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    loss: Tensor = trainer.callback_metrics["train_loss"]
    return statistics.median(clock.seconds[min(WARMUP, steps - 1) :]), peak, loss.item()


def _options(rung: Rung) -> dict[str, Any]:
    strategy = MegatronStrategy(memory=MemoryConfig(**rung.memory))
    if rung.fp8:
        return {"plugins": [Fp8Precision()], "strategy": strategy}
    return {"precision": "bf16-mixed", "strategy": strategy}


def row(model: str, load: Workload, name: str, found: Any, peak: float | None) -> dict[str, Any]:
    """A line of the table; ``found`` is what `climb` returned, or why there is nothing."""
    header = {"model": f"{model}, {load.config.num_layers} layers", "rung": name}
    if isinstance(found, str):
        blank = dict.fromkeys(("tokens/s", "TFLOP/s", "MFU", "peak GiB", "last loss"), "-")
        return {**header, **blank, "ms/step": found}
    seconds, peak_bytes, loss = found
    rate = load.batch_size * load.length / seconds
    flops = rate * training_flops_per_token(load.config, load.length, causal="full")
    return {
        **header,
        "tokens/s": round(rate),
        "TFLOP/s": round(flops / 1e12, 4 if peak is None else 1),
        "MFU": "-" if peak is None else f"{100 * flops / peak:.1f} %",
        "peak GiB": round(peak_bytes / 2**30, 2) if peak_bytes else "-",
        "last loss": round(loss, 3),
        "ms/step": round(1e3 * seconds, 2),
    }


def measure(model: str, steps: int) -> Iterator[dict[str, Any]]:
    """The rungs of one model, each as soon as it has run."""
    gpu = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else 0
    peak = peak_flops(torch.cuda.get_device_name()) if gpu else None
    load = workload(model, memory)
    for rung in (None, *rungs(model == "tiny")):
        name = "plain Lightning" if rung is None else rung.name
        yield row(model, load, name, outcome(load, rung, steps), peak)
        gc.collect()
        torch.compiler.reset()
        if gpu:
            torch.cuda.empty_cache()


def outcome(load: Workload, rung: Rung | None, steps: int) -> Any:
    """What `climb` returns, or why there is nothing; the other rungs are measured all the same."""
    lack = None if rung is None else rung.lacks()
    if lack is not None:
        return f"skipped: {lack} is not there"
    try:
        return climb(load, rung, steps)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        if not torch.cuda.is_available():
            raise
        traceback.print_exc()
        return f"failed: {type(error).__name__}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    options = parser(__doc__, steps=20)
    options.add_argument("--model", nargs="+", choices=("1b", "8b", "tiny"), default=["1b", "8b"])
    given = options.parse_args(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no figures"
    title = f"Options added one by one, {device}, bf16-mixed"
    rows: list[dict[str, Any]] = []
    for line in (found for model in given.model for found in measure(model, given.steps)):
        rows.append(line)
        write("ladder", title, rows, given.output)
        print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    report("ladder", title, rows, given.output)


if __name__ == "__main__":
    main()
