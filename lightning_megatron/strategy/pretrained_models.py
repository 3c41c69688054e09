"""Models of transformers in a run: all ranks save them together.

Saving gathers, so a call on one rank alone would wait for the others until the timeout of their
groups. `Rendezvous` asks the store of the processes instead whether all have come.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron._torch import default_store
from lightning_megatron.adoption.saving import (
    SavedWhole,
    gather_with,
    note_whole,
    save_whole,
)
from lightning_megatron.checkpoint.chunks import clean_name
from lightning_megatron.checkpoint.gather_state import gather
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.apply import layout_of

PATIENCE_S = 120.0
"""Seconds that ranks may come after each other to a collective save."""
_KEY = "lightning_megatron/save_pretrained"
_GIVEN_UP = b"given up"


class _Together:
    """What all ranks do to save one model.

    Args:
        module: the LightningModule, on its layout.
        name: name of the model in it.
        group: all ranks, for objects; None for the default group.
        key: beginning of the keys in the store, which no other model has, in no run.
    """

    def __init__(
        self, module: nn.Module, name: str, group: dist.ProcessGroup | None, key: str
    ) -> None:
        self._module = module
        self._prefix = clean_name(f"{name}.") if name else ""
        self._group = group
        self._rendezvous = Rendezvous(key)

    def refuse_copy(self) -> None:
        """Raise a `ConfigError` if this rank holds a part of the model."""
        refuse_copy_of_part(self._module)

    def __call__(self, what: str, write: Callable[[Mapping[str, Any]], None]) -> None:
        """See `adoption.saving.Gathered`."""
        peers = Peers(self._group)
        self._rendezvous(what, peers)
        prefix = self._prefix
        whole = gather(self._module, rank=0, device=torch.device("cpu"), prefix=prefix)
        state = {n.removeprefix(prefix): v for n, v in whole.items() if n.startswith(prefix)}
        peers.run(what, lambda: write(state) if peers.is_first else None, lambda _: None)


def refuse_copy_of_part(module: nn.Module) -> None:
    """Refuse to copy a model of which this rank holds a part.

    Raises:
        ConfigError: it is split by tp, pp, cp or ep.
    """
    parallel = layout_of(module)
    if parallel is None:
        return
    topology = parallel.topology
    axes = {n: getattr(topology, n).size for n in ("tp", "pp", "cp", "ep")}
    split = ", ".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    if split:
        raise ConfigError(
            f"copy.deepcopy of an adopted model under {split}: each rank holds a part of it, which "
            "computes in groups of the run; nearest valid: copy.deepcopy before trainer.fit, "
            "adopted as a model of its own, or a layout of zero=0..2 alone"
        )


class Rendezvous:
    """Place in the store of the processes where all ranks meet, any number of times.

    Args:
        key: beginning of the keys in the store, the same on all ranks.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._calls = 0

    def __call__(self, what: str, peers: Peers) -> None:
        """Wait until all ranks have come.

        The first rank that sees all of them, or loses patience, writes the outcome of a meeting,
        which holds for all. Meetings that others gave up are passed over.

        Raises:
            ConfigError: some ranks have not come.
        """
        if peers.size == 1:
            return
        store, limit = default_store(), time.monotonic() + PATIENCE_S
        outcome, there, key = _GIVEN_UP, 0, ""
        while outcome == _GIVEN_UP:
            self._calls += 1
            key = f"{self._key}/{self._calls}"
            outcome = store.compare_set(f"{key}/outcome", "", "")
        store.set(f"{key}/{peers.rank}", "here")
        store.add(key, 1)
        while (there := store.add(key, 0)) < peers.size:
            if time.monotonic() > limit:
                break
            time.sleep(0.01)
        wanted = _GIVEN_UP if there < peers.size else b"met"
        if store.compare_set(f"{key}/outcome", "", wanted.decode()) == _GIVEN_UP:
            ranks = [r for r in range(peers.size) if store.check([f"{key}/{r}"])]
            raise ConfigError(
                f"{what}: called on ranks {', '.join(map(str, ranks))} of {peers.size} alone "
                f"({there} within {PATIENCE_S:.0f} s), and each holds a part of the model; "
                "nearest valid: the same call on all ranks, not inside of `if "
                "trainer.is_global_zero`"
            )


def common_key(name: str, group: dist.ProcessGroup | None) -> str:
    """Return a key that all ranks have in common, and that no run had before; collective."""
    made = Peers(group).run(name, lambda: None, lambda _: uuid.uuid4().hex)
    return f"{name}/{made}"


def note_whole_models(module: nn.Module) -> list[SavedWhole]:
    """Find the models of transformers in a module that is about to be divided."""
    models = save_whole(module)
    for model in models:
        if "_gathered" not in model.__dict__:
            note_whole(model)
    return models


def save_together(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Have all ranks save the models of transformers in ``module`` together."""
    names = {id(child): name for name, child in module.named_modules()}
    key = common_key(_KEY, group)
    for model in save_whole(module):
        name = names[id(model)]
        gather_with(model, _Together(module, name, group, f"{key}/{name}"))


def save_alone(module: nn.Module) -> None:
    """Have each rank save its models itself: it holds all of them again."""
    for model in save_whole(module):
        gather_with(model, None)
