"""Sequences that the layers of this rank have split over cp in the present microbatch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout, ContextOrder

_contexts: WeakValueDictionary[str, "Context"] = WeakValueDictionary()


@dataclass
class _Now:
    """What all notes of a rank have in common."""

    microbatch: int = 0
    suspended: int = 0


@dataclass
class _Notes:
    """Lengths of sequences, by the size of this rank's part."""

    of_microbatches: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    present: dict[int, set[int]] = field(default_factory=dict)
    """Those of the present microbatch. Layers look here: what selects a microbatch is no concern
    of theirs, and a compiler would take its number for a constant of the graph."""
    of_call: dict[int, set[int]] = field(default_factory=dict)
    is_joined: bool | None = None
    """Whether the last in this call was a join; None before anything was cut or joined."""

    def __post_init__(self) -> None:
        self.go_to(0, forget=False)

    def go_to(self, microbatch: int, *, forget: bool) -> None:
        """Look at another microbatch, or begin one."""
        if forget:
            self.of_microbatches.pop(microbatch, None)
        self.present = self.of_microbatches.setdefault(microbatch, {})
        self.start_call()

    def start_call(self) -> None:
        """Begin a call of the trunk."""
        self.of_call.clear()
        self.is_joined = None


class Context:
    """Split of the sequences in the present step, which layers of one rank share.

    A splitter notes the length of each sequence that it cuts (`split`). Layers behind it, which see
    their part only, ask which sequence it is a part of (`layout`). Each `PipelineSequential` has
    notes of its own (`of_trunk`), beside those that came with a message of the stage before: two
    sequences of 61 and 63 positions have parts of the same size.

    Args:
        config: what the user chose.
        cp: cp axis.
        tp: ranks that divide the part of a cp rank once more; 1 without sequence parallelism.
        ulysses: axis of the ranks that exchange heads, for ``kind="ring"`` with ``ulysses > 1``.
        ring: axis of the ranks that then pass keys and values around.

    Attributes:
        key: key of `context_of`.
    """

    def __init__(
        self,
        config: ContextConfig,
        cp: Axis,
        *,
        tp: int = 1,
        ulysses: Axis | None = None,
        ring: Axis | None = None,
    ) -> None:
        self.config = config
        self.cp = cp
        self.key = cp.key
        self.tp = tp
        self.ulysses = ulysses
        self.ring = ring
        self.order: ContextOrder = "contiguous" if config.order == "contiguous" else "zigzag"
        self._now = _Now()
        self._notes = _Notes()
        self._trunks: list[Context] = []
        self._parent: Context | None = None
        _contexts[self.key] = self

    @property
    def is_active(self) -> bool:
        """Whether layers split sequences now."""
        return self.cp.size > 1 and not self._now.suspended

    def of_trunk(self) -> "Context":
        """Return the same split with notes of its own."""
        part = copy.copy(self)
        part._notes, part._trunks, part._parent = _Notes(), [], self
        part._notes.go_to(self._now.microbatch, forget=False)
        self._trunks.append(part)
        return part

    def start_call(self) -> None:
        """Begin a call of the trunk: sequences of earlier ones are no longer meant.

        They stay known, for a backward that computes an earlier call again.
        """
        self._notes.start_call()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which all layers work on whole sequences, as every cp rank then does."""
        self._now.suspended += 1
        try:
            yield
        finally:
            self._now.suspended -= 1

    def begin(self, microbatch: int, *, forget: bool) -> None:
        """Go to a microbatch: before its forward, and before a backward that may recompute it.

        Args:
            microbatch: index of the microbatch, also of a stage of it.
            forget: whether a forward begins, so that nothing is known of its sequences.
        """
        self._now.microbatch = microbatch
        for context in (self, *self._trunks):
            context._notes.go_to(microbatch, forget=forget)

    def split(self, length: int) -> ContextLayout:
        """Note that a sequence is cut; return how."""
        layout = ContextLayout(length, self.cp.size, self.order, self.tp)
        self._notes.present.setdefault(layout.local, set()).add(length)
        self._notes.of_call.setdefault(layout.local, set()).add(length)
        self._notes.is_joined = False
        return layout

    def join(self) -> None:
        """Note that a sequence was joined, so that what follows has it whole."""
        self._notes.is_joined = True

    @property
    def is_joined(self) -> bool | None:
        """Whether a sequence was joined after the last cut of this call; None if neither was."""
        return self._notes.is_joined

    def noted(self) -> list[int]:
        """Lengths of the sequences that were cut in this microbatch, to tell the next stage."""
        contexts = (self, *self._trunks) if self._parent is None else (self, self._parent)
        found = [lengths for context in contexts for lengths in context._notes.present.values()]
        return sorted(set().union(*found))

    def layout(self, local: int, length: int | None = None) -> ContextLayout:
        """Sequence of which this rank holds ``local`` positions (those of all its tp ranks).

        Where several sequences of about the same length were cut the longest is returned: they
        differ in the padding only, which `lengths` tells apart.

        Args:
            local: positions of this cp rank.
            length: positions of the whole sequence, where the caller knows.

        Raises:
            ConfigError: no sequence of this microbatch was cut into parts of that length.
        """
        known = self.lengths(local)
        if length is None and not known:
            raise ConfigError(
                f"cp={self.cp.size}: a layer got {local} positions of a sequence, but sequences "
                f"were cut into parts of {self.parts() or 'no length'}: the sequence was shortened "
                "or joined behind the split; nearest valid: GatherContext() before what changes "
                "the length and SplitContext() after it, or do it outside of the "
                "PipelineSequential"
            )
        return ContextLayout(length or max(known), self.cp.size, self.order, self.tp)

    def lengths(self, local: int) -> frozenset[int]:
        """Lengths of the sequences with parts of ``local`` positions.

        They are those of this call of the trunk, if it cut some, else of this microbatch.
        """
        places = [self._notes.of_call, self._notes.present]
        if self._parent is not None:
            places.append(self._parent._notes.present)
        return frozenset(next((notes[local] for notes in places if local in notes), ()))

    def parts(self) -> list[int]:
        """Positions of this rank's parts of the sequences of this microbatch."""
        above = {} if self._parent is None else self._parent._notes.present
        return sorted({*self._notes.present, *above})


def context_of(key: str) -> Context:
    """Return the context with that key; for operators, whose arguments are tensors and numbers."""
    return _contexts[key]
