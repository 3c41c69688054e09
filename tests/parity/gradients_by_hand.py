"""Gradients that the strategy has not asked for, each way to make them as a module of its own.

A plain ``loss.backward()``, ``p.grad = g``, parameters that only an optimizer knows, and hooks that
act on a gradient in the backward. `notes` collects what a module has found out on the way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import LayerNorm
from tests.parity.plain_modules import FromMemory, draw


class Gradients(FromMemory):
    """Two parallel layers, a norm, and a factor of the module's own; the base of all others."""

    by_hand = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.by_hand
        self.net = self.make_net()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.notes: list[float] = []

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, 6),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    def loss(self, batch: Any, *, flipped: bool = False) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x.flip(1) if flipped else x) * self.factor, y)

    def note(self, value: Any) -> None:
        self.notes.append(float(value))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.by_hand:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.make_gradients(batch)
        optimizer.step()
        return None

    def make_gradients(self, batch: Any) -> None:
        """Between ``zero_grad`` and ``step``."""


# ``loss.backward()`` ------------------------------------------------------------------------------


class PlainBackward(Gradients):
    def make_gradients(self, batch: Any) -> None:
        self.loss(batch).backward()


class PlainThenClips(Gradients):
    """Clips by the norm of all, and looks at the gradient of one."""

    def make_gradients(self, batch: Any) -> None:
        self.loss(batch).backward()
        self.note(self.net.head.weight.grad.abs().sum())
        self.note(clip_grad_norm_(self.parameters(), 0.1))


class PlainClipsByName(Gradients):
    def make_gradients(self, batch: Any) -> None:
        self.loss(batch).backward()
        self.clip_gradients(self.optimizers(), 0.1, "norm")


class PlainAndManual(Gradients):
    """Several backwards before a step; the first uses some of the parameters."""

    def make_gradients(self, batch: Any) -> None:
        (0.1 * self.net.head.weight.square().sum() + self.factor).backward()
        self.manual_backward(self.loss(batch))
        self.loss(batch, flipped=True).backward()


class TwoManual(Gradients):
    def make_gradients(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))
        self.net.head.weight.grad.mul_(0.5)
        self.manual_backward(self.loss(batch, flipped=True))


class StepsEverySecond(Gradients):
    """Accumulates by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch) / 2
        if batch_idx % 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            self.manual_backward(loss)


class PlainInHook(Gradients):
    """A second backward, of a loss of this rank's samples, behind that of the step."""

    by_hand = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = batch

    def on_after_backward(self) -> None:
        (0.5 * self.loss(self.kept, flipped=True)).backward()


class KeepsGradients(Gradients):
    """Accumulates under automatic optimization, by hooks."""

    by_hand = False

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx % 2:
            optimizer.step()


def _one_key_head(kind: type[Gradients]) -> type[Gradients]:
    """The module with fewer key-value heads than ranks of tp, and sequences to divide."""

    class Attends(kind):  # type: ignore[misc, valid-type]
        def make_net(self) -> PipelineSequential:
            return PipelineSequential(
                embedding=VocabParallelEmbedding(8, 6),
                attention=SelfAttention(6, 2, 1, out_bias=True),
                norm=LayerNorm(6),
                up=ColumnParallelLinear(6, 8),
                act=nn.Tanh(),
                down=RowParallelLinear(8, 6),
                head=ColumnParallelLinear(6, 4),
            )

        def batch(self, step: int) -> Any:
            return draw(4, high=8, step=step), draw(4, 4, step=step + 50)

    Attends.__name__ = Attends.__qualname__ = f"{kind.__name__}Attends"
    return Attends


PlainBackwardAttends = _one_key_head(PlainBackward)
PlainThenClipsAttends = _one_key_head(PlainThenClips)
PlainAndManualAttends = _one_key_head(PlainAndManual)
TwoManualAttends = _one_key_head(TwoManual)
StepsEverySecondAttends = _one_key_head(StepsEverySecond)
KeepsGradientsAttends = _one_key_head(KeepsGradients)
PlainInHookAttends = _one_key_head(PlainInHook)


# ``p.grad = g`` -----------------------------------------------------------------------------------


class Assigns(Gradients):
    def make_gradients(self, batch: Any) -> None:
        parameters = list(self.parameters())
        found = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient


class AssignsThenClips(Assigns):
    def make_gradients(self, batch: Any) -> None:
        super().make_gradients(batch)
        self.note(clip_grad_norm_(self.parameters(), 0.1))


class AssignsClipsByName(Assigns):
    def make_gradients(self, batch: Any) -> None:
        super().make_gradients(batch)
        self.clip_gradients(self.optimizers(), 0.1, "norm")


class AssignsUnused(Gradients):
    """Some have none; the sum of two tasks, as PCGrad takes it."""

    def make_gradients(self, batch: Any) -> None:
        parameters = list(self.parameters())
        losses = self.loss(batch), self.net.head.weight.square().sum()
        tasks = [torch.autograd.grad(x, parameters, allow_unused=True) for x in losses]
        for parameter, *parts in zip(parameters, *tasks, strict=True):
            known = [part for part in parts if part is not None]
            parameter.grad = sum(known[1:], known[0]) if known else None


class CopiesInto(Gradients):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx == 0:
            self.manual_backward(self.loss(batch))
        optimizer.zero_grad(set_to_none=False)
        parameters = list(self.parameters())
        found = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad.add_(gradient)
        optimizer.step()


class ChangesByAssignment(Gradients):
    """Changes what is the mean already."""

    by_hand = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            parameter.grad = parameter.grad.clamp(-0.05, 0.05)
        self.net.norm.bias.grad = None
        self.factor.grad *= 0.5
        self.note(self.net.head.weight.grad.norm())


class AddsGradients(Gradients):
    """Adds the gradient of another loss, under automatic optimization."""

    by_hand = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = batch

    def on_after_backward(self) -> None:
        parameters = list(self.parameters())
        found = torch.autograd.grad(self.loss(self.kept, flipped=True), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = parameter.grad + 0.5 * gradient


# Parameters that only an optimizer knows ----------------------------------------------------------


class WeighsLosses(Gradients):
    """Learns the weights of its losses, which are in a list."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2)]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.weights], lr=1e-2, eps=1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self.net(x) * self.factor
        losses = F.mse_loss(found, y), F.l1_loss(found, y)
        return sum(
            (-weight).exp() * loss + weight
            for weight, loss in zip(self.weights, losses, strict=True)
        )

    def on_train_batch_end(self, *_: Any) -> None:
        for weight in self.weights:
            self.note(weight.detach())


class WeighsLossesClipped(WeighsLosses):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


class AddsLayer(Gradients):
    """Adds a layer in mid-run."""

    by_hand = False

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.more = nn.Linear(6, 3).double()
            with torch.no_grad():
                for parameter in self.more.parameters():
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if hasattr(self, "more"):
            x, y = batch
            loss = loss + F.mse_loss(self.more(x), y)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if hasattr(self, "more"):
            self.note(self.more.weight.detach().square().sum())


# Gradients of gradients, and of all weights -------------------------------------------------------


class DifferentiatesAll(Gradients):
    by_hand = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        found = torch.autograd.grad(loss, self.parameters(), retain_graph=True)
        return loss * (1 + sum(gradient.norm() for gradient in found).detach())


class PenaltyOfTwoCalls(Gradients):
    """A penalty on the slope at other points, as in WGAN-GP and R1."""

    by_hand = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        between = (x * 0.5).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return self.loss(batch) + 0.1 * slope.square().mean()


# Hooks in the backward ----------------------------------------------------------------------------


class ClampsInBackward(Gradients):
    by_hand = False

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


class PerturbsInput(Gradients):
    """Trains on inputs that are moved along a gradient, which a backward in the step has made."""

    by_hand = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        moved = x.clone().requires_grad_(True)
        self.loss((moved, y)).backward()
        assert moved.grad is not None
        return self.loss(((x + 0.1 * moved.grad.sign()), y))


class StepsInBackward(Gradients):
    """An optimizer for each parameter, which steps as soon as there is its gradient."""

    by_hand = False

    def on_fit_start(self) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in self.net.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.factor], lr=0.1)


AssignsAttends = _one_key_head(Assigns)
AssignsThenClipsAttends = _one_key_head(AssignsThenClips)
AddsGradientsAttends = _one_key_head(AddsGradients)
ClampsInBackwardAttends = _one_key_head(ClampsInBackward)


def _by_name(*kinds: type) -> dict[str, Any]:
    return {kind.__name__: kind for kind in kinds}


BACKWARDS = _by_name(
    *(PlainBackward, PlainThenClips, PlainClipsByName, PlainAndManual, TwoManual),
    *(StepsEverySecond, PlainInHook, KeepsGradients),
)
ATTENDING = _by_name(
    *(PlainBackwardAttends, PlainThenClipsAttends, PlainAndManualAttends, TwoManualAttends),
    *(StepsEverySecondAttends, KeepsGradientsAttends, PlainInHookAttends, AssignsAttends),
    *(AssignsThenClipsAttends, AddsGradientsAttends, ClampsInBackwardAttends),
)
ASSIGNED = _by_name(
    *(Assigns, AssignsThenClips, AssignsClipsByName, AssignsUnused, CopiesInto),
    *(ChangesByAssignment, AddsGradients),
)
OWN = _by_name(WeighsLosses, WeighsLossesClipped, AddsLayer)
TWICE = _by_name(DifferentiatesAll, PenaltyOfTwoCalls)
IN_BACKWARD = _by_name(ClampsInBackward, StepsInBackward)
