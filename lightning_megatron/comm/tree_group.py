"""The process group of a tree: ``torch.distributed`` over `comm.tree`.

``dist.all_gather_object``, ``dist.broadcast`` and the like take it for ``group=``, so who sends
objects between hosts need not know how. It is a backend of our own, by the way that torch has for
such (``Backend.register_backend``); its collectives end before they return.
"""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch import PrefixStore, connect_gloo
from lightning_megatron.comm.tree import Branch, Fold, Tree

BACKEND = "gloo_tree"


def new_tree_group(
    machines: Sequence[Hashable], timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a tree over all processes; collective.

    Args:
        machines: machine of each rank, the same list on all ranks.
        timeout: timeout of a collective; torch's default when None.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    options: Any = tuple(machines)
    group: Any = dist.new_group(backend=BACKEND, timeout=timeout, pg_options=options)
    assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
    return group


def tree_of(group: dist.ProcessGroup | None) -> Tree:
    """The tree of a group for tensors on the host; a group of another kind is its only branch."""
    if isinstance(group, TreeGroup):
        return group.tree
    whole: Any = group or dist.group.WORLD
    size = dist.get_world_size(group)
    return Tree(dist.get_rank(group), [0] * size, lambda _: whole, fan=size)


def _make(options: Any, machines: Any) -> "TreeGroup":
    return TreeGroup(options.store, options.group_rank, options.timeout, options.group_id, machines)


class _Done(dist.Work):
    """Handle of a collective that is over."""

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True


class TreeGroup(dist.ProcessGroup):
    """All processes, by way of a tree; for tensors in host memory.

    Args:
        store: store of this group alone.
        rank: rank of this process.
        timeout: timeout of a collective.
        name: name of this group.
        machines: machine of each rank.
    """

    def __init__(
        self, store: Any, rank: int, timeout: timedelta, name: str, machines: Sequence[Hashable]
    ) -> None:
        super().__init__(rank, len(machines))  # type: ignore[call-arg]
        self._store = store
        self._timeout = timeout
        self._name = name
        self._pairs: dict[int, Any] = {}
        self.ranks_of_branches: dict[str, list[int]] = {}
        """Ranks of this rank's groups, by the names that the flight recorder has for them."""
        self.tree = Tree(rank, machines, self._connect)

    def _connect(self, branch: Branch) -> Any:
        return self._gloo(f"{branch.level}.{branch.ranks[0]}", branch.ranks)

    def _gloo(self, name: str, ranks: Sequence[int]) -> Any:
        full = f"{self._name}.{name}"
        self.ranks_of_branches[full] = list(ranks)
        store = PrefixStore(name, self._store)
        return connect_gloo(store, self.rank(), ranks, self._timeout, full)

    def _get_backend(self, device: torch.device) -> Any:
        """Backend that torch asks whether the group can be split, where a device is bound."""
        return self

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name that torch gave it; the base class asks its backends, of which this has none."""
        return self._name

    @property
    def supports_splitting(self) -> bool:
        """Whether torch is to connect its device at once; there is none."""
        return False

    @override
    def shutdown(self) -> None:
        """Close the connections."""
        self.tree.groups.clear()
        self._pairs.clear()

    # What torch.distributed calls; its stubs have overloads beside that nobody uses ---------------

    @override
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, local in zip(outputs, inputs, strict=True):
            for row, found in zip(output, self.tree.all_gather(local.contiguous()), strict=True):
                row.copy_(found)
        return _Done()

    @override
    def all_gather_single(self, output: Tensor, local: Tensor, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(self.tree.all_gather(local.contiguous()).view(-1))
        return _Done()

    _allgather_base = all_gather_single  # type: ignore[assignment]  # its name before 2.13

    @override
    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            plain = tensor.contiguous()
            self.tree.broadcast(plain, opts.rootRank)
            if plain is not tensor:
                tensor.copy_(plain)
        return _Done()

    @override
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        found = self.tree.gather(inputs[0].contiguous(), opts.rootRank)
        if found is not None:
            for row, of_rank in zip(outputs[0], found, strict=True):
                row.copy_(of_rank)
        return _Done()

    @override
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        rows = torch.stack(list(inputs[0])) if inputs else None
        self.tree.scatter(rows, outputs[0], opts.rootRank)
        return _Done()

    @override
    def allreduce(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            tensor.copy_(self.tree.reduce(tensor.contiguous(), _fold(opts.reduceOp)))
        return _Done()

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        self.tree.barrier()
        return _Done()

    @override
    def send(self, tensors: Any, to: int, tag: int) -> dist.Work:
        return self._pair(to).send(tensors, int(to > self.rank()), tag)  # type: ignore[no-any-return]

    @override
    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        return self._pair(source).recv(tensors, int(source > self.rank()), tag)  # type: ignore[no-any-return]

    def _pair(self, other: int) -> Any:
        """A group of this rank and another, connected when they first send to each other."""
        if other not in self._pairs:
            ranks = sorted((self.rank(), other))
            self._pairs[other] = self._gloo(f"pair.{ranks[0]}.{ranks[1]}", ranks)
        return self._pairs[other]


def _fold(op: Any) -> Fold:
    known: list[tuple[Any, Fold]] = [
        (dist.ReduceOp.SUM, lambda rows: rows.sum(0, dtype=rows.dtype)),
        (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
        (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    ]
    for one, fold in known:
        if op == one:
            return fold
    raise NotImplementedError(f"{BACKEND} sums and finds the largest and smallest, not {op}")
