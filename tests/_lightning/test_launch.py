"""Launchers, and what is done to processes, are what `_lightning.launch` takes them for."""

import atexit
import os
import subprocess
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from lightning_megatron._lightning import launch
from lightning_megatron._lightning.launch import (
    LauncherBase,
    LaunchingStrategy,
    ScriptLauncher,
    abort_group_at_exit,
    callback_states,
    default_backend,
    destroy_group_at_exit,
    forget_launcher,
    is_interactive,
    limit_threads,
    run_as_entry_point,
    take_children,
)
from tests._lightning.running import make_trainer


class Process:
    pid = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        self.rank = options["env"]["LOCAL_RANK"]
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> ScriptLauncher:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # so that they are put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "Popen", Process)
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=3, num_nodes=1)
    launcher.start_children()
    return launcher


def test_script_launcher(started: ScriptLauncher) -> None:
    processes: Any = started.procs
    assert [process.rank for process in processes] == ["1", "2"]
    started.kill(15)
    assert [process.signals for process in processes] == [[15], [15]]


def test_take_children(started: ScriptLauncher) -> None:
    children: Any = take_children(started)
    assert [process.rank for process in children] == ["1", "2"]
    assert started.procs == []
    assert take_children(None) == []


class Nothing(LauncherBase):
    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args)

    @override
    def kill(self, signum: Any) -> None: ...


class Launching(LaunchingStrategy, DDPStrategy):
    @override
    def make_launcher(self) -> LauncherBase | None:
        return Nothing()


def test_launching_strategy_and_forget_launcher() -> None:
    strategy = make_trainer(strategy=Launching(), devices=2).strategy
    assert isinstance(strategy.launcher, Nothing)
    forget_launcher(strategy)
    assert strategy.launcher is None


def test_limit_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    limit_threads(2)
    assert torch.get_num_threads() == before
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        limit_threads(10_000)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_is_interactive() -> None:
    assert is_interactive() is False


def test_default_backend() -> None:
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda")) == "nccl"


def test_destroy_group_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    destroy_group_at_exit()
    [function] = registered
    assert "destroy_process_group" in function.__code__.co_names


def test_run_as_entry_point() -> None:
    told: list[BaseException] = []

    class Told(pl.Callback):
        @override
        def on_exception(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
        ) -> None:
            told.append(exception)

    trainer = make_trainer(Told())
    assert run_as_entry_point(trainer, lambda: 3) == 3

    def fail() -> None:
        raise ValueError("this")

    with pytest.raises(ValueError, match="this"):
        run_as_entry_point(trainer, fail)
    assert [str(error) for error in told] == ["this"]
    assert trainer.state.status == TrainerStatus.INTERRUPTED


def test_callback_states() -> None:
    stopping = EarlyStopping("loss")
    assert callback_states(make_trainer(stopping)) == {stopping.state_key: stopping.state_dict()}


class Exit:
    """Stands in for `atexit`: what is registered, by function."""

    def __init__(self) -> None:
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def register(self, function: Any, *args: Any) -> None:
        self.calls[function] = args

    def unregister(self, function: Any) -> None:
        self.calls.pop(function, None)

    def run(self) -> None:
        for function, args in self.calls.items():
            function(*args)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_process_that_failed_does_not_wait_for_its_peers_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    """Destroying groups would wait for a collective that no peer joins; even aborting may."""
    ended, at_exit, codes = threading.Event(), Exit(), []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    def abort() -> None:
        if blocks:
            assert ended.wait(30)

    monkeypatch.setattr(launch, "atexit", at_exit)
    monkeypatch.setattr(os, "_exit", leave)
    destroy_group_at_exit()
    for _ in range(2):  # a second run failed as well
        abort_group_at_exit(abort, 0.05 if blocks else 30)
    assert len(at_exit.calls) == 1
    assert launch._destroy_dist_connection not in at_exit.calls
    at_exit.run()
    assert codes == ([1] if blocks else [])
