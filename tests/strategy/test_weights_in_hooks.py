"""What hooks and steps find out about weights in parts is that of one process, or an error."""

import pickle
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector
from torch.nn.utils.prune import custom_from_mask

from lightning_megatron import CompileConfig, PipelineConfig, PipelineSequential, gather
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.whole.stage_functions import device_of_result
from tests.strategy.small import WIDTH, Small, dp_of, loader, make_trainer


class Looking(Small):
    """Layers that are cut, and notes of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        block = nn.Sequential(
            ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)
        )
        self.net = PipelineSequential(
            first=nn.Linear(WIDTH, WIDTH), block=block, head=nn.Linear(WIDTH, WIDTH)
        )
        self.seen: list[float] = []

    def note(self, value: Any) -> None:
        self.seen.append(float(value))


class Clips(Looking):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.note(clip_grad_norm_(self.parameters(), 0.1))


class ClipsInStep(Looking):
    def optimizer_step(self, epoch: Any, index: Any, optimizer: Any, closure: Any) -> None:
        def clipped() -> Any:
            loss = closure()
            self.note(clip_grad_norm_(self.parameters(), 0.1, norm_type=3.0))
            return loss

        optimizer.step(clipped)


class ClipsPart(Looking):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(clip_grad_norm_(self.net.head.parameters(), 0.05, norm_type="inf"))

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


class ClipsByHand(Looking):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.note(clip_grad_norm_(self.parameters(), 0.1))
        optimizer.step()


class LogsNorms(Looking):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen += [float(value) for value in norms.values()]


class SumsNorms(Looking):
    def on_after_backward(self) -> None:
        self.note(sum(p.grad.detach().norm() ** 2 for p in self.parameters()) ** 0.5)


class LooksAtEnd(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [float(p.grad.abs().max()) for p in self.parameters()]
        self.seen += [float(value.sum()) for value in self.state_dict().values()]
        self.seen += [float(p.isfinite().all()) + float(p.data.mean()) for p in self.parameters()]


class Penalty(Looking):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        squares = sum(p.pow(2).sum() for p in self.parameters())
        loss = self.loss(batch) + 0.1 * squares + 0.01 * sum(map(torch.norm, self.parameters()))
        self.note(loss)
        return loss


class Vectors(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note(parameters_to_vector(self.parameters()).norm())


class WalksGroups(Looking):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        self.note(len(weights))
        self.note(clip_grad_norm_(weights, 0.1))
        self.note(sum(p.grad.norm(1) for p in weights))
        united = sum((group["params"] for group in optimizer.param_groups), [])
        self.note(len(united) + get_total_norm([p.grad for p in united]))
        group = optimizer.param_groups[0]["params"]
        self.note(sum(place * p.detach().norm() for place, p in enumerate(reversed(group))))
        self.note(len(group.copy()) + group.index(self.net.first.weight))
        with torch.no_grad():
            self.note(sum(torch._foreach_norm(group)))


class OneByOne(Looking):
    """Looks at weights by the names of layers, of which a rank may have one only."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(self.net.head.weight.norm())
        self.note(self.net.block[0].weight[:2, 1:].sum() + self.net.first.bias.max())
        self.note((self.net.first.weight @ self.net.head.weight.T).mean())
        self.note(self.net.head.weight.argmax())
        self.note(self.net.block[2].bias.detach().numpy().sum())
        if self.net.head.weight.abs().max() > 0.1:
            self.net.head.weight.data.clamp_(-0.3, 0.3)


class Constrains(Looking):
    """Changes weights and gradients, each by itself and by others."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.manual_seed(7)
        for p in self.parameters():
            p.grad.add_(0.01 * torch.randn_like(p)).nan_to_num_()
        self.net.head.weight.grad[:2] = 0
        self.net.first.weight.grad = self.net.head.weight.grad * 0.5

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    p.div_(p.norm(dim=1, keepdim=True).clamp(min=1.0))
                self.note(len(name) + p.numel() + p.shape[0])
            self.net.first.bias.copy_(self.net.head.bias + self.net.block[2].bias)


class Averages(Looking):
    """An average of weights, copied when training begins, in which validation runs."""

    def on_train_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]
        self.twins = [deepcopy(self.net.first)]  # in a list, it is no part of the module

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.parameters(), strict=True):
                mean.lerp_(p, 0.5)
            for mean, p in zip(
                self.twins[0].parameters(), self.net.first.parameters(), strict=True
            ):
                mean.mul_(0.5).add_(p, alpha=0.5)
        self.note(sum(mean.square().sum() for mean in self.average))
        self.note(sum(mean.square().sum() for mean in self.twins[0].parameters()))

    def on_train_end(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.parameters(), strict=True):
                p.copy_(mean)


class AveragesCopy(Looking):
    """A copy of the whole network, whose weights follow, and which it ends with."""

    def on_train_start(self) -> None:
        self.twins = [deepcopy(self.net)]  # in a list, it is no part of the module
        self.first = deepcopy(self.state_dict())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.twins[0].parameters(), self.net.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        self.note(sum(mean.square().sum() for mean in self.twins[0].parameters()))
        self.note(sum(value.square().sum() for value in self.first.values()))

    def on_train_end(self) -> None:
        self.net.load_state_dict(self.twins[0].state_dict())
        self.net.first.load_state_dict(self.net.head.state_dict())  # of another stage


class Formats(Looking):
    """Numbers of weights in other formats."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            self.note((p > 0.1).double().mean())
            self.note((p.float().double() - p).abs().max() > 0)


class Clears(Looking):
    """Looks at gradients before and after an optimizer has cleared them."""

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.note(sum(p.grad is None for p in self.parameters()))
        optimizer.optimizer.zero_grad()
        self.note(sum(p.grad is None for p in self.parameters()))


class Prunes(Looking):
    """Masks that a hook makes of weights, and forwards use."""

    def on_train_start(self) -> None:
        for layer in (self.net.first, self.net.head):
            custom_from_mask(layer, "weight", mask=torch.ones_like(layer.weight).triu())

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(sum(p.detach().sum() for p in self.parameters()))


class _UnfreezesFirst(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.first)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(module.net.first, optimizer, lr=0.03)


class Unfreezes(Looking):
    """Lightning's callback; before it, the first stage has nothing that is trained."""

    def configure_callbacks(self) -> Any:
        return [_UnfreezesFirst()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            self.note(len(group["params"]) + sum(p.grad.norm() for p in group["params"]))


class Regularises(Looking):
    """Adds gradients of a penalty on all weights after the backward."""

    def on_after_backward(self) -> None:
        with torch.enable_grad():
            penalty = 0.1 * sum(p.square().sum() for p in self.parameters())
        penalty.backward()
        self.note(penalty)


class SomeLearn(Looking):
    """Weights without gradients, and a hook that asks which have one."""

    def __init__(self) -> None:
        super().__init__()
        self.net.block[0].weight.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            self.note(p.requires_grad + 2 * (p.grad is None))


class Tied(Looking):
    """One weight in the first and the last layer, which a hook finds and changes by both."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.net = PipelineSequential(first=first, inner=inner, last=last)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = list(self.parameters())
        self.note(len(weights) + sum(p.numel() + p.nbytes for p in weights))
        self.note(clip_grad_norm_(weights, 0.3))
        self.note(self.net.last.weight.grad.norm() + self.net.first.weight.norm())
        self.note((self.net.last.weight * 2 - self.net.first.weight).sum())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net.first.weight.clamp_(-0.4, 0.4)
            self.net.last.weight.mul_(0.9)
        self.note(len(self.state_dict()))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                self.note(layer.weight.abs().mean())


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Clips, ClipsInStep, ClipsPart, ClipsByHand, LogsNorms, SumsNorms, LooksAtEnd),
        *(
            Penalty,
            Vectors,
            Tied,
            WalksGroups,
            OneByOne,
            Constrains,
            Averages,
            Regularises,
            SomeLearn,
            AveragesCopy,
            Formats,
            Clears,
            Prunes,
            Unfreezes,
        ),
    )
}
REFUSED: dict[str, dict[str, str]] = {
    "tp": {},
    "pp": {"ClipsByHand": "manual_backward"},
    "dp": {},
}
Found = dict[str, tuple[dict[str, Any], list[float]] | str]


def look(
    layout: Mapping[str, Any] | None, devices: int, names: Sequence[str] = tuple(KINDS)
) -> Found:
    found: Found = {}
    for name in names:
        module = KINDS[name]()
        trainer = make_trainer(layout, devices, max_steps=2)
        try:
            trainer.fit(module, loader(dp=dp_of(devices, layout or {})))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = gather(module), module.seen
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Found:
    return pool.run(1, look, None, 1)[0]  # type: ignore[no-any-return]


FEW = ("Clips", "ClipsByHand", "LogsNorms", "Penalty", "Vectors")
"""One of each kind of value."""
IN_HOOKS = tuple(name for name in KINDS if name != "Penalty")
"""What a pipeline gives: weights of other stages are of no use to a step."""
COPIES = ("Averages", "AveragesCopy")
"""What copies a layer."""
ZBV = {"pp": PipelineConfig(degree=2, schedule="zbv", partition=[1] * 4)}
INTERLEAVED = {
    "pp": PipelineConfig(degree=2, schedule="interleaved", stages_per_rank=2, partition=[1] * 4),
    "num_microbatches": 4,
}


@pytest.mark.parametrize(
    ("devices", "layout", "names"),
    [
        (2, {"tp": 2}, (*KINDS,)),
        (2, {"pp": 2}, IN_HOOKS),
        pytest.param(2, ZBV, ("Tied",), marks=pytest.mark.thorough),
        pytest.param(2, INTERLEAVED, ("Tied",), marks=pytest.mark.thorough),
        pytest.param(4, {"pp": 2, "tp": 2}, IN_HOOKS, marks=pytest.mark.thorough),
        pytest.param(
            4,
            {"pp": 2, "zero": 3},
            tuple(name for name in IN_HOOKS if name not in (*COPIES, "Prunes")),  # refused there
            marks=pytest.mark.thorough,
        ),
        pytest.param(4, {"pp": 2, "zero": 1}, IN_HOOKS, marks=pytest.mark.thorough),
        (2, {"zero": 3}, FEW),
        pytest.param(
            2,
            {"zero": 3},
            tuple(name for name in KINDS if name != "Prunes"),  # a parameter has units of ZeRO 3
            marks=pytest.mark.thorough,
        ),
        pytest.param(4, {"tp": 2, "zero": 3}, FEW, marks=pytest.mark.thorough),
    ],
    ids=lambda value: f"{len(value)} kinds" if isinstance(value, tuple) else str(value),
)
def test_what_modules_see_of_their_weights(
    pool: WorkerPool, alone: Found, devices: int, layout: dict[str, Any], names: Sequence[str]
) -> None:
    refused = next((axis for axis in ("pp", "tp") if axis in layout), "dp")
    for found in pool.run(devices, look, layout, devices, names):
        for name, outcome in found.items():
            pattern = REFUSED[refused].get(name)
            if pattern is not None or isinstance(outcome, str):
                assert pattern, outcome
                assert isinstance(outcome, str), f"{name} runs"
                assert re.search(pattern, outcome), f"{name}: {outcome}"
                continue
            (weights, seen), (ours, ours_seen) = alone[name], outcome
            for key, value in weights.items():
                torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10)
            # A loss is that of the rank's samples.
            if name != "Penalty" or layout == {"tp": 2}:
                assert ours_seen == pytest.approx(seen, rel=1e-10), name


class NumberOfBatch(Looking):
    """A factor inside of a penalty, of which each data-parallel rank has another."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss + 0.1 * (self.net.block[0].weight * float(loss)).norm()


def penalise_by_number(zero: int) -> dict[str, Any]:
    module = NumberOfBatch()
    make_trainer({"zero": zero}, 2, max_steps=2).fit(module, loader(dp=2))
    return gather(module)


def test_numbers_of_a_rank_do_not_reach_other_ranks_parts(pool: WorkerPool) -> None:
    [expected, _] = pool.run(2, penalise_by_number, 1)
    for weights in pool.run(2, penalise_by_number, 3):
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-10)


class WritesByNumpy(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.block[0].weight.detach().numpy()[0] = 0.25


def write_by_numpy(layout: Mapping[str, Any]) -> str:
    try:
        make_trainer(layout, 2).fit(WritesByNumpy(), loader())
    except ValueError as error:
        return str(error)
    return "trains"


@pytest.mark.parametrize("layout", [{"tp": 2}, {"zero": 3}], ids=str)
def test_arrays_of_weights_in_parts_take_no_values(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    for said in pool.run(2, write_by_numpy, layout):
        assert "read-only" in said


def penalise_compiled() -> tuple[dict[str, Any], dict[str, int]]:
    """Weights, and what broke graphs."""
    counters.clear()
    torch.compiler.reset()
    module, compiled = Penalty(), CompileConfig(scope="model", backend="aot_eager")
    make_trainer({"tp": 2, "compile": compiled}, 2, max_steps=2).fit(module, loader())
    assert counters["stats"]["unique_graphs"]
    return gather(module), dict(counters["graph_break"])


def test_graphs_do_not_break_where_steps_are_watched(pool: WorkerPool, alone: Found) -> None:
    expected: Any = alone["Penalty"][0]
    for weights, breaks in pool.run(2, penalise_compiled):
        assert not breaks
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-10)


def penalise(layout: Mapping[str, Any]) -> None:
    make_trainer(layout, 2).fit(Penalty(), loader())


def test_a_penalty_on_the_weights_of_one_stage_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="with pp=2 a step has the weights of its own stage"):
        pool.run(2, penalise, {"pp": 2}, grace=0.2)


class AsksByRank(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note(list(self.parameters())[self.global_rank].norm())


class SumsBuffers(Looking):
    """Buffers of items: a hook may set those of all stages, and reads those of its own only."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first.register_buffer("counts", torch.ones(3))
        self.net.head.register_buffer("counts", torch.ones(3))

    def on_train_batch_end(self, *_: Any) -> None:
        for buffer in self.buffers():
            buffer.fill_(2.0)
            buffer.data.mul_(2.0)
        self.note(sum(buffer.sum() for buffer in self.buffers()))


class ReshapesInPlace(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.head.weight.data.t_()


class PicklesWeights(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        pickle.dumps(self.state_dict())


class DifferentiatesInHook(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net.head.weight
        torch.autograd.grad(weight.norm(), [weight])


class Counts(nn.Module):
    """Counts its calls in a number of Python's, as its stage knows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


class ReadsAttributes(Looking):
    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(first=Counts(), head=Counts())

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(self.net.first.linear.in_features + self.net.head.linear.in_features)
        self.note(self.net.first.calls + self.net.head.calls)


class DrawsInside(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        functional.gumbel_softmax(self.net.head.weight.detach())


class ReadsState(Looking):
    """State of an optimizer, of which each stage has its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().optimizer.state  # type: ignore[union-attr]
        self.note(sum(state[p]["momentum_buffer"].norm() for p in self.parameters()))


class CountsAddresses(Looking):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note(len({p.data_ptr() for p in self.parameters()}))


class GroupsOfOne(Looking):
    """Groups that each stage has others of."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [p]} for p in self.parameters()], lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.note(sum(len(group["params"]) for group in optimizer.param_groups))


REFUSED_IN_HOOKS = {
    ReadsState: r"optimizer\.state\[net\..*is on pipeline rank [01]",
    CountsAddresses: "data_ptr: .* is on pipeline rank [01], and has no address on other ranks",
    GroupsOfOne: r"optimizer\.param_groups: the pipeline's ranks have other groups",
    ReadsAttributes: r"pipeline stage [01], and so is its attribute 'calls'",
    AsksByRank: "norm: the ranks of the pipeline ask for values of different weights",
    SumsBuffers: r"sum: counts is a buffer on pipeline rank [01].*lightning_megatron\.gather",
    ReshapesInPlace: "t_: changes the shape of a weight of a pipeline stage in place",
    PicklesWeights: "stands for a weight of another pipeline stage cannot be pickled",
    DifferentiatesInHook: "autograd.grad of weights of pipeline stages, in a hook",
}


def run_refused(kind: type[Looking]) -> str:
    try:
        make_trainer({"pp": 2}, 2).fit(kind(), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trains"


@pytest.mark.parametrize("kind", REFUSED_IN_HOOKS, ids=lambda kind: kind.__name__)
def test_hooks_are_refused_what_stages_cannot_tell(pool: WorkerPool, kind: type[Looking]) -> None:
    for said in pool.run(2, run_refused, kind):
        assert re.search(f"(Config|Attribute)Error: .*{REFUSED_IN_HOOKS[kind]}", said)


def draw_inside() -> None:
    make_trainer({"pp": 2}, 2).fit(DrawsInside(), loader())


def test_what_other_stages_cannot_draw_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="draws random numbers for a weight of a pipeline stage"):
        pool.run(2, draw_inside, grace=0.2)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "device"),
    [
        (Tensor.mul, (2,), {}, "meta"),
        (Tensor.cpu, (), {}, "cpu"),
        (Tensor.to, ("cuda:1",), {}, "cuda:1"),
        (Tensor.to, (torch.float64,), {}, "meta"),
        (Tensor.to, (torch.zeros(1),), {}, "cpu"),
        (Tensor.to, (), {"device": torch.device("cpu")}, "cpu"),
        (torch.zeros_like, (), {"device": "cpu"}, "cpu"),
    ],
)
def test_results_know_the_device_that_they_would_be_on(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> None:
    weight = torch.empty(2, device="meta")
    assert device_of_result(func, (weight, *args), kwargs) == torch.device(device)


def look_after_run() -> list[Any]:
    """What a module of a pipeline is before, during and after a run."""

    class Notes(Looking):
        def on_train_batch_end(self, *_: Any) -> None:
            kinds.append([type(m) for m in self.net.modules() if isinstance(m, nn.Linear)])
            names.append([name for name, _ in self.named_parameters()])
            shapes.append([p.shape for p in self.parameters()])

    kinds: list[Any] = []
    names: list[Any] = []
    shapes: list[Any] = []
    module = Notes()
    trainer = make_trainer({"pp": 2}, 2)
    trainer.fit(module, loader())
    left = [type(p) for p in module.parameters()] + [
        type(group["params"]) for group in trainer.optimizers[0].param_groups
    ]
    pickle.dumps(module.net.first)  # no more than what the rank has
    pickle.dumps(module.net.head)
    return [[len(k) for k in kinds], names[0], shapes[0], left]


def test_hooks_find_the_modules_of_all_stages(pool: WorkerPool) -> None:
    alone = Looking()
    for counts, names, shapes, left in pool.run(2, look_after_run):
        # Two of torch's, each as what it is or as what stands for it, and as its own class.
        assert set(counts) == {2}
        assert names == [name for name, _ in alone.named_parameters()]
        assert shapes == [p.shape for p in alone.parameters()]
        assert set(left) == {nn.Parameter, list}


def keep_best() -> list[float]:
    """Norms of what a hook kept of weights, after the run, on the rank that has them."""

    class Keeps(Looking):
        def on_train_batch_end(self, *_: Any) -> None:
            self.best = {name: value.clone() for name, value in self.state_dict().items()}

        def on_train_end(self) -> None:
            self.load_state_dict(self.best)

    module = Keeps()
    make_trainer({"pp": 2, "gather_at_end": False}, 2).fit(module, loader())
    own = dict(module.named_parameters())
    return [float((module.best[name] - value).abs().max()) for name, value in own.items()]


def test_a_rank_keeps_its_weights_from_hooks(pool: WorkerPool) -> None:
    for found in pool.run(2, keep_best):
        assert found
        assert set(found) == {0.0}
