"""An encoder-decoder and a vision transformer, of torch's layers and of ours.

The reference is made of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`. Ours is one
`PipelineSequential` each, between whose items the encoder-decoder passes a tuple of two streams.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers import (
    ColumnParallelLinear,
    DecoderBlock,
    EncoderBlock,
    LayerNorm,
    PositionEmbedding,
    SplitContext,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from tests.parity import reference
from tests.parity.jobs import GlobalBatches, Outcome, Recorder, quiet_trainer, whole_parameters
from tests.parity.reference import Curve

Kind = Literal["translator", "padded", "vision"]
"""``padded`` is ``translator`` with sources of several lengths."""
HIDDEN, HEADS, MLP, VOCABULARY, CLASSES, PATCH = 16, 4, 24, 32, 10, 4
SOURCE, TARGET = 7, 11
TORCH = {"batch_first": True, "norm_first": True, "dropout": 0.0, "activation": F.gelu}


def batches(kind: Kind) -> list[Any]:
    """Global batches of three steps."""
    draw = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(3):
        if kind == "vision":
            images = torch.randn(4, 3, 12, 12, generator=draw, dtype=torch.float64)
            found.append((images, torch.randint(CLASSES, (4,), generator=draw)))
            continue
        source = torch.randint(VOCABULARY, (4, SOURCE), generator=draw)
        target = torch.randint(VOCABULARY, (4, TARGET + 1), generator=draw)
        lengths = torch.randint(1, SOURCE + 1, (4,), generator=draw)
        found.append((source, target, lengths) if kind == "padded" else (source, target))
    return found


class TorchTranslator(nn.Module):
    """Reads a source without its padding, writes a target."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, HIDDEN) for _ in range(2))
        self.source_place, self.target_place = (nn.Embedding(TARGET, HIDDEN) for _ in range(2))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, MLP, **TORCH) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(HIDDEN, HEADS, MLP, **TORCH) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        source, target, *lengths = batch
        padding = torch.arange(SOURCE) >= lengths[0][:, None] if lengths else None
        x = self.source(source) + self.source_place(torch.arange(SOURCE))
        y = self.target(target[:, :-1]) + self.target_place(torch.arange(TARGET))
        for block in self.encoder:
            x = block(x)
        future = torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1)
        for block in self.decoder:
            y = block(y, x, tgt_mask=future, memory_key_padding_mask=padding)
        logits = self.head(self.norm(y))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class TorchVision(nn.Module):
    """Classes of images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(9, HIDDEN))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, MLP, **TORCH) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        images, classes = batch
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.encoder:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), classes)


def torch_model(kind: Kind) -> Any:
    torch.manual_seed(2)
    model = (TorchVision() if kind == "vision" else TorchTranslator()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@cache
def curve(kind: Kind) -> Curve:
    """Training of the reference, its weights by our names."""
    model = torch_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **reference.ADAMW)
    losses, norms = [], []
    for batch in batches(kind):
        loss = model.loss(batch)
        losses.append(loss.item())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), reference.CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return Curve(losses, norms, our_weights(model))


_PLACES = {
    "source": "embedding.source",
    "target": "embedding.target",
    "source_place": "embedding.source_place",
    "target_place": "embedding.target_place",
    "norm1": "attention_norm",
    "self_attn": "attention",
    "multihead_attn": "cross_attention",
    "linear1": "mlp.up",
    "linear2": "mlp.down",
}


def our_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the reference by the names that ours have."""
    found = {}
    is_vision = isinstance(model, TorchVision)
    norms = {
        "encoder": {"norm2": "mlp_norm"},
        "decoder": {"norm2": "cross_norm", "norm3": "mlp_norm"},
    }
    for name, value in model.named_parameters():
        stack, *rest = name.split(".")
        value = value.detach().clone()
        if stack not in norms:
            place = _PLACES.get(stack, stack)
            place = f"patches.{stack}" if stack in ("patches", "places") else place
            outside = is_vision and stack == "head"
            found[".".join(["head" if outside else f"trunk.{place}", *rest])] = value
            continue
        number, part, *leaf = rest
        prefix = f"trunk.{stack}.{number}." + ("" if is_vision else "block.")
        prefix += {**_PLACES, **norms[stack]}[part]
        if leaf[0].startswith("in_proj"):
            for projection, piece in zip("qkv", value.chunk(3), strict=True):
                found[f"{prefix}.w{projection}.{leaf[0].removeprefix('in_proj_')}"] = piece
        elif leaf[0] == "out_proj":
            found[f"{prefix}.wo.{leaf[1]}"] = value
        else:
            found[".".join([prefix, *leaf])] = value
    return found


class Embedding(nn.Module):
    """Both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (VocabParallelEmbedding(VOCABULARY, HIDDEN) for _ in range(2))
        self.source_place, self.target_place = (PositionEmbedding(TARGET, HIDDEN) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.source(source) + self.source_place(source)
        return x, self.target(target) + self.target_place(target)


class Encode(nn.Module):
    """Item of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.block = EncoderBlock(HIDDEN, HEADS, MLP)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = state
        return self.block(x), y


class Decode(nn.Module):
    """Item of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.block = DecoderBlock(HIDDEN, HEADS, MLP)

    def forward(
        self, state: tuple[Tensor, Tensor], source_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, y = state
        y = self.block(y, x, memory_lengths=source_lengths)
        return x, y


class Written(nn.Module):
    """The stream that was written."""

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return state[1]


class Patches(nn.Module):
    """Squares of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(9, HIDDEN))

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2) + self.places


class Translator(GlobalBatches):
    def __init__(self, kind: Kind) -> None:
        super().__init__(batches(kind))
        self.trunk = PipelineSequential(
            embedding=Embedding(),
            encoder=[Encode() for _ in range(2)],
            decoder=[Decode() for _ in range(2)],
            written=Written(),
            norm=LayerNorm(HIDDEN),
            head=ColumnParallelLinear(HIDDEN, VOCABULARY),
        )
        self.loss = VocabParallelCrossEntropy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target, *lengths = batch
        told = {"source_lengths": lengths[0]} if lengths else {}
        logits = self.trunk(source, target[:, :-1], **told)
        loss: Tensor = self.loss(logits, target[:, 1:])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **reference.ADAMW)


class Vision(GlobalBatches):
    def __init__(self) -> None:
        super().__init__(batches("vision"))
        self.trunk = PipelineSequential(
            patches=Patches(),
            split=SplitContext(),
            encoder=[EncoderBlock(HIDDEN, HEADS, MLP) for _ in range(2)],
            norm=LayerNorm(HIDDEN),
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.head(self.trunk(images).mean(1)), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **reference.ADAMW)


def encoder_job(options: Mapping[str, Any], kind: Kind) -> Outcome:
    """Train ours under one layout, from the reference's weights."""
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options)
    recorder = Recorder(1)
    trainer = quiet_trainer(strategy, callbacks=[recorder], gradient_clip_val=reference.CLIP)
    module = (Vision() if kind == "vision" else Translator(kind)).double()
    module.load_state_dict(our_weights(torch_model(kind)))
    trainer.fit(module)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module, strategy.topology))
