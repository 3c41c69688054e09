"""Activations that all tp ranks hold alike go to the next stage in parts, once in all.

Without sequence parallelism every tp rank of a stage has the whole activation, and sends it to its
counterpart in the next stage: a tensor of ``n`` bytes goes over the network ``tp`` times. Here each
rank sends ``n / tp`` bytes, and the receivers gather the parts among themselves (Narayanan et al.,
arXiv 2104.04473, section 4.1). That pays where a gather is cheap and a message is dear: between two
stages on different nodes, each of whose tp ranks share a node. Gradients go the same way back. What
each rank ends up with are the same bytes as without.

All that is sent is one flat run of bytes, of any number of tensors of any format, of which a rank
sends its part; the last part is padded.

*Are the tensors alike?* Nothing in a tensor tells: a network may pass its own part of something on.
So the tp ranks compare a hash of the first message between each pair of stages and in each
direction, bit by bit, and whatever differs goes whole then and always. After that each message has
sums over its tensors with it, as its sender held them, and the receiver compares them with those of
what it has put together. They must agree as far as rounding lets equal computations differ; if they
do not, the step ends in a `ConfigError`, before any weight is changed.

*Order.* The gathers are collectives on the group of the layers, asked for by the same thread. All
tp ranks of a stage take its messages in the order of the one schedule, between the same
computations, so their collectives are in one order. A gather waits for the counterparts of the
other tp ranks, which stand where one's own does; thus it waits for nothing that a collective in a
layer would not wait for, and no schedule blocks that did not without.
"""

import hashlib
import json
import logging
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.comm.peers import Peers
from lightning_megatron.comm.point_to_point import Tree, describe, rebuild
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.coordinates import rank_of
from lightning_megatron.topology.mesh import Topology

logger = logging.getLogger(__name__)

ScatterGatherChoice: TypeAlias = bool | Literal["auto"]
"""Whether to send parts; ``"auto"``: where it saves bytes between nodes."""

_ALIGN = 16
"""Bytes to which tensors begin at a multiple; the widest format has as many."""
_LEAST_BYTES = 1 << 14
"""Bytes of a message from which parts pay: below, latency counts."""
_SEGMENTS = 8
"""Sums that are compared of each tensor."""
_ROUNDING = 8.0
"""Units of the last place by which elements may differ that should be equal."""


def scatters_to(topology: Topology, peer: int, choice: ScatterGatherChoice) -> bool:
    """Whether messages to and from the pipeline rank ``peer`` go in parts; alike at both ends."""
    if topology.tp.size == 1 or topology.sequence_parallel or choice is False:
        return False
    if choice is True:
        return True
    here, there = (
        [
            rank_of({**topology.position, "pp": stage, "tp": tp}, topology.degrees)
            for tp in range(topology.tp.size)
        ]
        for stage in (topology.pp.rank, peer)
    )
    nodes = topology.nodes
    return nodes.share(here) and nodes.share(there) and nodes[here[0]] != nodes[there[0]]


class ScatterGather:
    """Takes messages apart on one side and puts them together on the other.

    Args:
        tp: the ranks that hold the messages alike.
        least_bytes: messages that are shorter go whole.

    Attributes:
        sent_in_parts: messages that this rank has sent in parts.
    """

    def __init__(self, tp: Axis, least_bytes: int = _LEAST_BYTES) -> None:
        self._tp = tp
        self._least = least_bytes
        self._alike: dict[Hashable, bool] = {}
        self._differing: list[Tensor] = []
        self.sent_in_parts = 0

    def begin(self) -> None:
        """Forget what is known of a step that did not end."""
        self._differing.clear()

    def take_apart(self, key: Hashable, tree: Tree) -> Tree:
        """This rank's message in place of ``tree``; collective over tp for the first of a key.

        Args:
            key: of all messages of a kind between two stages.
            tree: tensors and what holds them.
        """
        leaves: list[Tensor] = []
        structure = describe(tree, leaves)
        plain = [leaf.detach().contiguous() for leaf in leaves]
        if key not in self._alike:
            self._alike[key] = self._compare(key, structure, plain)
        total = sum(map(_aligned_bytes, plain))
        if not self._alike[key] or total < self._least:
            return {"whole": tree}
        self.sent_in_parts += 1
        part = _part_of(plain, -(-total // self._tp.size), self._tp.rank)
        return {"structure": structure, "sums": _sums(plain), "part": part}

    def put_together(self, message: Tree) -> Tree:
        """The tree of which every tp rank has received its part; collective over tp if in parts."""
        if "whole" in message:
            return message["whole"]
        flat = start_gather(message["part"], self._tp, 0).wait()
        offset, found = 0, []

        def take(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
            nonlocal offset
            size = dtype.itemsize * torch.Size(shape).numel()
            leaf = flat[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)
            found.append(leaf)
            return leaf.requires_grad_(requires_grad)

        tree = rebuild(message["structure"], take)
        self._differing.append(_differ(message["sums"], [leaf.detach() for leaf in found]))
        return tree

    def check(self) -> None:
        """The end of a step: look whether what was put together is what each sender held.

        Raises:
            ConfigError: it is not.
        """
        differing, self._differing = self._differing, []
        if differing and bool(torch.stack(differing).any()):
            raise ConfigError(
                "a pipeline stage passes on tensors that were equal on all tp ranks in the first "
                "step and now are not, so that they cannot be sent in parts; nearest valid: "
                "PipelineConfig(scatter_gather=False)"
            )

    def _compare(self, key: Hashable, structure: Any, leaves: Sequence[Tensor]) -> bool:
        """Whether all tp ranks hold the same, to the bit; collective over tp."""
        text = hashlib.blake2b(json.dumps(structure).encode(), digest_size=16)
        for leaf in leaves:
            text.update(_as_bytes(leaf).cpu().numpy().tobytes())
        alike = len(set(Peers.over(self._tp).all_gather(text.hexdigest()))) == 1
        if not alike and self._tp.rank == 0:
            logger.info("messages %s differ over tp, and go whole from every rank", key)
        return alike


def _as_bytes(leaf: Tensor) -> Tensor:
    return leaf.reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _aligned_bytes(leaf: Tensor) -> int:
    return _aligned(leaf.numel() * leaf.element_size())


def _part_of(leaves: Sequence[Tensor], size: int, rank: int) -> Tensor:
    """The ``rank``-th run of ``size`` bytes of the tensors, one after the other."""
    pieces, begin, offset = [], rank * size, 0
    for leaf in leaves:
        flat = _as_bytes(leaf)
        low, high = max(begin - offset, 0), min(begin + size - offset, flat.numel())
        offset += _aligned_bytes(leaf)
        if low < high:
            pieces.append((offset - _aligned_bytes(leaf) + low - begin, flat[low:high]))
    if len(pieces) == 1 and pieces[0][1].numel() == size:
        return pieces[0][1]
    part = torch.zeros(size, dtype=torch.uint8, device=leaves[0].device)
    for place, piece in pieces:
        part[place : place + piece.numel()] = piece
    return part


def _sums(leaves: Sequence[Tensor]) -> Tensor:
    """``[tensors, segments]``: sums over equal runs of the elements of each tensor."""
    return torch.stack([_segment_sums(leaf) for leaf in leaves])


def _segment_sums(leaf: Tensor) -> Tensor:
    flat = leaf.reshape(-1) if leaf.is_floating_point() else _as_bytes(leaf)
    if flat.dtype.itemsize == 1 and leaf.is_floating_point():
        flat = flat.float()  # nothing adds up the 8-bit formats
    left = -flat.numel() % _SEGMENTS
    if left:
        flat = F.pad(flat, (0, left))
    sums: Tensor = flat.view(_SEGMENTS, flat.numel() // _SEGMENTS).sum(1, dtype=torch.float64)
    return sums


def _differ(expected: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Whether tensors have other sums than ``expected``, but for rounding: a number of truth."""
    found = _sums(leaves)
    limits = torch.stack([_limit(leaf) for leaf in leaves]).unsqueeze(1)
    beyond = (found - expected).abs() > limits
    return (beyond | (found.isnan() != expected.isnan())).any()


def _limit(leaf: Tensor) -> Tensor:
    """Largest difference between sums of equal computations.

    Elements that differ by some units of their last place, up or down, change a sum by as many
    units of the root of the sum of squares; the order of the summation changes it, too.
    """
    if not leaf.is_floating_point():
        return torch.zeros((), dtype=torch.float64, device=leaf.device)
    wide = leaf.float() if leaf.dtype.itemsize == 1 else leaf
    units = _ROUNDING * torch.finfo(leaf.dtype).eps + 4e-16 * leaf.numel() ** 0.5
    norm: Tensor = torch.linalg.vector_norm(wide, dtype=torch.float64)
    return norm.nan_to_num(0.0, 0.0).mul(units)
