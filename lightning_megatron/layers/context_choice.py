"""Costs of each way to exchange a split sequence, and which one ``kind="auto"`` takes.

Over cp each rank has ``n = s / p`` positions of a sequence. Its attention needs keys and values of
the other ranks. Bytes that a rank sends in one layer, per microbatch:

===========  =====================  =======================  ==================  =================
kind         forward                backward                 memory beside       hidden behind
===========  =====================  =======================  ==================  =================
``ring``     2 b n K d e (p-1)      2 b n K d (e+a) (p-1)    4 b n K d e         products of a hop
``gather``   2 b n K d e (p-1)      2 b n K d (e+a) (p-1)    2 b s K d (e + a)   the first block
``ulysses``  2 b n d e (H+K')(p-1)  the same                 none                nothing
             ``/ p``
===========  =====================  =======================  ==================  =================

``K' = lcm(K, p)``: heads of keys are repeated until ``p`` divides them. ``ring`` with ``u`` ranks
that exchange heads is a ring of ``p / u`` ranks with ``n u`` positions and ``K' / u`` heads each,
and ulysses over ``u``.

In contiguous order keys travel no further than a window needs: ``ceil((window - 1) / n)`` in place
of ``p - 1`` hops.

Two things follow. With ``g = H / K`` query heads for one of keys, ulysses sends less than a ring
forward if ``p > g + 1`` (Llama 3 8B has ``g = 4``: if ``p > 5``). And a hop of a ring, which takes
``2 b n K d e / B`` seconds over a link of ``B`` bytes per second, is hidden behind the products of
the hop before, ``2 b H d n^2 / F`` seconds under a causal mask, from

    n = (e / g) (F / B)

positions a rank on: 20,000 / g for bfloat16, 500 TFLOP/s and a port of 400 Gbit/s.

`choose` takes the kind with the least time in which a rank only waits. Where several take equally
long it takes ulysses, whose results equal one process's bit for bit. On CPUs, where messages and
products share the cores, nothing is hidden: ulysses if the number of heads allows it, else a ring.

Sources: ring attention (arXiv 2310.01889), zig-zag (arXiv 2311.09431), gather (arXiv 2407.21783,
section 3.3.2), ulysses (arXiv 2309.14509), both (arXiv 2405.07719).

Legend: b sequences of a microbatch, s positions, p = cp, H heads of queries and K of keys *of this
tp rank*, d size of a head, e bytes of a number, a bytes of one in which gradients of keys are added
up. Everything here is arithmetic and imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_megatron.topology.context_layout import ContextOrder
from lightning_megatron.topology.degrees import nearest_divisors

Kind = Literal["ring", "gather", "ulysses"]
"""Ways in which attention exchanges what other cp ranks hold."""

KINDS: tuple[Kind, ...] = ("ulysses", "ring", "gather")
"""All kinds; of equally quick ones `choose` takes the first."""

_REACHED = 0.5
"""Share of a device's peak that attention reaches: 0.35 to 0.75 on an H100 (arXiv 2407.08608)."""


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of one attention call whose sequence is split over cp."""

    cp: int
    """Ranks over which the sequence is split."""
    heads: int
    """Heads of queries of a tp rank."""
    kv_heads: int
    """Heads of keys and values of a tp rank."""
    head_dim: int
    """Size of a head."""
    length: int
    """Positions of the whole sequence."""
    batch: int = 1
    """Sequences of a microbatch."""
    key_length: int | None = None
    """Positions of the whole sequence of keys, if it is another one (cross-attention)."""
    element_bytes: int = 2
    """Bytes of a number."""
    causal: bool = True
    """Whether a position sees only itself and those before it."""
    window: int | None = None
    """Positions that each one sees at most."""
    order: ContextOrder = "zigzag"
    """Order in which ranks hold the sequence."""

    @property
    def local(self) -> float:
        """Positions of a cp rank."""
        return self.length / self.cp

    @property
    def key_bytes(self) -> float:
        """Bytes of the keys and values of a cp rank."""
        keys = (self.length if self.key_length is None else self.key_length) / self.cp
        return 2 * self.batch * keys * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def sum_bytes(self) -> float:
        """Bytes of the gradients of these, in the format in which they are added up."""
        return self.key_bytes * max(4, self.element_bytes) / self.element_bytes

    @property
    def hops(self) -> int:
        """Ranks to which the keys of one travel around a ring, at most."""
        ordered = self.causal and self.order == "contiguous" and self.window is not None
        if not ordered or self.window is None:
            return self.cp - 1
        return min(self.cp - 1, math.ceil((self.window - 1) / self.local))

    def flops(self) -> float:
        """Operations of the forward products of a rank, if all ranks have equally many."""
        keys = self.length if self.key_length is None else self.key_length
        pairs = self.length * keys / (2 if self.causal else 1)
        if self.window is not None:
            wide = self.window if self.causal else 2 * self.window
            pairs = min(pairs, self.length * wide)
        return 4 * self.batch * self.heads * self.head_dim * pairs / self.cp


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of what the ranks of a cp group run on.

    The defaults are those of an H100 with NVLink and a port of 400 Gbit/s for each GPU.
    """

    flops: float = 500e12
    """Operations per second that the products of attention reach."""
    link: float = 450e9
    """Bytes per second between ranks of one node."""
    network: float = 50e9
    """Bytes per second that each rank sends to other nodes."""
    ranks_per_node: int | None = None
    """Ranks of a cp group on each node; None: all."""

    @staticmethod
    def of_peak(peak_flops: float | None, ranks_per_node: int | None = None) -> "Hardware":
        """Hardware of a device with that peak (None: unknown); half of it is reached."""
        found = Hardware(ranks_per_node=ranks_per_node)
        return found if peak_flops is None else replace(found, flops=_REACHED * peak_flops)


@dataclass(frozen=True, kw_only=True)
class ContextCost:
    """Costs of one attention layer on one rank, for one microbatch."""

    kind: Kind
    """Way in which ranks exchange."""
    ulysses: int | None
    """Ranks of a ring that exchange heads among themselves."""
    forward_bytes: float
    """Bytes that a rank sends in forward."""
    backward_bytes: float
    """Bytes that it sends in backward."""
    extra_bytes: float
    """Bytes of memory beside those of its own queries, keys, values and results, at most."""
    forward_waits: float
    """Seconds of forward in which it only waits."""
    backward_waits: float
    """Seconds of backward in which it only waits."""

    @property
    def bytes(self) -> float:
        """Bytes that a rank sends in both directions."""
        return self.forward_bytes + self.backward_bytes

    @property
    def waits(self) -> float:
        """Seconds of both directions in which it only waits."""
        return self.forward_waits + self.backward_waits


@dataclass(frozen=True)
class ContextChoice:
    """Kind that ``auto`` takes."""

    kind: Kind
    """The kind."""
    reason: str
    """One sentence that says why."""


def refusal(
    kind: Kind,
    *,
    heads: int,
    cp: int,
    ulysses: int | None = None,
    dropout: float = 0.0,
    mask: bool = False,
) -> str | None:
    """Reason why a kind cannot do a call, with the nearest valid choice; None if it can.

    Args:
        kind: the kind.
        heads: query heads of a tp rank.
        cp: ranks over which the sequence is split.
        ulysses: ranks of a ring that exchange heads among themselves.
        dropout: probability of a weight to be zeroed.
        mask: whether there is a mask beside ``causal``, ``window`` and documents.

    >>> print(refusal("ulysses", heads=6, cp=4))
    kind='ulysses', heads of a tp rank=6, cp=4: heads must be divisible by cp; nearest valid: cp=3 or 6, or kind='ring'
    """  # noqa: E501 (the doctest shows the whole sentence)
    if kind == "ring" and dropout:
        return (
            f"kind='ring', attention dropout={dropout}: a ring draws no masks of weights; "
            "nearest valid: kind='gather' or 'ulysses', or no dropout of attention"
        )
    if kind == "ring" and mask:
        return (
            "kind='ring', a mask: a ring sees one block of keys at a time; "
            "nearest valid: kind='gather' or 'ulysses', or documents in place of the mask"
        )
    name, ranks = ("cp", cp) if kind == "ulysses" else ("ulysses", ulysses or 1)
    if kind == "gather" or heads % ranks == 0:
        return None
    valid = " or ".join(str(d) for d in nearest_divisors(heads, ranks))
    other = "kind='ring'" if kind == "ulysses" else "ulysses=None"
    return (
        f"kind={kind!r}, heads of a tp rank={heads}, {name}={ranks}: heads must be divisible by "
        f"{name}; nearest valid: {name}={valid}, or {other}"
    )


def cost(
    kind: Kind,
    sizes: AttentionSizes,
    hardware: Hardware | None = None,
    ulysses: int | None = None,
) -> ContextCost:
    """Compute what a kind costs (see the module's text).

    >>> sizes = AttentionSizes(cp=8, heads=32, kv_heads=8, head_dim=128, length=131072)
    >>> [round(cost(kind, sizes).forward_bytes / 2**20) for kind in ("ring", "gather", "ulysses")]
    [448, 448, 280]
    """
    hardware = hardware or Hardware()
    if kind == "ulysses":
        return _ulysses(sizes, hardware)
    if kind == "gather":
        return _gather(sizes, hardware)
    if ulysses is None or ulysses == 1:
        return _ring(sizes, hardware)
    return _ring_of_groups(sizes, hardware, ulysses)


def choose(
    sizes: AttentionSizes,
    *,
    device: str = "cpu",
    hardware: Hardware | None = None,
    mask: bool = False,
    dropout: float = 0.0,
) -> ContextChoice:
    """Choose a kind for ``kind="auto"``, the same on all ranks of a cp group.

    Args:
        sizes: sizes of the call.
        device: kind of device, as ``cpu`` or ``cuda``.
        hardware: speeds; the defaults of `Hardware` when None.
        mask: whether there is a mask beside ``causal``, ``window`` and documents.
        dropout: probability of a weight to be zeroed.

    >>> print(choose(AttentionSizes(cp=2, heads=4, kv_heads=2, head_dim=16, length=64)).reason)
    cp=2: attention takes kind='ulysses', as nothing is hidden behind products on CPUs
    """
    able: Mapping[Kind, str | None] = {
        kind: refusal(kind, heads=sizes.heads, cp=sizes.cp, dropout=dropout, mask=mask)
        for kind in KINDS
    }
    left = [kind for kind in KINDS if able[kind] is None]
    because = "".join(
        f"; {refused.partition(';')[0]}" for refused in able.values() if refused is not None
    )
    start = f"cp={sizes.cp}: attention takes kind="
    if len(left) == 1:
        return ContextChoice(left[0], f"{start}{left[0]!r}, the only one that can{because}")
    if device == "cpu":
        text = f"{start}{left[0]!r}, as nothing is hidden behind products on CPUs{because}"
        return ContextChoice(left[0], text)
    costs = {kind: cost(kind, sizes, hardware) for kind in left}
    best = min(left, key=lambda kind: _about(costs[kind].waits))
    times = ", ".join(f"{kind} {_milliseconds(costs[kind].waits)}" for kind in left)
    return ContextChoice(
        best, f"{start}{best!r}; a rank would wait in each layer and microbatch: {times}{because}"
    )


def _ulysses(sizes: AttentionSizes, hardware: Hardware) -> ContextCost:
    p = sizes.cp
    queries = 2 * sizes.batch * sizes.local * sizes.heads * sizes.head_dim * sizes.element_bytes
    repeats = math.lcm(sizes.kv_heads, p) // sizes.kv_heads
    sent = (queries + sizes.key_bytes * repeats) * (p - 1) / p
    near = min(hardware.ranks_per_node or p, p)
    seconds = max(
        sent * (p - near) / max(p - 1, 1) / hardware.network,
        sent * (near - 1) / max(p - 1, 1) / hardware.link,
    )
    return ContextCost(
        kind="ulysses",
        ulysses=None,
        forward_bytes=sent,
        backward_bytes=sent,
        extra_bytes=2 * (repeats - 1) * sizes.key_bytes,
        forward_waits=seconds,
        backward_waits=seconds,
    )


def _ring(sizes: AttentionSizes, hardware: Hardware) -> ContextCost:
    """Cost of a ring: its hops, each behind the products of as large a part."""
    hops, speed = sizes.hops, _slowest_link(sizes.cp, hardware)
    forward, sums = hops * sizes.key_bytes, hops * sizes.sum_bytes
    products = sizes.flops() / (hops + 1) / hardware.flops
    hop = sizes.key_bytes / speed
    hop_back = (sizes.key_bytes + sizes.sum_bytes) / speed
    last = sizes.sum_bytes / speed if hops else 0.0
    return ContextCost(
        kind="ring",
        ulysses=None,
        forward_bytes=forward,
        backward_bytes=forward + sums,
        extra_bytes=2 * sizes.key_bytes,
        forward_waits=hops * max(0.0, hop - products),
        backward_waits=hops * max(0.0, hop_back - 2.5 * products) + last,
    )


def _gather(sizes: AttentionSizes, hardware: Hardware) -> ContextCost:
    """Cost of collecting all keys; the products of the rank's own block hide a part of it."""
    hops, speed = sizes.cp - 1, _slowest_link(sizes.cp, hardware)
    forward, sums = hops * sizes.key_bytes, hops * sizes.sum_bytes
    products = sizes.flops() / sizes.cp / hardware.flops
    return ContextCost(
        kind="gather",
        ulysses=None,
        forward_bytes=forward,
        backward_bytes=forward + sums,
        extra_bytes=sizes.cp * (sizes.key_bytes + sizes.sum_bytes),
        forward_waits=max(0.0, forward / speed - products),
        backward_waits=max(0.0, forward / speed - 2.5 * products) + sums / speed,
    )


def _ring_of_groups(sizes: AttentionSizes, hardware: Hardware, ulysses: int) -> ContextCost:
    """Cost of a ring of ``cp / ulysses`` places, each a group of ranks that exchange heads."""
    near = min(hardware.ranks_per_node or sizes.cp, sizes.cp)
    inside = replace(sizes, cp=ulysses, length=round(sizes.local * ulysses), key_length=None)
    if sizes.key_length is not None:
        inside = replace(inside, key_length=round(sizes.key_length / sizes.cp * ulysses))
    exchange = _ulysses(inside, replace(hardware, ranks_per_node=min(near, ulysses)))
    heads = math.lcm(sizes.kv_heads, ulysses)
    around = replace(
        sizes, cp=sizes.cp // ulysses, heads=sizes.heads // ulysses, kv_heads=heads // ulysses
    )
    ring = _ring(around, replace(hardware, ranks_per_node=max(1, near // ulysses)))
    return ContextCost(
        kind="ring",
        ulysses=ulysses,
        forward_bytes=exchange.forward_bytes + ring.forward_bytes,
        backward_bytes=exchange.backward_bytes + ring.backward_bytes,
        extra_bytes=exchange.extra_bytes + ring.extra_bytes,
        forward_waits=exchange.forward_waits + ring.forward_waits,
        backward_waits=exchange.backward_waits + ring.backward_waits,
    )


def _slowest_link(cp: int, hardware: Hardware) -> float:
    """Bytes per second of the link that all ranks of a ring wait for."""
    return hardware.network if cp > (hardware.ranks_per_node or cp) else hardware.link


def _about(seconds: float) -> float:
    """Round to two digits: smaller differences are no reason."""
    return float(f"{seconds:.2g}")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
