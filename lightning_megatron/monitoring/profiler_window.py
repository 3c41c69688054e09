"""torch.profiler over a few steps of a few ranks.

A trace of a whole run is useless and endless; one of three steps in the middle of it shows where
the time goes. Lightning's own profilers trace all ranks alike; this window traces the chosen ones,
and each writes ``DIRECTORY/profile/rank_00000-steps_100-102.json.gz``, to be opened in Perfetto.
Ranks of one pipeline or tensor group next to each other show who waits for whom.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.profiler import profile, supported_activities
from typing_extensions import override

from lightning_megatron.errors import raise_if_any

logger = logging.getLogger(__name__)


class ProfilerWindow(pl.Callback):
    """Traces the optimizer steps ``start`` to ``start + steps - 1`` of this run.

    Counted are steps from the beginning of training (``trainer.global_step``); a run that resumes
    behind the window traces nothing. With accumulated gradients a step has several batches. A trace
    that cannot be written costs a warning.

    Args:
        start: first step.
        steps: how many.
        ranks: global ranks that trace; None for all.
        directory: where traces go; None: the Trainer's ``default_root_dir``.
        memory: also trace allocations.
        stacks: also trace Python's stacks, which costs more.

    Raises:
        ConfigError: the window is empty or begins before the first step.
    """

    def __init__(
        self,
        start: int = 10,
        steps: int = 3,
        ranks: Sequence[int] | None = (0,),
        directory: str | None = None,
        memory: bool = False,
        stacks: bool = False,
    ) -> None:
        problems = []
        if start < 0:
            problems.append(f"start={start}: must be at least 0; nearest valid: start=0")
        if steps < 1:
            problems.append(f"steps={steps}: must be at least 1; nearest valid: steps=1")
        raise_if_any(problems)
        self._start = start
        self._end = start + steps
        self._ranks = None if ranks is None else frozenset(ranks)
        self._directory = directory
        self._memory = memory
        self._stacks = stacks
        self._profile: profile | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        missing = sorted(rank for rank in self._ranks or () if not 0 <= rank < trainer.world_size)
        raise_if_any(
            [
                f"ranks={missing}: there are {trainer.world_size} processes; nearest valid: "
                f"ranks=[{trainer.world_size - 1}]"
            ]
            if missing
            else []
        )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is None and trainer.global_step == self._start and self._traces(trainer):
            self._profile = profile(
                activities=supported_activities(),  # type: ignore[no-untyped-call]
                profile_memory=self._memory,
                with_stack=self._stacks,
            )
            self._profile.start()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step >= self._end:
            self._write(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._write(trainer)

    def _traces(self, trainer: pl.Trainer) -> bool:
        return self._ranks is None or trainer.global_rank in self._ranks

    def _write(self, trainer: pl.Trainer) -> None:
        """End the trace, if there is one, and write it."""
        finished, self._profile = self._profile, None
        if finished is None:
            return
        finished.stop()
        folder = Path(self._directory or trainer.default_root_dir) / "profile"
        steps = f"{self._start}-{max(trainer.global_step - 1, self._start)}"
        file = folder / f"rank_{trainer.global_rank:05d}-steps_{steps}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            message = "rank %d: the trace could not be written to %s: %s; training goes on"
            logger.warning(message, trainer.global_rank, file, error)
