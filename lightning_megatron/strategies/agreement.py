"""What all ranks know of each other in every batch, by one small collective.

Some decisions must be the same everywhere, or ranks wait for ever for a peer that has gone another
way: to stop because one of them got a signal, to leave out a step because one of them found a loss
that is not finite. Each such question registers a `Slot`. During a batch every rank puts a number
into it; once per batch, after the backward and before the update, all slots are gathered together,
and then each rank can see what every rank has put.

It takes the place of the broadcast by which Lightning tells the ranks of a SIGTERM before every
batch. That one only knows of a signal that reached rank 0, and goes through the device, whose queue
it empties. This one stays on the host: 8 bytes a slot and rank, over gloo.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron._torch import start_all_gather
from lightning_megatron.errors import ConfigError


class Slot:
    """One number a batch of every rank.

    Args:
        name: says what it is, the same on every rank.
        default: what a rank has put that has put nothing in this batch.

    Attributes:
        values: of every rank, by global rank, as they were settled last; empty until then.
    """

    def __init__(self, name: str, default: float = 0.0) -> None:
        self.name, self._default = name, default
        self.reset()

    def put(self, value: float) -> None:
        """Tell the other ranks, when the batch is settled, or the next one if this has been.

        Until then a later value takes its place.
        """
        self._mine = float(value)

    @property
    def max(self) -> float:
        """The largest of `values`; NaN if one is."""
        if any(math.isnan(value) for value in self.values):
            return math.nan
        return max(self.values)

    def reset(self) -> None:
        """Forget what was put and settled."""
        self.values: tuple[float, ...] = ()
        self._mine = self._default

    def take(self) -> float:
        """What this rank has put, which is thereby used."""
        mine, self._mine = self._mine, self._default
        return mine


class Agreement:
    """Gathers the slots of all ranks, once per batch.

    The strategy has one, from its construction on. Whoever uses it registers in ``setup``, puts
    values in any hook up to ``on_after_backward``, and reads or is called from then on.
    """

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._listeners: list[Callable[[], None]] = []
        self._group: dist.ProcessGroup | None = None
        self._size = 1
        self._compared = False

    def register(self, name: str, default: float = 0.0) -> Slot:
        """The slot of this name; made where there is none, on every rank in the same order.

        Args:
            name: says what it is.
            default: see `Slot`; counts when the slot is made.
        """
        if name not in self._slots:
            self._slots[name] = Slot(name, default)
            self._compared = False
        return self._slots[name]

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever the slots of a batch have been settled, on all ranks.

        It may use collectives; what it raises, it should raise on all ranks.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Begin a run.

        Args:
            group: all processes, for tensors on the host; None for the default group.
        """
        self._group, self._compared = group, False
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        for slot in self._slots.values():
            slot.reset()

    def settle(self) -> None:
        """Let every rank see what all have put; collective."""
        slots = list(self._slots.values())
        if self._size > 1 and not self._compared:
            self._compare()
        columns = self.exchange([slot.take() for slot in slots])
        for slot, column in zip(slots, columns, strict=True):
            slot.values = column
        for listener in self._listeners:
            listener()

    def exchange(self, mine: Sequence[float]) -> list[tuple[float, ...]]:
        """For each of some numbers, that of every rank; collective."""
        if self._size == 1 or not mine:
            return [(value,) for value in mine]
        local = torch.tensor(mine, dtype=torch.float64)
        everything = torch.empty(self._size * len(mine), dtype=torch.float64)
        group: Any = self._group or dist.group.WORLD
        start_all_gather(everything, local, group).wait()
        rows = everything.view(self._size, len(mine)).tolist()
        return list(zip(*rows, strict=True))

    def _compare(self) -> None:
        """Numbers in other slots, or another number of them, would mean something else."""
        everyone: list[list[str]] = [[]] * self._size
        dist.all_gather_object(everyone, list(self._slots), group=self._group)
        differing = [rank for rank, names in enumerate(everyone) if names != everyone[0]]
        if differing:
            raise ConfigError(
                f"rank 0 exchanges {everyone[0]} in every batch, rank {differing[0]} "
                f"{everyone[differing[0]]}; nearest valid: the same callbacks on every rank"
            )
        self._compared = True
