"""Rank coordinates, process groups and random streams of the parallel axes.

* Sizes of the axes: `Degrees`
* Groups of a rank along each axis: `Topology`, `Axis`

Names are imported when they are first used: degrees and coordinates need no torch.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.topology.axis import Axis
    from lightning_megatron.topology.degrees import Degrees
    from lightning_megatron.topology.mesh import Topology

_HOMES = {
    "Axis": "axis",
    "Degrees": "degrees",
    "Topology": "mesh",
}

__all__ = [
    "Axis",
    "Degrees",
    "Topology",
]

__getattr__ = lazy_names(__name__, _HOMES)
