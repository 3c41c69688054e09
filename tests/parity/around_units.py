"""Code that enters the members of lists by other ways than their forward.

Members of an ``nn.ModuleList`` are units of ZeRO 3, which their forward gathers. Here others read
their weights, call their methods, run what is in them, lend them other weights, or copy them.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from lightning_megatron import PipelineSequential
from tests.parity.plain_modules import FromMemory, draw

CLASSES = 4


class AroundUnits(FromMemory):
    """Classifies by a list of members; the base of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.member() for _ in range(3))
        self.head = nn.Linear(6, CLASSES)
        self.notes: list[float] = []

    def member(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def batch(self, step: int) -> Any:
        return draw(6, step=step), draw(high=CLASSES, step=step + 50)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.features(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class IteratesMembers(AroundUnits):
    """Runs what is in the members, and every other member itself."""

    def features(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            h = layer(x)
            if index % 2 == 0:
                h = x
                for inner in layer:
                    h = inner(h)
            x = x + h
        return x


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def decode(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(h)
        return y


class CallsMethods(AroundUnits):
    """Calls members by other methods than forward, in steps and in a hook."""

    def member(self) -> nn.Module:
        return Coder()

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.decode(layer.encode(x) ** 2)  # type: ignore[operator]
        return self.layers[0](x)  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            probe = torch.ones(1, 6, dtype=torch.float64)
            self.notes.append(float(self.layers[0].encode(probe).sum()))  # type: ignore[operator]


class ReadsWeights(AroundUnits):
    """Reads, and stacks, weights of members, before and after these have run."""

    def member(self) -> nn.Module:
        return nn.Linear(6, 6)

    def features(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        x = super().features(F.linear(x, first.weight, first.bias))
        weights = torch.stack([layer.weight for layer in self.layers])  # type: ignore[misc]
        return x @ first.weight + torch.einsum("bi,lij->bj", x.to(first.weight.dtype), weights)


class Ensemble(AroundUnits):
    """Runs all members at once by ``torch.func``, on weights that it stacks."""

    def member(self) -> nn.Module:
        return nn.Linear(6, 6)

    def features(self, x: Tensor) -> Tensor:
        base: nn.Module = self.layers[0]
        named = [dict(layer.named_parameters()) for layer in self.layers]
        stacked = {key: torch.stack([one[key] for one in named]) for key in named[0]}

        def run(weights: dict[str, Tensor]) -> Tensor:
            y: Tensor = functional_call(base, weights, (x,))
            return y

        first = {"weight": 2 * named[0]["weight"]}  # the bias stays the member's own
        return torch.vmap(run)(stacked).mean(0) + functional_call(base, first, (x,)) + base(x)  # type: ignore[no-any-return]


class FrozenEnsemble(AroundUnits):
    """The same on a copy of a member, as the tutorial of torch has it."""

    def features(self, x: Tensor) -> Tensor:
        base = copy.deepcopy(self.layers[0]).to("meta")
        weights, buffers = stack_module_state(list(self.layers))

        def run(weights: Any, buffers: Any) -> Any:
            return functional_call(base, (weights, buffers), (x,))

        return super().features(x) + torch.vmap(run)(weights, buffers).mean(0).detach()


class LendsWeights(AroundUnits):
    """Lends a member weights that follow from its own, all of them and some."""

    def features(self, x: Tensor) -> Tensor:
        first, last = self.layers[0], self.layers[2]
        doubled = {key: 2 * value for key, value in first.named_parameters()}
        moved = {"0.bias": dict(last.named_parameters())["0.bias"] + 1}
        x = super().features(x) + functional_call(first, doubled, (x,))
        return x + functional_call(last, moved, (x,))  # type: ignore[no-any-return]


class Scripts(AroundUnits):
    """Has scripts: a member, in a member, and beside; each has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = torch.jit.script(self.layers[0])
        self.layers[1].append(torch.jit.script(nn.Linear(6, 6)))  # type: ignore[operator]
        self.beside = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.beside(x))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Coder(), nn.LayerNorm(6)), Coder()])
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out(x)
        return y


class Baseline(AroundUnits):
    """Learns from its distance to a copy of itself, made anew after each epoch."""

    def member(self) -> nn.Module:
        return Policy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, copied = super().training_step(batch, batch_idx), vars(self).get("copied")
        if copied is None:
            return loss
        with torch.no_grad():
            aim = copied[0](batch[0])
        return loss + F.mse_loss(self.layers[0](batch[0]), aim)

    def on_train_epoch_end(self) -> None:
        self.copied = [copy.deepcopy(self.layers[0]).to(self.device).eval()]
        self.notes.append(float(sum(p.square().sum() for p in self.copied[0].parameters())))


class Recurrent(AroundUnits):
    """Has recurrent layers, whose weights are attributes of another kind, in a unit and beside."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, num_layers=2, batch_first=True)

    def member(self) -> nn.Module:
        return nn.GRUCell(6, 6)

    def features(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x[:, None].expand(-1, 3, -1))
        return super().features(h[:, -1])


class CopiesStages(FromMemory):
    """Copies a trunk, and all of itself with its Trainer, in hooks."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
        self.net = PipelineSequential(nn.Linear(6, 6), layers=layers, last=nn.Linear(6, CLASSES))
        self.notes: list[float] = []

    def batch(self, step: int) -> Any:
        return draw(6, step=step), draw(high=CLASSES, step=step + 50)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def on_train_start(self) -> None:
        self.mean = [copy.deepcopy(self.net).requires_grad_(False)]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.mean[0].parameters(), self.net.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        self.note(self.mean[0])

    def on_train_epoch_end(self) -> None:
        self.note(copy.deepcopy(self))
        self.note(copy.deepcopy(self.net.layers[0]))

    def note(self, module: nn.Module) -> None:
        self.notes.append(float(sum(p.square().sum() for p in module.parameters())))


AROUND: dict[str, type[AroundUnits]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, AroundUnits) and cls is not AroundUnits
}
