"""Optimizers and shards in host memory, as far as CPUs show it; see `tests.gpu`, too."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from lightning_megatron import ShardingConfig
from lightning_megatron._torch.fsdp import move_outside_units, parameter_groups
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local
from tests.strategy.small import Small, loader, make_trainer, weights


class Where(L.Callback):
    """What the optimizer steps on, seen from inside of a step."""

    def __init__(self) -> None:
        self.apart: set[bool] = set()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]
        own = {p.data_ptr() for p in map(local, module.parameters())}

        step = optimizer.step

        def look_and_step(*args: Any, **kwargs: Any) -> Any:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self.apart |= {p.data_ptr() not in own for p in held if p.numel()}
            return step(*args, **kwargs)

        optimizer.step = look_and_step


def offload_job(
    layout: dict[str, Any], devices: int, precision: str = "64-true"
) -> tuple[dict[str, Any], set[bool], int, list[str]]:
    """Weights, whether steps are on copies, units whose shards are in host memory, warnings."""
    module, where = Small(), Where()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, devices, callbacks=[where], precision=precision)
        trainer.fit(module, loader(dp=devices))
    roots = [m for m in module.modules() if isinstance(m, FSDPModule)]
    groups = [group for root in roots for group in parameter_groups(root._get_fsdp_state())]
    offloaded = sum(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    said = [str(w.message) for w in caught if "offload_" in str(w.message)]
    return weights(module), where.apart, offloaded, said


@pytest.mark.parametrize(("devices", "zero"), [(1, 1), (2, 1), (2, 2), (2, 3)])
def test_the_optimizer_steps_on_copies_in_host_memory(
    pool: WorkerPool, devices: int, zero: int
) -> None:
    layout = {"zero": ShardingConfig(stage=zero, offload_optimizer=True)}
    by_rank = pool.run(devices, offload_job, layout, devices)
    (expected, none, _, _), *_ = pool.run(1, offload_job, {}, 1)
    assert none == {False}
    for rank, (found, apart, _, said) in enumerate(by_rank):
        assert apart == {True}
        assert len(said) == (rank == 0), "a run on CPUs is told once that nothing is saved"
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


def test_units_keep_their_shards_in_host_memory(pool: WorkerPool) -> None:
    layout = {
        "zero": ShardingConfig(stage=3, offload_parameters=True),
        "gather_at_end": False,
    }
    by_rank = pool.run(2, offload_job, layout, 2)
    (expected, *_), *_ = pool.run(1, offload_job, {}, 1)
    for found, _, units, _ in by_rank:
        assert units >= 4
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


def moving_job() -> dict[str, str]:
    """Where everything is after all but the units was brought to another device."""
    root = nn.ModuleDict({"unit": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
    root.register_parameter("scale", nn.Parameter(torch.ones(4)))
    fully_shard(root["unit"], mesh=init_device_mesh("cpu", (1,)))
    move_outside_units(root, torch.device("meta"))
    return {name: tensor.device.type for name, tensor in root.state_dict().items()}


def test_units_stay_where_they_are_when_the_rest_comes_to_the_device(pool: WorkerPool) -> None:
    """FSDP2 refuses to run a unit whose shards were taken out of the host's memory again."""
    [found] = pool.run(1, moving_job)
    assert {found.pop("unit.weight"), found.pop("unit.bias")} == {"cpu"}
    assert len(found) == 6
    assert set(found.values()) == {"meta"}


def idle_job() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero = ShardingConfig(stage=1, wrap=["Sequential"], min_numel=7)
        make_trainer({"zero": zero}, 1).fit(Small(), loader())
    return [str(w.message) for w in caught if "zero." in str(w.message)]


def test_options_of_units_without_units_are_told(pool: WorkerPool) -> None:
    [[wrap, size]] = pool.run(1, idle_job)
    assert wrap.startswith("zero.wrap=['Sequential'], zero=1: only zero=3 has units")
    assert size.startswith("zero.min_numel=7, zero=1")
