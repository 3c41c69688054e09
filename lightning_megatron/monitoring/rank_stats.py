"""Numbers that differ from rank to rank, for outlets that can tell them apart.

Loggers take one number a name, so what every rank has of its own goes there as lowest, mean and
highest, with the rank of the worst. Prometheus knows labels: there each rank keeps its number,
``lightning_megatron_mem_rss_bytes{rank="3"}``. Callbacks that have brought the ranks together leave
what they found here, beside what they log; what changes between the steps in which they log, and
while a rank hangs, is read when somebody asks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

Values = Mapping[tuple[str, ...], float]
"""Numbers by the labels' values."""


class Family(NamedTuple):
    """One metric with labels."""

    name: str
    """As a logger would have it, ``mem/rss_gib``."""
    labels: tuple[str, ...]
    """Their names."""
    values: Values


class Labelled:
    """What is known of the ranks one by one; one object belongs to a strategy.

    Any thread may read it: what is put takes the place of what was there as a whole.
    """

    def __init__(self) -> None:
        self._put: dict[str, Family] = {}
        self._live: dict[str, Callable[[], Iterable[Family]]] = {}

    def put(self, name: str, by_rank: Sequence[float]) -> None:
        """Leave a number of every rank."""
        values: Values = {(str(rank),): float(value) for rank, value in enumerate(by_rank)}
        self._put[name] = Family(name, ("rank",), values)

    def put_family(self, family: Family) -> None:
        """Leave numbers with labels of any kind."""
        self._put[family.name] = family

    def ask(self, who: str, source: Callable[[], Iterable[Family]] | None) -> None:
        """Have ``source`` called by whoever reads, in its thread; None ends that."""
        if source is None:
            self._live.pop(who, None)
        else:
            self._live[who] = source

    def families(self) -> list[Family]:
        """All there are now."""
        found = list(self._put.values())
        for source in list(self._live.values()):
            found += source()
        return found


_LABELLED: WeakKeyDictionary[Strategy, Labelled] = WeakKeyDictionary()


def labelled_of(trainer: pl.Trainer) -> Labelled:
    """What is known of the ranks under the Trainer's strategy, whichever it is."""
    return _LABELLED.setdefault(trainer.strategy, Labelled())
