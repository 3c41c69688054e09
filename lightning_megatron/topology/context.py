"""Sequences that the layers of this rank have split over cp in the present microbatch."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout, ContextOrder

_contexts: WeakValueDictionary[str, "Context"] = WeakValueDictionary()


class Context:
    """Split of the sequences in the present step, which layers of one rank share.

    A splitter notes the length of each sequence that it cuts (`split`). Layers behind it, which see
    their part only, ask which sequence it is a part of (`layout`).

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
        self._lengths: dict[int, dict[int, set[int]]] = {}
        self._microbatch = 0
        self._suspended = 0
        _contexts[self.key] = self

    @property
    def is_active(self) -> bool:
        """Whether layers split sequences now."""
        return self.cp.size > 1 and not self._suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which all layers work on whole sequences, as every cp rank then does."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def begin(self, microbatch: int, *, forget: bool) -> None:
        """Go to a microbatch: before its forward, and before a backward that may recompute it.

        Args:
            microbatch: index of the microbatch, also of a stage of it.
            forget: whether a forward begins, so that nothing is known of its sequences.
        """
        self._microbatch = microbatch
        if forget:
            self._lengths.pop(microbatch, None)

    def split(self, length: int) -> ContextLayout:
        """Note that a sequence is cut; return how."""
        layout = ContextLayout(length, self.cp.size, self.order, self.tp)
        self._lengths.setdefault(self._microbatch, {}).setdefault(layout.local, set()).add(length)
        return layout

    def noted(self) -> list[int]:
        """Lengths of the sequences that were cut in this microbatch, to tell the next stage."""
        found = self._lengths.get(self._microbatch, {}).values()
        return sorted(length for lengths in found for length in lengths)

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
        known = self._lengths.get(self._microbatch, {}).get(local, set())
        if length is None and not known:
            parts = sorted(self._lengths.get(self._microbatch, {}))
            raise ConfigError(
                f"cp={self.cp.size}: a layer got {local} positions of a sequence, but sequences "
                f"were cut into parts of {parts or 'no length'}: the sequence was shortened or "
                "joined behind the split; nearest valid: GatherContext() before what changes the "
                "length and SplitContext() after it, or do it outside of the PipelineSequential"
            )
        return ContextLayout(length or max(known), self.cp.size, self.order, self.tp)

    def lengths(self, local: int) -> frozenset[int]:
        """Lengths of all sequences of this microbatch with parts of ``local`` positions."""
        return frozenset(self._lengths.get(self._microbatch, {}).get(local, set()))


def context_of(key: str) -> Context:
    """Return the context with that key; for operators, whose arguments are tensors and numbers."""
    return _contexts[key]
