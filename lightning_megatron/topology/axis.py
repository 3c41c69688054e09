"""Place of this process on one axis of the layout, and the axis' process group."""

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch.distributed as dist

from lightning_megatron.topology.meter import Meter

_axes: WeakValueDictionary[str, "Axis"] = WeakValueDictionary()


@dataclass(frozen=True)
class Axis:
    """Position of this process on one axis, and the axis' process group."""

    name: str
    """Name of the mesh axis or derived axis."""
    rank: int
    """Position on the axis."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in axis order."""
    group: dist.ProcessGroup | None
    """Process group; None when the axis has size 1. It numbers its ranks by their global ranks, not
    in axis order."""
    meter: Meter = field(default_factory=Meter, compare=False, repr=False)
    """Meter of what this rank sends over the axis."""
    size: int = field(init=False, compare=False, repr=False)
    """Degree of the axis."""
    key: str = field(init=False, compare=False, repr=False)
    """Key of `axis_of`: the name of the group, which is unique."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))  # layers ask for it in every call
        object.__setattr__(self, "key", "" if self.group is None else self.group.group_name)
        known = _axes.get(self.key)
        if known is None or known.group is not self.group:
            _axes[self.key] = self  # axes with the same ranks share a group: the first made

    def forget_group(self) -> None:
        """Drop a group that was destroyed: its threads live as long as a reference to it."""
        object.__setattr__(self, "group", None)


def axis_of(key: str) -> Axis:
    """Return an axis with that `Axis.key` (several may share a group); for compiled graphs."""
    return _axes[key]
