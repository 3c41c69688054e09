"""Between the steps in which the Trainer logs, the suite logs nothing and sends nothing of its own.

Values that are logged and collectives were nearly all that it cost; what is left are microseconds,
which `benchmarks.suite_overhead --hooks` measures.
"""

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_megatron import FaultTolerance, Monitor
from lightning_megatron._torch.groups import flight_recorder
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, samples

EVERY = 6


class Counts(pl.Callback):
    """Collectives that this process has begun, after each batch."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        status = flight_recorder(entries=False)["pg_status"].values()
        self.begun.append(sum(max(int(g["last_enqueued_collective"]), 0) for g in status))

    @property
    def between(self) -> list[int]:
        """Of the batches in which nothing is logged, after the first of all kinds."""
        each = [b - a for a, b in zip(self.begun, self.begun[1:], strict=False)]
        return each[EVERY : 2 * EVERY - 2]


def spent(layout: dict[str, Any], devices: int, folder: str) -> tuple[list[int], list[int], Any]:
    """Collectives of batches without the suite and with it, and what was logged in them."""
    found, logged = [], {}

    def log(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        logged.setdefault(name, set()).add(self.trainer.global_step)

    for callbacks in ([], [FaultTolerance(folder), Monitor(folder)]):
        counts = Counts()
        trainer = make_trainer(
            layout, devices, callbacks=[*callbacks, counts], log_every_n_steps=EVERY
        )
        with mock.patch.object(pl.LightningModule, "log", log):
            count = 8 * (2 * EVERY + 1)
            trainer.fit(Small(), loader(samples(count), dp=dp_of(devices, layout)))
        found.append(counts.between)
    logged.pop("perf/tokens_per_s")  # the progress bar's, once a second
    return found[0], found[1], logged


@pytest.mark.parametrize(
    "layout", [{"zero": 0}, pytest.param({"tp": 2}, marks=pytest.mark.thorough)], ids=str
)
def test_nothing_is_logged_and_sent_between_logging_steps(
    pool: WorkerPool, tmp_path: Any, layout: dict[str, Any]
) -> None:
    for without, suite, logged in pool.run(2, spent, layout, 2, str(tmp_path)):
        assert len(without) == EVERY - 2
        assert suite == without
        quiet = set(range(EVERY + 1, 2 * EVERY - 1))  # the norm is logged before its step
        assert {"optim/lr", "ft/goodput", "optim/grad_norm"} <= logged.keys()
        assert not [name for name, steps in logged.items() if steps & quiet]
