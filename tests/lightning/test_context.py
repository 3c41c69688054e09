"""A user's module under cp: what it logs, predicts and trains is what one process does."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import LanguageModel, MegatronStrategy, PipelineSequential
from lightning_megatron.layers import CausalSelfAttention, VocabParallelEmbedding
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import batch_share, quiet_trainer

V, H = 12, 8
SIZES = {
    "vocab_size": V, "hidden_size": H, "num_layers": 2, "num_heads": 2, "max_seq_len": 32,
}  # fmt: skip


class Stranger(L.LightningModule):
    """Shifts labels, pools, logs accuracy by hand and by torchmetrics; knows nothing of cp."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        torch.manual_seed(0)
        self.trunk = PipelineSequential(
            embedding=VocabParallelEmbedding(V, H),
            attention=CausalSelfAttention(H, 2),
            norm=nn.LayerNorm(H),
        )
        self.head = nn.Linear(H, V)
        self.classes = nn.Linear(H, 3)
        self.accuracy = MulticlassAccuracy(num_classes=V, average="micro")

    def _loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(tokens)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))
        pooled = F.cross_entropy(self.classes(hidden.mean(1)), tokens[:, 0] % 3)
        return loss + pooled, logits

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss, logits = self._loss(tokens)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        accuracy = (logits.argmax(-1)[:, :-1] == tokens[:, 1:]).double().mean()
        self.log("train_accuracy", accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        loss, logits = self._loss(tokens)
        self.log("val_loss", loss, sync_dist=True)
        self.accuracy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("val_accuracy", self.accuracy)

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Any:
        hidden = self.trunk(tokens)
        return {"logits": self.head(hidden), "pooled": hidden.mean(1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _batches(lengths: tuple[int, ...], pair: bool) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    found: list[Any] = []
    for length in lengths:
        tokens = torch.randint(V, (4, length), generator=draw)
        labels = tokens.roll(-1, 1)
        labels[0, length // 3 :] = -100
        found.append((tokens, labels) if pair else tokens)
    return found


def _loader(trainer: L.Trainer, batches: list[Any], share: bool) -> Any:
    if share:
        axis = trainer.strategy.topology.batch  # type: ignore[attr-defined]
        batches = [batch_share(batch, axis.size, axis.rank) for batch in batches]
    return DataLoader(batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def job(kind: str, options: dict[str, Any]) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer(
        MegatronStrategy(**options), num_sanity_val_steps=0, max_epochs=2, limit_val_batches=2
    )
    pair = kind != "stranger"
    module: Any = Stranger() if not pair else LanguageModel(SIZES, chunked_loss=kind == "chunked")
    train, other = _batches((13, 6, 2), pair), _batches((9, 3), pair)
    trainer.fit(module, _Loaders(train, other))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, trainer.predict(module, _Loaders(train, other))


class _Loaders(L.LightningDataModule):
    def __init__(self, train: list[Any], other: list[Any]) -> None:
        super().__init__()
        self.train, self.other = train, other

    def train_dataloader(self) -> Any:
        return _loader(self.trainer, self.train, True)

    def val_dataloader(self) -> Any:
        return _loader(self.trainer, self.other, True)

    def predict_dataloader(self) -> Any:
        return _loader(self.trainer, self.other, False)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[[str], Any]:
    return cache(lambda kind: pool.run(1, job, kind, {})[0])


CASES = [
    pytest.param("stranger", {"cp": 2}, 2, marks=pytest.mark.thorough),
    ("stranger", {"cp": 2, "zero": 3}, 2),
    pytest.param(
        "model",
        {"cp": 2, "tp": 2, "sequence_parallel": True},
        4,
        marks=pytest.mark.thorough,
    ),
    pytest.param("model", {"cp": 2, "pp": 2}, 4, marks=pytest.mark.thorough),
    ("chunked", {"cp": 2}, 2),
]


@pytest.mark.parametrize(("kind", "options", "world"), CASES, ids=str)
def test_what_is_logged_and_predicted(
    pool: WorkerPool, alone: Callable[[str], Any], kind: str, options: dict[str, Any], world: int
) -> None:
    metrics, predictions = alone(kind)
    for found, predicted in pool.run(world, job, kind, options):
        assert found.keys() == metrics.keys()
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-6 if kind == "stranger" else 1e-9)
        torch.testing.assert_close(predicted, predictions, rtol=1e-9, atol=1e-9)
