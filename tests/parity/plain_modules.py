"""Modules as users write them, with nothing in them for our sake but a `PipelineSequential`."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos import Transformer as DemoTransformer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron.layers.sequential import PipelineSequential
from tests.parity.jobs import batch_share

STEPS, BATCH = 2, 8


def draw(*shape: int, high: int | None = None, step: int = 0) -> Tensor:
    """Data that depends on its shape and step only."""
    generator = torch.Generator().manual_seed(100 + step)
    if high is not None:
        return torch.randint(high, (BATCH, *shape), generator=generator)
    return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)


class FromMemory(L.LightningModule):
    """Reads this rank's share of the global batches that `batch` makes."""

    def batch(self, step: int) -> Any:
        return draw(6, step=step), draw(3, step=step + 50)

    def train_dataloader(self) -> Any:
        topology = getattr(self.trainer.strategy, "_topology", None)
        size, rank = self.trainer.world_size, self.trainer.global_rank
        if topology is not None:
            size, rank = topology.batch.size, topology.batch.rank
        shares = [batch_share(self.batch(step), size, rank) for step in range(STEPS)]
        return DataLoader(shares, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


class Boring(FromMemory, BoringModel):
    """Lightning's BoringModel on given data."""

    def batch(self, step: int) -> Any:
        return draw(32, step=step)

    def configure_optimizers(self) -> Any:
        return BoringModel.configure_optimizers(self)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Demo(FromMemory, LightningTransformer):
    """Lightning's Transformer demo on given data, small and without dropout."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.model = DemoTransformer(vocab_size=20, ninp=8, nhead=2, nhid=8, nlayers=1, dropout=0.0)

    def batch(self, step: int) -> Any:
        return draw(5, high=20, step=step), draw(5, high=20, step=step + 50)

    def prepare_data(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return LightningTransformer.configure_optimizers(self)


class Regression(FromMemory):
    """Linear layers on random data; the base of the modules below."""

    def __init__(self) -> None:
        super().__init__()
        # Under ZeRO 3 the last block is a unit that works in place on its input.
        last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))
        self.net = nn.Sequential(nn.Linear(6, 8), last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss


class Frozen(Regression):
    """The first layer and one bias do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1][1].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Unused(Regression):
    """A layer that no step calls, and one that only odd steps call."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.sometimes = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x) + self.sometimes(x) if batch_idx % 2 else self(x)
        return F.mse_loss(out, y)


class Tied(FromMemory):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, step: int) -> Any:
        return draw(4, high=11, step=step), draw(4, high=11, step=step + 50)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Groups(Regression):
    """Two parameter groups and a schedule that moves every step."""

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in self.named_parameters() if n.endswith("weight")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Classifier(FromMemory):
    """Convolutions, BatchNorm and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(16, 3)
        self.train_accuracy = MulticlassAccuracy(3)
        self.val_accuracy = MulticlassAccuracy(3)

    def batch(self, step: int) -> Any:
        return draw(2, 6, 6, step=step), draw(high=3, step=step)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self(images)
        self.train_accuracy(logits, labels)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, labels)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy.update(self(images), labels)
        self.log("val_accuracy", self.val_accuracy)


class Adversaries(FromMemory):
    """Two networks, two optimizers, steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(noise)).mean() * self.temperature
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.generator(noise).detach()
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        mine = [*self.generator.parameters(), self.temperature]
        return (
            torch.optim.SGD(mine, lr=0.1, momentum=0.5),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        )


class Residual(nn.Module):
    """A user's own block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.inner(x))


class Trunk(FromMemory):
    """A trunk of plain modules, with layers before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.trunk = PipelineSequential(
            nn.Linear(8, 8),
            # The first item of the second stage works in place on what the first one sent.
            layers=[Residual(8), nn.LayerNorm(8), nn.ReLU(inplace=True), Residual(8)],
            last=nn.Linear(8, 8),
        )
        self.after = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.gain = nn.Parameter(torch.tensor(1.2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.trunk(self.before(x) * self.gain)
        # The parameter is used on both sides of the trunk.
        loss = F.mse_loss(self.after(out) * self.gain, y)
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss, "size": out.shape[1]}


class Carry(nn.Module):
    """Takes and gives a dict; what it does not touch travels on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: Mapping[str, Any]) -> dict[str, Any]:
        x = torch.tanh(self.linear(state["x"])).masked_fill(state["mask"], 0.0)
        pair = (state["pair"][0] + x, state["pair"][1])
        return {**state, "x": x, "pair": pair, "depth": state["depth"] + 1}


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        skip = torch.sin(y)
        return {
            "x": y,
            "mask": x[:, :1] > 1.0,
            "pair": (y, None),
            "skip": skip,  # passes the middle stages untouched
            "depth": 0,
            "none": [None, torch.arange(3)],
        }


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        total = state["x"] + state["pair"][0] + state["skip"]
        return self.linear(total), state["depth"] + state["none"][1].sum()


class Dicts(FromMemory):
    """Activations that are dicts with tuples, flags, numbers and tensors without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(enter=Enter(), layers=[Carry(), Carry()], leave=Leave())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out, depth = self.trunk(x)
        assert int(depth) == 2 + 3
        return F.mse_loss(out, y)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0, **others: Any) -> Tensor:
        assert set(others) <= {"mask"}
        out: Tensor = self.linear(x) * scale
        return out


class Keywords(FromMemory):
    """Keyword arguments of the trunk reach the items that name them, on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(
            layers=[Masked(), nn.Linear(6, 6), Masked(), Scaled()], head=nn.Linear(6, 3)
        )

    def batch(self, step: int) -> Any:
        lengths = draw(1, high=4, step=step) + 1
        mask = torch.arange(4) >= lengths
        return {"x": draw(4, 6, step=step), "mask": mask, "scale": draw(1, 1, step=step).abs()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.trunk(batch["x"], mask=batch["mask"], scale=batch["scale"])
        return out.square().mean()


ORDINARY: dict[str, Callable[[], L.LightningModule]] = {
    "boring": Boring,
    "demo": Demo,
    "frozen": Frozen,
    "unused": Unused,
    "tied": Tied,
    "groups": Groups,
    "classifier": Classifier,
    "adversaries": Adversaries,
}
PIPELINED: dict[str, Callable[[], L.LightningModule]] = {
    "trunk": Trunk,
    "dicts": Dicts,
    "keywords": Keywords,
}
