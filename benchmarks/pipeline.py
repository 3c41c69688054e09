"""1F1B in two and four processes against ``torch.distributed.pipelining``.

Both run the same stages (blocks of a transformer, from the same weights) on the same microbatches,
one round of one after one round of the other; a step is forward and backward of all microbatches,
without an optimizer (target: at most 1.0). The gradients are compared before timing.

The bubble is measured with stages that sleep instead of computing, because four processes on two
cores have no idle time to show: forward and backward take a fixed time each, so the step should
take ``(m + p - 1) (f + b)``, and what it takes longer is the runner and its transfers.

    python -m benchmarks.pipeline [--rounds 8] [--steps 6]
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness import arguments, interleave, report, slowest
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import build_trunk
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.pipeline.schedule import make_schedule
from lightning_megatron.pipeline.sequential import PipelineSequential
from lightning_megatron.pipeline.simulate import simulate
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

MICROBATCHES = 8
BLOCKS = 4
SHAPES = {64: (2, 32), 256: (2, 64)}
"""Samples of a microbatch and sequence length, by hidden size."""
FORWARD_S, BACKWARD_S = 0.010, 0.020


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Sleeper(nn.Module):
    """Takes the time of a stage without using a core."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.scale)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _items(hidden: int, count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    if not hidden:
        return [Sleeper() for _ in range(count)]
    config = TransformerConfig(hidden_size=hidden, num_layers=count, num_heads=4)
    return list(build_trunk(config).layers)


def _ours(
    topology: Topology, items: list[nn.Module], x: Tensor, target: Tensor
) -> tuple[nn.Module, Callable[[], Any]]:
    pp, per_stage = topology.pp, len(items) // topology.pp.size
    trunk = PipelineSequential(layers=items)
    trunk.keep([range(i * per_stage, (i + 1) * per_stage) for i in range(pp.size)], pp.rank)
    runner = Pipeline(topology, trunk, "1f1b")
    inputs, targets = x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)

    def step(index: int) -> Tensor:
        return _loss(trunk(inputs[index]), targets[index])

    return trunk, lambda: runner.train(
        step, lambda loss, _: loss / MICROBATCHES, MICROBATCHES, lambda _: None
    )


def _peer(
    topology: Topology, items: list[nn.Module], x: Tensor, target: Tensor
) -> tuple[nn.Module, Callable[[], Any]]:
    pp, per_stage = topology.pp, len(items) // topology.pp.size
    mine = nn.Sequential(*items[pp.rank * per_stage : (pp.rank + 1) * per_stage])
    stage = PipelineStage(mine, pp.rank, pp.size, torch.device("cpu"), group=pp.group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=_loss)
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    args = (x,) if first else ()
    return mine, lambda: schedule.step(*args, **({"target": target} if last else {}))


def job(hidden: int, rounds: int, steps: int) -> dict[str, float]:
    """Seconds per step of both on this rank."""
    dist.init_process_group("gloo")
    pp = dist.get_world_size()
    topology = Topology(Degrees(pp=pp), torch.device("cpu"))
    samples, length = SHAPES.get(hidden, (2, 32))
    shape = (samples * MICROBATCHES, length, hidden or 16)
    x, target = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    blocks = BLOCKS if hidden else pp
    sides = {
        "ours": _ours(topology, _items(hidden, blocks), x, target),
        "torch": _peer(topology, _items(hidden, blocks), x, target),
    }
    for _, step in sides.values():
        step()
    for mine, theirs in zip(*(m.parameters() for m, _ in sides.values()), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)

    def timed(step: Callable[[], Any]) -> list[float]:
        seconds = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds

    return interleave({name: lambda s=step: timed(s) for name, (_, step) in sides.items()}, rounds)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=8, steps=6)
    rows = []
    with WorkerPool(4, timeout=900) as pool:
        for pp in (2, 4):
            for hidden in (*SHAPES, 0):
                times = slowest(pool.run(pp, job, hidden, options.rounds, options.steps))
                schedule = make_schedule("1f1b", pp, MICROBATCHES)
                ideal = simulate(schedule, forward=FORWARD_S, backward=BACKWARD_S)
                rows.append(
                    {
                        "pp": pp,
                        "stages": f"hidden {hidden}" if hidden else "sleeping",
                        "ours (ms)": round(1e3 * times["ours"], 2),
                        "torch (ms)": round(1e3 * times["torch"], 2),
                        "ratio": round(times["ours"] / times["torch"], 3),
                        "target": 1.0,
                        "ideal (ms)": "" if hidden else round(1e3 * ideal.step_time, 2),
                        "ideal bubble": "" if hidden else round(ideal.bubble_fraction, 3),
                        "our bubble": ""
                        if hidden
                        else round(1 - MICROBATCHES * (FORWARD_S + BACKWARD_S) / times["ours"], 3),
                    }
                )
    title = f"1F1B against torch.distributed.pipelining, {MICROBATCHES} microbatches"
    report("pipeline", title, rows, options.output)


if __name__ == "__main__":
    main()
