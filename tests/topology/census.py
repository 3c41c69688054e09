"""Census of process groups: every group that set-up code makes, as it would be made on GPUs.

A rank of a world of any size runs in this process under torch's fake backend, whose collectives
do nothing. The default group says that it is bound to a GPU, as it is under NCCL, and the census
stands in for ``dist.new_group`` and ``dist.split_group``: it notes every call, gives the group the
name that torch would give it, and counts how often the communicator of the world would be split.

`faults` compares the census of several ranks. What it proves: that ranks make the same groups in
the same order, with the same names and the timeout of the run. Not that NCCL makes them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from tests.comm.fake_world import fake_world

NCCL_DEFAULT = timedelta(minutes=10)
GLOO_DEFAULT = timedelta(minutes=30)


@dataclass(frozen=True)
class Made:
    """One call that makes groups."""

    how: str
    """``"split"``, ``"new"`` or ``"local"`` (without the ranks outside)."""
    backend: str
    """``"nccl"`` or ``"gloo"``."""
    described: str
    parts: tuple[tuple[int, ...], ...]
    timeout: timedelta
    name: str | None
    """Of the group that this rank got."""
    bound: bool
    """Whether the communicator of the world is split for it."""

    def part_of(self, rank: int) -> tuple[int, ...]:
        return next((part for part in self.parts if rank in part), ())


@dataclass
class Census:
    """Calls of one rank, in order."""

    rank: int
    made: list[Made] = field(default_factory=list)

    @property
    def splits(self) -> int:
        """How often the communicator of the world is split."""
        return sum(made.bound and made.backend == "nccl" for made in self.made)

    @property
    def communicators(self) -> list[tuple[str, int]]:
        """Communicators of the device that exist after set-up, by name and size."""
        return [
            (made.described, len(made.part_of(self.rank)))
            for made in self.made
            if made.backend == "nccl" and made.bound and made.name is not None
        ]


def take(rank: int, world_size: int, job: Callable[[], Any]) -> Census:
    """Run set-up code as one rank of a world; returns the groups that it made."""
    census = Census(rank)
    with fake_world(rank, world_size), _noting(census):
        job()
    return census


@contextmanager
def _noting(census: Census) -> Iterator[None]:
    world: Any = dist.group.WORLD
    new = dist.new_group

    def new_group(
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **more: Any,
    ) -> Any:
        device, world.bound_device_id = world.bound_device_id, None
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        kind = backend or "nccl"
        try:
            group: Any = new(
                members,
                backend="fake",
                use_local_synchronization=use_local_synchronization,
                group_desc=group_desc,
            )
        finally:
            world.bound_device_id = device
        default = NCCL_DEFAULT if kind == "nccl" else GLOO_DEFAULT
        mine = census.rank in members
        # Also for a group of gloo torch splits the world's communicator: for the ranks outside.
        bound = device is not None and (kind == "nccl" or not mine)
        census.made.append(
            Made(
                how="local" if use_local_synchronization else "new",
                backend="nccl" if bound else kind,
                described=group_desc or "",
                parts=(tuple(sorted(members)),),
                timeout=timeout or default,
                name=group.group_name if mine else None,
                bound=bound,
            )
        )
        return group

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        device, world.bound_device_id = world.bound_device_id, None
        assert device is not None
        mine = next((sorted(part) for part in split_ranks if census.rank in part), None)
        group: Any = None
        try:
            if mine is not None:  # the same name as torch's, a hash of ranks and of groups so far
                group = new(
                    mine, backend="fake", use_local_synchronization=True, group_desc=group_desc
                )
        finally:
            world.bound_device_id = device
        census.made.append(
            Made(
                how="split",
                backend="nccl",
                described=group_desc or "",
                parts=tuple(tuple(sorted(part)) for part in split_ranks),
                timeout=timeout or NCCL_DEFAULT,
                name=None if group is None else group.group_name,
                bound=True,
            )
        )
        return group

    # Not by its index: nobody asks this build for its devices.
    world.bound_device_id = torch.device("cuda", 0)
    with ExitStack() as patches:
        for module in (dist, dist.distributed_c10d, device_mesh):
            for name, stand_in in (("new_group", new_group), ("split_group", split_group)):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, stand_in))
        yield


def faults(censuses: Mapping[int, Census], timeout: timedelta) -> list[str]:
    """What is wrong with the groups of some ranks of a run.

    Args:
        censuses: by rank; of all ranks, or of some.
        timeout: that all groups should have.
    """
    found = []
    first = next(iter(censuses.values()))
    for rank, census in censuses.items():
        for number, made in enumerate(census.made):
            if made.timeout != timeout:
                found.append(f"rank {rank}: group {number} ({made.described}) has {made.timeout}")
            if (made.name is None) != (not made.part_of(rank)):
                found.append(f"rank {rank}: is not in group {number} of its own")
        kinds, others = ([_kind(made) for made in c.made] for c in (census, first))
        if kinds != others:
            place = next(
                (n for n, pair in enumerate(zip(kinds, others, strict=False)) if len({*pair}) > 1),
                min(len(kinds), len(others)),
            )
            found.append(f"rank {rank}: makes another group than rank {first.rank} as {place}")
        names = [made.name for made in census.made if made.name is not None]
        if len(names) != len(set(names)):
            found.append(f"rank {rank}: two of its groups have one name")
        if census.splits != first.splits:
            found.append(f"rank {rank}: splits the world {census.splits} times")
    return found + _differing_names(censuses)


def _kind(made: Made) -> tuple[Any, ...]:
    # Who makes a group without the ranks outside is in another group than they.
    return (made.how, made.described, None if made.how == "local" else made.parts)


def _differing_names(censuses: Mapping[int, Census]) -> list[str]:
    found = []
    for number in range(max(len(census.made) for census in censuses.values())):
        names: dict[tuple[int, ...], set[str | None]] = {}
        for rank, census in censuses.items():
            if number < len(census.made) and (part := census.made[number].part_of(rank)):
                names.setdefault(part, set()).add(census.made[number].name)
        differing = [part for part, given in names.items() if len(given) > 1]
        found += [f"group {number}: {part} differ in its name" for part in differing]
    return found
