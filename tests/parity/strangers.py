"""What users write in a module that any layout can hold, each habit as a module of its own.

The net is built from parallel layers in a `PipelineSequential`. `notes` collects what a module has
found out on the way.
"""

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from torchmetrics import SumMetric

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.parity import penalties
from tests.parity.plain_modules import FromMemory, draw

CLASSES = 4


class Stranger(FromMemory):
    """Classifies random data; the base of all others."""

    whole_head = True

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()
        self.notes: list[float] = []

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, 6),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, CLASSES) if self.whole_head else ColumnParallelLinear(6, CLASSES),
        )

    def batch(self, step: int) -> Any:
        return draw(6, step=step), draw(high=CLASSES, step=step + 50)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def note(self, value: Any) -> None:
        self.notes.append(float(value))


class LogitsByHand(Stranger):
    """Accuracy, confidence, entropy, margins and a loss by hand from a column-parallel head."""

    whole_head = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        p = logits.softmax(-1)
        entropy = -(p * p.log()).sum(-1).mean()
        top = logits.topk(2, dim=-1).values
        right = logits.log_softmax(-1).gather(1, y[:, None]).mean()
        self.log("acc", (logits.argmax(-1) == y).double().mean(), sync_dist=True, on_epoch=True)
        self.log("max", logits.max(dim=-1).values.mean(), sync_dist=True, on_epoch=True)
        return -right + 0.1 * entropy + 0.1 * (top[:, 0] - top[:, 1]).mean()


class ClipsByHand(Stranger):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.note(clip_grad_norm_(self.parameters(), 0.2))


class ClipsInHook(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.2)


class ClipsValues(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_value_(self.parameters(), 0.01)


class LogsNorms(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(grad_norm(self, 2)["grad_2.0_norm_total"])


class NormByHand(Stranger):
    def on_after_backward(self) -> None:
        total = sum(p.grad.norm() ** 2 for p in self.parameters() if p.grad is not None)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.div_(total.sqrt() + 1e-3)


class NormOfEach(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-3)


class StackedNorms(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        scale = 1 / (1 + torch.cat(grads).norm())
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(scale)


class Penalty(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = sum(p.square().sum() for p in self.parameters())
        return self.loss(*batch) + 1e-2 * weights


class PenaltyTimesLoss(Stranger):
    """A factor that follows from the weights: each rank's loss learns something else of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch) * (1 + 0.1 * self.net.up.weight.norm())


class RecomputedPenalty(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def penalty() -> Tensor:
            return sum((p.norm() ** 3 for p in self.parameters()), torch.zeros(()).double())

        return self.loss(*batch) + 0.1 * checkpoint(penalty, use_reentrant=False)


class PenaltyOfOne(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch) + 1e-2 * self.net.up.weight.norm()


class NoisyWeights(Stranger):
    """Adds to weights what depends on their place."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.linspace(0, 1e-2, p.shape[-1], dtype=p.dtype).expand(p.shape))


class Clamps(Stranger):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


class ClampsData(Stranger):
    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            p.data = p.data.clamp(-0.2, 0.2)


class Vectors(Stranger):
    def on_train_batch_end(self, *_: Any) -> None:
        vector = torch.cat([p.detach().flatten() for p in self.parameters()])
        vector_to_parameters(vector * 0.9, self.parameters())


class NormalisesWeights(Stranger):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.div_(p.norm() + 1.0)


class TensorHooks(Stranger):
    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda g: g * 0.5)


class ScalesGradients(Stranger):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad *= 0.5


class Signs(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.sign()


class Unfreezes(Stranger):
    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_("up" not in name)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for p in self.parameters():
                p.requires_grad_(True)


class RateByHand(Stranger):
    def on_train_epoch_end(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


class RateOfLoss(Stranger):
    """The next epoch's learning rate follows from this epoch's losses."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        mean = self.all_gather(torch.stack(self.losses).mean()).mean()
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= float(mean)


class SetsInHook(Stranger):
    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.net.head.weight.fill_(0.1)


class ByHand(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        lower, upper = self.optimizers()
        for optimizer in (lower, upper):
            optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        self.clip_gradients(lower, 0.1, "norm")
        lower.step()
        upper.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.up.parameters(), lr=0.3),
            torch.optim.SGD([*self.net.down.parameters(), *self.net.head.parameters()], lr=0.1),
        ]


class HeadOnly(Stranger):
    """Optimizes one layer; the others get gradients that nobody clears."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "head" in n], lr=0.3)


class Trust(torch.optim.Optimizer):
    """Scales each step by the ratio of norms of weight and gradient, as LARS does."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.add_(p.grad, alpha=-group["lr"] * float(ratio))
        return loss


class Lars(Stranger):
    def configure_optimizers(self) -> Any:
        return Trust(self.parameters())


class NotesWeights(Stranger):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note(sum(float(p.abs().sum()) for p in self.parameters()))


class NotesState(Stranger):
    def on_train_epoch_end(self) -> None:
        self.note(sum(float(v.sum()) for v in self.state_dict().values()))


class CountsParameters(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch) / sum(p.numel() for p in self.parameters())


class SavesWeights(Stranger):
    """Keeps the best weights in memory and returns to them."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.kept = {k: v.detach().clone() for k, v in self.state_dict().items()}
        else:
            self.load_state_dict(self.kept)


class Gathers(Stranger):
    """Pulls each sample towards the mean over the batch, gathered from all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        everyone = self.all_gather(out, sync_grads=True).reshape(-1, CLASSES)
        return F.cross_entropy(out, y) + (out - everyone.mean(0)).square().mean()


class Leaves(nn.Module):
    """A block that adds a loss of its own to a list."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.losses = losses

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.losses.append(y.square().mean())
        return x + y.tanh()


class LossesOfBlocks(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        blocks = [Leaves(self.losses) for _ in range(4)]
        self.net = PipelineSequential(blocks=blocks, head=nn.Linear(6, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.clear()
        return self.loss(*batch) + 0.1 * sum(self.losses)


class HookedFeatures(Stranger):
    """A forward hook keeps what a layer has computed, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net.act.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.features["act"] = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        return loss + sum(f.abs().mean() for f in self.features.values())


class Encodes(Stranger):
    """Keeps in an attribute what is computed before the trunk, and uses it behind."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.encoded = self.encoder(x)
        return self.loss(self.encoded, y) + self.encoded.square().mean()


class Centres(Stranger):
    """Moves a buffer behind the trunk, and uses it before that in the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))
        self.rate = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x * self.rate - self.centre)
        self.centre += 0.1 * self.all_gather(out.detach().mean()).mean()
        self.rate = 1.0 / (2.0 + batch_idx)
        return F.cross_entropy(out, y)


class RateOfOutputs(Stranger):
    """A hook after each batch uses what the step has returned beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        return {"loss": F.cross_entropy(out, y), "out": out.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        size = self.all_gather(outputs["out"].abs().mean()).mean()
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = float(size)


class Sums(L.Callback):
    """Has metrics of its own, one of them in a dict."""

    def __init__(self) -> None:
        self.total = SumMetric()
        self.more = {"count": SumMetric()}

    def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, *__: Any) -> None:
        self.total.update(batch[1].sum())
        self.more["count"].update(len(batch[1]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.note(self.total.compute())
        module.note(self.more["count"].compute())


class CountsInCallback(Stranger):
    """A metric of a callback, and one in a list of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.several = [SumMetric()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.several[0].update(len(batch[1]))

    def on_train_epoch_end(self) -> None:
        self.note(self.several[0].compute())

    def configure_callbacks(self) -> Any:
        return [Sums()]


class NormedWeight(Stranger):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net.down)


class WholeWeights(Stranger):
    """Looks at weights and gradients as at whole ones: base of what only one stage can."""


class PenaltyElsewhere(WholeWeights):
    """Penalties in another file, in a module and in a function of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = penalties.Spectral()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        extra = penalties.orthogonal(self.net.up.weight) + 0.1 * penalties.roots(self.net)
        return self.loss(*batch) + 1e-2 * (extra + self.spectral(self.net.down))


class Watched(WholeWeights):
    def on_train_batch_end(self, *_: Any) -> None:
        self.notes += penalties.Watcher(self.net).renormalise()


class DecoratedHook(WholeWeights):
    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(1 / (1 + p.norm()))


class TrainsSomeRows(WholeWeights):
    """Writes to rows of weights and gradients by their place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net.up.weight.grad[:3] = 0
        self.net.up.bias.grad[[0, 7]] = 0.5
        self.net.down.weight.grad[:, 1] = 0

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net.up.weight[0] = 0.25
        self.net.down.weight.data[0] = 0.5


class AdaptiveWeight(WholeWeights):
    """A factor from norms of gradients at the last layer, as VQGAN's."""

    whole_head = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        first, second = F.cross_entropy(logits, y), logits.square().mean()
        weight = self.net.head.weight
        grad = torch.autograd.grad
        norms = [grad(value, weight, retain_graph=True)[0].norm() for value in (first, second)]
        factor = (norms[0] / (norms[1] + 1e-4)).detach()
        self.note(factor)
        return first + 0.1 * factor * second


class TiesByHand(WholeWeights):
    """Uses a layer's weight by a function of torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        again = F.linear(x, self.net.up.weight, self.net.up.bias)
        back = F.linear(again.tanh(), self.net.down.weight)
        return self.loss(x, y) + 0.1 * back.square().mean()


class RecomputesLayers(WholeWeights):
    """Calls layers by torch's own function, and looks at a weight where they run again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def layers(x: Tensor) -> Tensor:
            h = self.net.up(x).tanh() * self.net.up.weight.norm()
            out: Tensor = self.net.down(h)
            return out

        x, y = batch
        inner = checkpoint(layers, x, use_reentrant=False)
        return self.loss(x, y) + 0.1 * inner.square().mean()


class CompilesPenalties(WholeWeights):
    """Functions that the user compiles get weights, gradients and logits."""

    whole_head = False

    def __init__(self) -> None:
        super().__init__()
        self.gram = torch.compile(lambda w: (w @ w.T).square().sum(), backend="eager")
        self.size = torch.compile(lambda w: w.norm(), backend="eager")
        self.cross = torch.compile(lambda out, y: F.cross_entropy(out, y), backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss: Any = self.cross(self.net(x), y)
        return loss + 1e-2 * self.gram(self.net.up.weight)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(self.size(self.net.up.weight))
        self.note(self.size(self.net.down.weight.grad))


class LargestValue(WholeWeights):
    """The norm of a matrix, which is none of its elements'."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        largest = torch.linalg.norm(self.net.up.weight, 2)
        return self.loss(*batch) + 0.1 * largest + 0.1 * torch.linalg.norm(self.net.down.weight)


class WritesByView(WholeWeights):
    """Writes to a view of a weight that no rank has."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.up.weight.data[0].zero_()


class LooksAtShapes(WholeWeights):
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net.up.weight
        self.notes += [*weight.shape, weight.numel(), len(weight), weight.ndim, weight.size(-1)]
        self.note(weight[3, 2])
        self.note(torch.linalg.svdvals(weight.detach())[0])
        self.note(weight.detach().std() + weight.grad.var(0).sum())


class Perturbs(WholeWeights):
    """Random numbers beside weights, which are the same on all ranks."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.manual_seed(7)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p), alpha=1e-3)
            nn.init.normal_(self.net.up.bias, std=0.1)


class AverageOfWeights(WholeWeights):
    """Copies of weights follow these."""

    def on_train_start(self) -> None:
        self.mean = [copy.deepcopy(p.detach()) for p in self.net.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for mean, p in zip(self.mean, self.net.parameters(), strict=True):
            mean.lerp_(p, 0.3)
            self.note(mean.norm())
            self.note(copy.deepcopy(p).square().sum())


WHOLE: dict[str, type[Stranger]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, WholeWeights) and cls is not WholeWeights
}
STRANGERS: dict[str, type[Stranger]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Stranger) and not issubclass(cls, WholeWeights)
}


class PenaltyOfLayers(Stranger):
    """Bias-free layers, one of which the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            blocks=[nn.Linear(6, 6, bias=False) for _ in range(3)],
            head=nn.Linear(6, CLASSES, bias=False),
        )

    def penalty(self) -> Any:
        return sum(p.square().sum() for p in self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch) + 0.1 * self.penalty()


class PenaltyByModules(PenaltyOfLayers):
    def penalty(self) -> Any:
        layers = (m for m in self.net.modules() if isinstance(m, nn.Linear))
        return sum(m.weight.square().sum() for m in layers)


class PenaltyInLoop(PenaltyOfLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        for name, p in self.named_parameters():
            if name.endswith("weight"):
                loss = loss + 0.1 * p.norm()
        return loss


PENALTIES: dict[str, type[Stranger]] = {
    cls.__name__: cls for cls in (PenaltyOfLayers, PenaltyByModules, PenaltyInLoop)
}
"""Sums over parameters, of which a rank may have one only."""
