"""Packed documents train as the same documents in rows of their own, in a plain loop."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from tests.parity import reference
from tests.parity.jobs import Outcome, ParityModule, Recorder, quiet_trainer, whole_parameters
from tests.parity.layouts import Layout
from tests.parity.reference import Architecture, Curve, Data, DenseTransformer
from tests.parity.test_matrix import check

LENGTHS = ((3, 9, 1), (13,), (5, 8), (1, 1, 11), (7, 6), (12, 1), (2, 2, 9), (4, 4, 5))
"""Lengths of the documents of each row."""


@dataclass(frozen=True)
class Packed(Data):
    """Rows that hold several documents."""

    lengths: tuple[int, ...] = (13,)

    def batches(self) -> list[Any]:
        documents = documents_of(LENGTHS, 13)
        return [(*batch, documents) for batch in super().batches()]


class PackedModule(ParityModule):
    """A user's step, with documents."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets, documents = batch
        logits = self.model(tokens, documents=documents)
        loss: Tensor = self.loss(logits, targets)
        return {"loss": loss, "num_tokens": (targets != reference.IGNORED).sum()}


@cache
def unpacked_curve(architecture: Architecture) -> Curve:
    """The same in one process, document by document."""
    model = DenseTransformer(architecture)
    optimizer = torch.optim.AdamW(model.parameters(), **reference.ADAMW)
    losses, norms = [], []
    for tokens, targets, _ in Packed(ignored=True).batches():
        total = torch.zeros((), dtype=torch.float64)
        for row, lengths in enumerate(LENGTHS):
            parts = zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True)
            for x, y in parts:
                total = total + F.cross_entropy(model(x[None])[0], y, reduction="sum")
        loss = total / (targets != reference.IGNORED).sum()
        losses.append(loss.item())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), reference.CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Curve(losses, norms, weights)


def packed_job(options: dict[str, Any], architecture: Architecture) -> Outcome:
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options)
    recorder = Recorder(1)
    trainer = quiet_trainer(strategy, callbacks=[recorder], gradient_clip_val=reference.CLIP)
    module = PackedModule(architecture, Packed(ignored=True), by_token=True)
    trainer.fit(module)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module.model, strategy.topology))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(architecture="gpt"),
        Layout(pp=2, num_microbatches=2),
        Layout(cp=2, kind="gather", zero=3),
        Layout(tp=2, cp=2, sequence_parallel=True),
        Layout(pp=2, cp=2, kind="ulysses", num_microbatches=2, architecture="gpt"),
        *(
            pytest.param(layout, marks=pytest.mark.thorough)
            for layout in (
                Layout(tp=2, pp=2, num_microbatches=2),
                Layout(pp=2, dp=2, zero=3, num_microbatches=2, architecture="gpt"),
                Layout(cp=2, dp=2, kind="gather", zero=3),
                Layout(cp=4, dp=2, zero=2),
            )
        ),
    ],
    ids=str,
)
def test_packed_documents_train_as_unpacked_ones(pool: WorkerPool, layout: Layout) -> None:
    outcomes = pool.run(
        layout.world_size, packed_job, layout.strategy_options(), layout.architecture
    )
    check(outcomes, unpacked_curve(layout.architecture))
