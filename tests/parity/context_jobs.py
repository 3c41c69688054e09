"""A network without attention whose items cut sequences by hand, for the cp axis alone."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.mlp import MLP
from tests.parity import reference
from tests.parity.jobs import GlobalBatches, Outcome, Recorder, quiet_trainer, whole_parameters
from tests.parity.reference import Data


class CutEmbedding(ParallelLayer):
    """Embeds the positions of this cp rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(reference.VOCABULARY, reference.HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(_part(self, tokens, 0, note=True))


class WholeLoss(ParallelLayer):
    """Loss of whole sequences, from logits and targets of this rank's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(reference.HIDDEN, reference.VOCABULARY)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(x)
        targets = _part(self, targets, reference.IGNORED)
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
        )
        counted = (targets != reference.IGNORED).sum().double()
        if self.context is None:
            return torch.stack([losses, counted])
        return _SumOverContext.apply(torch.stack([losses, counted]), self.context.cp)


class _SumOverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.size = axis.size
        total = x.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None


def _part(layer: ParallelLayer, whole: Tensor, fill: int, *, note: bool = False) -> Tensor:
    context = layer.context
    if context is None:
        return whole
    length = whole.shape[1]
    layout = context.split(length)
    padded = F.pad(whole, (0, layout.padded - length), value=fill)
    chunks = layout.chunks(context.cp.rank)
    return torch.cat([padded[:, c.start : c.stop] for c in chunks], dim=1)


class PositionwiseModule(GlobalBatches):
    """Embedding, two blocks, head and loss, and a scale outside of the trunk.

    Args:
        data: the global batches.
        by_token: return the sum of the losses and the number of tokens instead of a mean.
        dropout: between the blocks.
    """

    def __init__(self, data: Data, by_token: bool = False, dropout: float = 0.0) -> None:
        super().__init__(data.batches())
        torch.manual_seed(3)
        h = reference.HIDDEN
        self.trunk = PipelineSequential(
            embedding=CutEmbedding(),
            blocks=[nn.Sequential(nn.LayerNorm(h), MLP(h, 24), nn.Dropout(dropout)) for _ in "ab"],
            loss=WholeLoss(),
        ).double()
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.by_token = by_token

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        total, counted = self.trunk(tokens, targets=targets)
        total = total * self.scale.prod() * self.temperature
        if self.by_token:
            return {"loss": total, "num_tokens": counted.detach()}
        return total / counted.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **reference.ADAMW)


def positionwise_job(
    options: Mapping[str, Any], data: Data, by_token: bool = False, accumulate: int = 1
) -> Outcome:
    """Train the module under one layout."""
    L.seed_everything(1, verbose=False)
    strategy, recorder = MegatronStrategy(**options), Recorder(accumulate)
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder],
        gradient_clip_val=reference.CLIP,
        accumulate_grad_batches=accumulate,
    )
    module = PositionwiseModule(data, by_token)
    trainer.fit(module)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module, strategy.topology))
