"""Pipeline schedules against their simulation and against ``torch.distributed.pipelining``.

*real*: both runners run the same stages (blocks of a transformer, from the same weights) on the
same microbatches, one round of one after one round of the other, for the schedules that both have;
a step is forward and backward of all microbatches, without an optimizer (target: at most 1.0). The
gradients are compared before timing. Beside it stands the peak of what autograd keeps on the rank
that keeps most.

*sleeping*: stages that sleep instead of computing, because several processes on two cores have no
idle time to show: the bubble of the step against the one that the simulator gives for the times
that the stages really took (target: the step takes at most 1.1 of the simulated time).

*overhead*: with stages that compute next to nothing, the processor time of a step spent neither in
the stages and the loss, nor in autograd, nor in the channels, per action (target: 60 us).

    python -m benchmarks.pipeline [--rounds 4] [--steps 4]
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peers

from benchmarks.harness import arguments, interleave, report, slowest
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import build_trunk
from lightning_megatron.pipeline.links import Links
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

MICROBATCHES = 8
BLOCKS = 8
SHAPES = {64: (2, 32), 256: (2, 64)}
"""Samples of a microbatch and sequence length, by hidden size."""
SLEEP_S = 0.02
"""Forward, input part and weight part of a rank's share of the network."""
PEERS: dict[str, Any] = {
    "gpipe": peers.ScheduleGPipe,
    "1f1b": peers.Schedule1F1B,
    "interleaved": peers.ScheduleInterleaved1F1B,
    "breadth-first": peers.ScheduleLoopedBFS,
    "zbv": peers.ScheduleZBVZeroBubble,
    "dualpipev": peers.ScheduleDualPipeV,
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: "Sleeper") -> Tensor:
        time.sleep(layer.seconds)
        ctx.layer = layer
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, (scale,) = ctx.layer, ctx.saved_tensors
        time.sleep(layer.seconds)

        def weights() -> list[Tensor]:
            time.sleep(layer.seconds)
            return [torch.zeros_like(scale)]

        if layer.wgrad_queue is not None and layer.wgrad_queue.collecting:
            layer.wgrad_queue.add([scale], weights)
            return gradient, None, None
        return gradient, weights()[0], None


class Sleeper(ParallelLayer):
    """Takes the time of a stage without using a core.

    Args:
        seconds: of the forward and of each half of the backward.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.scale, self)
        return result


class Silent:
    """No data parallelism."""

    def before_forward(self, stage: int) -> None:
        """Nothing."""

    def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
        """Nothing."""

    def after_weights(self, stage: int, *, last: bool) -> None:
        """Nothing."""


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _blocks(hidden: int) -> list[nn.Module]:
    torch.manual_seed(0)
    config = TransformerConfig(hidden_size=hidden, num_layers=BLOCKS, num_heads=4)
    return list(build_trunk(config).layers)


def _placement(name: str, pp: int) -> tuple[int, ...]:
    return make_schedule(name, pp, MICROBATCHES).stage_ranks


def _ours(
    topology: Topology, items: list[nn.Module], x: Tensor, target: Tensor, name: str
) -> tuple[nn.Module, Callable[[], Any], Pipeline]:
    pp, placement = topology.pp, _placement(name, topology.pp.size)
    size = len(items) // len(placement)
    trunk = PipelineSequential(layers=items)
    trunk.keep(
        [range(i * size, (i + 1) * size) for i in range(len(placement))],
        [stage for stage, rank in enumerate(placement) if rank == pp.rank],
    )
    runner = Pipeline(topology, trunk, partial(make_schedule, name, pp.size), placement)
    inputs, targets = x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)

    def step(index: int, to_end: bool) -> Tensor:
        return _loss(trunk(inputs[index]), targets[index])

    def run() -> Any:
        return runner.train(step, lambda loss, _: loss / MICROBATCHES, MICROBATCHES, Silent())

    return trunk, run, runner


def _peer(
    topology: Topology, items: list[nn.Module], x: Tensor, target: Tensor, name: str
) -> tuple[nn.Module, Callable[[], Any]]:
    pp, placement = topology.pp, _placement(name, topology.pp.size)
    size, count = len(items) // len(placement), len(placement)
    mine = [stage for stage, rank in enumerate(placement) if rank == pp.rank]
    parts = [nn.Sequential(*items[s * size : (s + 1) * size]) for s in mine]
    stages = [
        PipelineStage(part, s, count, torch.device("cpu"), group=pp.group)
        for part, s in zip(parts, mine, strict=True)
    ]
    given = stages if count > pp.size else stages[0]
    schedule = PEERS[name](given, MICROBATCHES, loss_fn=_loss)
    args = (x,) if 0 in mine else ()
    kwargs = {"target": target} if count - 1 in mine else {}
    return nn.ModuleList(parts), lambda: schedule.step(*args, **kwargs)


@contextmanager
def _counting_saved() -> Iterator[list[int]]:
    """Bytes that autograd keeps: ``[now, peak]``."""
    count = [0, 0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            count[0] += self.size
            count[1] = max(count)

        def __del__(self) -> None:
            count[0] -= self.size

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else Kept(tensor)

    def unpack(kept: Any) -> Tensor:
        tensor: Tensor = kept.tensor if isinstance(kept, Kept) else kept
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield count


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _topology() -> Topology:
    dist.init_process_group("gloo")
    return Topology(Degrees(pp=dist.get_world_size()), torch.device("cpu"))


def _data(hidden: int) -> tuple[Tensor, Tensor]:
    samples, length = SHAPES.get(hidden, (2, 32))
    shape = (samples * MICROBATCHES, length, hidden)
    x, target = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    return x, target


def real_job(name: str, hidden: int, rounds: int, steps: int) -> dict[str, float]:
    """Seconds per step of both runners on this rank, and MiB that each keeps."""
    topology = _topology()
    x, target = _data(hidden)
    sides = {
        "ours": _ours(topology, _blocks(hidden), x, target, name)[:2],
        "torch": _peer(topology, _blocks(hidden), x, target, name),
    }
    for _, step in sides.values():
        step()
    # Now, as torch's runner divides what it has accumulated once more with every step.
    for mine, theirs in zip(*(m.parameters() for m, _ in sides.values()), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        error = float((mine.grad - theirs.grad).norm() / theirs.grad.norm())
        assert error < 1e-4, error
    found = {}
    for side, (_, step) in sides.items():
        with _counting_saved() as count:
            step()
        found[f"{side} MiB"] = count[1] / 2**20
    runs = {side: partial(_timed, step, steps) for side, (_, step) in sides.items()}
    return interleave(runs, rounds) | found


def sleeping_job(name: str, rounds: int) -> tuple[float, float, float]:
    """With stages that sleep: seconds per step, bubble, and bubble simulated with the same times.

    The times are those that the stages really took, as a sleep lasts a little longer than asked.
    """
    topology = _topology()
    stages = len(_placement(name, topology.pp.size))
    seconds = SLEEP_S * topology.pp.size / stages
    x, target = _data(16)
    items: list[nn.Module] = [Sleeper(seconds) for _ in range(stages)]
    _, step, runner = _ours(topology, items, x, target, name)
    step()
    found = []
    for _ in range(rounds):
        runner.measure(True)
        spent = _timed(step, 1)[0]
        measured = runner.bubble()
        assert measured is not None
        found.append((spent, measured.fraction, measured.ideal))
    times, fractions, ideals = zip(*found, strict=True)
    return statistics.median(times), statistics.median(fractions), statistics.median(ideals)


def overhead_job(name: str, steps: int) -> float:
    """Processor seconds per action outside the stages, the loss, autograd and the channels."""
    topology = _topology()
    stages = len(_placement(name, topology.pp.size))
    x, target = _data(4)
    inside = 0.0

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                inside += time.thread_time() - start

        return timed

    items: list[nn.Module] = [nn.Linear(4, 4) for _ in range(stages)]
    trunk, step, _ = _ours(topology, items, x, target, name)
    for items in trunk.stage_items:
        items.forward = outside(items.forward)
    actions = len(make_schedule(name, topology.pp.size, MICROBATCHES).row(topology.pp.rank))
    step()
    found = []
    with (
        mock.patch.dict(globals(), {"_loss": outside(_loss)}),
        mock.patch.object(torch.autograd, "backward", outside(torch.autograd.backward)),
        mock.patch.object(Links, "send", outside(Links.send)),
        mock.patch.object(Links, "receive", outside(Links.receive)),
        mock.patch.object(Links, "end", outside(Links.end)),
        mock.patch.object(Links, "begin", outside(Links.begin)),
    ):
        for _ in range(steps):
            inside = 0.0
            dist.barrier()
            start = time.thread_time()
            step()
            found.append((time.thread_time() - start - inside) / actions)
    return statistics.median(found)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=4, steps=4)
    real, sleeping = [], []
    with WorkerPool(4, timeout=900) as pool:
        for pp in (2, 4):
            for hidden in SHAPES:
                for name in PEERS:
                    times = slowest(
                        pool.run(pp, real_job, name, hidden, options.rounds, options.steps)
                    )
                    real.append(
                        {
                            "pp": pp,
                            "schedule": name,
                            "hidden": hidden,
                            "ours (ms)": round(1e3 * times["ours"], 2),
                            "torch (ms)": round(1e3 * times["torch"], 2),
                            "ratio": round(times["ours"] / times["torch"], 3),
                            "target": 1.0,
                            "ours keeps (MiB)": round(times["ours MiB"], 2),
                            "torch keeps (MiB)": round(times["torch MiB"], 2),
                        }
                    )
            for name in SCHEDULES:
                seconds, fraction, ideal = max(pool.run(pp, sleeping_job, name, options.rounds))
                # With the same work on both sides, (1 - bubble) is work over time.
                ratio = (1 - ideal) / (1 - fraction)
                sleeping.append(
                    {
                        "pp": pp,
                        "schedule": name,
                        "step (ms)": round(1e3 * seconds, 1),
                        "bubble": round(fraction, 3),
                        "simulated bubble": round(ideal, 3),
                        "time over simulated": round(ratio, 3),
                        "target": 1.1,
                        "overhead (us/action)": round(
                            1e6 * max(pool.run(pp, overhead_job, name, 20)), 1
                        ),
                    }
                )
    what = f"{MICROBATCHES} microbatches"
    report("pipeline", f"Against torch.distributed.pipelining, {what}", real, options.output)
    report("bubble", f"Bubble against the simulation, {what}", sleeping, options.output)


if __name__ == "__main__":
    main()
