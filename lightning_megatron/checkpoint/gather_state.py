"""`gather`: the whole weights of a module that is sharded over processes."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.checkpoint.chunks import (
    Chunk,
    assemble,
    clean_name,
    describe,
    model_chunks,
    own_chunks,
    whole,
)
from lightning_megatron.checkpoint.whole_state import WholeState, edits_state
from lightning_megatron.comm.peers import Peers
from lightning_megatron.parallel.apply import layout_of
from lightning_megatron.whole.memory import own_weights


@own_weights
def gather(
    module: nn.Module,
    rank: int | None = None,
    device: torch.device | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Return the state_dict of a module with whole, plain tensors, under any layout; collective.

    Every process of the run calls it, in a hook or after ``fit``. The result fits
    ``load_state_dict`` of a new module of the same class, in any process::

        plain = MyModule()
        plain.load_state_dict(lightning_megatron.gather(module))

    Args:
        module: the LightningModule.
        rank: rank of the only process that returns the result; all of them if None.
        device: device of the result, to which it moves tensor by tensor; None for the module's.
        prefix: beginning of the names that are wanted, which may spare gathering the others.

    Returns:
        The ``state_dict`` that the module would have in one process, with copies of the tensors;
        an empty dictionary on the other ranks if ``rank`` is given.
    """
    parallel = layout_of(module)
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    if parallel is None or world == 1:
        rows = None if parallel is None else parallel.data.rows
        state = model_chunks(module, rows=rows)
        copies = {name: _copy(value, device) for name, value in state.items()} if mine else {}
        return _named(copies, state) if mine else {}
    parallel.data.come_to_rest()
    if any(Peers().all_gather(edits_state(module))):
        view = WholeState(parallel, None, "lightning_megatron.gather")
        view.attach()
        try:
            seen = {n: _clone(v, device) for n, v in view.state().items()} if mine else view.state()
            view.conclude(None)
        finally:
            view.detach()
        return seen if mine else {}
    state = model_chunks(module, parallel.canonical, parallel.data.rows)
    everyone = Peers().all_gather({n: describe(c) for n, c in _chunks(state)})
    found: dict[str, Any] = {n: v for n, v in state.items() if not isinstance(v, Chunk)}
    for name in sorted(set().union(*everyone)):
        aliases = {alias for known in everyone if name in known for alias in known[name][1]}
        if not any(each.startswith(prefix) for each in (name, *aliases)):
            continue
        full = assemble(name, state.get(name), everyone, parallel.topology.device, keep=mine)
        full = full if full is None or device is None else full.to(device)
        found |= dict.fromkeys((name, *sorted(aliases)), full)
    return found if mine else {}


@own_weights
def gather_tensors(
    module: nn.Module, device: torch.device, most_bytes: int, names: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module whole, unless they are too large; collective.

    Args:
        module: the LightningModule, on its layout.
        device: device of the result.
        most_bytes: size of the result for which this rank has room. The smallest of all ranks
            counts.
        names: names of tensors that must be there, the same on all ranks.

    Returns:
        Tensors by every name; tensors under several names are one. Empty where they are too large,
        or names are missing.
    """
    parallel = layout_of(module)
    assert parallel is not None
    parallel.data.come_to_rest()
    chunks = own_chunks(module, parallel.canonical, parallel.data.rows)
    for name, buffer in module.named_buffers(remove_duplicate=False):  # also what is not saved
        chunks.setdefault(clean_name(name), whole(buffer, identical=False))
    told = Peers().all_gather((most_bytes, {n: describe(c) for n, c in chunks.items()}))
    everyone = [known for _, known in told]
    sizes = {
        name: math.prod(form.shape) * form.dtype.itemsize
        for known in everyone
        for name, (form, _) in known.items()
    }
    known_names = sizes.keys() | {
        a for known in everyone for _, more in known.values() for a in more
    }
    if sum(sizes.values()) > min(room for room, _ in told) or not known_names.issuperset(names):
        return {}
    found: dict[str, Tensor] = {}
    for name in sorted(sizes):
        full = assemble(name, chunks.get(name), everyone, parallel.topology.device, keep=True)
        assert full is not None
        aliases = {alias for known in everyone if name in known for alias in known[name][1]}
        found |= dict.fromkeys((name, *aliases), full.to(device))
    return found


@own_weights
def gather_named(
    module: nn.Module, names: Collection[str], rank: int | None = None
) -> dict[str, Tensor]:
    """Return whole parameters and buffers of these names; collective over several processes.

    Args:
        module: the LightningModule, on its layout.
        names: names in the module, aliases of shared tensors among them.
        rank: rank of the only process that returns the result; all of them if None.

    Returns:
        Copies by name; an empty dictionary on the other ranks if ``rank`` is given.
    """
    parallel = layout_of(module)
    assert parallel is not None
    parallel.data.come_to_rest()
    chunks = own_chunks(module, parallel.canonical, parallel.data.rows)
    wanted = {n: c for n, c in chunks.items() if not {n, *c.aliases}.isdisjoint(names)}
    everyone = Peers().all_gather({n: describe(c) for n, c in wanted.items()})
    mine, found = rank is None or dist.get_rank() == rank, dict[str, Tensor]()
    for name in sorted(set().union(*everyone)):
        full = assemble(name, wanted.get(name), everyone, parallel.topology.device, keep=mine)
        aliases = {alias for known in everyone if name in known for alias in known[name][1]}
        if full is not None:
            found |= dict.fromkeys((name, *aliases), full)
    return {name: found[name] for name in names if name in found}


def _chunks(state: dict[str, Any]) -> Iterator[tuple[str, Chunk]]:
    return ((name, value) for name, value in state.items() if isinstance(value, Chunk))


def _clone(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if device is None else value.to(device, copy=True)


def _copy(value: Any, device: torch.device | None) -> Any:
    return _clone(value.tensor if isinstance(value, Chunk) else value, device)


def _named(found: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return ``found`` with the aliases of shared tensors added."""
    aliases = {alias: found[name] for name, chunk in _chunks(state) for alias in chunk.aliases}
    return found | aliases
