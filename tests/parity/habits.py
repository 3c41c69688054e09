"""What modules do that look at or write to weights and gradients, each as a module of its own.

All of it works under ``DistributedDataParallel``. `notes` collects what a module has found out on
the way, which every layout is to find out alike.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, WeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
    vector_to_parameters,
)

from tests.parity.plain_modules import FromMemory, draw

PROBE = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(2, 6)


class Habit(FromMemory):
    """Two layers; the base of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)

    def note(self, value: Any) -> None:
        self.notes.append(float(value))

    def probe(self) -> None:
        with torch.no_grad():
            self.note(self(PROBE).sum())


class ByHand(Habit):
    """The same under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Habit.training_step(self, batch, batch_idx))
        self.between(batch)
        optimizer.step()
        self.probe()

    def between(self, batch: Any) -> None:
        """Between backward and step."""


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module) -> None:
    """Move the weights of an average towards those of a network."""
    for mean, weight in zip(target.parameters(), source.parameters(), strict=True):
        mean.lerp_(weight, 0.25)


class Momentum(Habit):
    """Learns to match a moving average of itself, which its step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.move()
        return F.mse_loss(self(x), y) + F.mse_loss(self(x), self.target(x))

    def move(self) -> None:
        follow(self.target, self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-5)


class MomentumAtBatchEnd(Momentum):
    def move(self) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        follow(self.target, self.net)


class Follower(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        follow(module.target, module.net)


class MomentumByCallback(Momentum):
    def move(self) -> None:
        pass

    def configure_callbacks(self) -> Any:
        return [Follower()]


class Prototypes(Habit):
    """Weights that are normalised before each step, and clamped after it, by ``.data`` too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            weight = self.net[2].weight
            weight.copy_(F.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].weight.data.clamp_(-0.3, 0.3)


class ForwardAfterBackward(Habit):
    def on_after_backward(self) -> None:
        self.probe()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.probe()


class ForwardBetween(ByHand):
    def between(self, batch: Any) -> None:
        self.probe()


def _probing(name: str) -> Callable[..., None]:
    def hook(self: Habit, *_: Any, **__: Any) -> None:
        self.probe()

    hook.__name__ = name
    return hook


class CallsInHooks(Habit):
    """Calls itself in every hook there is."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.probe()
        self.log("val", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)


for _name in (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"),
    *("on_before_optimizer_step", "on_train_epoch_end", "on_validation_start", "on_train_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end", "on_fit_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "teardown"),
):
    setattr(CallsInHooks, _name, _probing(_name))


class Generates(FromMemory):
    """A model of another library that generates in a hook."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)
        self.notes: list[float] = []

    def batch(self, step: int) -> Any:
        return draw(6, high=11, step=step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        prompt = torch.tensor([[1, 2, 3]])
        found = self.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        self.notes += found.flatten().tolist()


def halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


class HookEarly(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(halved)


class HookLate(Habit):
    def on_train_start(self) -> None:
        self.net[0].weight.register_hook(halved)


class ClipsByHand(Habit):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.note(clip_grad_norm_(self.parameters(), 0.1))


class ClipsValuesByHand(ByHand):
    def between(self, batch: Any) -> None:
        clip_grad_value_(self.parameters(), 0.01)


class LogsGradients(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.notes += [float(value) for value in norms.values()]
        self.notes += [float(p.grad.abs().max()) for p in self.parameters()]


class LooksAtBatchEnd(Habit):
    """Gradients stay until they are cleared."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes += [float(p.grad.abs().sum()) for p in self.parameters()]


class LooksUnderDecorator(Habit):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.notes += [float(p.grad.abs().sum()) for p in self.parameters()]


class LooksDecorated(Habit):
    """Between backward and step, and changes what it finds."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            self.note(p.grad.norm())
            p.grad.mul_(0.5)


class LooksElsewhere(Habit):
    """By an object that is in no callback, and of one gradient only."""

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.notes) % 2 == 0:
            self.note(HIDDEN[1](self.net[2]))
        self.notes += HIDDEN[2](self)


class Accumulates(Habit):
    """Changes gradients between batches of a step, and clears them behind it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:  # before it they are those of this rank's samples, as under DDP
            self.notes += HIDDEN[2](self)
            HIDDEN[4](self)
            self.note(self.net[2].weight.grad is None)

    def on_train_batch_start(self, *_: Any) -> None:
        HIDDEN[3](self)


class AddsNoise(Habit):
    def on_after_backward(self) -> None:
        for index, p in enumerate(self.parameters()):
            if index % 2:
                p.grad.add_(torch.sin(p.detach()), alpha=0.01)
            else:
                p.grad = p.grad + 0.01 * torch.cos(p.detach())


class LoadsInSetup(Habit):
    def _load(self) -> None:
        values = {k: torch.full_like(v, 0.1) + 0.01 * v for k, v in self.state_dict().items()}
        self.load_state_dict(values)

    def setup(self, stage: str) -> None:
        self._load()


class LoadsAtFitStart(LoadsInSetup):
    def setup(self, stage: str) -> None:
        pass

    def on_fit_start(self) -> None:
        self._load()


class Copies(Habit):
    """Takes a copy of its network in mid-run, and learns to stay near it."""

    teacher: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]
        return (
            loss
            if self.teacher is None
            else loss + F.mse_loss(self(batch[0]), self.teacher[0](batch[0]))
        )


class Prunes(Habit):
    """In float64 from the start: what the callback makes of the weights is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def configure_callbacks(self) -> Any:
        layers = [(self.net[0], "weight"), (self.net[2], "weight")]
        return [ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)]


class Averages(Habit):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=0.5)]


class AveragesEvenly(Habit):
    def configure_callbacks(self) -> Any:
        return [WeightAveraging()]


class Vectors(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        vector = parameters_to_vector(self.net.parameters()).detach()
        self.note(vector.norm())
        vector_to_parameters(vector * 0.99, self.net.parameters())


class Assigns(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        for index, p in enumerate(self.parameters()):
            p.data = p.data * 0.9 if index % 2 else p.data.clamp(-0.3, 0.3)
        self.probe()


class AssignsElsewhere(Habit):
    """By a function that nobody knows of who looks at the code of modules and callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        HIDDEN[0](self)


def shrink(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data * 0.9


def sum_of_gradient(layer: nn.Module) -> float:
    assert isinstance(layer, nn.Linear)
    assert layer.weight.grad is not None
    return float(layer.weight.grad.sum())


class Report:
    def __call__(self, module: nn.Module) -> list[float]:
        return [float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None]


def halve_some(module: nn.Module) -> None:
    for p in list(module.parameters())[1:]:
        if p.grad is not None:
            p.grad = p.grad * 0.5


def clear_all(module: nn.Module) -> None:
    module.zero_grad()


HIDDEN: list[Any] = [shrink, sum_of_gradient, Report(), halve_some, clear_all]


class ReducesByHand(Habit):
    """The mean of what is the mean already."""

    def on_after_backward(self) -> None:
        if dist.is_initialized():
            for p in self.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class CopiesAtEpochEnd(Habit):
    def on_train_epoch_end(self) -> None:
        copied = copy.deepcopy(self.net)
        with torch.no_grad():
            self.note(copied(PROBE).sum())


class ZeroRedundancy(Habit):
    def configure_optimizers(self) -> Any:
        if not dist.is_initialized():
            return super().configure_optimizers()
        from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles scripts, and warns

        options: Any = {"lr": 1e-2, "eps": 1e-5}
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, **options)


class GradientPenalty(Habit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class OtherMethods(Habit):
    """A method of a block that is not its forward, and a weight without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x) + self.blocks[0].encode(x) + self.blocks[1](x)
        hidden = F.linear(x, self.net[0].weight)
        return F.mse_loss(out, y) + hidden.square().mean() + self.net[2].weight.square().sum()


class Branches(Habit):
    """A layer for some samples, all of which are with one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 3)
        self.never = nn.Linear(2, 2)

    def batch(self, step: int) -> Any:
        x, y = super().batch(step)
        x[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out, chosen = self(x), x[:, 0] > 0
        if chosen.any():
            out = out.index_add(0, chosen.nonzero().flatten(), self.extra(x[chosen]))
        return F.mse_loss(out, y)


class Branching(nn.Module):
    """A block that does something for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if not chosen.any():
            return x * 1.0
        out: Tensor = x.index_add(0, chosen.nonzero().flatten(), self.extra(x[chosen]))
        return out


class BranchesInside(Branches):
    """Blocks with a layer for some samples, and an optimizer that shrinks what has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Branching(), Branching()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        for block in self.blocks:
            out = block(out, x[:, 0] > 0)
        return F.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.3)


class Experts(Branches):
    """Layers in a list, one of which is for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out, chosen = self(x) + self.experts[0](x), x[:, 0] > 0
        if chosen.any():
            out = out.index_add(0, chosen.nonzero().flatten(), self.experts[1](x[chosen]))
        return F.mse_loss(out, y)


class Lists(ByHand):
    """Children without a forward, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.named = nn.ModuleDict({"a": nn.Linear(6, 3)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(layer(x) for layer in self.layers) + self.named["a"](x)
        return out * self.scales[0] * self.scales[1]


class NestedLists(ByHand):
    """Lists in lists, and children that hold weights and have no forward."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleList([nn.Linear(6, 3), nn.ParameterList([nn.Parameter(torch.ones(3))])])
        self.lists = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 3)}), inner])
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(3))})

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.lists
        out: Tensor = first["a"](x) * self.named["b"] + second[0](x) * second[1][0]
        return out


class Twice(ByHand):
    """Two optimizers that share the work, and two backwards before one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, union-attr]
        x, y = batch
        for optimizer in (first, second):
            optimizer.zero_grad()
        for part in (x[:, :], x.flip(1)):
            self.manual_backward(F.mse_loss(self(part), y))
        first.step()
        self.probe()
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[i].parameters(), lr=1e-2, eps=1e-5) for i in (0, 2)]


def _by_name(kinds: Iterable[type]) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


HABITS: dict[str, Any] = _by_name(
    (
        *(Momentum, MomentumAtBatchEnd, MomentumByCallback, Prototypes, ForwardAfterBackward),
        *(ForwardBetween, CallsInHooks, Generates, HookEarly, HookLate, ClipsByHand),
        *(ClipsValuesByHand, LogsGradients, LooksAtBatchEnd, AddsNoise, LoadsInSetup),
        *(LoadsAtFitStart, Copies, Prunes, Averages, AveragesEvenly, Vectors, GradientPenalty),
        *(Assigns, AssignsElsewhere, ReducesByHand, CopiesAtEpochEnd, ZeroRedundancy),
        *(OtherMethods, Branches, Lists, Twice, BranchesInside, Experts),
        *(NestedLists, LooksUnderDecorator, LooksDecorated, LooksElsewhere, Accumulates),
    )
)
