"""What processes of several machines are told at once, instead of waiting for each other."""

import socket
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_megatron import ConfigError, ConnectionConfig, MegatronStrategy
from lightning_megatron.errors import raise_if_any
from lightning_megatron.launch import interfaces
from lightning_megatron.launch.rendezvous import join
from lightning_megatron.launch.rendezvous_store import host_store
from lightning_megatron.strategy.processes.checks import start_problems, tell_others
from tests.strategy.small import Small, loader, make_trainer

HOST = socket.gethostname()
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets variables, and unsets those that launchers have set."""

    def give(variables: dict[str, str]) -> None:
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", *MEETING):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("variables", "nodes", "text"),
    [
        ({**MEETING, "NODE_RANK": "2"}, 2, rf"NODE_RANK=2 on {HOST}, .*nearest valid: NODE_RANK=1"),
        ({"NODE_RANK": "1"}, 1, r"NODE_RANK=1 .*num_nodes=1.*NODE_RANK=0, or .*num_nodes=2"),
        ({**MEETING, "LOCAL_RANK": "2"}, 2, r"LOCAL_RANK=2 .*nearest valid: Trainer\(devices=3\)"),
        ({}, 2, "MASTER_ADDR and MASTER_PORT not set .*on every node"),
        ({"MASTER_ADDR": "127.0.0.1"}, 2, "^MASTER_PORT not set .*MASTER_PORT=29500 on every node"),
        (
            {**MEETING, "MASTER_ADDR": "198.51.100.7"},
            2,
            rf"MASTER_ADDR=198.51.100.7: rank 0 .* runs on {HOST}, which has no such name",
        ),
    ],
)
def test_lightning(given: Any, variables: dict[str, str], nodes: int, text: str) -> None:
    given(variables)
    with pytest.raises(ConfigError, match=text):
        raise_if_any(start_problems(LightningEnvironment(), nodes, 2, None))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (("2", "4"), "SLURM_NNODES=2, .*num_nodes=1.*nearest valid: Trainer.num_nodes=2."),
        (("1", "4"), "SLURM_NTASKS=4, .*devices=2.*nearest valid: Trainer.devices=4."),
        (("1", "2"), None),
    ],
)
def test_slurm(given: Any, sizes: tuple[str, str], text: str | None) -> None:
    given({**SLURM, "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "nobody"})
    given(dict(zip(("SLURM_NNODES", "SLURM_NTASKS"), sizes, strict=True)))
    problems = start_problems(SLURMEnvironment(), 1, 2, None)
    if text is None:
        assert problems == []
        return
    with pytest.raises(ConfigError, match=text) as raised:
        raise_if_any(problems)
    assert "MASTER_ADDR" not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "nodes", "bind"),
    [
        ({}, 1, None),
        ({**MEETING, "NODE_RANK": "1"}, 2, None),
        (MEETING, 2, None),
        ({**MEETING, "MASTER_ADDR": "198.51.100.7"}, 2, interfaces.EVERY),
        ({**MEETING, "MASTER_ADDR": "198.51.100.7", "NODE_RANK": "1"}, 2, interfaces.loopback()),
    ],
)
def test_nothing_is_wrong(given: Any, variables: dict[str, str], nodes: int, bind: str) -> None:
    given(variables)
    assert start_problems(LightningEnvironment(), nodes, 2, bind) == []


def test_a_trainer_refuses_before_it_starts_processes(given: Any) -> None:
    given({"NODE_RANK": "1"})
    strategy = {"connection": ConnectionConfig(init_timeout_s=600)}
    trainer = make_trainer(strategy, 2, num_nodes=2)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT not set"):
        trainer.fit(Small(), loader())
    assert isinstance(trainer.strategy, MegatronStrategy)
    assert trainer.strategy.launcher.procs == []  # type: ignore[union-attr]


def test_the_others_are_told(given: Any) -> None:
    """Rank 0 waits for rank 1, which is not one of the run."""
    store = host_store("127.0.0.1", 0, "127.0.0.1", 60)
    given({**MEETING, "MASTER_PORT": str(store.port), "NODE_RANK": "2"})
    tell_others(LightningEnvironment(), 2, 1, ConfigError("NODE_RANK=2 is wrong"))
    with pytest.raises(ConfigError, match="NODE_RANK=2 is wrong"):
        join(store, 0, 2, 600.0, fresh=True)
