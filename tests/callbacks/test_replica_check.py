"""`ReplicaCheck`: a bit that flips on one rank is found, named and healed, or ends the run."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import ConfigError, ReplicaCheck, ShardingConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local
from tests.fault_tolerance.numbers.guarded import batches, differences, fit, state_of
from tests.strategy.small import Small, loader, make_trainer


class Flip(pl.Callback):
    """Flips one bit on one rank after a step: of a parameter, or of what the optimizer keeps."""

    def __init__(self, rank: int, name: str, key: str | None = None, at: int = 2) -> None:
        self.rank, self.name, self.key, self.at = rank, name, key, at

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.at and trainer.global_rank == self.rank:
            trainer.strategy.parallel.data.come_to_rest()
            parameter = dict(module.named_parameters())[self.name]
            state = trainer.optimizers[0].state[parameter]
            tensor = local(parameter.detach() if self.key is None else state[self.key])
            tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1


def healing(
    layout: Mapping[str, Any], devices: int, rank: int, name: str, key: str | None
) -> tuple[Any, ...]:
    """What differs from a run without a flip, and what was done."""
    clean = state_of(fit(layout, devices, batches(4)))
    check = ReplicaCheck(every=1, action="heal")
    trainer = fit(layout, devices, batches(4), Flip(rank, name, key), check)
    logged = int(trainer.callback_metrics["ft/replicas_healed_total"])
    return differences(state_of(trainer), clean), logged, check.checks


HELD = [
    (3, {"zero": 0}, 2, "net.1.0.weight"),
    (4, {"zero": 0, "tp": 2}, 2, "net.0.weight"),  # which tp ranks hold alike
    (4, {"zero": 0, "pp": 2, "num_microbatches": 2}, 3, "net.0.weight"),  # tied over both stages
    (3, {"zero": ShardingConfig(stage=2, dp_replicate=3)}, 0, "net.1.0.weight"),
]
"""Ranks, layout, rank that is wrong, and the parameter."""


@pytest.mark.parametrize(
    ("held", "key"),
    [
        (HELD[0], None),
        (HELD[2], None),
        (HELD[3], "exp_avg"),
        *(
            pytest.param(held, key, marks=pytest.mark.thorough)
            for held, key in zip((*HELD, HELD[1]), (*("exp_avg", None) * 2, "exp_avg"), strict=True)
        ),
    ],
)
def test_the_majority_heals_the_rank_that_differs(
    pool: WorkerPool, held: tuple[int, dict[str, Any], int, str], key: str | None
) -> None:
    """It is the parameter that differs, or what the optimizer keeps of it."""
    devices, layout, rank, name = held
    for found in pool.run(devices, healing, layout, devices, rank, name, key):
        assert found == ([], 1, 4)


def noticing(
    layout: Mapping[str, Any], devices: int, rank: int, name: str, action: Any, at: int
) -> str:
    try:
        flip, check = Flip(rank, name, at=at), ReplicaCheck(every=3, action=action)
        fit(layout, devices, batches(6), flip, check)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_raise_names_the_rank_at_the_next_check(pool: WorkerPool) -> None:
    errors = pool.run(4, noticing, {"zero": 0}, 4, 3, "net.1.0.bias", "raise", 3)
    assert len(set(errors)) == 1
    assert errors[0].startswith("step 3: rank 3 differs from the majority in net.1.0.bias, ")


@pytest.mark.parametrize(
    ("layout", "name", "pair"),
    [
        (
            {"zero": ShardingConfig(stage=3, dp_replicate=2)},
            "net.1.0.weight",
            ("rank 0", "rank 2"),
        ),
        ({"tp": 2, "zero": 3}, "net.1.2.bias", ("rank 2", "rank 3")),
    ],
    ids=["hybrid", "tp=2"],
)
def test_of_two_that_differ_nobody_can_tell(
    pool: WorkerPool, layout: dict[str, Any], name: str, pair: tuple[str, str]
) -> None:
    for error in pool.run(4, noticing, layout, 4, 2, name, "heal", 3):
        assert error.startswith("step 3: ")
        assert all(rank in error for rank in pair), error
        assert "no majority shows which are right" in error


def test_nothing_to_compare_and_wrong_options() -> None:
    check = ReplicaCheck(every=1)
    with pytest.warns(UserWarning, match="no two ranks have the same parameters"):
        fit({}, 1, batches(2), check)
    assert check.checks == 2
    assert check.found == []
    with pytest.raises(ConfigError, match="every=0") as caught:
        ReplicaCheck(every=0, action="hope")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="it needs to know the copies"):
        make_trainer(None, callbacks=[ReplicaCheck()]).fit(Small(), loader())
