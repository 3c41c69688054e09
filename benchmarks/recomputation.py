"""What recomputing activations saves, and what it costs.

Two numbers of each mode on one process: bytes of the activations that are alive when the forward of
a batch ends (and the most that are alive at any time of the step, gradients included), counted by a
tracker of tensor storages, on a GPU by its allocator; and the time of a forward and backward,
measured without it (on CPUs, of the one process on the processor, which other load does not change
much), while modes take turns. Published (Korthikanti et al., arXiv 2205.05198): a layer keeps
``s b h (34 + 5 a s / h)`` bytes in 16 bits; without the ``s x s`` tensors of attention that is not
fused, ``34 s b h``, at a few percent of time; together with sequence parallelism about a fifth of
all. The time is that of a large network: what is computed again is ``s / (6 h + s)`` of a block's
operations, 3 % for GPT-3 and 25 % here, and more of the time on a CPU.

What is offloaded counts as gone, as on a GPU; on a CPU copies cost what they cost, as there is no
other stream.

    python -m benchmarks.recomputation             # --rounds 0 leaves the times out

Adaptive recomputation has a table of its own (`benchmarks.adaptive`).
"""

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import Self

from benchmarks.harness import (
    Model,
    Tokens,
    arguments,
    fit,
    keep_freed_memory,
    ratio,
    report,
    take_turns,
)
from lightning_megatron import ActivationConfig, MegatronStrategy
from lightning_megatron._torch.graphs import TorchDispatchMode, tree_flatten
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.parallel.activations.config import blocks_to_recompute
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.parallel.forward_wrapper import outermost
from lightning_megatron.testing import WorkerPool

LENGTH = 512
DROPOUT = TransformerConfig(
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    max_seq_len=LENGTH,
    activation="gelu",
    norm="layernorm",
    dropout=0.1,
    attention_dropout=0.1,
)
FUSED = replace(DROPOUT, dropout=0.0, attention_dropout=0.0)
CONFIGS = {"with dropout, s x s weights": DROPOUT, "fused": FUSED}
MODES: dict[str, ActivationConfig] = {
    "none": ActivationConfig(),
    "selective": ActivationConfig(recompute="selective"),
    "selective, keep matmul": ActivationConfig(recompute="selective", keep=["matmul"]),
    "selective, attention only": ActivationConfig(recompute="full", blocks=["*.attention"]),
    "full, every 2nd": ActivationConfig(recompute="full", every=2),
    "full": ActivationConfig(recompute="full"),
    "full, groups of 2": ActivationConfig(recompute="full", group=2),
    "none, offloaded": ActivationConfig(offload=True),
    "full, offloaded": ActivationConfig(recompute="full", offload=True),
}


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made since it began and are alive.

    Args:
        elsewhere: how many of them would not be on a device; asked whenever there are more.
    """

    def __init__(self, elsewhere: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()
        self._elsewhere = elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(s) for s in _storages((args, kwargs))}
        for storage in _storages(result):
            key = id(storage)  # torch keeps one Python object for a storage as long as it lives
            if key in self._known or key in given:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now - self._elsewhere())
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Allocated(AbstractContextManager["Allocated"]):
    """The same of a GPU, by its allocator."""

    most = 0

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None:
        self.most = torch.cuda.max_memory_allocated() - self._before

    @property
    def now(self) -> int:
        """What is taken since it began."""
        return torch.cuda.memory_allocated() - self._before


def _storages(tree: Any) -> list[Any]:
    return [t.untyped_storage() for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]


class Tracked(Model):
    """Notes what is alive when the forward of its second batch ends."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.kept = self.most = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            return super().training_step(batch, batch_idx)
        offloader = getattr(outermost(self.trunk.layers[0]), "_offloader", None)
        elsewhere = (lambda: offloader.held) if offloader else (lambda: 0)
        on_gpu = self.device.type == "cuda"
        self.tracker = Allocated() if on_gpu else LiveBytes(elsewhere)
        self.tracker.__enter__()
        loss = super().training_step(batch, batch_idx)
        self.kept = self.tracker.now - (0 if on_gpu else elsewhere())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kept:
            self.tracker.__exit__(None, None, None)
            self.most = self.tracker.most


def count(
    config: TransformerConfig, options: Mapping[str, Any], accelerator: str = "cpu"
) -> tuple[int, int]:
    """Bytes alive after the forward, and the most of the step, of this rank."""
    module = Tracked(config)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=2 if "tp" in options else 1,
        strategy=MegatronStrategy(**options),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(2, LENGTH, 256)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
    return module.kept, module.most


def stepper(
    config: TransformerConfig, memory: ActivationConfig, length: int, accelerator: str = "cpu"
) -> Callable[[], None]:
    """Forward and backward of a model whose blocks recompute, as often as called."""
    module = Model(config)
    fit(module, MegatronStrategy(activations=memory), 1, 1, length, accelerator=accelerator)
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    # After a run blocks are as they were before it.
    transform_blocks(module, blocks_to_recompute(module, memory), memory, device)
    return step_of(module, length, accelerator)


def step_of(module: Model, length: int, accelerator: str = "cpu") -> Callable[[], None]:
    """Forward and backward of a model, as often as called."""
    device = "cuda" if accelerator == "gpu" else "cpu"
    module.to(device)  # Lightning takes it off a GPU in the end
    tokens = torch.randint(256, (1, length + 1), device=device)

    def step() -> None:
        module.training_step((tokens[:, :-1], tokens[:, 1:]), 0).backward()
        for p in module.parameters():
            p.grad = None

    return step


def times(config: TransformerConfig, rounds: int, accelerator: str) -> dict[str, list[float]]:
    """Seconds of every step by mode: of a CPU, those of this process on the processor."""
    keep_freed_memory()
    steps = {name: stepper(config, memory, LENGTH, accelerator) for name, memory in MODES.items()}
    return take_turns(steps, rounds, _device_time if accelerator == "gpu" else time.process_time)


def _device_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def table(kind: str, rounds: int, run: Callable[..., Any], accelerator: str) -> list[Any]:
    """The rows of one kind of attention.

    Args:
        kind: key in `CONFIGS`.
        rounds: of the times; none are taken if 0.
        run: calls a function with arguments in so many processes; what the first one returned.
        accelerator: as the Trainer names it.
    """
    config = CONFIGS[kind]
    alone = {m: run(1, count, config, {"activations": c}, accelerator) for m, c in MODES.items()}
    split = {}
    if accelerator == "cpu":
        layout = {"tp": 2, "sequence_parallel": True}
        split = {m: run(2, count, config, {"activations": c, **layout}) for m, c in MODES.items()}
    seconds = run(1, times, config, rounds, accelerator) if rounds else {}
    rows = []
    for mode, (kept, most) in alone.items():
        row: dict[str, Any] = {
            "attention": kind,
            "recompute": mode,
            "MiB kept by the forward": round(kept / 2**20, 1),
            "less by": round(alone["none"][0] / kept, 2),
            "MiB at most": round(most / 2**20, 1),
        }
        if split:
            row["with tp=2, sp"] = round(split[mode][0] / 2**20, 1)
            row["less in all by"] = round(alone["none"][0] / split[mode][0], 2)
        if seconds:
            row["step time, to none"] = ratio(seconds[mode], seconds["none"])
        rows.append(row)
    return rows


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=8, steps=1)
    if torch.cuda.is_available():
        rows = [
            row
            for kind in CONFIGS
            for row in table(kind, options.rounds, lambda _, job, *given: job(*given), "gpu")
        ]
        device = torch.cuda.get_device_name()
    else:
        with WorkerPool(2, timeout=600) as pool:
            rows = [
                row
                for kind in CONFIGS
                for row in table(
                    kind,
                    options.rounds,
                    lambda world, job, *given: pool.run(world, job, *given)[0],
                    "cpu",
                )
            ]
        device = "CPU"
    title = f"Activations of 4 layers, h=256, 8 heads, 1 x 512 tokens, float32, {device}"
    report("recomputation", title, rows, options.output)


if __name__ == "__main__":
    main()
