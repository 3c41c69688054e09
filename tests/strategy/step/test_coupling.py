"""Losses that couple samples are told of when batches are cut into microbatches."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, loader, make_trainer


class Contrastive(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        everyone = self.all_gather(self.net(batch[0]), sync_grads=True)
        return everyone.square().mean()


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.net = PipelineSequential(nn.BatchNorm1d(WIDTH), *layers)


class Told(Small):
    couples_samples = True


class Denied(Normed):
    couples_samples = False


class Frozen(Normed):
    """Its batch norms take what they have learned before."""

    def on_train_epoch_start(self) -> None:
        self.net.eval()


class Compares(Small):
    """Gathers between its steps, when batches are whole."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.all_gather(self.lr)


MODULES = (Contrastive, Normed, Told, Denied, Frozen, Compares, Small)


def job(layout: Mapping[str, Any], devices: int) -> dict[str, list[str]]:
    """What each module's run warns of."""
    found = {}
    for module in MODULES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(layout, devices, max_steps=2).fit(module(), loader())
        texts = [str(warning.message) for warning in caught]
        found[module.__name__] = [text for text in texts if "microbatches of a batch" in text]
    return found


@pytest.mark.parametrize(
    ("layout", "devices"),
    [({"num_microbatches": 2}, 1), ({"num_microbatches": 2, "pp": 2}, 2)],
    ids=str,
)
def test_each_is_named_once(pool: WorkerPool, layout: dict[str, Any], devices: int) -> None:
    by_rank = pool.run(devices, job, layout, devices)
    # Each stage tells of its own batch norms, and the last of what stands behind the trunk.
    found = {name: by_rank[0][name] or by_rank[-1][name] for name in by_rank[0]}
    assert {name: len(texts) for name, texts in found.items()} == {
        "Contrastive": 1,
        "Normed": 1,
        "Told": 1,
        "Denied": 0,
        "Frozen": 0,
        "Compares": 0,
        "Small": 0,
    }
    assert found["Contrastive"][0].startswith("Contrastive calls self.all_gather in its step")
    assert "each of 2 microbatches" in found["Told"][0]
    assert "num_microbatches=1 keeps batches whole" in found["Told"][0]
    assert "(net." in found["Normed"][0]


def test_one_rank_of_a_stage_tells(pool: WorkerPool) -> None:
    first, second = pool.run(2, job, {"num_microbatches": 2}, 2)
    assert [len(first[name]) for name in ("Contrastive", "Normed", "Told")] == [1, 1, 1]
    assert not any(second.values())


@pytest.mark.parametrize(
    ("layout", "devices"), [({}, 1), ({"num_microbatches": 1, "pp": 2}, 2)], ids=str
)
def test_whole_batches_are_not_warned_of(
    pool: WorkerPool, layout: dict[str, Any], devices: int
) -> None:
    assert not any(any(found.values()) for found in pool.run(devices, job, layout, devices))
