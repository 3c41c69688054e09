"""What users write around a trunk whose sequences are split, each habit as a module of its own.

`notes` collects what a module has found out on the way. Sequences have lengths that no degree of cp
divides.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import (
    MLP,
    CausalSelfAttention,
    ColumnParallelLinear,
    GatherContext,
    SplitContext,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from lightning_megatron.layers.rotary import Rotary
from tests.parity.plain_modules import FromMemory, draw

VOCABULARY, WIDTH = 12, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalSelfAttention(WIDTH, 4, 2, rotary=Rotary(2))
        self.mlp = MLP(WIDTH, 16, "gelu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Speaker(FromMemory):
    """Predicts the next token; the base of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH),
            blocks=[Block(), Block()],
            norm=nn.LayerNorm(WIDTH),
            head=ColumnParallelLinear(WIDTH, VOCABULARY),
        )
        self.notes: list[float] = []

    def batch(self, step: int) -> Any:
        return draw(11 - 2 * step, high=VOCABULARY, step=step)

    def note(self, value: Any) -> None:
        self.notes.append(float(value))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Shifts(Speaker):
    """Shifts the logits and flattens, as in many tutorials."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch)
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1), ignore_index=3
        )
        self.log("loss", loss)
        return loss


class Ignores(Speaker):
    """Counts a few labels only, all of them on one rank, by our loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = VocabParallelCrossEntropy(label_smoothing=0.1, z_loss=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = torch.full_like(batch, -100)
        labels[:, 3:5] = batch[:, 4:6]
        loss = self.loss(self.net(batch[:, :-1]), labels[:, :-1])
        self.log("loss", loss)
        return loss


class Measures(Speaker):
    """Accuracy by hand and by torchmetrics, confidence, perplexity and the norm of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.net(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        hits = logits.argmax(-1) == labels
        self.log("hits", hits.double().mean(), sync_dist=True)
        self.log("confidence", logits.softmax(-1).amax(-1).mean(), sync_dist=True)
        self.log("size", logits.detach().norm(dim=-1).mean(), sync_dist=True)
        self.log("longest", float(logits.shape[1]))
        self.accuracy(logits.argmax(-1).flatten(), labels.flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("perplexity", loss.exp(), sync_dist=True, on_epoch=True)
        return loss


class Pools(Speaker):
    """Classifies whole sequences by a plain head behind the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH), blocks=[Block(), Block()]
        )
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net(batch)
        pooled = torch.cat((x.mean(1), x[:, -1], x[:, 0]), 0)
        return F.cross_entropy(self.head(pooled), (batch[:, 0] % 3).repeat(3))


class Contrasts(Pools):
    """A loss that couples samples: each sequence against its own beginning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = F.normalize(self.net(batch).mean(1), dim=-1)
        second = F.normalize(self.net(batch[:, :4]).mean(1), dim=-1)
        loss = self.head(first).square().mean()
        pairs = first.unflatten(0, (-1, 2)) @ second.unflatten(0, (-1, 2)).mT
        target = torch.arange(2).expand(pairs.shape[0], 2).reshape(-1)
        return loss + F.cross_entropy(pairs.flatten(0, 1) / 0.1, target)


class PoolsInside(Speaker):
    """Joins the sequence inside of the trunk before it pools."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH),
            block=Block(),
            join=GatherContext(),
            mean=Mean(),
            head=nn.Linear(WIDTH, 3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch), batch[:, 0] % 3)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Frames(Speaker):
    """Reads vectors through a layer before the trunk, and scales by a parameter outside."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.net = PipelineSequential(cut=SplitContext(), blocks=[Block(), Block()])

    def batch(self, step: int) -> Any:
        return draw(11 - 2 * step, 5, step=step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.read(batch).tanh()
        y = self.net(x) * self.scale
        return (y.roll(1, 1) - x).square().mean() + y[:, 1:].sub(y[:, :-1]).abs().mean()


class Attacks(Frames):
    """Trains on inputs moved along their gradient, and notes it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.read(batch).tanh()
        x.register_hook(lambda grad: self.note(grad.norm()))
        gate = x.mean(1, keepdim=True)
        gate.retain_grad()
        loss = (self.net(x) * gate - x).square().mean()
        given = batch.clone().requires_grad_()
        other = (self.net(self.read(given).tanh()) + given.sum(-1, keepdim=True)).square().mean()
        [gradient] = torch.autograd.grad(other, given)
        self.note(gradient.norm())
        moved = self.read(batch + 0.5 * gradient / gradient.norm()).tanh()
        return loss + self.net(moved).square().mean()


class ReadsLate(Shifts):
    """Registers a hook on the logits after the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        logits.register_hook(lambda grad: self.note(grad.norm()))
        return loss


class DifferentiatesLate(Shifts):
    """Asks for the gradient of the logits after the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.note(torch.autograd.grad(loss, logits, retain_graph=True)[0].norm())
        return loss


class LooksAtGradients(Shifts):
    """Notes norms of weights and gradients, and clips by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.note(norm)
        self.note(self.net.norm.weight.grad.abs().sum())  # type: ignore[union-attr]
        self.note(self.net.norm.weight.detach().norm())


class ByHand(Speaker):
    """Two optimizers by manual optimization, several backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.full((), 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weights, scales = self.optimizers()  # type: ignore[misc]
        for optimizer in (weights, scales):
            logits = self.net(batch[:, :-1]) * self.scale
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.note(loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.3),
            torch.optim.Adam([self.scale], lr=1e-2, eps=1e-5),
        ]


class Writes(Shifts):
    """Writes into logits in place, and keeps them for a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch)
        self.kept = logits.detach()
        logits = logits.clone()
        logits[:, :, 0] = -5.0
        logits[:, 2] += 1.0
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(self.kept.mean())
        self.note(self.kept[:, -1].amax())
        self.note(outputs["loss"])


class LeavesLosses(Speaker):
    """A block adds a loss of its own to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH), block=Leaves(self.losses)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.clear()
        return self.net(batch).square().mean() + sum(self.losses)


class Leaves(nn.Module):
    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.losses = losses

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.losses.append(y.square().mean())
        return x + y.tanh()


class Hooks(Shifts):
    """A forward hook keeps what a layer has computed, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net.norm.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.features["norm"] = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(f.abs().mean() for f in self.features.values())


class Carries(Speaker):
    """Blocks hand on a loss of their own beside the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH), start=Start(), block=Adds()
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, extra = self.net(batch)
        return x.square().mean() + 0.1 * extra


class Start(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.new_zeros(())


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y: Tensor = self.layer(pair[0])
        return pair[0] + y.tanh(), pair[1] + y.square().mean()


class OwnAttention(Speaker):
    """A block calls torch's attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH), block=Attends()
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class OwnPositions(OwnAttention):
    """An item numbers the positions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH), places=Places()
        )


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1], device=x.device))
        return found


class PoolsUnawares(PoolsInside):
    """Pools inside of the trunk what it has of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(
            tokens=VocabParallelEmbedding(VOCABULARY, WIDTH),
            mean=Mean(),
            head=nn.Linear(WIDTH, 3),
        )


class NoSplit(Frames):
    """Nothing in the trunk splits the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(blocks=[Block()])


KEPT: dict[str, type[Speaker]] = {
    kind.__name__: kind
    for kind in (
        *(Shifts, Ignores, Measures, Pools, Contrasts, PoolsInside, Frames),
        *(Attacks, LooksAtGradients, ByHand, Writes),
    )
}
"""Modules that train as in one process."""
