"""The handlers of signals that a Trainer installs when it runs, and takes back at the end.

Lightning's handler of SIGTERM broadcasts, and that of Slurm's requeue signal saves a checkpoint,
from wherever a rank is at that moment. A Trainer takes no others, so its connector is replaced.
"""

import signal
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import (
    _HandlersCompose,
    _SignalConnector,
)


class SignalConnector(_SignalConnector):
    """Lightning's connector, with public names for what a subclass needs.

    Private: `lightning.pytorch.trainer.connectors.signal_connector._SignalConnector`. A Trainer
    calls its ``register_signal_handlers`` and ``teardown``, and reads ``received_sigterm``.
    """

    def keep_handlers(self) -> None:
        """Note the present handlers, which ``teardown`` restores.

        Private: `_original_handlers` and `_get_current_signal_handlers`.
        """
        self._original_handlers = self._get_current_signal_handlers()

    @property
    def keeps_handlers(self) -> bool:
        """Whether there are handlers to restore."""
        return bool(self._original_handlers)

    def install(self, number: int, handlers: list[Any]) -> None:
        """Have a signal call these handlers, one after the other.

        Private: `_register_signal`, which does nothing in threads, and `_HandlersCompose`.
        """
        self._register_signal(number, chain_of(handlers))

    def save_and_requeue(self, number: int) -> None:
        """Save a checkpoint and have Slurm queue the job again; collective.

        Private: `_slurm_sigusr_handler_fn`, which does not look at the frame.
        """
        frame: Any = None
        self._slurm_sigusr_handler_fn(number, frame)


def replace_signal_connector(trainer: Trainer, ours: SignalConnector) -> None:
    """Have this Trainer install the handlers of ``ours`` when it runs.

    Replaced: `Trainer._signal_connector`. Unnecessary if a Trainer, or its strategy, could be given
    one.
    """
    trainer._signal_connector = ours


def signal_connector(trainer: Trainer) -> Any:
    """The connector that a Trainer has."""
    return trainer._signal_connector


def chain_of(handlers: list[Any]) -> Any:
    """A handler that calls others, one after the other; none at all for an empty list.

    Private: `_HandlersCompose`. It is one of Lightning's, so that a Trainer that was never torn
    down leaves nothing that `parts_of_chain` could not read.
    """
    return _HandlersCompose(handlers) if handlers else signal.SIG_DFL


def parts_of_chain(handler: Any) -> list[Any] | None:
    """The handlers that a handler of Lightning's calls; None if it is none of Lightning's.

    Private: `_HandlersCompose`.
    """
    return list(handler.signal_handlers) if isinstance(handler, _HandlersCompose) else None
