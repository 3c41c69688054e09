"""Metrics of saving: time that training waits, duration, size, failures.

==========================  ========================================================================
``ckpt/stall_s``            seconds for which the last save kept training waiting
``ckpt/duration_s``         seconds from its beginning until it stood on the disk
``ckpt/bytes``              its size, over all ranks
``ckpt/gb_per_s``           the two above as a rate, in 1e9 bytes
``ckpt/saves_total``        saves that stand
``ckpt/failures_total``     saves that failed
``ckpt/last_good_step``     step of the last one that stands; a crash now would go back to it
``ckpt/age_s``              seconds since it began to stand
``ckpt/verify_s``           seconds for which the checkpoint was verified that the run went on from
``ckpt/local/...``          all but the last of these for local checkpoints
                            (``CheckpointConfig(local=True)``)
==========================  ========================================================================

Of this process' run; until its first save one that resumed has only the last, which others never
have. On rank 0, as rank 0 saw it: the stall of others may differ by what they wait for each other.
"""

import time
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.monitoring.window import WindowCallback
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.services import events_of


class CheckpointMonitor(WindowCallback):
    """Logs what came of saves, under `MegatronStrategy`; others do not tell.

    Args:
        every_n_steps: optimizer steps between two values; by default the Trainer's
            ``log_every_n_steps``.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._shared = _Saves()
        self._local = _Saves()
        self._verify_s: float | None = None
        self._events: EventLog | None = None

    @property
    def latest(self) -> dict[str, Any] | None:
        """Event of the last shared save; None before it."""
        return self._shared.latest

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._events = events_of(trainer)
        self._events.subscribe(self._take)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._events is not None:
            self._events.unsubscribe(self._take)

    def _take(self, event: dict[str, Any]) -> None:
        """Note a save that has ended; called in the thread that wrote it."""
        if event["kind"] == "verified":
            self._verify_s = event["seconds"]
        elif event["kind"] == "save":
            self._shared.take(event)
        elif event["kind"] == "local_save":
            self._local.take(event)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log nothing: Lightning takes no more values here."""

    @override
    def on_window(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: dict[str, float]
    ) -> None:
        values: dict[str, float] = {}
        if self._verify_s is not None:
            values["ckpt/verify_s"] = self._verify_s
        shared, local = self._shared.values(), self._local.values()
        values |= {f"ckpt/{name}": value for name, value in shared.items()}
        values |= {f"ckpt/local/{name}": value for name, value in local.items()}
        if values:  # the other ranks' own; the logger and the progress bar are rank 0's
            pl_module.log_dict({name: float(v) for name, v in values.items()}, batch_size=1)


class _Saves:
    """Results of the saves of one kind."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] | None = None
        self._good: dict[str, Any] | None = None
        self._complete = self._failures = 0

    def take(self, event: dict[str, Any]) -> None:
        if event["ok"]:
            self._complete += 1
            self._good = event
        elif event["error"] is not None:  # else it was given up for a newer one
            self._failures += 1
        self.latest = event

    def values(self) -> dict[str, float]:
        latest, good = self.latest, self._good
        found: dict[str, float] = {}
        if latest is not None:
            found |= {
                "stall_s": latest["stall"],
                "duration_s": latest["seconds"],
                "saves_total": self._complete,
                "failures_total": self._failures,
            }
        if good is not None:
            found["bytes"] = good["bytes"]
            found["gb_per_s"] = good["bytes"] / max(good["seconds"], 1e-9) / 1e9
            found["last_good_step"] = good["step"]
            found["age_s"] = time.time() - good["t"]
        return found
