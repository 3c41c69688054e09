"""Code of users that gets a part of a tensor without torch telling the tensor's class.

Functions of their own for autograd, scripts, transforms, compilers, buffers and gradients of
gradients meet the outputs of column-parallel layers, and weights of which a rank has a part.
"""

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_megatron import PipelineSequential
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm
from tests.parity import context_habits
from tests.parity.plain_modules import draw
from tests.parity.strangers import CLASSES, Stranger


class Split(Stranger):
    """The base of all others: the head's outputs are split."""

    whole_head = False


# Functions of the user's for autograd -------------------------------------------------------------


class Softmax(torch.autograd.Function):
    """Saves what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = x.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * (grad - (grad * p).sum(-1, keepdim=True))


class CrossEntropy(torch.autograd.Function):
    """Saves what it gets, and keeps something else in an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.y = y
        ctx.scale = scale
        return scale * (x.logsumexp(-1) - x.gather(1, y[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        one_hot = torch.zeros_like(x).scatter(1, ctx.y[:, None], 1.0)
        return grad * ctx.scale * (x.softmax(-1) - one_hot) / len(x), None, None


class Kept(torch.autograd.Function):
    """Keeps its input in an attribute, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[:, None] * ctx.x.softmax(-1)


class Swish(torch.autograd.Function):
    """Works element by element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class RowNorm(torch.autograd.Function):
    """Divides each row by its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, size)
        return x / size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, size = ctx.saved_tensors
        return grad / size - x * (grad * x).sum(-1, keepdim=True) / size**3


class Applies(nn.Module):
    """A function for autograd as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(x)
        return found


class Reverse(torch.autograd.Function):
    """Turns gradients around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Round(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Same(torch.autograd.Function):
    """Returns what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - 0.5 * grad.mean(-1, keepdim=True)


class Precomputed(torch.autograd.Function):
    """Computes the gradient in the forward, and saves that of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        p = x.softmax(-1)
        found = -p.gather(1, y[:, None]).log().mean()
        ctx.save_for_backward(p.scatter(1, y[:, None], p.gather(1, y[:, None]) - 1) / len(x))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None


class Scales(torch.autograd.Function):
    """Has weights, saves what it returns, and says by `setup_context` what."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Any:
        y = (x * scale).tanh()
        return y, y.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_sum: Tensor) -> Any:
        x, scale, y, _ = ctx.saved_tensors
        inner = (grad + of_sum[:, None]) * (1 - y * y)
        return inner * scale, (inner * x).sum(0)


class OwnScale(Split):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, CLASSES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, sums = Scales.apply(self.net(x), self.scale)
        found: Tensor = F.cross_entropy(out, y) + sums.square().mean()
        return found


class Cubes(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        x.pow_(3)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0].square() * grad


class OwnLosses(Split):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        first = -Softmax.apply(Same.apply(logits)).gather(1, y[:, None]).log().mean()
        second = CrossEntropy.apply(Round.apply(logits), y, 0.5) + Precomputed.apply(logits, y)
        third = 0.1 * Kept.apply(Cubes.apply(0.5 * logits)).square().mean()
        found: Tensor = first + second + third
        return found


class OwnLayers(Stranger):
    def make_net(self) -> PipelineSequential:
        functions = (Swish, Reverse, RowNorm)
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            functions=[Applies(function) for function in functions],
            down=RowParallelLinear(8, 6),
            head=nn.Linear(6, CLASSES),
        )


class Kernel(torch.autograd.Function):
    """Hands memory to a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.data_ptr()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OwnKernel(Split):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Kernel.apply(self.net(x)), y)


class WeightByFunction(Stranger):
    """A function for autograd gets a weight."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rounded = Round.apply(self.net.up.weight)
        normed = RowNorm.apply(self.net.down.weight)
        return super().loss(x, y) + 0.1 * (rounded.square().mean() + normed[:, 0].sum())


class Recomputes(Split):
    """A loss of split logits that is computed again in the backward."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        def entropy(logits: Tensor) -> Tensor:
            p = logits.softmax(-1)
            return -(p * p.log()).sum(-1).mean() + F.cross_entropy(logits, y)

        def layers(x: Tensor) -> Tensor:
            h: Tensor = self.net.up(x).tanh()
            return h / h.norm(dim=-1, keepdim=True)

        inner = self.net.down(checkpoint(layers, x.clone().requires_grad_(), use_reentrant=True))
        found: Tensor = checkpoint(entropy, self.net(x), use_reentrant=True)
        return found + inner.square().mean()


# Scripts, transforms and compilers ----------------------------------------------------------------


def focal(logits: Tensor, y: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1).gather(1, y[:, None])[:, 0]
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


class Scripted(Split):
    def __init__(self) -> None:
        super().__init__()
        self.focal = torch.jit.script(focal)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.focal(self.net(x), y)
        return found


def energy(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).sum()


class FunctionalGrad(Split):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        return F.cross_entropy(logits, y) + torch.func.grad(energy)(logits).square().mean()


class MapsRows(Split):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        def one(row: Tensor, label: Tensor) -> Tensor:
            return row.logsumexp(-1) - row.gather(0, label[None])[0]

        found: Tensor = torch.vmap(one)(self.net(x), y)
        return found.mean()


class MapsNetwork(Split):
    """A Jacobian of the network itself."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        jacobian = torch.vmap(torch.func.jacrev(self.net))(x)
        return F.cross_entropy(self.net(x), y) + 0.1 * jacobian.square().mean()


class CompiledModule(Split):
    """A criterion that is a module, compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.compile(nn.CrossEntropyLoss(), backend="aot_eager")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.criterion(self.net(x), y)
        return found


class CompiledNetwork(Split):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")


class CompiledBeside(Split):
    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net, backend="aot_eager")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fast(x), y)


# Buffers ------------------------------------------------------------------------------------------


class Centre(Split):
    """A running mean of logits, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        loss = F.cross_entropy(logits - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return loss


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y.tanh()


class Features(Stranger):
    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            act=RunningMean(),
            down=RowParallelLinear(8, 6),
            head=nn.Linear(6, CLASSES),
        )


# Weights that hooks compute, and functions of torch that take a weight ----------------------------


class Pruned(Stranger):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.net.up, "weight", amount=0.3)


class OldWeightNorm(Stranger):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.net.up)


class PrunedByCallback(Stranger):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=False)]


class PrunedInHook(Stranger):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            prune.l1_unstructured(self.net.up, "weight", amount=0.3)


class Deviation(Split):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        return (
            F.cross_entropy(logits, y) + 0.1 * (logits.var(1, True) + logits.std(1, False)).mean()
        )


class TiedHead(Stranger):
    """Multiplies by the table of an embedding."""

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            embedding=VocabParallelEmbedding(8, 6),
            up=ColumnParallelLinear(6, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, 6),
        )

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def batch(self, step: int) -> Any:
        return draw(high=8, step=step), draw(high=8, step=step + 50)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h, table = self.net(x), self.net.embedding.weight
        loss = F.cross_entropy(F.linear(h, table, self.bias), y)
        return loss + (F.linear(h, table) + h @ table.T).square().mean()


class WeightNoise(Stranger):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        torch.manual_seed(7)
        for p in self.parameters():
            p.add_(0.01 * torch.randn_like(p))


class GradientNoise(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.manual_seed(8)
        for p in self.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)
            p.grad.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.01)


# Gradients of gradients ---------------------------------------------------------------------------


class GradientPenalty(Split):
    """A penalty on the gradient at the input, as WGAN-GP's."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        logits = self.net(x)
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class InnerLoop(Stranger):
    """A step on weights within a step, as MAML's."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, fast, (x,)), y)


class NormedNetwork(Split):
    """A layer of this package that no transform of torch.func takes."""

    def make_net(self) -> PipelineSequential:
        return PipelineSequential(
            up=ColumnParallelLinear(6, 8),
            norm=RMSNorm(8),
            down=RowParallelLinear(8, 6),
            head=ColumnParallelLinear(6, CLASSES),
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.vmap(self.net)(x), y)


# Sequences over cp --------------------------------------------------------------------------------


class Statistics(context_habits.Shifts):
    """A forward hook notes what a layer has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net.norm.register_forward_hook(self.look)

    def look(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.note(output.detach().abs().mean())


class ContextCentre(context_habits.Shifts):
    """A running mean of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(context_habits.VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch)
        self.centre = 0.9 * self.centre + 0.1 * logits.detach()[0, 1]
        return (logits - self.centre).square().mean()


USERS: dict[str, type[Stranger]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Stranger) and cls not in (Stranger, Split)
}
