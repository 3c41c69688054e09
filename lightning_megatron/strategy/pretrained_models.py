"""Models of transformers in a run: all ranks save them together.

Saving gathers, so a call on one rank alone would wait for the others until the timeout of their
groups. So ranks meet at the store first (`StoreBarrier`), which can say who has not come.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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
from lightning_megatron.launch.store_barrier import StoreBarrier
from lightning_megatron.parallel.apply import layout_of


class _Together:
    """What all ranks do to save one model.

    Args:
        module: the LightningModule, on its layout.
        name: name of the model in it.
        group: all ranks, for objects; None for the default group.
    """

    def __init__(self, module: nn.Module, name: str, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._prefix = clean_name(f"{name}.") if name else ""
        self._peers = peers = Peers(group)
        self._barrier = StoreBarrier(f"save_pretrained {name}", range(peers.size), peers.rank)

    def refuse_copy(self) -> None:
        """Raise a `ConfigError` if this rank holds a part of the model."""
        refuse_copy_of_part(self._module)

    def __call__(self, what: str, write: Callable[[Mapping[str, Any]], None]) -> None:
        """See `adoption.saving.SaveTogether`."""
        self._barrier.require_all(what)
        peers, prefix = self._peers, self._prefix
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
    for model in save_whole(module):
        gather_with(model, _Together(module, names[id(model)], group))


def save_alone(module: nn.Module) -> None:
    """Have each rank save its models itself: it holds all of them again."""
    for model in save_whole(module):
        gather_with(model, None)
