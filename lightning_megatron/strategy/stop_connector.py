"""Handlers of signals that communicate nothing, in place of Lightning's."""

import os
import signal
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from lightning_megatron._lightning.connectors import cluster_environment
from lightning_megatron._lightning.signals import SignalConnector, chain_of, parts_of_chain
from lightning_megatron.fault_tolerance.preemption.signals import StopFlag, interrupt_once

_INTERRUPTS = (signal.default_int_handler, interrupt_once)


class StopConnector(SignalConnector):
    """Handlers that a Trainer installs when it runs, and takes back at the end.

    Args:
        trainer: whose handlers these are.
        flag: what they set.
        signals: that end the run, beside SIGTERM.
        replaces_requeue: whether someone else sees to Slurm's requeue.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        flag: StopFlag,
        signals: tuple[int, ...],
        *,
        replaces_requeue: bool,
    ) -> None:
        super().__init__(trainer)
        self._flag = flag
        self._signals = signals
        self._replaces_requeue = replaces_requeue
        self.requeue_signal: int | None = None
        """Signal of Slurm to save the job and queue it again; None if others see to it.
        """

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
        _dismiss_flags()
        self.keep_handlers()
        self._flag.clear()
        numbers = {signal.SIGTERM, *self._signals}
        self.requeue_signal = None
        environment = cluster_environment(self.trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            asks = environment.requeue_signal or signal.SIGUSR1
            numbers.add(asks)
            if not self._replaces_requeue:
                self.requeue_signal = asks
        for number in numbers:
            existing = signal.getsignal(number)
            handlers: list[Any] = [self._flag]
            # Python's own handler of interrupts would break off the batch.
            if callable(existing) and existing not in _INTERRUPTS:
                handlers.append(existing)
            self.install(number, handlers)
        self._flag.speaks = self.trainer.is_global_zero
        self._flag.watch(numbers)

    def requeue(self) -> None:
        """Save a checkpoint and have Slurm queue the job again; collective."""
        assert self.requeue_signal is not None
        self.save_and_requeue(self.requeue_signal)

    @override
    def teardown(self) -> None:
        had = self.keeps_handlers
        super().teardown()
        self._flag.release()
        number, acted = self._flag.number, self.received_sigterm
        self._flag.clear()
        failed = self.trainer.state.status == TrainerStatus.INTERRUPTED
        if had and number and not acted and not failed:
            # No batch was left to agree in: let it do what it does after the run.
            os.kill(os.getpid(), number)


def _dismiss_flags() -> None:
    """Take away the handlers of a run that was never torn down, which nobody asks any more."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        existing = signal.getsignal(number)
        others = _without_flags(existing)
        if others != [existing]:
            signal.signal(number, chain_of(others))


def _without_flags(handler: Any) -> list[Any]:
    if isinstance(handler, StopFlag):
        return []
    parts = parts_of_chain(handler)
    if parts is None:
        return [handler]
    kept = [_without_flags(part) for part in parts]
    if all(part == [one] for part, one in zip(kept, parts, strict=True)):
        return [handler]
    return [one for part in kept for one in part]
