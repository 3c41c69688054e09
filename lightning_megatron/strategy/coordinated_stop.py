"""All ranks end a run at the same batch when a signal asks one of them to.

Lightning's handler of SIGTERM broadcasts, and that of Slurm's requeue signal saves a checkpoint:
from wherever a rank is at that moment, while its peers are somewhere else. A signal that reaches
one rank only then pairs its broadcast with their gradients, and all hang. Here a handler notes the
signal (`fault_tolerance.signals`), the note rides on the votes of every batch
(`comm.votes`), and when that batch is over, all ranks leave by `SIGTERMException`.

Before they do, whoever registered as `stop.before_leaving` may save a checkpoint. What comes
after it must be what would have come, which depends on where Lightning is:

* after a batch: nothing to mend, Lightning's end of the batch is behind it;
* before or during a validation: the checkpoint says that validation has yet to begin, and the run
  that goes on from it validates from the first batch;
* after the last batch of an epoch: the run goes on to the epoch's end, callbacks included.

Evaluation is ended likewise where all ranks have the same number of batches, which they compare at
its beginning; elsewhere a signal waits for its end.
"""

import os
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_megatron._lightning.connectors import cluster_environment
from lightning_megatron._lightning.hooks import trainer_of
from lightning_megatron._lightning.launch import take_children
from lightning_megatron._lightning.loops import (
    broadcast_no_signals,
    end_batch,
    end_epoch,
    evaluation_loop,
    is_last_batch,
    replace_end_of_batch,
    replace_end_of_epoch,
    say_validation_has_begun,
    validates_after_batch,
)
from lightning_megatron._lightning.signals import (
    SignalConnector,
    chain_of,
    parts_of_chain,
    replace_signal_connector,
    signal_connector,
)
from lightning_megatron.comm.votes import Vote
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.signals import Stop, StopFlag, interrupt_once
from lightning_megatron.strategy.data.loaders import DataLoading
from lightning_megatron.strategy.run import Run

_PATIENCE_S = 20.0
"""Seconds in which the processes that Lightning started may leave by themselves."""


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


class CoordinatedStop:
    """Settles the votes of every batch, and ends the run when a signal asks one rank to.

    Args:
        run: that ends.
        data: is told of the end of an epoch.

    Attributes:
        flag: set by the handlers of signals.
        signals: numbers that end the run, beside SIGTERM.
        replaces_requeue: whether a callback does what Slurm's requeue signal asks for.
        requested: set on all ranks at the same batch, when they have agreed to end; None until
            then.
        before_leaving: called on all ranks, where they may save a checkpoint.
    """

    def __init__(self, run: Run, data: DataLoading) -> None:
        self._run = run
        self._data = data
        self.flag = StopFlag()
        self.signals: tuple[int, ...] = ()
        self.replaces_requeue = False
        self.requested: Stop | None = None
        self.before_leaving: Callable[[Stop], None] | None = None
        self._vote: Vote
        self._should_stop: Vote
        self._settled: int | None = None
        self._evaluates_evenly = False
        self._requeues = False
        self._mend: Callable[[dict[str, Any]], None] | None = None
        self._children: list[subprocess.Popen[Any]] = []

    def begin(self) -> None:
        """Begin a run: before Lightning installs its handlers, after callbacks have been set up.

        Handlers and broadcasts of the Trainer are replaced, in this instance.
        """
        trainer = self._run.trainer
        self.requested = None
        self._settled = None
        self._requeues = False
        self._mend = None
        votes = self._run.votes
        self._vote = votes.register("stop signal")
        self._should_stop = votes.register("trainer.should_stop")
        votes.start(self._run.host_group)
        connector = StopConnector(
            trainer,
            self.flag,
            self.signals,
            replaces_requeue=self.replaces_requeue,
        )
        replace_signal_connector(trainer, connector)
        broadcast_no_signals(trainer)  # before every batch: the votes take its place
        replace_end_of_batch(trainer, self._end_batch)
        replace_end_of_epoch(trainer, self._end_epoch)

    # Agreeing -------------------------------------------------------------------------------------

    def vote(self) -> None:
        """Let ranks tell each other what they found; once per batch, though it may be called more.

        Collective. A backward may run several times, and under manual optimization not at all.
        """
        trainer = self._run.trainer
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if batch == self._settled:
            return
        self._settled = batch
        mine = float(self.flag.number)
        self._vote.put(mine)
        self._should_stop.put(trainer.should_stop)
        self._run.votes.settle()
        # A step may set it by what one rank sees; who went on alone would wait for ever.
        trainer.should_stop = trainer.should_stop or bool(self._should_stop.max)
        self._decide(self._vote.max, mine)

    def begin_evaluation(self) -> None:
        """Find out whether all ranks evaluate the same number of batches; collective.

        Raises:
            ConfigError: they do not, and their forwards communicate.
        """
        trainer = self._run.trainer
        loop = trainer.predict_loop if trainer.predicting else evaluation_loop(trainer)
        batches = [float(count) for count in loop.max_batches]
        known = all(count != float("inf") for count in batches)
        digest = float(zlib.crc32(repr(batches).encode())) if known else float("nan")
        total = sum(batches) if known else 0.0
        highest, lowest, most, least = self._run.votes.largest([digest, -digest, total, -total])
        self._evaluates_evenly = highest == -lowest  # not if one is NaN
        if highest > -lowest and self._run.steps.evaluates_together:
            found = f"{-least:g} to {most:g}" if most > -least else f"{most:g}"
            raise ConfigError(
                f"evaluation of {found} batches, not the same of each loader on all ranks: ranks "
                "that read different samples hold parts of one network, so that each forward needs "
                "all of them; nearest valid: use_distributed_sampler=True, or loaders of equal "
                "length"
            )

    def _decide(self, highest: float, mine: float) -> None:
        """Stop if any rank asks for it; collective where one does.

        Args:
            highest: number of a signal, of all ranks; 0 if none got one.
            mine: the number that this rank has put.
        """
        if not highest or self.requested is not None:
            return
        [numbers] = self._run.votes.exchange([mine])
        ranks = tuple(rank for rank, number in enumerate(numbers) if number)
        connector = self._connector()
        number = int(numbers[ranks[0]])
        if number == connector.requeue_signal:
            self._requeues = True
            self.flag.clear()
            return
        self.requested = Stop(number, ranks)
        connector.received_sigterm = True
        self._children = take_children(self._run.launcher)

    # Leaving --------------------------------------------------------------------------------------

    def _end_batch(self, fetcher: Any) -> None:
        """Lightning's end of a batch, and that of the run if so agreed."""
        loop = self._run.trainer.fit_loop.epoch_loop
        if self._settled != loop.total_batch_idx and self._run.world_size == 1:
            # Lightning allows one process, and no other, a step without a backward.
            self._decide(self.flag.number, self.flag.number)
        if self.requested is not None and validates_after_batch(loop.trainer, fetcher):
            self._leave(say_validation_has_begun)
        with suppress(SIGTERMException) if self.requested is not None else nullcontext():
            end_batch(loop.trainer, fetcher)
        if self.requested is not None and not is_last_batch(loop.trainer):
            self._leave()
        if self._requeues:  # what Lightning does in its handler
            self._requeues = False
            self._connector().requeue()

    def _end_epoch(self) -> None:
        """Lightning's end of an epoch, and that of the run if so agreed."""
        loop = self._run.trainer.fit_loop
        if self.requested is None:
            end_epoch(loop.trainer)
            self._data.position.after_epoch(loop.trainer, self._run.topology)
            return
        with suppress(SIGTERMException):
            end_epoch(loop.trainer)
        self._leave()

    def end_evaluation(self) -> None:
        """End the run within the evaluation of a batch, if so agreed."""
        if self._evaluates_evenly and self.requested is None:
            mine = float(self.flag.number)
            [highest] = self._run.votes.largest([mine])
            self._decide(highest, mine)
        if self.requested is not None:
            self._leave(say_validation_has_begun)

    def _leave(self, mend: Callable[[dict[str, Any]], None] | None = None) -> None:
        stop = self.requested
        assert stop is not None
        self._mend = mend
        trainer = self._run.trainer
        if self.before_leaving is not None:
            self.before_leaving(stop)
        elif trainer.is_global_zero:
            announce(f"{stop}: the run ends at step {trainer.global_step}", _unsaved(trainer))
        raise SIGTERMException(self.flag.code_for(stop.number))

    def mend(self, checkpoint: dict[str, Any]) -> None:
        """Change in a checkpoint what the resumed run does before it reads the next batch."""
        progress = checkpoint.get("loops", {}).get("fit_loop")
        if self._mend is not None and progress is not None:
            self._mend(progress)

    def after(self, exception: BaseException) -> None:
        """Say what an interrupt leaves unsaved, and wait for the processes that are leaving."""
        if isinstance(exception, KeyboardInterrupt) and self.before_leaving is None:
            self._tell_of_interrupt()
        deadline = time.monotonic() + _PATIENCE_S
        for process in self._children:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            process.kill()

    def _tell_of_interrupt(self) -> None:
        # It may come before a run has begun.
        trainer = trainer_of(self._run.lightning_module)
        if trainer is not None and trainer.is_global_zero and trainer.global_step:
            announce(f"interrupted at step {trainer.global_step}", _unsaved(trainer))

    def _connector(self) -> StopConnector:
        connector = signal_connector(self._run.trainer)
        assert isinstance(connector, StopConnector)
        return connector


def _unsaved(trainer: pl.Trainer) -> list[str]:
    """Lines to print where nobody saves a run that is broken off."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    return ["nothing was saved for it; with callbacks=[Preemption()] a signal or Ctrl-C saves"]
