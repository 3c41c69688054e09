"""Decisions of a forward that its recomputation takes over.

A block that is recomputed computes its logits once more, and these may differ in the last bit: a
product of other shape, another kernel, a gather that adds up in another order. Where two experts
score nearly alike the token then goes to the other one. Its backward would get gradients of an
expert that the forward never asked, and where tokens travel between ranks, messages of other sizes
than the peers expect: torch ends in a CheckpointError, or the run hangs. So what was decided is
kept, a few bytes a token, and given back (`kept`).

`parallel.activations.checkpointing` notes decisions around every forward that runs again, whatever
else it keeps. Where nobody notes, as in a user's own ``torch.utils.checkpoint``, the decision is
made anew.

Counting is the reverse: it happens in the first run alone (`Count`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from lightning_megatron._torch.graphs import runs_backward

T = TypeVar("T")
_REENTRANT: CodeType = CheckpointFunction.forward.__code__


class Decisions:
    """Decisions of one forward, in order."""

    def __init__(self) -> None:
        self._noted: list[Any] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context of the forward. Within that of another one, both note."""
        outer = _present.get()

        def take(decide: Callable[[], Any]) -> Any:
            self._noted.append(decide() if outer is None else outer.take(decide))
            return self._noted[-1]

        with _around(_Run(take, outer is not None and outer.is_repetition)):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context of a recomputation; may be entered again for another backward."""
        left = iter(self._noted)

        def take(decide: Callable[[], Any]) -> Any:
            for noted in left:
                return noted
            raise RuntimeError(
                "A recomputed block decides more often in the backward than in the forward: it "
                "does not compute the same thing twice"
            )

        with _around(_Run(take, is_repetition=True)):
            yield


def kept(decide: Callable[[], T]) -> T:
    """Return what ``decide`` returns, or in a recomputation what it returned in the forward.

    Args:
        decide: function whose result is kept as it is, tensors without a gradient among it. It may
            communicate: the recomputation does not call it. Both runs decide in the same order.
    """
    present = _present.get()
    return decide() if present is None else present.take(decide)


@contextmanager
def uncounted() -> Iterator[None]:
    """Context of forwards that are run for their own sake, as to measure them."""
    with _purpose("trial"):
        yield


@contextmanager
def company() -> Iterator[None]:
    """Context of a forward and backward that only take part in the collectives of other ranks."""
    with _purpose("company"):
        yield


def keeps_company() -> bool:
    """Whether this forward only takes part in the collectives of other ranks."""
    return _why.get() == "company"


def counts_now() -> bool:
    """Whether a forward leaves something to the step: it is no recomputation, nor `uncounted`."""
    return _why.get() != "trial" and not runs_backward()


class Count:
    """Tells of each forward of a layer whether it counts: each input of a training step once.

    What runs without a gradient is no training (a teacher, a copy that is compared), unless it is
    the first run of a reentrant checkpoint: then a backward runs the layer once more, and that run
    counts. A recomputation of ours, or of a checkpoint that is not reentrant, does not: its first
    run had a gradient.
    """

    def __init__(self) -> None:
        self._without_gradient = 0

    def __repr__(self) -> str:
        """Return the same text for all: layers whose attributes read alike are alike."""
        return "Count()"

    def is_due(self) -> bool:
        """Whether the forward that asks, once, counts."""
        present = _present.get()
        if _why.get() != "training" or (present is not None and present.is_repetition):
            return False
        if not torch.is_grad_enabled():
            self._without_gradient += _is_reentrant()
            return False
        if not runs_backward():
            return True
        if self._without_gradient == 0:
            return False
        self._without_gradient -= 1
        return True


def _is_reentrant() -> bool:
    """Whether the first run of a reentrant checkpoint is on the stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _purpose(why: str) -> Iterator[None]:
    token = _why.set(why)
    try:
        yield
    finally:
        _why.reset(token)


class _Run(NamedTuple):
    """Surroundings of a forward."""

    take: Callable[[Callable[[], Any]], Any]
    """Returns a decision."""
    is_repetition: bool
    """Whether the forward is a recomputation."""


@contextmanager
def _around(run: _Run) -> Iterator[None]:
    token = _present.set(run)
    try:
        yield
    finally:
        _present.reset(token)


# What is around a forward cannot be passed to it: the user's modules lie between. Like torch's own
# modes these are of a thread, and recomputation enters them in that of the backward.
_present: ContextVar[_Run | None] = ContextVar("present", default=None)
_why: ContextVar[str] = ContextVar("why", default="training")
