"""Bytes of each way to bring tokens to their experts, and which one ``dispatch="auto"`` takes.

Each of ``p`` ranks of ep has ``t`` tokens of ``h`` numbers and ``E / p`` experts; each token has
``k`` of them. Bytes that a rank sends in one layer, per microbatch:

==========  =================================  ==============================  =================
kind        forward                            backward                        before it
==========  =================================  ==============================  =================
``once``    t r (2 h e + 2 c w) + counts       t r (2 h e + c w)               counts
``gather``  t (p-1) (2 h e + k (w + 4))        t (p-1) (2 h e + k w)           nothing, or sizes
==========  =================================  ==============================  =================

``e`` bytes of a number, ``w`` of a weight, ``c = min(k, E / p)``. ``r`` is the number of *other*
ranks that a token goes to. If all experts are equally likely it is

    r = (p - 1) (1 - C(E - E/p, k) / C(E, k))    about    (p - 1) (1 - (1 - 1/p)^k)

and less where a router takes a token's experts from few groups, which lie on few ranks. A row for
each choice, as Megatron-LM sends, would be ``k (p-1) / p`` rows: with ``k = 8`` four times as many
at ``p = 2``, and 1.2 times at ``p = 16``.

``once`` never sends more, but ranks must tell each other numbers of rows before tokens can set out,
and the host waits for them in every layer and microbatch. So do numbers of tokens with ``gather``
if ranks of ep read different samples; all then send as many as the one with the most. If they read
the same ones, which tp or cp divides, tokens set out at once.

So ``auto`` gathers where ranks of ep read the same samples and ``once`` would save less than a
tenth of the rows: for ``k = 8`` up to ``ep=4``, for ``k = 2`` never. The choice follows from the
layer and the layout alone, so all ranks choose the same.

Everything here is arithmetic and imports no torch.
"""

from dataclasses import dataclass
from math import comb

from lightning_megatron.topology.expert_layout import ExpertDispatch

_WORTH = 0.1
"""Share of the rows that must be saved for the host to wait."""
_INTEGER = 8
"""Bytes of a number of rows."""


@dataclass(frozen=True, kw_only=True)
class DispatchSizes:
    """Sizes of a mixture of experts, as far as they concern what travels."""

    ep: int
    """Ranks over which the experts are spread."""
    num_experts: int
    """Experts of all ranks."""
    top_k: int
    """Experts of a token."""
    groups: int = 1
    """Groups into which the router divides the experts."""
    top_groups: int = 1
    """Groups from which a token takes its experts."""
    same_samples: bool = False
    """Whether the ranks of ep work on the same samples: they are ranks of tp and cp."""

    @property
    def held(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.ep

    @property
    def choices(self) -> int:
        """Most choices of a token on one rank."""
        return min(self.top_k, self.held)

    def rows(self, kind: ExpertDispatch) -> float:
        """Rows that a token takes to other ranks, in the mean over equally likely experts.

        >>> sizes = DispatchSizes(ep=4, num_experts=64, top_k=8)
        >>> [round(sizes.rows(kind), 2) for kind in ("once", "gather")]
        [2.74, 3]
        >>> round(DispatchSizes(ep=8, num_experts=64, top_k=8, groups=8, top_groups=2).rows("once"), 2)
        1.75
        """  # noqa: E501 (the doctest shows the whole call)
        others = self.ep - 1
        return others if kind == "gather" else others * self._reached()

    def _reached(self) -> float:
        """Share of the tokens that have any expert on a given rank."""
        of_group = self.num_experts // self.groups
        eligible = of_group * self.top_groups
        spread = max(1, self.groups // self.ep)  # groups that a rank has a part of
        part = min(self.held, of_group)
        reached = 0.0
        for taken in range(min(spread, self.top_groups) + 1):
            ways = comb(spread, taken) * comb(self.groups - spread, self.top_groups - taken)
            missed = comb(eligible - taken * part, self.top_k) / comb(eligible, self.top_k)
            reached += ways / comb(self.groups, self.top_groups) * (1 - missed)
        return reached


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of what travels with a row."""

    token: int
    """Bytes of a token's hidden state: ``h e``."""
    weight: int = 4
    """Bytes of a weight: 8 where the network computes in float64."""


def once_bytes(
    sizes: DispatchSizes, row: RowBytes, sent: float, received: float
) -> tuple[float, float]:
    """Bytes that a rank sends forward and backward with ``once``.

    Args:
        sizes: sizes of the layer.
        row: bytes of a row.
        sent: rows that this rank's tokens take to other ranks.
        received: rows that other ranks' tokens take to this one.

    >>> sizes = DispatchSizes(ep=2, num_experts=8, top_k=2)
    >>> once_bytes(sizes, RowBytes(token=1024), sent=100, received=90)
    (196208, 195280)
    """
    counts = (sizes.ep - 1) * (2 + sizes.held) * _INTEGER
    weights = sizes.choices * row.weight
    forward = sent * (row.token + 2 * weights) + received * row.token + counts
    return forward, sent * row.token + received * (row.token + weights)


def gather_bytes(sizes: DispatchSizes, row: RowBytes, tokens: float) -> tuple[float, float]:
    """Bytes that a rank sends forward and backward with ``gather``.

    Args:
        sizes: sizes of the layer.
        row: bytes of a row.
        tokens: those of the rank of ep with the most.

    >>> sizes = DispatchSizes(ep=2, num_experts=8, top_k=2)
    >>> gather_bytes(sizes, RowBytes(token=1024), tokens=130)
    (268336, 267280)
    """
    rows, weights = tokens * (sizes.ep - 1), sizes.top_k * row.weight
    forward = rows * (2 * row.token + weights + sizes.top_k * 4) + (sizes.ep - 1) * 2 * _INTEGER
    return forward, rows * (2 * row.token + weights)


@dataclass(frozen=True)
class DispatchChoice:
    """Result of `choose`."""

    kind: ExpertDispatch
    """How tokens travel."""
    reason: str
    """Sentence for the log."""


def choose(sizes: DispatchSizes) -> DispatchChoice:
    """Choose a kind for ``dispatch="auto"``, the same on all ranks.

    >>> print(choose(DispatchSizes(ep=4, num_experts=8, top_k=2)).reason)
    ep=4, num_experts=8, top_k=2: experts take dispatch='once', as a token goes to 1.39 other ranks on average and not to 3
    >>> choose(DispatchSizes(ep=2, num_experts=64, top_k=8, same_samples=True)).kind
    'gather'
    """  # noqa: E501 (the doctest shows the whole sentence)
    rows, most = sizes.rows("once"), sizes.rows("gather")
    start = f"ep={sizes.ep}, num_experts={sizes.num_experts}, top_k={sizes.top_k}"
    if sizes.groups > 1:
        start += f", groups={sizes.groups}, top_groups={sizes.top_groups}"
    start += ": experts take dispatch="
    goes = f"a token goes to {rows:.2f} other ranks on average"
    if sizes.same_samples and rows > (1 - _WORTH) * most:
        text = f"{start}'gather', as {goes}, nearly all {most:g}, if counts are sent first"
        return DispatchChoice("gather", text)
    return DispatchChoice("once", f"{start}'once', as {goes} and not to {most:g}")
