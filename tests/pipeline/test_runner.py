"""Our runner against `torch.distributed.pipelining` on the same stages."""

import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.runner import NoPipeline, Pipeline, StageBoundary
from lightning_megatron.schedules.schedule import SCHEDULES, Kind, make_schedule
from lightning_megatron.schedules.simulate import simulate
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

SAMPLES, WIDTH = 8, 6
REFERENCES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth-first": ScheduleLoopedBFS,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def layers(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages * 2)]
    return [module.double() for module in made]


class Silent:
    """No data parallelism; writes down what the runner announces."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def before_forward(self, stage: int) -> None:
        pass

    def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
        self.calls.append(("input" if split else "backward", stage, last))

    def after_weights(self, stage: int, *, last: bool) -> None:
        self.calls.append(("weights", stage, last))


def pipeline_of_rank(
    items: list[nn.Module],
    topology: Topology,
    schedule: str,
    host_group: dist.ProcessGroup | None = None,
) -> tuple[PipelineSequential, Pipeline]:
    """The items cut into equal stages, of which this rank keeps its own."""
    size = topology.pp.size
    placement = make_schedule(schedule, size, 1).stage_ranks
    per_stage = len(items) // len(placement)
    trunk = PipelineSequential(layers=items)
    trunk.keep(
        [range(i * per_stage, (i + 1) * per_stage) for i in range(len(placement))],
        [stage for stage, rank in enumerate(placement) if rank == topology.pp.rank],
    )
    make = partial(make_schedule, schedule, size)
    return trunk, Pipeline(topology, trunk, make, placement, host_group)


def make_topology(stages: int) -> Topology:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Topology(Degrees(pp=stages), torch.device("cpu"))


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return tuple(  # type: ignore[return-value]
        torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)
    )


def gradients(module: nn.Module) -> list[Tensor]:
    found = [p.grad for p in module.parameters()]
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


class TheirStage(PipelineStage):
    """Sends nothing before it begins: in torch 2.11 to itself, too, which gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def reference(microbatches: int, schedule: str, stages: int) -> dict[str, Tensor]:
    """Gradients by name that torch's own pipeline finds on this rank."""
    items, rank = layers(stages), dist.get_rank()
    ranks = dist.get_world_size()
    kind = REFERENCES[schedule]
    owned = [
        s for s, owner in enumerate(make_schedule(schedule, ranks, 1).stage_ranks) if owner == rank
    ]
    parts = [
        TheirStage(nn.Sequential(*items[2 * s : 2 * s + 2]), s, stages, torch.device("cpu"))
        for s in owned
    ]
    run = kind(parts if stages > ranks else parts[0], microbatches, loss_fn=F.mse_loss)
    x, y = data()
    run.step(*((x,) if 0 in owned else ()), **({"target": y} if stages - 1 in owned else {}))
    return {
        f"layers.{2 * s + i}.{name}": p.grad
        for s in owned
        for i in range(2)
        for name, p in items[2 * s + i].named_parameters()
    }


def our_pipeline(
    schedule: str, microbatches: int, stages: int, *, device: bool = False
) -> dict[str, Tensor]:
    topology = make_topology(dist_size())
    host_group = topology.new_group("pp") if device else None
    trunk, pipeline = pipeline_of_rank(layers(stages), topology, schedule, host_group)
    x, y = (t.chunk(microbatches) for t in data())

    def step(index: int, to_end: bool) -> Tensor:
        return F.mse_loss(trunk(x[index]), y[index])

    heard = Silent()
    outputs = pipeline.train(step, lambda loss, _: loss / microbatches, microbatches, heard)
    assert len(outputs) == (microbatches if pipeline.is_last else 0)
    assert not any(t.requires_grad for t in outputs)
    for stage in range(stages // topology.pp.size):
        announced = [call for call in heard.calls if call[1] == stage]
        assert [last for _, _, last in announced] == [False] * (len(announced) - 1) + [True]
        assert announced[-1][0] != "input"
    return {name: p.grad for name, p in trunk.named_parameters()}


def compare_job(schedule: str, microbatches: int) -> float:
    dist_size()
    stages = make_schedule(schedule, dist.get_world_size(), 1).num_stages
    theirs = reference(microbatches, schedule, stages)
    ours = our_pipeline(schedule, microbatches, stages)
    assert ours
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def streams_job(schedule: str, microbatches: int) -> float:
    """Difference of gradients with a device's groups, for whose backend gloo stands in."""
    stages = make_schedule(schedule, dist_size(), 1).num_stages
    plain = our_pipeline(schedule, microbatches, stages)
    found = our_pipeline(schedule, microbatches, stages, device=True)
    return max(float((found[name] - plain[name]).abs().max()) for name in plain)


@pytest.mark.parametrize(("schedule", "ranks"), [("interleaved", 3), ("dualpipev", 4)])
def test_gradients_by_streams_of_a_device(pool: WorkerPool, schedule: str, ranks: int) -> None:
    assert max(pool.run(ranks, streams_job, schedule, 8)) == 0.0


def dist_size() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("schedule", REFERENCES)
def test_gradients_are_those_of_torch(pool: WorkerPool, schedule: str, ranks: int) -> None:
    # torch's schedules need at least as many microbatches as stages, and equal ones.
    assert max(pool.run(ranks, compare_job, schedule, 8)) <= 1e-14


def whole_job(schedule: str, counts: list[int]) -> float:
    """Against the network in one piece, for every number of microbatches."""
    topology = make_topology(dist_size())
    stages = make_schedule(schedule, topology.pp.size, 1).num_stages
    trunk, pipeline = pipeline_of_rank(layers(stages), topology, schedule)
    whole = nn.Sequential(*layers(stages))
    for count in counts:
        x, y = (t.tensor_split(count) for t in data())
        pipeline.train(
            lambda i, to_end, x=x, y=y: F.mse_loss(trunk(x[i]), y[i]),
            lambda loss, _: loss,
            count,
            Silent(),
        )
        for i in range(count):
            F.mse_loss(whole(x[i]), y[i]).backward()
    return max(
        float((p.grad - whole.get_parameter(name.removeprefix("layers.")).grad).abs().max())
        for name, p in trunk.named_parameters()
    )


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_any_number_of_microbatches(
    pool: WorkerPool, schedule: str, ranks: int
) -> None:
    assert max(pool.run(ranks, whole_job, schedule, [1, 7, 2])) <= 1e-12


def one_process(count: int) -> list[Tensor]:
    """Gradients of the whole network, microbatch by microbatch."""
    network = nn.Sequential(*layers(2))
    x, y = (t.chunk(count) for t in data())
    NoPipeline().train(
        lambda i, to_end: F.mse_loss(network(x[i]), y[i]),
        lambda loss, _: loss / count,
        count,
        Silent(),
    )
    return gradients(network)


def test_without_a_pipeline_microbatches_run_one_by_one() -> None:
    whole, parts = one_process(1), one_process(4)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def order_job(schedule: str, microbatches: int) -> list[str]:
    """Forwards and backwards of a rank in the order in which they run."""
    topology = make_topology(dist_size())
    stages = make_schedule(schedule, topology.pp.size, 1).num_stages
    trunk, pipeline = pipeline_of_rank(layers(stages), topology, schedule)
    x, y = (t.tensor_split(microbatches) for t in data())
    found: list[str] = []

    class Heard(Silent):
        def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
            found.append(f"{'I' if split else 'B'}{stage}")

        def after_weights(self, stage: int, *, last: bool) -> None:
            found.append(f"W{stage}")

    for position, items in enumerate(trunk.stage_items):
        items.register_forward_pre_hook(lambda *_, p=position: found.append(f"F{p}"))
    pipeline.train(
        lambda i, to_end: F.mse_loss(trunk(x[i]), y[i]),
        lambda loss, _: loss,
        microbatches,
        Heard(),
    )
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_actions_are_carried_out_in_the_order_of_the_schedule(
    pool: WorkerPool, schedule: str
) -> None:
    plan = make_schedule(schedule, 2, 5)
    for rank, found in enumerate(pool.run(2, order_job, schedule, 5)):
        mine = plan.stages_of_rank(rank)
        assert found == [f"{a.kind.value}{mine.index(a.stage)}" for a in plan.row(rank)]


def uneven_job(sizes: list[list[int]], schedule: str) -> float:
    """Microbatches of different sizes, other ones in every step, and evaluation in between."""
    topology = make_topology(dist_size())
    stages = make_schedule(schedule, topology.pp.size, 1).num_stages
    trunk, pipeline = pipeline_of_rank(layers(stages), topology, schedule)
    whole = nn.Sequential(*layers(stages))
    worst = 0.0
    for step_sizes in sizes:
        xs = [torch.randn(n, WIDTH, dtype=torch.float64) for n in step_sizes]
        steps = [lambda i, _, m=m, xs=xs: m(xs[i]).square().sum() for m in (trunk, whole)]
        count = len(xs)
        pipeline.train(steps[0], lambda loss, _: loss, count, Silent())
        NoPipeline().train(steps[1], lambda loss, _: loss, count, Silent())
        with torch.no_grad():
            found = pipeline.evaluate(steps[0], count)
            expected = NoPipeline().evaluate(steps[1], count)
        if pipeline.is_last:
            worst = max(
                worst, *(float((a - b).abs()) for a, b in zip(found, expected, strict=True))
            )
        else:
            assert found == []
    for name, parameter in trunk.named_parameters():
        reference = whole.get_parameter(name.removeprefix("layers."))
        worst = max(worst, float((parameter.grad - reference.grad).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        *(("1f1b", 2), ("interleaved", 2), ("zbv", 3)),
        pytest.param("1f1b", 4, marks=pytest.mark.thorough),
    ],
)
def test_shapes_and_counts_change_from_step_to_step(
    pool: WorkerPool, schedule: str, ranks: int
) -> None:
    sizes = [[3, 3, 2], [1], [40, 2, 3, 500, 1, 7], [100, 100], [1, 2, 3, 4]]
    assert max(pool.run(ranks, uneven_job, sizes, schedule)) <= 1e-10


def misuse_job(kind: str) -> None:
    topology = make_topology(2)
    trunk, pipeline = pipeline_of_rank(layers(2), topology, "1f1b")

    def step(index: int, to_end: bool) -> Tensor:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        if kind == "not called":
            return x.sum()
        out = trunk(x)
        return trunk(out).sum()

    pipeline.train(step, lambda loss, _: loss, 2, Silent())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not called", "without calling the module's PipelineSequential"),
        ("twice", "called its PipelineSequential twice"),
    ],
)
def test_the_trunk_is_called_once_in_every_step(pool: WorkerPool, kind: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(2, misuse_job, kind)


def caught_job() -> list[float]:
    """A user's `except Exception` and `finally` around the trunk."""
    topology = make_topology(2)
    trunk, pipeline = pipeline_of_rank(layers(2), topology, "gpipe")
    finished = []

    def step(index: int, to_end: bool) -> Tensor:
        try:
            out = trunk(torch.ones(2, WIDTH, dtype=torch.float64))
        except Exception as error:
            raise AssertionError("the stage boundary was caught") from error
        finally:
            finished.append(index)
        return out.sum()

    pipeline.train(step, lambda loss, _: loss, 3, Silent())
    assert finished == [0, 1, 2]
    return [float(p.grad.norm()) for p in trunk.parameters()]


def test_a_handler_in_the_step_does_not_stop_the_boundary(pool: WorkerPool) -> None:
    assert all(norm > 0 for norms in pool.run(2, caught_job) for norm in norms)
    assert not issubclass(StageBoundary, Exception)


def flags_job(case: str) -> list[bool]:
    """Activations of which some, or all, need no gradient; returns whose parameters got one."""
    topology = make_topology(2)
    first, second = (layer[0] for layer in layers(1))

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = first(x)
            if case == "all detached":
                return y.detach()
            if case == "one detached":
                return {"y": y, "other": y.detach(), "mask": y > 0}
            return {"y": y, "unused": y * 2}

    class Begins(nn.Module):
        def forward(self, state: Any) -> Tensor:
            y = state if isinstance(state, Tensor) else state["y"]
            out: Tensor = second(y)
            return out

    start, end = Ends(), Begins()
    start.inner, end.inner = first, second
    trunk, pipeline = pipeline_of_rank([start, end], topology, "1f1b")
    pipeline.train(
        lambda i, to_end: trunk(torch.ones(2, WIDTH, dtype=torch.float64)).sum(),
        lambda loss, _: loss,
        2,
        Silent(),
    )
    return [p.grad is not None for p in trunk.parameters()]


@pytest.mark.parametrize("case", ["all detached", "one detached", "one unused"])
def test_what_needs_no_gradient_gets_none(pool: WorkerPool, case: str) -> None:
    before, after = pool.run(2, flags_job, case)
    assert all(after)
    assert all(before) == (case != "all detached")


def memory_job() -> list[int]:
    """Number of stage outputs alive when each forward begins."""
    topology = make_topology(2)
    items = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    trunk, pipeline = pipeline_of_rank(items, topology, "gpipe")
    alive: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []

    def step(index: int, to_end: bool) -> Tensor:
        alive.append(sum(output() is not None for output in outputs))
        try:
            loss: Tensor = trunk(torch.ones(2, WIDTH)).sum()
        except StageBoundary as boundary:
            outputs.append(weakref.ref(boundary.output))
            raise
        return loss

    pipeline.train(step, lambda loss, _: loss, 4, Silent())
    return alive


def test_a_sent_output_is_freed_before_its_backward(pool: WorkerPool) -> None:
    assert pool.run(2, memory_job)[0] == [0, 0, 0, 0]


class Array(np.ndarray):  # type: ignore[type-arg]
    """An array that can be watched; a tensor made from it dies with it."""


class _Tracked(torch.autograd.Function):
    """A copy of a tensor of which one can tell how long its memory lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: list[Any]) -> Tensor:
        array = x.detach().numpy().copy().view(Array)
        watched.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Watched(nn.Module):
    """A linear layer whose input is watched."""

    def __init__(self, watched: list[Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(_Tracked.apply(x, self.watched))
        return out


def live_job(schedule: str, microbatches: int) -> list[int]:
    """Activations alive after every action of this rank."""
    topology = make_topology(dist_size())
    stages = make_schedule(schedule, topology.pp.size, 1).num_stages
    watched: list[Any] = []
    items: list[nn.Module] = [Watched(watched) for _ in range(stages)]
    trunk, pipeline = pipeline_of_rank(items, topology, schedule)
    x, y = (t.tensor_split(microbatches) for t in data())
    alive: list[int] = []

    class Counting(Silent):
        """Counts when an action begins, which is when the one before has ended."""

        def count(self, *args: Any, **kwargs: Any) -> None:
            alive.append(sum(ref() is not None for ref in watched))

        before_forward = before_backward = after_weights = count

    pipeline.train(
        lambda i, to_end: F.mse_loss(trunk(x[i]), y[i]),
        lambda loss, _: loss,
        microbatches,
        Counting(),
    )
    assert not any(ref() is not None for ref in watched)
    return alive


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_activations_follow_the_simulation(pool: WorkerPool, schedule: str) -> None:
    plan = make_schedule(schedule, 2, 6)
    for rank, alive in enumerate(pool.run(2, live_job, schedule, 6)):
        expected, live = [], 0
        for action in plan.row(rank):
            releases = action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            if action.kind is Kind.BACKWARD_WEIGHT:  # counted when it has ended
                expected.append(live - 1)
            else:
                expected.append(live)
            live += (action.kind is Kind.FORWARD) - releases
        assert alive == expected
        assert max(alive) <= simulate(plan).peak_live[rank]


def buffers_job(schedule: str) -> list[int]:
    """Receive buffers allocated after each of several steps."""
    topology = make_topology(dist_size())
    stages = make_schedule(schedule, topology.pp.size, 1).num_stages
    trunk, pipeline = pipeline_of_rank(layers(stages), topology, schedule)
    x, y = (t.chunk(4) for t in data())
    made = []
    for _ in range(4):
        pipeline.train(
            lambda i, to_end: F.mse_loss(trunk(x[i]), y[i]), lambda loss, _: loss, 4, Silent()
        )
        made.append(sum(channel.buffers.made for channel in pipeline._links._from.values()))
    return made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_receive_buffers_are_used_again(pool: WorkerPool, schedule: str) -> None:
    for made in pool.run(2, buffers_job, schedule):
        assert 0 < made[0] == made[-1] < 8
