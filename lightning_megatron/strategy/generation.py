"""Text generation of adopted models in a run: ranks that have parts of one model write together.

A call on one rank alone would wait for the others until the timeout of their groups. So the ranks
meet at the store of the processes first, which can say who has not come.
"""

import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_megatron._torch.groups import default_store
from lightning_megatron.adoption.generation import AdoptedGenerator, Meeting
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.coordinates import coordinates_of
from lightning_megatron.topology.mesh import Topology

PATIENCE_S = 120.0
"""Seconds that ranks may come after each other."""


def generate_together(
    module: nn.Module, topology: Topology, gathered: Callable[[Callable[[], Any]], Any] | None
) -> None:
    """Tell the adopted models in a module what they need from a run to generate; collective.

    Args:
        module: the LightningModule, on its layout.
        topology: the layout.
        gathered: function that calls with the parameters that a step gathers; None if it does not.
    """
    models = [m for m in module.modules() if isinstance(m, AdoptedGenerator)]
    for model in models:
        model.__dict__["meet"] = _Meeting(topology, gathered)


class _Meeting(Meeting):
    """Wait for the other ranks of one model.

    Args:
        topology: the layout.
        gathered: see `Meeting`.
    """

    def __init__(
        self, topology: Topology, gathered: Callable[[Callable[[], Any]], Any] | None
    ) -> None:
        self.topology = topology
        self.gathered = gathered
        degrees, rank = topology.degrees, topology.rank
        own = _data_of(rank, topology)
        self._ranks = [r for r in range(degrees.world_size) if _data_of(r, topology) == own]
        self._rank = rank
        self._key = f"lightning_megatron/generate/{_common_number(topology)}"
        self._calls = 0

    @override
    def __call__(self) -> None:
        """Wait until all have called `generate`.

        Raises:
            ConfigError: some have not.
        """
        if len(self._ranks) == 1:
            return
        self._calls += 1
        store, key = default_store(), f"{self._key}/{self._calls}"
        store.set(f"{key}/{self._rank}", "here")
        store.add(key, 1)
        limit = time.monotonic() + PATIENCE_S
        while store.add(key, 0) < len(self._ranks):
            if time.monotonic() > limit:
                there = [str(r) for r in self._ranks if store.check([f"{key}/{r}"])]
                raise ConfigError(
                    f"generate: called on ranks {', '.join(there)} of "
                    f"{', '.join(map(str, self._ranks))} alone within {PATIENCE_S:.0f} s, and each "
                    "has a part of the model; nearest valid: the same call on all ranks, not "
                    "inside of `if trainer.is_global_zero`"
                )
            time.sleep(0.002)

    def __deepcopy__(self, memo: Any) -> "_Meeting":
        """Return itself: a copy of the model is on the same ranks."""
        return self


def _common_number(topology: Topology) -> int:
    """A number that the ranks of one model have in common, and no others."""
    number = torch.tensor(uuid.uuid4().int >> 65, device=topology.device)
    for axis in (topology.pp, topology.cp, topology.tp):
        if axis.group is not None:
            dist.broadcast(number, axis.ranks[0], group=axis.group)
    return int(number)


def _data_of(rank: int, topology: Topology) -> tuple[int, int]:
    """Which samples a rank reads."""
    at = coordinates_of(rank, topology.degrees)
    return at["dp_replicate"], at["dp_shard"]
