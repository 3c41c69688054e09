"""Our runner against `torch.distributed.pipelining` on the same stages."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from lightning_megatron.pipeline.runner import NoPipeline, Pipeline, StageBoundary
from lightning_megatron.pipeline.schedule import Kind, make_schedule
from lightning_megatron.pipeline.sequential import PipelineSequential
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

SAMPLES, WIDTH = 8, 6
REFERENCES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def layers(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages * 2)]
    return [module.double() for module in made]


def trunk_of_rank(items: list[nn.Module], topology: Topology) -> PipelineSequential:
    size = topology.pp.size
    trunk = PipelineSequential(layers=items)
    per_stage = len(items) // size
    trunk.keep([range(i * per_stage, (i + 1) * per_stage) for i in range(size)], topology.pp.rank)
    return trunk


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


def torch_pipeline(schedule: str, topology: Topology, microbatches: int) -> list[Tensor]:
    """Gradients of this rank's stage found by torch's own pipeline."""
    stages, rank = topology.pp.size, topology.pp.rank
    module = nn.Sequential(*layers(stages)[2 * rank : 2 * rank + 2])
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    run = REFERENCES[schedule](stage, microbatches, loss_fn=F.mse_loss)
    x, y = data()
    if rank == 0:
        run.step(x)
    elif rank == stages - 1:
        run.step(target=y)
    else:
        run.step()
    return gradients(module)


def our_pipeline(schedule: str, topology: Topology, microbatches: int) -> list[Tensor]:
    trunk = trunk_of_rank(layers(topology.pp.size), topology)
    x, y = (t.chunk(microbatches) for t in data())

    def step(index: int) -> Tensor:
        return F.mse_loss(trunk(x[index]), y[index])

    calls: list[bool] = []
    outputs = Pipeline(topology, trunk, schedule).train(
        step, lambda loss, _: loss / microbatches, microbatches, calls.append
    )
    assert len(outputs) == (microbatches if topology.pp.rank == topology.pp.size - 1 else 0)
    assert calls == [False] * (microbatches - 1) + [True]
    assert not any(t.requires_grad for t in outputs)
    return gradients(trunk.stage_items)


def compare_job(schedule: str, microbatches: int) -> float:
    topology = make_topology(dist_size())
    reference = torch_pipeline(schedule, topology, microbatches)
    found = our_pipeline(schedule, topology, microbatches)
    assert len(found) == len(reference) == 4
    return max(float((a - b).abs().max()) for a, b in zip(found, reference, strict=True))


def dist_size() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", REFERENCES)
def test_gradients_are_those_of_torch(pool: WorkerPool, schedule: str, stages: int) -> None:
    # torch's 1F1B needs at least as many microbatches as stages, and equal ones.
    assert max(pool.run(stages, compare_job, schedule, 4)) <= 1e-14


def one_process(count: int) -> list[Tensor]:
    """Gradients of the whole network, microbatch by microbatch."""
    network = nn.Sequential(*layers(2))
    x, y = (t.chunk(count) for t in data())
    NoPipeline().train(
        lambda i: F.mse_loss(network(x[i]), y[i]),
        lambda loss, _: loss / count,
        count,
        lambda last: None,
    )
    return gradients(network)


def test_without_a_pipeline_microbatches_run_one_by_one() -> None:
    whole, parts = one_process(1), one_process(4)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


class Recorder:
    """Writes down the order of a rank's forwards and backwards."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.actions: list[tuple[str, int]] = []
        self._backward = pipeline._backward
        pipeline._backward = self.backward  # type: ignore[method-assign]
        self._next = 0

    def backward(self, saved: Any) -> None:
        self.actions.append(("backward", self._next))
        self._next += 1
        self._backward(saved)


def order_job(schedule: str, microbatches: int) -> list[tuple[str, int]]:
    topology = make_topology(dist_size())
    trunk = trunk_of_rank(layers(topology.pp.size), topology)
    x, y = (t.chunk(microbatches) for t in data())
    pipeline = Pipeline(topology, trunk, schedule)
    recorder = Recorder(pipeline)

    def step(index: int) -> Tensor:
        recorder.actions.append(("forward", index))
        return F.mse_loss(trunk(x[index]), y[index])

    pipeline.train(step, lambda loss, _: loss, microbatches, lambda last: None)
    return recorder.actions


@pytest.mark.parametrize("schedule", REFERENCES)
def test_actions_are_carried_out_in_the_order_of_the_schedule(
    pool: WorkerPool, schedule: str
) -> None:
    plan = make_schedule(schedule, 3, 4)
    for rank, actions in enumerate(pool.run(3, order_job, schedule, 4)):
        expected = [
            ("forward" if a.kind is Kind.FORWARD else "backward", a.microbatch)
            for a in plan.actions[rank]
        ]
        assert actions == expected


def uneven_job(sizes: list[list[int]]) -> float:
    """Microbatches of different sizes, other ones in every step, and evaluation in between."""
    topology = make_topology(dist_size())
    trunk = trunk_of_rank(layers(topology.pp.size), topology)
    whole = nn.Sequential(*layers(topology.pp.size))
    pipeline = Pipeline(topology, trunk, "1f1b")
    worst = 0.0
    for step_sizes in sizes:
        xs = [torch.randn(n, WIDTH, dtype=torch.float64) for n in step_sizes]
        steps = [lambda i, m=m, xs=xs: m(xs[i]).square().sum() for m in (trunk, whole)]
        count = len(xs)
        pipeline.train(steps[0], lambda loss, _: loss, count, lambda last: None)
        NoPipeline().train(steps[1], lambda loss, _: loss, count, lambda last: None)
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


@pytest.mark.parametrize("stages", [2, 4])
def test_shapes_and_counts_change_from_step_to_step(pool: WorkerPool, stages: int) -> None:
    sizes = [[3, 3, 2], [1], [40, 2, 3, 500, 1, 7], [100, 100], [1, 2, 3, 4]]
    assert max(pool.run(stages, uneven_job, sizes)) <= 1e-11


def misuse_job(kind: str) -> None:
    topology = make_topology(2)
    trunk = trunk_of_rank(layers(2), topology)

    def step(index: int) -> Tensor:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        if kind == "not called":
            return x.sum()
        out = trunk(x)
        return trunk(out).sum()

    Pipeline(topology, trunk, "1f1b").train(step, lambda loss, _: loss, 2, lambda last: None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not called", "without calling the module's PipelineSequential"),
        ("twice", "called its PipelineSequential twice"),
    ],
)
def test_the_trunk_is_called_once_in_every_step(pool: WorkerPool, kind: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(2, misuse_job, kind, timeout=20)


def caught_job() -> list[float]:
    """A user's `except Exception` and `finally` around the trunk."""
    topology = make_topology(2)
    trunk = trunk_of_rank(layers(2), topology)
    finished = []

    def step(index: int) -> Tensor:
        try:
            out = trunk(torch.ones(2, WIDTH, dtype=torch.float64))
        except Exception as error:
            raise AssertionError("the stage boundary was caught") from error
        finally:
            finished.append(index)
        return out.sum()

    Pipeline(topology, trunk, "gpipe").train(step, lambda loss, _: loss, 3, lambda last: None)
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
    trunk = trunk_of_rank([start, end], topology)
    Pipeline(topology, trunk, "1f1b").train(
        lambda i: trunk(torch.ones(2, WIDTH, dtype=torch.float64)).sum(),
        lambda loss, _: loss,
        2,
        lambda last: None,
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
    trunk = trunk_of_rank([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], topology)
    alive: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []

    def step(index: int) -> Tensor:
        alive.append(sum(output() is not None for output in outputs))
        try:
            loss: Tensor = trunk(torch.ones(2, WIDTH)).sum()
        except StageBoundary as boundary:
            outputs.append(weakref.ref(boundary.output))
            raise
        return loss

    Pipeline(topology, trunk, "gpipe").train(step, lambda loss, _: loss, 4, lambda last: None)
    return alive


def test_a_sent_output_is_freed_before_its_backward(pool: WorkerPool) -> None:
    assert pool.run(2, memory_job)[0] == [0, 0, 0, 0]
