"""Lightning's connector of signals is what `_lightning.signals` takes it for."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors import signal_connector as lightnings
from typing_extensions import override

from lightning_megatron._lightning.signals import (
    SignalConnector,
    chain_of,
    parts_of_chain,
    replace_signal_connector,
    signal_connector,
)
from tests._lightning.running import Module, On, make_trainer


class Ours(SignalConnector):
    calls: list[str]

    @override
    def register_signal_handlers(self) -> None:
        self.calls = ["register"]
        self.keep_handlers()
        self.install(signal.SIGUSR2, [lambda *_: self.calls.append("handle"), signal.SIG_IGN])

    @override
    def teardown(self) -> None:
        self.calls.append("teardown")
        assert self.keeps_handlers
        super().teardown()
        assert not self.keeps_handlers


@pytest.fixture
def before() -> Iterator[Any]:
    """A handler of SIGUSR2, without which that ends the process."""
    original, handler = signal.getsignal(signal.SIGUSR2), lambda *_: None
    signal.signal(signal.SIGUSR2, handler)
    yield handler
    signal.signal(signal.SIGUSR2, original)


def test_replace_signal_connector_and_its_handlers(before: Any) -> None:
    raised = On(on_train_start=lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    trainer = make_trainer(raised)
    ours = Ours(trainer)
    replace_signal_connector(trainer, ours)
    assert signal_connector(trainer) is ours
    trainer.fit(Module())
    assert ours.calls == ["register", "handle", "teardown"]
    assert signal.getsignal(signal.SIGUSR2) is before
    ours.received_sigterm = True
    assert trainer.received_sigterm


def test_save_and_requeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = make_trainer(default_root_dir=tmp_path)
    saved: list[str] = []
    commands: list[Any] = []
    monkeypatch.setattr(trainer, "save_checkpoint", saved.append)
    monkeypatch.setattr(lightnings, "call", lambda command: commands.append(command) or 0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    SignalConnector(trainer).save_and_requeue(signal.SIGUSR1)
    assert saved == [str(tmp_path / "hpc_ckpt_1.ckpt")]
    assert commands == [["scontrol", "requeue", "7"]]


def test_chain_of_and_parts_of_chain() -> None:
    calls: list[int] = []
    one, two = (lambda *_: calls.append(1)), (lambda *_: calls.append(2))
    chain = chain_of([one, two])
    chain(signal.SIGUSR2, None)
    assert calls == [1, 2]
    assert parts_of_chain(chain) == [one, two]
    assert parts_of_chain(one) is None
    assert chain_of([]) == signal.SIG_DFL


def test_parts_of_chain_of_lightnings_handlers() -> None:
    found: list[Any] = []
    note = On(on_train_start=lambda *_: found.append(signal.getsignal(signal.SIGTERM)))
    make_trainer(note).fit(Module())
    assert parts_of_chain(found[0])
