"""The strategy's collectives mean what Lightning, callbacks and users' code take them to mean."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import gather
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, assert_same, dp_of, loader, make_trainer


class Asking(pl.Callback):
    """Calls every collective before training starts."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        value = torch.tensor(float(rank))
        strategy.barrier("named")
        self.answers = {
            "rank": (rank, trainer.world_size, trainer.is_global_zero, trainer.local_rank),
            "broadcast": strategy.broadcast({"from": rank}),
            "broadcast from 1": strategy.broadcast(rank, src=min(1, trainer.world_size - 1)),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
            "any of none": strategy.reduce_boolean_decision(False, all=False),
            "all but one": strategy.reduce_boolean_decision(rank != 1),
            "all": strategy.reduce_boolean_decision(True),
            "mean": strategy.reduce(value).item(),
            "sum": strategy.reduce(value, reduce_op="sum").item(),
            "max": strategy.reduce(value, reduce_op="max").item(),
            "mean of integers": strategy.reduce(torch.tensor(rank)).item(),
            "not a tensor": strategy.reduce("text"),
            "world": strategy.reduce(value, group=torch.distributed.group.WORLD).item(),
            "gathered": strategy.all_gather(value).tolist(),
            "untouched": value.item(),
        }


def answers(layout: Mapping[str, Any], devices: int) -> dict[str, Any]:
    callback = Asking()
    trainer = make_trainer(layout, devices, callbacks=[callback], max_steps=1)
    trainer.fit(Small(), loader())
    return callback.answers


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp=2 x dp=2", "pp=2 x dp=2"])
def test_collectives_mean_the_job_or_the_batch_ranks(
    pool: WorkerPool, layout: dict[str, int]
) -> None:
    """Decisions and broadcasts concern all processes, values those that saw other samples."""
    for rank, found in enumerate(pool.run(4, answers, layout, 4)):
        # tp peers are neighbours; the data-parallel peers of a stage are.
        batch = [rank % 2, rank % 2 + 2] if "tp" in layout else [rank // 2 * 2, rank // 2 * 2 + 1]
        mean = sum(batch) / 2
        assert found == {
            "rank": (rank, 4, rank == 0, rank),
            "broadcast": {"from": 0},
            "broadcast from 1": 1,
            "any": True,
            "any of none": False,
            "all but one": False,
            "all": True,
            "mean": mean,
            "sum": sum(batch),
            "max": max(batch),
            "mean of integers": mean,
            "not a tensor": "text",
            "world": 1.5,
            "gathered": batch,
            "untouched": rank,
        }


def test_collectives_of_one_process(pool: WorkerPool) -> None:
    [found] = pool.run(1, answers, {}, 1)
    assert found["broadcast"] == {"from": 0}
    assert found["all"] is True
    assert found["any of none"] is False
    assert found["mean"] == 0.0
    assert found["gathered"] == [0.0]


class Gathering(Small):
    """Uses ``self.all_gather`` where only the ranks of the last stage come by."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        everyone = self.all_gather({"output": output, "target": batch[1]}, sync_grads=True)
        self.shapes.append(list(everyone["output"].shape))
        return (everyone["output"] - everyone["target"]).square().mean()


def gather_in_step(layout: Mapping[str, Any], devices: int) -> tuple[list[list[int]], Any]:
    module = Gathering()
    trainer = make_trainer(layout, devices, max_steps=2)
    trainer.fit(module, loader(dp=2))
    loss = trainer.callback_metrics
    return module.shapes, loss


def test_all_gather_inside_a_step_concerns_the_batch_ranks(pool: WorkerPool) -> None:
    results = pool.run(4, gather_in_step, {"pp": 2, "num_microbatches": 2}, 4)
    # The last stage gathers; the others are told at the end of the epoch what it has filled.
    assert all(shapes == [[2, 2, 4]] * 4 for shapes, _ in results)
    results = pool.run(4, gather_in_step, {"tp": 2}, 4)
    assert all(shapes == [[2, 4, 4]] * 2 for shapes, _ in results)


class Contrastive(Small):
    """Negatives of all ranks, and a branch beside the gathered one that gets the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        layers = (ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH))
        self.queries, self.beside = nn.Sequential(*layers), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        rank = getattr(strategy, "data_parallel_rank", 0)
        size = getattr(strategy, "data_parallel_size", 1)
        queries, keys = self.queries(batch[0]), self.net(batch[1])
        gathered = self.all_gather(keys, sync_grads=True).view(-1, WIDTH)
        assert len(gathered) == size * len(keys)
        labels = torch.arange(len(queries)) + rank * len(queries)
        loss = F.cross_entropy(queries @ gathered.T, labels)
        own = self.beside(batch[0])
        # Autograd hands one tensor to both sides of a sum, first to what was computed last.
        both = torch.stack([own] * size)
        both = both + self.all_gather(own, sync_grads=True).view(size, -1, WIDTH)
        return loss + both[rank].square().mean()


def contrast(layout: Mapping[str, Any] | None, devices: int) -> dict[str, Tensor]:
    module = Contrastive()
    make_trainer(layout, devices).fit(module, loader(dp=dp_of(devices, layout or {})))
    return gather(module)


def test_negatives_of_all_ranks_make_the_loss_of_one_process(pool: WorkerPool) -> None:
    [alone] = pool.run(1, contrast, None, 1)
    for found in pool.run(4, contrast, {"tp": 2}, 4):
        assert_same(found, alone)
