"""A network without attention whose items cut sequences by hand, for the cp axis alone."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import MegatronStrategy, PipelineSequential, ReplicaCheck
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.optim.adafactor import Adafactor
from lightning_megatron.optim.muon import Muon
from lightning_megatron.optim.param_groups import muon_groups
from tests.parity import reference
from tests.parity.jobs import (
    GlobalBatches,
    Outcome,
    ParityModule,
    Recorder,
    quiet_trainer,
    transformer_config,
    whole_parameters,
)
from tests.parity.reference import Data


class CutEmbedding(ParallelLayer):
    """Embeds the positions of this cp rank."""

    splits_context = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(reference.VOCABULARY, reference.HIDDEN)
        self.gain = nn.Parameter(torch.tensor(1.2))  # nothing divides a scalar

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(_part(self, tokens, 0)) * self.gain


class WholeLoss(ParallelLayer):
    """Loss of whole sequences, from logits and targets of this rank's positions."""

    exchanges_context = True

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


def _part(layer: ParallelLayer, whole: Tensor, fill: int) -> Tensor:
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
        optimizer: "adamw", "muon", "adafactor", or "manual" for two that the module steps itself.
    """

    def __init__(self, data: Data, by_token: bool = False, optimizer: str = "adamw") -> None:
        super().__init__(data.batches())
        torch.manual_seed(3)
        h = reference.HIDDEN
        self.trunk = PipelineSequential(
            embedding=CutEmbedding(),
            blocks=[nn.Sequential(nn.LayerNorm(h), MLP(h, 24)) for _ in "ab"],
            loss=WholeLoss(),
        ).double()
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.by_token, self.optimizer = by_token, optimizer
        self.automatic_optimization = optimizer != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        total, counted = self.trunk(tokens, targets=targets)
        total = total * self.scale.prod() * self.temperature
        if self.by_token:
            return {"loss": total, "num_tokens": counted.detach()}
        loss = total / counted.detach()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=reference.CLIP)
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "muon":
            return Muon(muon_groups(self, 0.1), lr=1e-2, eps=1e-5)
        if self.optimizer == "adafactor":
            return Adafactor(self.parameters(), lr=3e-2, weight_decay=0.1)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), **reference.ADAMW)
        rest = [p for name, p in self.named_parameters() if not name.startswith("trunk.blocks")]
        return [
            torch.optim.AdamW(self.trunk.blocks.parameters(), **reference.ADAMW),
            torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        ]


def positionwise_job(
    options: Mapping[str, Any],
    data: Data,
    by_token: bool = False,
    accumulate: int = 1,
    optimizer: str = "adamw",
    load: str | None = None,
    save: str = "",
    nodes: str = "",
) -> Outcome:
    """Train the module under one layout.

    Args:
        options: of the strategy.
        data: the global batches.
        by_token: see the module.
        accumulate: batches of an optimizer step.
        optimizer: see the module.
        load: checkpoint to go on from.
        save: checkpoint to write before the last step.
        nodes: for each rank, the letter of the node that it takes itself to be on.
    """
    L.seed_everything(1, verbose=False)
    strategy, recorder = MegatronStrategy(**options), Recorder(accumulate)
    by_hand = optimizer == "manual"
    trainer = quiet_trainer(
        strategy,
        callbacks=[Weights(), ReplicaCheck(1), *([] if by_hand else [recorder])],
        gradient_clip_val=None if by_hand else reference.CLIP,
        accumulate_grad_batches=accumulate,
    )
    trainer.callbacks.append(SaveBefore(save, len(data.batches()) - 1))  # type: ignore[attr-defined]
    module = PositionwiseModule(data, by_token, optimizer)
    names = nodes or "a" * 8
    with mock.patch("socket.gethostname", return_value=names[int(os.environ["RANK"])]):
        trainer.fit(module, ckpt_path=load)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    weights = whole_parameters(module, strategy.topology)
    return Outcome(losses, recorder.norms, weights, trainer.callback_metrics.get("weights"))


class Weights(L.Callback):
    """Has all ranks agree on the norm of all weights."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        norm = trainer.strategy.gradients.parameter_norm()  # type: ignore[attr-defined]
        trainer.callback_metrics["weights"] = norm


class SaveBefore(L.Callback):
    """Saves once so many batches have been trained on."""

    def __init__(self, path: str, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.path and batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


class Noisy(nn.Module):
    """Notes what an item draws, and passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return x


class NoisyModule(PositionwiseModule):
    """Draws inside and outside of its trunk."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.trunk.blocks[0].insert(1, Noisy())
        self.outside: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.outside.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def noisy_job(
    options: Mapping[str, Any], load: str | None = None, save: str = ""
) -> tuple[list[float], list[float]]:
    """What the items and the step around them have drawn on this rank."""
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer(MegatronStrategy(**options), callbacks=[SaveBefore(save, 2)])
    module = NoisyModule(Data(steps=3))
    trainer.fit(module, ckpt_path=load)
    noisy = [child for child in module.modules() if isinstance(child, Noisy)]
    return [number for child in noisy for number in child.drawn], module.outside


def dropout_job(options: Mapping[str, Any], seed: int = 1) -> Outcome:
    """Train a transformer with dropout between its blocks' parts."""
    L.seed_everything(seed, verbose=False)
    recorder, data = Recorder(1), Data(steps=2, lengths=(8, 7))
    trainer = quiet_trainer(
        MegatronStrategy(**options), callbacks=[recorder], gradient_clip_val=reference.CLIP
    )
    module = ParityModule("llama", data)
    dropping = Transformer(replace(transformer_config("llama"), dropout=0.2)).double()
    dropping.load_state_dict(module.model.state_dict())
    module.model = dropping
    trainer.fit(module)
    return Outcome([float(loss) for loss in recorder.losses], recorder.norms)
