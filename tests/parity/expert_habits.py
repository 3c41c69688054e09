"""What users write around a mixture of experts, each habit as a module of its own.

The first kind are the modules of `tests.parity.strangers`, with a mixture in their net. The second
do what only a mixture invites. `notes` collects what a module has found out on the way.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import MixtureOfExperts, RouterConfig, auxiliary_loss
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.parity.habits import follow
from tests.parity.plain_modules import FromMemory, draw
from tests.parity.strangers import CLASSES, STRANGERS, Stranger

WIDTH = 6


def mixture(**options: Any) -> MixtureOfExperts:
    """Four experts, of which each token uses two."""
    return MixtureOfExperts(WIDTH, 5, num_experts=4, top_k=2, **options)


class OfSamples(nn.Module):
    """A mixture that takes each sample as a sequence of one token, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = mixture(router=RouterConfig(z_loss=1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x[:, None])
        return x + y[:, 0]


class WithMixture(Stranger):
    """Puts a mixture into the net of another stranger."""

    def make_net(self) -> PipelineSequential:
        head = nn.Linear(WIDTH, CLASSES)
        return PipelineSequential(
            up=ColumnParallelLinear(WIDTH, 8),
            act=nn.Tanh(),
            down=RowParallelLinear(8, WIDTH),
            mix=OfSamples(),
            head=head if self.whole_head else ColumnParallelLinear(WIDTH, CLASSES),
        )


def mixed(name: str) -> Stranger:
    """A stranger with a mixture in its net."""
    module: Stranger = type(name, (WithMixture, STRANGERS[name]), {})()
    return module


MIXED = [
    name
    for name, kind in STRANGERS.items()
    if ("__init__" not in vars(kind) or name in ("ByHand", "Unfreezes")) and name != "Signs"
]
"""Strangers that take a mixture; not the one that takes signs, of gradients that are roundings."""


class Sets(FromMemory):
    """Classifies sets of vectors by a plain network without a trunk; the base of those below."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.mix = self.make_mixture()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.notes: list[float] = []

    def make_mixture(self) -> nn.Module:
        return mixture()

    def batch(self, step: int) -> Any:
        return draw(5, WIDTH, step=step), draw(high=CLASSES, step=step + 50)

    def note(self, value: Any) -> None:
        self.notes.append(float(value))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        out: Tensor = self.head((x + self.mix(x)).mean(1))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Teaches(Sets):
    """Follows an average of its own mixture, which runs in training mode without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.mix).requires_grad_(False)

    def make_mixture(self) -> nn.Module:
        return mixture(router=RouterConfig(bias_update=1e-2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with torch.no_grad():
            wanted = self.target(self.enter(x))
        return F.cross_entropy(self(x), y) + F.mse_loss(self.mix(self.enter(x)), wanted)

    def on_train_batch_end(self, *_: Any) -> None:
        follow(self.target, self.mix)


class Repeats(Sets):
    """Uses one mixture twice, and another one in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = mixture()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.enter(x)
        x = x + self.mix(x)
        x = x + self.mix(x.tanh())
        if batch_idx == 0:
            x = x + self.seldom(x)
        return F.cross_entropy(self.head(x.mean(1)), y)


class Freezes(Sets):
    """Trains the router with frozen experts, then the experts with a frozen router."""

    def on_train_epoch_start(self) -> None:
        even = self.current_epoch % 2 == 0
        self.mix.experts.requires_grad_(not even)
        self.mix.router.requires_grad_(even)


class Alternates(Sets):
    """Two optimizers by hand, one for experts; clips what each steps on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        experts = list(self.mix.experts.parameters())
        others = [p for p in self.parameters() if all(p is not q for q in experts)]
        return [torch.optim.SGD(experts, lr=0.3), torch.optim.Adam(others, lr=1e-2, eps=1e-4)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y))
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()


class AddsLosses(Sets):
    """Adds the auxiliary losses itself, and logs them."""

    def make_mixture(self) -> nn.Module:
        return mixture(router=RouterConfig(inject=False, z_loss=0.1, balance_weight=0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        more = auxiliary_loss(self)
        self.log("auxiliary", more, sync_dist=True, on_epoch=True)
        return loss + more


class SharesBias(Sets):
    """Is kept in balance by a bias, with sigmoid scores, and notes it."""

    def make_mixture(self) -> nn.Module:
        return mixture(
            shared_size=4,
            shared_gate=True,
            router=RouterConfig(score="sigmoid", bias_update=0.05, scale=2.5),
        )

    def on_train_batch_end(self, *_: Any) -> None:
        self.note((self.mix.router.bias * torch.arange(4)).sum())


class Recomputes(SharesBias):
    """Recomputes its mixture by a checkpoint of its own, in one of torch's two ways by turns."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        self.turn = not getattr(self, "turn", False)
        y: Tensor = checkpoint(self.mix, x, use_reentrant=self.turn)
        out: Tensor = self.head((x + y).mean(1))
        return out


class Masks(Sets):
    """Leaves padded vectors out, and drops what exceeds the capacity."""

    def make_mixture(self) -> nn.Module:
        return mixture(router=RouterConfig(capacity_factor=0.75, balance_weight=0.5))

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] < 0.8
        x = self.enter(x)
        out: Tensor = self.head((x + self.mix(x, token_mask=kept)).mean(1))
        return out


class Evaluates(Sets):
    """Validates between its steps, which must move neither bias nor counts."""

    def make_mixture(self) -> nn.Module:
        return mixture(router=RouterConfig(bias_update=0.05))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)


class LearnsNorms(Sets):
    """A factor that follows from the experts' weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + 0.1 * self.mix.experts.down.norm())


class Scales(nn.Module):
    """A block whose forward takes numbers of the weights of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = mixture()
        self.up, self.down = ColumnParallelLinear(WIDTH, 8), RowParallelLinear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.experts(x)).tanh())
        return y * (1 + 0.1 * self.experts.experts.down.norm() + 0.1 * self.up.weight.norm())


class LearnsInside(Sets):
    def make_mixture(self) -> nn.Module:
        return Scales()


class WritesExperts(Sets):
    """Ties the scale of experts to their norms, and decays what is not a router by hand."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for name, p in self.mix.named_parameters():
                if "router" not in name:
                    p.mul_(0.99).div_(1.0 + 0.1 * p.norm())


class LooksAtExperts(Sets):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.mix.experts.parameters():
            self.note(p.grad.norm())
            p.grad.mul_(0.5)


class Chooses(Sets):
    """Takes one of two mixtures by the samples that the rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.second = mixture()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        layer = self.second if (batch_idx + rank) % 2 else self.mix
        return F.cross_entropy(self.head(layer(self.enter(x)).mean(1)), y)


class Soft(MixtureOfExperts):
    """Computes with all experts by itself."""

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        inner = torch.einsum("bsh,efh->bsef", x, self.experts.up)
        return torch.einsum("bsef,ehf->bsh", inner, self.experts.down)


class Softens(Sets):
    def make_mixture(self) -> nn.Module:
        return Soft(WIDTH, 5, num_experts=4)


class Adds(Sets):
    """Changes the output of a mixture in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = self.mix(x)
        y += x
        out: Tensor = self.head(y.mean(1))
        return out


class TeachesAndRecomputes(Recomputes):
    """Runs its mixture without gradients, too, as a teacher of itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mix(x)
        self.turn = True  # then torch's other way
        return super().forward(x)


class HooksRouter(SharesBias):
    """A hook gets what the router is given, a part of the tokens where tp splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix.router.register_forward_hook(lambda *_: None)


OWN: dict[str, type[Sets]] = {
    kind.__name__: kind
    for kind in (
        *(Teaches, Repeats, Freezes, Alternates, AddsLosses, SharesBias, Recomputes, Masks),
        *(
            Evaluates,
            LearnsNorms,
            LearnsInside,
            WritesExperts,
            LooksAtExperts,
            Adds,
            TeachesAndRecomputes,
        ),
    )
}
