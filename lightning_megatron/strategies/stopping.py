"""All ranks end a run at the same batch when a signal asks one of them to.

Lightning's handler of SIGTERM broadcasts, and that of Slurm's requeue signal saves a checkpoint:
from wherever a rank is at that moment, while its peers are somewhere else. A signal that reaches
one rank only then pairs its broadcast with their gradients, and all hang. Here a handler notes the
signal (`resilience.signals`), the note rides on the agreement of every batch (`strategies.
agreement`), and from there on Lightning sees it on all ranks, at the same place: it leaves at the
end of the batch, by `SIGTERMException`. `callbacks.Preemption` saves a checkpoint before.

Evaluation is ended likewise where all ranks have the same number of batches, which they compare at
its beginning; elsewhere a signal waits for its end.
"""

import logging
import os
import signal
import subprocess
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import (
    _HandlersCompose,
    _SignalConnector,
)
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_megatron.resilience.signals import StopFlag, name_of
from lightning_megatron.strategies.agreement import Agreement

logger = logging.getLogger(__name__)

_PATIENCE_S = 20.0
"""How long the processes that Lightning started may take to leave by themselves."""


@dataclass(frozen=True)
class Stop:
    """What the ranks have agreed on."""

    number: int
    """Of the signal."""
    ranks: tuple[int, ...]
    """Which got it."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{name_of(self.number)} on rank{'s' if len(self.ranks) > 1 else ''} {ranks}"


class StopConnector(_SignalConnector):
    """Handlers that communicate nothing, in place of Lightning's.

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
        self._flag, self._signals = flag, signals
        self._replaces_requeue = replaces_requeue
        self.requeue_signal: int | None = None

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
        self._original_handlers = self._get_current_signal_handlers()
        self._flag.clear()
        environment = self.trainer._accelerator_connector.cluster_environment
        slurm = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.requeue_signal = None
        if slurm and not self._replaces_requeue:
            assert isinstance(environment, SLURMEnvironment)
            self.requeue_signal = environment.requeue_signal or signal.SIGUSR1
        extra = () if self.requeue_signal is None else (self.requeue_signal,)
        for number in dict.fromkeys((signal.SIGTERM, *self._signals, *extra)):
            existing = signal.getsignal(number)
            handlers: list[Any] = [self._flag]
            if callable(existing) and existing is not self._flag:
                handlers.append(existing)
            self._register_signal(number, _HandlersCompose(handlers))

    def requeue(self, number: int) -> None:
        """Save a checkpoint and have Slurm queue the job again; collective."""
        frame: Any = None  # which Lightning's handler does not look at
        self._slurm_sigusr_handler_fn(number, frame)

    @override
    def teardown(self) -> None:
        had = bool(self._original_handlers)
        super().teardown()
        self._flag.release()
        number, acted = self._flag.number, self.received_sigterm
        self._flag.clear()
        failed = self.trainer.state.status == TrainerStatus.INTERRUPTED
        if had and number and not acted and not failed:
            # No batch was left to agree in: let it do what it does after the run.
            os.kill(os.getpid(), number)


class StopHooks(ParallelStrategy):
    """The part of the strategy that settles the agreement and ends the run; mixed in first.

    Attributes:
        agreement: what ranks tell each other in every batch.
        stop_flag: set by the handlers of signals.
        stop_signals: that end the run, beside SIGTERM.
        replaces_requeue: whether a callback does what Slurm's requeue signal asks for.
        stop: set on all ranks at the same batch, when they have agreed to end; None until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.agreement = Agreement()
        self.stop_flag = StopFlag()
        self.stop_signals: tuple[int, ...] = ()
        self.replaces_requeue = False
        self.stop: Stop | None = None
        self._settled: int | None = None
        self._evaluates_evenly = False
        self._requeues: StopConnector | None = None
        self._children: list[subprocess.Popen[Any]] = []

    def start_agreement(self, trainer: pl.Trainer, group: Any) -> None:
        """Begin a run: before Lightning installs its handlers, after callbacks have been set up.

        Args:
            trainer: whose handlers and broadcast are replaced, in this instance.
            group: all processes, for tensors on the host; None for the default group.
        """
        self.stop, self._settled = None, None
        self._slot = self.agreement.register("stop signal")
        self.agreement.start(group)
        trainer._signal_connector = StopConnector(
            trainer, self.stop_flag, self.stop_signals, replaces_requeue=self.replaces_requeue
        )
        # The agreement takes the place of its broadcast before every batch.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = (  # type: ignore[method-assign]
            self._requeue_if_agreed
        )

    # Batches --------------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._settle()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._settle()  # unless a manual backward did
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._evaluated(super().predict_step(*args, **kwargs))
        if self.stop is not None:  # the loop of Lightning does not look
            raise SIGTERMException
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_evaluation()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_evaluation()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_evaluation()

    def _settle(self) -> None:
        """Once per batch, though a backward may run more often."""
        batch = self._trainer_of_run().fit_loop.epoch_loop.total_batch_idx
        if batch == self._settled:
            return
        self._settled = batch
        self._slot.put(self.stop_flag.number)
        self.agreement.settle()
        self._decide(self._slot.values)

    def _begin_evaluation(self) -> None:
        trainer = self._trainer_of_run()
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        batches = [float(count) for count in loop.max_batches]
        known = all(count != float("inf") for count in batches)
        digest = float(zlib.crc32(repr(batches).encode())) if known else float("nan")
        [everyone] = self.agreement.exchange([digest])
        self._evaluates_evenly = all(other == digest for other in everyone)

    def _evaluated(self, output: Any) -> Any:
        if self._evaluates_evenly and self.stop is None:
            [numbers] = self.agreement.exchange([self.stop_flag.number])
            self._decide(numbers)
        return output

    def _decide(self, numbers: tuple[float, ...]) -> None:
        ranks = tuple(rank for rank, number in enumerate(numbers) if number)
        if not ranks or self.stop is not None:
            return
        connector = self._trainer_of_run()._signal_connector
        assert isinstance(connector, StopConnector)
        number = int(numbers[ranks[0]])
        if number == connector.requeue_signal:
            self._requeues = connector
            self.stop_flag.clear()
            return
        self.stop = Stop(number, ranks)
        connector.received_sigterm = True
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            # Else its observer kills this process because one of them leaves, with 143.
            self._children = list(self._launcher.procs)
            self._launcher.procs.clear()
        if self.is_global_zero:
            logger.warning("%s: the run ends with this batch", self.stop)

    def _requeue_if_agreed(self) -> None:
        """What Lightning does in its handler: save, have the job queued again, and go on."""
        connector, self._requeues = self._requeues, None
        if connector is not None:
            assert connector.requeue_signal is not None
            connector.requeue(connector.requeue_signal)

    # End ------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = self.stop_flag.exit_code
        super().on_exception(exception)
        deadline = time.monotonic() + _PATIENCE_S
        for process in self._children:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            process.kill()

    def _trainer_of_run(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer
