"""Times at which local checkpoints are made.

That is between two batches, when every other callback has seen the first, so that what
ModelCheckpoint did in this step is part of it. All ranks must decide alike, though each is done
with the one before at another time, and only one of them measures what it costs. So they decide by
what they told each other in the batch (`comm.votes`): one that is still writing puts off
the next for all, and without ``every_n_steps`` it is rank 0 that says when one is due.
"""

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_megatron.checkpoint.config import LocalCheckpointConfig
from lightning_megatron.checkpoint.local.run import LocalRun
from lightning_megatron.checkpoint.save.saver import SaveOutcome
from lightning_megatron.comm.peers import Peers
from lightning_megatron.comm.votes import Vote
from lightning_megatron.strategy.checkpoint_paths import checkpoint_places

_DUE, _BUSY = 1.0, 2.0

_WAITING = 0.01
"""Part of the time for which training may wait for local checkpoints."""
_WRITING = 1 / 3
"""Part of the time in which one may be in the making."""


class LocalCheckpoints(pl.Callback):
    """Has local checkpoints made as training goes on; the strategy's own callback.

    Args:
        config: what the user set.
        trainer: whose last callback this becomes.
        peers: all ranks.
        background: the same ranks over a gloo group of its own.
        vote: what ranks tell each other of it in every batch.
        save: begins to make one of the present; collective.
        report: called with what came of each, in the thread that wrote it.

    Attributes:
        run: makes them and keeps them.
    """

    def __init__(
        self,
        config: LocalCheckpointConfig,
        trainer: pl.Trainer,
        peers: Peers,
        background: Peers,
        *,
        vote: Vote,
        save: Callable[[], None],
        report: Callable[[SaveOutcome], None],
    ) -> None:
        self._every = config.every_n_steps
        self._decides = peers.is_first
        self._vote = vote
        self._save = save
        self._report = report
        self._last_step = self._step_before = -1
        self._begun = self._stall_s = self._duration_s = 0.0
        self.run = LocalRun(
            config,
            checkpoint_places(trainer),
            peers,
            background,
            report=self._note,
        )
        if self.run.copies < 1 + config.replicas:
            rank_zero_info(_too_few(config.replicas, self.run.nodes.count))
        trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def detach(self, trainer: pl.Trainer) -> None:
        """Be no callback any more."""
        trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    def _note(self, outcome: SaveOutcome) -> None:
        self._duration_s = outcome.seconds
        self._report(outcome)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step
        if self.run.is_busy:
            self._vote.put(_BUSY)
        elif self._decides and self._every is None and self._is_time():
            self._vote.put(_DUE)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step, told, every = trainer.global_step, self._vote.max, self._every
        due = told == _DUE if every is None else told < _BUSY and step - self._last_step >= every
        if not due or step == self._step_before:  # amid an accumulation of gradients
            return
        self._last_step = step
        self._begun = time.monotonic()
        self._save()
        self._stall_s = time.monotonic() - self._begun

    def _is_time(self) -> bool:
        wait_s = max(self._stall_s / _WAITING, self._duration_s / _WRITING)
        return time.monotonic() >= self._begun + wait_s


def _too_few(replicas: int, nodes: int) -> str:
    there = "one machine" if nodes == 1 else f"{nodes} machines"
    if nodes == 1:
        what = "there is no other to keep a copy: killed processes are survived, but with the "
        what += "machine its local checkpoints are lost"
    else:
        what = f"each keeps copies of all {nodes - 1} others"
    return f"Local checkpoints: {there} for replicas={replicas}, so {what}"
