"""States that a loader of the user's had before the batches that are not trained on yet.

A loader with ``state_dict`` says how far it has been *read*. Lightning reads one batch ahead of
training where a loader has no length, a step may fail, and gradients may be accumulated; so the
state before a given batch is noted as the batch is read. The loader's own class, of which it
becomes a subclass, is what reads; only its iterators are followed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from lightning_megatron.data.reading.iterable_datasets import forget_state
from lightning_megatron.errors import ConfigError


class LoaderStates:
    """States of one loader in the present pass.

    Args:
        loader: with ``state_dict``; its class is replaced by a subclass.
        history: of how many batches the state is kept.
    """

    def __init__(self, loader: Any, history: int) -> None:
        self._states: deque[tuple[int, Any]] = deque(maxlen=history)
        self.read = 0
        self._restored: tuple[int, Any] | None = None
        self._was_restored = False
        kind = type(loader)
        kind = getattr(kind, "_unfollowed", kind)
        follow: Callable[[Any], Any] = lambda one: self._follow(one, kind.__iter__(one))  # noqa: E731
        members = {"__iter__": follow, "__slots__": (), "_unfollowed": kind}
        members |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
        try:
            loader.__class__ = type(kind.__name__, (kind,), members)
        except TypeError as error:
            raise ConfigError(
                f"a {kind.__name__} has a state_dict, but cannot be followed ({error}); nearest "
                "valid: a loader of a class of your own that hands out its batches"
            ) from error

    def go_to(self, batch: int, state: Any) -> None:
        """Begin the next pass with this batch; the loader was given its state before it."""
        self._restored = batch, state

    def _follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        self._states.clear()
        restored, self._restored = self._restored, None
        if restored is not None:
            self.read = restored[0]
            self._states.append(restored)
        else:
            if self._was_restored:
                forget_state(loader)
            self.read = 0
            self._note(loader)
        self._was_restored = restored is not None
        return self._batches(loader, batches)

    def _batches(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.read += 1
            self._note(loader)
            yield batch

    def _note(self, loader: Any) -> None:
        self._states.append((self.read, deepcopy(loader.state_dict())))

    def before(self, batch: int) -> Any:
        """State before a batch of this pass was read; None if unknown."""
        return next((state for number, state in self._states if number == batch), None)

    @property
    def last(self) -> Any:
        """The state after the last batch that was read."""
        return self._states[-1][1] if self._states else None
