"""Watches DataLoader workers, and replaces them where that loses nothing.

The mechanism is in `fault_tolerance.workers.loader_workers`; here it is put into every loader with
workers that a strategy prepares, under any strategy.
"""

import threading
from collections.abc import Callable

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.workers.loader_workers import GuardRules, WorkerFault, guard
from lightning_megatron.services import events_of


class WorkerGuard(pl.Callback):
    """Names DataLoader workers that die, hang or raise, and goes on with new ones.

    A worker that was killed, crashed or hangs is reported on stderr and as an event ``fault`` with
    its number, process, the signal that ended it and the samples of the batch that is due. The
    loader's workers are then replaced and read the same batches (under `MegatronStrategy` with the
    same random numbers) as those before would have. An error that the dataset raises is reported
    and goes on: it would come again.

    Args:
        respawn: how often a rank replaces the workers of a loader in a run; then, and where they
            cannot be replaced (iterable datasets, ``in_order=False``), training ends with a
            `WorkerLostError`.
        hang_s: seconds that a batch may take before its worker is taken for hung.

    Attributes:
        respawned: how often that has happened.

    Raises:
        ConfigError: a number makes no sense.
    """

    def __init__(self, respawn: int = 3, hang_s: float = 300.0) -> None:
        problems = []
        if respawn < 0:
            problems.append(f"respawn={respawn}: must not be negative; nearest valid: 0")
        if not hang_s > 0:
            problems.append(f"hang_s={hang_s}: must be positive; nearest valid: 300")
        raise_if_any(problems)
        self._respawn, self._hang_s = respawn, hang_s
        self._lock = threading.Lock()
        self.respawned = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if "process_dataloader" in vars(strategy):
            if not isinstance(strategy.process_dataloader, _GuardedProcessing):
                raise ConfigError(
                    "WorkerGuard: something else has replaced strategy.process_dataloader; "
                    "nearest valid: a strategy that overrides it in its class"
                )
            return
        rules = GuardRules(
            may_replace=self._may_replace,
            report=lambda fault, action: _report(trainer, fault, action),
            hang_s=self._hang_s,
        )
        vars(strategy)["process_dataloader"] = _GuardedProcessing(
            strategy.process_dataloader, rules
        )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(vars(trainer.strategy).get("process_dataloader"), _GuardedProcessing):
            del vars(trainer.strategy)["process_dataloader"]

    def _may_replace(self) -> bool:
        with self._lock:
            if self.respawned >= self._respawn:
                return False
            self.respawned += 1
            return True


class _GuardedProcessing:
    """What stands in for ``strategy.process_dataloader``."""

    def __init__(self, original: Callable[[object], object], rules: GuardRules) -> None:
        self._original, self._rules = original, rules

    def __call__(self, dataloader: object) -> object:
        loader = self._original(dataloader)
        if isinstance(loader, DataLoader):
            guard(loader, self._rules)
        return loader


def _report(trainer: pl.Trainer, fault: WorkerFault, action: str | None) -> None:
    lines = [str(fault), action or "found now; dealt with when the next batch is asked for"]
    announce("DataLoader", lines, rank=trainer.global_rank)
    if action is not None:
        events_of(trainer).write(
            "fault",
            what="dataloader worker",
            rank_of_fault=trainer.global_rank,
            section="data",
            worker=fault.worker,
            pid=fault.pid,
            samples=list(fault.samples),
            detail=str(fault),
            action=action,
            step=trainer.global_step,
        )
