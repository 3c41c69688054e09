"""Limit of restarts for a run that fails without progress: `RestartPolicy`.

A restart helps after a machine died or another job took the memory. It does not help if the model
fails on a batch every time. A launcher counts restarts only; progress tells the two apart. Rank 0
records the last step of each attempt (`fault_tolerance.attempt_log`): several attempts in
a row without a new step are a cycle. It also records why each attempt failed, if it learns it, and
the last attempt reports these.
"""

import os
import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron.errors import ConfigError, RestartLimitError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.attempt_log import (
    AttemptLog,
    AttemptRecord,
    cycles_without_progress,
)
from lightning_megatron.run_log.events import PEER_LOST
from lightning_megatron.services import events_of, services_if_any


class RestartPolicy(pl.Callback):
    """Ends a run that was restarted too often, or whose attempts make no progress.

    It decides before anything is loaded, so that such an attempt costs no more than its start, and
    raises `RestartLimitError` on every rank. torchrun would restart the workers nonetheless: it is
    ended on each node by SIGTERM, whatever its ``--max-restarts``.

    Attempts that finished or that a signal ended do not count.

    Args:
        max_restarts: restarts of the run after a failure; None leaves the number to the launcher.
        cycles: attempts in a row without a new step after which the run ends; 0 for any number.
        run_dir: directory of the records, in ``attempts/``; by default the Trainer's
            ``default_root_dir``. On several machines it must be shared, as rank 0 may move.

    Attributes:
        earlier: the attempts before this one, on rank 0.

    Raises:
        ConfigError: a number is negative.
    """

    def __init__(
        self,
        max_restarts: int | None = None,
        cycles: int = 3,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("max_restarts", max_restarts), ("cycles", cycles)):
            if value is not None and value < 0:
                raise ConfigError(
                    f"RestartPolicy({name}={value}): must be 0 or more; nearest valid: {name}=0"
                )
        self._max_restarts = max_restarts
        self._cycles = cycles
        self._run_dir = run_dir
        self._log: AttemptLog | None = None
        self._failed: AttemptLog | None = None
        """Record of an attempt that has failed, until its cause is known."""
        self._run = ""
        self._step = -1
        self.earlier: list[AttemptRecord] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        services = services_if_any(trainer)
        attempt = None if services is None else services.attempt
        self._run = "" if attempt is None else attempt.run_id
        self._step = -1
        if trainer.is_global_zero:
            self._open(trainer, 0 if attempt is None else attempt.number)
            events_of(trainer).subscribe(self._on_event)
        self._decide(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        events_of(trainer).unsubscribe(self._on_event)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Record a cause that is found after the callbacks' ``on_exception``."""
        log = self._log or self._failed
        if log is None:
            return
        if event["kind"] == "hang":
            said = f"rank {event['rank_of_fault']} hung in {event['section']}"
            log.update(why=event.get("silence") or said)
        elif event["kind"] == "fault" and event["what"] == PEER_LOST:
            log.update(why=event["detail"])

    def _open(self, trainer: pl.Trainer, number: int) -> None:
        if self._failed is not None:
            self._failed.close()
            self._failed = None
        run_dir = self._run_dir or trainer.default_root_dir
        if "://" in os.fspath(run_dir):
            rank_zero_warn(
                f"RestartPolicy: run_dir={os.fspath(run_dir)} must be a local directory; earlier "
                "attempts are unknown; nearest valid: run_dir='attempts'"
            )
            return
        try:
            self._log = AttemptLog(run_dir, self._run, number)
        except OSError as error:
            rank_zero_warn(f"RestartPolicy: {error}; earlier attempts are unknown")

    def _decide(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks if the run is to end."""
        why = ""
        if self._log is not None:
            self.earlier = self._log.chain()
            why = self._reason_to_stop()
        why = trainer.strategy.broadcast(why)
        if not why:
            return
        if trainer.is_global_zero:
            announce(f"restarts end: {why}", map(_line, self.earlier[-8:]), rank=0)
        events_of(trainer).write("fault", what="restart limit", detail=why, action="end")
        self._note_end("failed")
        self._end_torchrun(trainer)
        raise RestartLimitError(why)

    def _reason_to_stop(self) -> str:
        failed = [a for a in self.earlier if a.end not in ("finished", "stopped")]
        best = max((attempt.step for attempt in self.earlier), default=-1)
        if self._max_restarts is not None and len(failed) > self._max_restarts:
            return (
                f"the run has failed {len(failed)} times, and RestartPolicy(max_restarts="
                f"{self._max_restarts}) allows {self._max_restarts} restarts"
            )
        cycles = cycles_without_progress(self.earlier)
        if self._cycles and cycles >= self._cycles:
            return (
                f"{cycles} attempts in a row ended without a step beyond step {max(best, 0)} "
                f"(RestartPolicy(cycles={self._cycles})). The failure repeats: see the "
                "causes that the attempts reported; to try again nonetheless, remove the folder "
                "attempts of the run directory"
            )
        return ""

    def _end_torchrun(self, trainer: pl.Trainer) -> None:
        """Send SIGTERM to torchrun if it would restart the workers."""
        elastic = env.torch_elastic()
        restarts = elastic is not None and elastic.max_restarts > elastic.restarts
        if restarts and trainer.local_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._decide(trainer)  # the checkpoint names the run that this one continues
        self._step = trainer.global_step

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._log is not None and trainer.global_step > self._step:
            self._step = trainer.global_step
            self._log.reached(self._step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_end("finished")

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        leaves = isinstance(exception, SIGTERMException | KeyboardInterrupt)
        name = type(exception).__name__
        why = "" if leaves else " ".join(f"{name}: {exception}".split())
        self._note_end("stopped" if leaves else "failed", why)

    def _note_end(self, end: str, why: str = "") -> None:
        log, self._log = self._log, None
        if log is None:
            return
        log.update(end=end, why=why)
        if end == "failed":
            self._failed = log
        else:
            log.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("run", "")
        if self._log is not None and saved != self._run:
            self._log.update(continues=saved)


def _line(attempt: AttemptRecord) -> str:
    step = "did no step" if attempt.step < 0 else f"came to step {attempt.step}"
    why = f": {attempt.why}" if attempt.why else ""
    end = f"{attempt.end or 'was killed'}{why}"
    return f"attempt {attempt.number} of run {attempt.run} {step}, {end}"
