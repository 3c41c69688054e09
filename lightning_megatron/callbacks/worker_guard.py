"""Replacement of DataLoader workers that die or hang: `WorkerGuard`.

`fault_tolerance.loader_workers` has the mechanism; the callback adds it to every loader
with workers that a strategy prepares, under any strategy.
"""

import threading
from collections.abc import Callable

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.loader_workers import GuardRules, WorkerFault, guard
from lightning_megatron.services import events_of


class WorkerGuard(pl.Callback):
    """Reports DataLoader workers that die, hang or raise, and replaces them.

    A worker that was killed, crashed or hangs is reported on stderr and as an event ``fault`` with
    its number, process, the signal that ended it and the samples of the batch that is due. The
    workers of the loader are then replaced and read the same batches (under `MegatronStrategy` with
    the same random numbers). An error of the dataset is reported and raised, as it would repeat.

    Args:
        respawn: replacements of workers by a rank in a run. Further faults, and those of workers
            that cannot be replaced (iterable datasets, ``in_order=False``), end training with a
            `WorkerLostError`.
        hang_s: seconds that a batch may take before its worker counts as hung.

    Attributes:
        respawned: replacements so far.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, respawn: int = 3, hang_s: float = 300.0) -> None:
        problems = []
        if respawn < 0:
            problems.append(f"respawn={respawn}: must not be negative; nearest valid: 0")
        if not hang_s > 0:
            problems.append(f"hang_s={hang_s}: must be positive; nearest valid: 300")
        raise_if_any(problems)
        self._respawn = respawn
        self._hang_s = hang_s
        self._lock = threading.Lock()
        self.respawned = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if "process_dataloader" in vars(strategy):
            if not isinstance(strategy.process_dataloader, _GuardedProcessing):
                raise ConfigError(
                    "WorkerGuard: strategy.process_dataloader is already replaced; "
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
    """Replacement of ``strategy.process_dataloader``."""

    def __init__(self, original: Callable[[object], object], rules: GuardRules) -> None:
        self._original = original
        self._rules = rules

    def __call__(self, dataloader: object) -> object:
        loader = self._original(dataloader)
        if isinstance(loader, DataLoader):
            guard(loader, self._rules)
        return loader


def _report(trainer: pl.Trainer, fault: WorkerFault, action: str | None) -> None:
    lines = [
        str(fault),
        action or "found now; the workers are replaced when the next batch is read",
    ]
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
