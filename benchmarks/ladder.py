"""What each option brings on one device, one after the other: speed and memory of a training step.

The rungs add up: every one keeps the options of those before it, but for selective recomputation,
which is measured without compilation (a compiled block decides itself what to recompute). All train
the same model on the same tokens in ``bf16-mixed`` with fused AdamW, beside Lightning's own
single-device strategy.

    MFU = tokens/s * FLOPs per token / peak       (PaLM, arXiv 2204.02311, appendix B)

FLOPs per token are `models.flops.training_flops_per_token`: matrix products of forward and backward
(three forwards), with all scores of attention counted (``causal="full"``) and nothing for what is
recomputed. The peak is that of dense bfloat16 (`monitoring.flops`; 989 TFLOP/s on H100 and H200),
for the FP8 rung too, so that its MFU may be compared with the others'. Peak memory is the
allocator's on a GPU; on a CPU it is not counted.

    python -m benchmarks.ladder --model 1b [--steps 20] [--seconds 540] [--output FOLDER]
    python -m benchmarks.ladder --model 8b        # in another call
    python -m benchmarks.ladder --model tiny      # on a CPU, in seconds: that it runs, no figures

The 8B shape has as many of its 32 layers as fit at 16 bytes a parameter with the eager rung's
activations beside them. A rung that fails says of what.

Machines with a GPU may be lent for minutes. The table is written again after every rung, no rung
begins that would probably end after ``--seconds``, and the next call with the same folder goes on
where this one has stopped (``--anew`` measures everything again).

FP8 halves at best the time of the products that it computes. The share of the FLOPs that runs in it
stands beside each rung: the head and what attention makes of keys and values do not, and by default
neither do the first and the last block. With a share ``a`` the speedup is below ``1 / (1 - a / 2)``
(Amdahl).
"""

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import WARMUP, Tokens, parser, write
from lightning_megatron import CompileConfig, Fp8Precision, LanguageModel, MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.flops import count_parameters, training_flops_per_token
from lightning_megatron.monitoring.flops import peak_flops
from lightning_megatron.parallel.activations.config import ActivationConfig, Mode

BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in float32."""
STATE_SHARE = 0.5
"""Part of the device's memory that these may take. A copy of the weights in bfloat16, about 1 GiB
of activations a layer and three copies of the logits in float32 need the rest."""
FAILED = "failed"
"""How the outcome of a rung begins that the next call tries again."""


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
    recompute: Mode = "none"
    compile: CompileConfig = CompileConfig()
    chunked_loss: bool = False
    fp8: int | None = None
    """Blocks at either end of the stack that are left in bfloat16; None: all of them."""


def rungs(tiny: bool) -> list[Rung]:
    """The ladder; a tiny one compiles without generating code, which takes longer than to train."""
    compiled = CompileConfig(scope="block", backend="eager" if tiny else "inductor")
    steps: list[tuple[str, dict[str, Any]]] = [
        ("+ compile, no recompute", {"compile": compiled}),
        ("+ chunked loss", {"chunked_loss": True}),
        ("+ FP8", {"fp8": 1}),
        ("+ FP8 in the first and last block", {"fp8": 0}),
    ]
    options: dict[str, Any] = {}
    found = [Rung(name="eager"), Rung(name="+ selective recompute", recompute="selective")]
    for name, more in steps:
        options = options | more
        found.append(Rung(name=name, **options))
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
    activations = ActivationConfig(recompute=rung.recompute)
    strategy = MegatronStrategy(activations=activations, compile=rung.compile)
    if rung.fp8 is not None:
        plugin = Fp8Precision(keep_first=rung.fp8, keep_last=rung.fp8)
        return {"plugins": [plugin], "strategy": strategy}
    return {"precision": "bf16-mixed", "strategy": strategy}


def flops_per_token(load: Workload) -> float:
    """FLOPs of training on one token."""
    return training_flops_per_token(load.config, load.length, causal="full")


def fp8_share(load: Workload, rung: Rung | None) -> float:
    """Part of the FLOPs of a step that are products in FP8.

    >>> deep = workload("1b", 0)
    >>> round(fp8_share(deep, Rung(name="", fp8=1)), 2)
    0.57
    """
    if rung is None or rung.fp8 is None:
        return 0.0
    config = load.config
    blocks = max(config.num_layers - 2 * rung.fp8, 0)
    return 6 * count_parameters(config).block * blocks / flops_per_token(load)


def row(
    model: str, load: Workload, rung: Rung | None, found: Any, peak: float | None
) -> dict[str, Any]:
    """A line of the table; ``found`` is what `climb` returned, or why there is nothing."""
    header = {
        "model": f"{model}, {load.config.num_layers} layers",
        "rung": name_of(rung),
        "in FP8": f"{100 * fp8_share(load, rung):.0f} %",
    }
    if isinstance(found, str):
        blank = dict.fromkeys(("tokens/s", "TFLOP/s", "MFU", "peak GiB", "last loss"), "-")
        return {**header, **blank, "ms/step": found}
    seconds, peak_bytes, loss = found
    rate = load.batch_size * load.length / seconds
    flops = rate * flops_per_token(load)
    return {
        **header,
        "tokens/s": round(rate),
        "TFLOP/s": round(flops / 1e12, 4 if peak is None else 1),
        "MFU": "-" if peak is None else f"{100 * flops / peak:.1f} %",
        "peak GiB": round(peak_bytes / 2**30, 2) if peak_bytes else "-",
        "last loss": round(loss, 3),
        "ms/step": round(1e3 * seconds, 2),
    }


def name_of(rung: Rung | None) -> str:
    """As the table calls it."""
    return "plain Lightning" if rung is None else rung.name


def measure(
    model: str,
    steps: int,
    known: Sequence[dict[str, Any]] = (),
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """The rungs of one model in their order, each as soon as it has run.

    Args:
        model: its name.
        steps: to train on each rung.
        known: lines of an earlier call, which are not measured again.
        seconds: after the first, no rung begins that would end later, did it take as long as the
            longest so far.
        clock: of these seconds.
    """
    gpu = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else 0
    peak = peak_flops(torch.cuda.get_device_name()) if gpu else None
    load = workload(model, memory)
    done = measured(known)
    start, longest = clock(), 0.0
    for rung in (None, *rungs(model == "tiny")):
        if name_of(rung) in done:
            yield done[name_of(rung)]
            continue
        begun = clock()
        if longest and begun - start + longest > seconds:
            return
        yield row(model, load, rung, outcome(load, rung, steps), peak)
        gc.collect()
        torch.compiler.reset()
        if gpu:
            torch.cuda.empty_cache()
        longest = max(longest, clock() - begun)


def outcome(load: Workload, rung: Rung | None, steps: int) -> Any:
    """What `climb` returns, or why there is nothing; the other rungs are measured all the same."""
    try:
        return climb(load, rung, steps)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        if not torch.cuda.is_available():
            raise
        traceback.print_exc()
        return f"{FAILED}: {type(error).__name__}"


def measured(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that need not be measured again, by rung."""
    return {line["rung"]: line for line in lines if FAILED not in str(line["ms/step"])}


def earlier(name: str, title: str, output: Path) -> list[dict[str, Any]]:
    """Lines that an earlier call has written for the same device, steps and torch."""
    path = output / f"{name}.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    same = data["title"] == title and data["machine"]["torch"] == torch.__version__
    return list(data["rows"]) if same else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    options = parser(__doc__, steps=20)
    options.add_argument("--model", choices=("1b", "8b", "tiny"), default="1b")
    options.add_argument("--seconds", type=float, default=540.0, help="time to begin rungs in")
    options.add_argument("--anew", action="store_true", help="measure again what is known")
    given = options.parse_args(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no figures"
    name = f"ladder_{given.model}"
    title = f"Options added one by one, {device}, bf16-mixed, {given.steps} steps"
    known = [] if given.anew else earlier(name, title, given.output)
    rows: list[dict[str, Any]] = []
    table = ""
    for line in measure(given.model, given.steps, known, given.seconds):
        rows.append(line)
        table = write(name, title, rows, given.output, threads=torch.get_num_threads())
        print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    print(table)
    left = 1 + len(rungs(given.model == "tiny")) - len(rows)
    if left:
        print(f"{left} rungs are left; the same call goes on with them")


if __name__ == "__main__":
    main()
