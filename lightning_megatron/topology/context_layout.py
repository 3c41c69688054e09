"""Split of a sequence over the cp axis: which rank holds which positions.

Context parallelism gives each of ``p`` ranks ``1/p`` of every sequence, so that activations shrink
``p``-fold. The layers cut the sequence and the user does not: inside of a `PipelineSequential` each
rank has its part, outside of it everything is whole and equal on all cp ranks. A sequence of any
length is filled up to a multiple of ``2 p`` (``2 p tp`` under sequence parallelism).

*Zig-zag.* Under a causal mask the last positions see the most. The filled sequence is cut into
``2 p`` chunks and rank ``r`` holds chunks ``r`` and ``2p - 1 - r``, so that all ranks compute
equally many scores (Brandon et al., arXiv 2311.09431; Llama 3, arXiv 2407.21783, section 3.3.2).
With ``order="contiguous"`` rank ``r`` holds chunks ``2r`` and ``2r + 1``: under a sliding window
this is as balanced, and a rank needs fewer neighbours.

Everything here is arithmetic on integers and imports no torch.
"""

from dataclasses import dataclass, fields
from typing import Literal

from lightning_megatron.errors import whole_numbers
from lightning_megatron.topology.degrees import nearest_divisors

ContextKind = Literal["auto", "ring", "gather", "ulysses"]
"""Ways in which attention exchanges what other cp ranks hold."""
ContextOrder = Literal["zigzag", "contiguous"]
"""Orders in which ranks hold the chunks of a sequence."""


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Context parallelism: over how many ranks sequences are split, and how attention exchanges."""

    degree: int
    """Ranks over which the sequence of every sample is split."""
    kind: ContextKind = "auto"
    """``ring`` passes keys and values from neighbour to neighbour behind the products; ``gather``
    collects all keys and values; ``ulysses`` exchanges a part of the sequence for a part of the
    heads; ``auto`` chooses by arithmetic and logs its choice (`layers.context_choice`)."""
    ulysses: int | None = None
    """With ``kind="ring"``, number of neighbouring ranks that exchange heads among themselves;
    ``degree / ulysses`` groups of them then pass keys and values around. None: no such groups."""
    order: Literal["auto", "zigzag", "contiguous"] = "auto"
    """Order in which ranks hold the sequence; ``auto`` is ``zigzag``."""

    def text(self) -> str:
        """Options as a message gives them: the degree, and what is not by default.

        >>> ContextConfig(degree=4, kind="ring", ulysses=2).text()
        "4 (kind='ring', ulysses=2)"
        """
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name != "degree" and getattr(self, field.name) != field.default
        ]
        return f"{self.degree} ({', '.join(changed)})" if changed else str(self.degree)

    def problems(self) -> list[str]:
        """Faults of the options among themselves."""
        found: list[str] = []  # of a degree tells `degrees.degree_problems`
        if self.kind not in ("auto", "ring", "gather", "ulysses"):
            found.append(
                f"kind={self.kind!r}: must be auto, ring, gather or ulysses; "
                "nearest valid: kind='auto'"
            )
        if self.order not in ("auto", "zigzag", "contiguous"):
            found.append(
                f"order={self.order!r}: must be auto, zigzag or contiguous; "
                "nearest valid: order='auto'"
            )
        if self.ulysses is not None:
            found += whole_numbers(1, ulysses=self.ulysses) or self._ulysses_problems(self.ulysses)
        return [f"cp.{problem}" for problem in found]

    def _ulysses_problems(self, ulysses: int) -> list[str]:
        if self.kind != "ring":
            return [
                f"ulysses={ulysses}, kind={self.kind!r}: it divides the ranks of a ring; "
                "nearest valid: kind='ring', or ulysses=None"
            ]
        if isinstance(self.degree, int) and self.degree >= 1 and self.degree % ulysses:
            valid = " or ".join(str(d) for d in nearest_divisors(self.degree, ulysses))
            return [
                f"ulysses={ulysses}, degree={self.degree}: ulysses must divide the degree; "
                f"nearest valid: ulysses={valid}"
            ]
        return []


@dataclass(frozen=True)
class ContextLayout:
    """Places of the positions of one sequence.

    >>> layout = ContextLayout(length=13, cp=2)
    >>> layout.padded, layout.chunks(0), layout.chunks(1)
    (16, (range(0, 4), range(12, 16)), (range(4, 8), range(8, 12)))
    >>> ContextLayout(length=13, cp=2, order="contiguous").chunks(1)
    (range(8, 12), range(12, 16))
    """

    length: int
    """Positions of the whole sequence."""
    cp: int
    """Ranks over which it is split."""
    order: ContextOrder = "zigzag"
    """Order of the chunks."""
    tp: int = 1
    """Ranks that divide the part of a cp rank once more (sequence parallelism)."""

    @property
    def padded(self) -> int:
        """Positions of the whole sequence after it was filled up."""
        multiple = 2 * self.cp * self.tp
        return -(-self.length // multiple) * multiple

    @property
    def local(self) -> int:
        """Positions of each cp rank (all tp ranks together)."""
        return self.padded // self.cp

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Positions of a cp rank, in the order in which it holds them."""
        size = self.local // 2
        numbers = (rank, 2 * self.cp - 1 - rank)
        if self.order == "contiguous":
            numbers = (2 * rank, 2 * rank + 1)
        return tuple(range(n * size, (n + 1) * size) for n in numbers)
