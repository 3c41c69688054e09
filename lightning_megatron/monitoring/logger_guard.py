"""A logger that fails costs its own lines, not the run.

Lightning calls loggers from inside its loops; what one of them raises (a server that does not
answer, a disk that is full) ends training. While a run lasts, `LoggerGuard` stands in front of the
methods of each logger object, and turns what they raise into one warning for each method; all
further lines are tried again. Loggers do their work on rank 0 alone, so nothing waits for what
failed.

What it cannot catch: what happens while a logger is made, or when the Trainer asks it for its
directory or version; what a logger's own threads raise; a call that never returns; and what a
module calls on ``logger.experiment`` itself.
"""

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

logger = logging.getLogger(__name__)

_METHODS = (
    "log_metrics",
    "log_hyperparams",
    "log_graph",
    "save",
    "after_save_checkpoint",
    "finalize",
)


class LoggerGuard(pl.Callback):
    """Keeps training going when a logger raises; under any strategy.

    Attributes:
        failures: how often which method of which class of loggers has failed.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self._guarded: list[tuple[Any, str]] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()
        for guarded in trainer.loggers:
            for name in _METHODS:
                if name not in vars(guarded) and callable(getattr(guarded, name, None)):
                    setattr(guarded, name, self._guard(guarded, name))
                    self._guarded.append((guarded, name))

    def _guard(self, guarded: Any, name: str) -> Callable[..., Any]:
        method, title = getattr(guarded, name), f"{type(guarded).__name__}.{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                self.failures[title] = self.failures.get(title, 0) + 1
                if self.failures[title] == 1:
                    message = (
                        "%s failed: %s: %s; training goes on without what it was to log, and "
                        "further failures are only counted"
                    )
                    logger.warning(message, title, type(error).__name__, error)
                return None

        return call

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(but="finalize")  # which Lightning calls after this

    def _release(self, but: str | None = None) -> None:
        for guarded, name in self._guarded:
            if name != but:
                vars(guarded).pop(name, None)
        self._guarded = [(guarded, name) for guarded, name in self._guarded if name == but]
