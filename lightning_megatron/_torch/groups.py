"""Process groups and the stores by which their ranks meet."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Public as names of torch.distributed, where type checkers do not see them (2.11-2.13).
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

_TIMEOUT = "_timeout"
"""Attribute of the options of a backend; a class of Lightning has one of the same name."""
_ALONE = "alone"
"""Description of the groups of one rank."""


def default_store() -> Any:
    """Return the store by which the ranks of the default group found each other (2.11-2.13)."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Any) -> Any:
    """Another connection to the store, which does not wait for others' requests (2.11-2.13)."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def known_groups() -> list[dist.ProcessGroup]:
    """Return all groups of this process (2.11-2.13)."""
    return list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether a group exists and was not destroyed (2.11-2.13)."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def make_group(
    parts: Sequence[Sequence[int]],
    timeout: timedelta | None,
    *,
    backend: str | None = None,
    name: str | None = None,
) -> dist.ProcessGroup | None:
    """Make a group of each of several disjoint lists of ranks; returns this rank's (2.11-2.13).

    Every process calls this at the same point, with the same lists. What it costs does not depend
    on their number where a default group is bound to a device: its communicator is split once for
    all lists, and gloo's groups are made as if it was not bound. (``new_group`` would split it once
    for every list, also for groups of gloo.) Otherwise a list costs the ranks outside it a counter.

    Args:
        parts: global ranks; each rank in one part, so that all count their groups alike: torch
            names a split group by the number of groups that a rank is in.
        timeout: of the groups; the default group's when None. torch's own default for NCCL is ten
            minutes, after which it ends the process.
        backend: None for the default group's.
        name: what the flight recorder calls the groups.

    Returns:
        The group; None where this rank is alone in its part and no communicator was split.
    """
    world: Any = dist.group.WORLD
    lists = [list(part) for part in parts]
    if max(map(len, lists)) == 1:
        return None
    timeout = timeout_of(world) if timeout is None else timeout
    if world.bound_device_id is not None and backend is None:
        split: Any = dist.split_group(split_ranks=lists, timeout=timeout, group_desc=name)
        return split if isinstance(split, dist.ProcessGroup) else None
    mine: dist.ProcessGroup | None = None
    with _unbound(world):
        for part in lists:
            if len(part) > 1:
                group: Any = dist.new_group(part, timeout=timeout, backend=backend, group_desc=name)
                mine = group if dist.get_rank() in part else mine
    return mine


def make_lone_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a group of this rank alone, as meshes want one of an axis of size 1 (2.11-2.13).

    Made once a default group: torch names it by how many groups there are, and while those of an
    earlier run are there this may be a number for the second time. It has no communicator until
    somebody uses it.
    """
    for known in known_groups():
        if known.group_desc == _ALONE:
            return known
    world: Any = dist.group.WORLD
    timeout = timeout_of(world) if timeout is None else timeout
    with _unbound(world):
        group: Any = dist.new_group(
            [dist.get_rank()], timeout=timeout, use_local_synchronization=True, group_desc=_ALONE
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def nccl_options(
    timeout: timedelta, *, high_priority: bool, max_channels: int | None
) -> Any | None:
    """Options of the default group and of those that are split from it (2.11-2.13).

    Args:
        timeout: of the group.
        high_priority: whether the streams of communicators go before those that compute.
        max_channels: most channels of each communicator; NCCL's own choice when None.

    Returns:
        None in a torch without NCCL.
    """
    if not dist.is_nccl_available():
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    setattr(options, _TIMEOUT, timeout)
    options.is_high_priority_stream = high_priority
    if max_channels is not None:
        options.config.max_ctas = max_channels
    return options


@contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Context in which the default group is bound to no device, so that nobody splits it."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def timeout_of(group: Any) -> timedelta | None:
    """Time after which a collective of a group fails; None for test backends (2.11-2.13)."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if (found := getattr(options, _TIMEOUT, None)) is not None:
            assert isinstance(found, timedelta)
            return found
    return None


DEVICE_RECORDER = "nccl:"
"""Begin of the numbers that `flight_recorder` has for the groups of a device's backend."""
ON_HOST = " on hosts"
"""End of the name of a group's gloo half, where the group has another half on devices."""


def group_ranks() -> dict[str, list[int]]:
    """The process groups this rank is in, by the name that `flight_recorder` uses (2.11-2.13)."""
    if not dist.is_initialized():
        return {}
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    # Groups that this rank is not in stand there as a number.
    own = [(g, ranks) for g, ranks in groups if isinstance(g, dist.ProcessGroup)]
    found: dict[str, list[int]] = {group.group_name: sorted(ranks) for group, ranks in own}
    for group, ranks in own:
        if "," in dist.distributed_c10d._world.pg_map[group][0]:
            found[group.group_name + ON_HOST] = sorted(ranks)
    return found


def abandon_process_groups() -> list[Any]:
    """Forget the process groups that a forked process has from its parent (2.11-2.13).

    Their threads have stayed with the parent: a collective would wait for ever, and so would
    destroying them, for threads to end. Yet torch takes them for its own, and connects to nobody.

    Returns:
        What must be kept until the process ends, by ``os._exit``: destructors join threads, too.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    kept: list[Any] = [world.default_pg, *world.pg_map.items()]
    c10d._update_default_pg(None)
    for name in (
        *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
        "pg_coalesce_state",
    ):
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    return kept


def abort_groups() -> None:
    """End all process groups at once, with what is under way on devices (2.11-2.13).

    Destroying them waits for it, for ever where a peer has not joined a collective.
    """
    if dist.is_available() and dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def restart_group_names() -> None:
    """Number the names of process groups from 0 again, where there is none (2.11-2.13).

    A default group that could not connect has taken a number. The next one would have another name
    than on the other ranks, and they would wait for each other.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def flight_recorder(*, entries: bool) -> dict[str, Any]:
    """Records of this process' collectives from torch's flight recorders (2.11-2.13).

    torch has two: one of gloo's groups, and one of NCCL's (RCCL's). Both number their groups from
    0; here the numbers of the second begin with `DEVICE_RECORDER`. A group that both record
    ("cpu:gloo,cuda:nccl") counts the collectives of each backend apart, so its gloo half gets a
    name of its own (`ON_HOST`).

    Args:
        entries: list the latest collectives (the recorder's 2000 take a tenth of a second), or tell
            no more than how many each group has begun and completed (a tenth of a millisecond).

    Returns:
        The recorders' own format, without entries and groups where they are not there.
    """
    host = _dump("_dump_fr_trace_json", entries=entries)
    device = _dump("_dump_nccl_trace_json", entries=entries)
    listed = [*device.get("entries", ())]
    both = {entry["process_group"][0] for entry in listed if entry.get("process_group")}
    for entry in listed:
        entry["pg_id"] = f"{DEVICE_RECORDER}{entry.get('pg_id', 0)}"
    for entry in host.get("entries", ()):
        name, *described = entry.get("process_group", ("?",))
        if name in both:
            entry["process_group"] = [name + ON_HOST, *described]
        listed.append(entry)
    status = dict(host.get("pg_status", {}))
    status |= {f"{DEVICE_RECORDER}{n}": state for n, state in device.get("pg_status", {}).items()}
    return {"entries": listed, "pg_status": status}


def _dump(name: str, *, entries: bool) -> dict[str, Any]:
    """Records of one of the flight recorders; empty in a torch without it, or without any."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if dump is None:
        return {}
    try:
        found = json.loads(dump(includeCollectives=entries, onlyActive=False))
    except (RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
