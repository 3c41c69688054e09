"""Communication between ranks: collectives with a gradient, point-to-point transfers.

* Collectives with a gradient, for layers of your own: `copy_to`, `reduce_from`, `gather_from`,
  `split_to`, `all_gather`, `reduce_scatter`

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.comm.functional import (
        all_gather,
        copy_to,
        gather_from,
        reduce_from,
        reduce_scatter,
        split_to,
    )

_HOMES = {
    "all_gather": "functional",
    "copy_to": "functional",
    "gather_from": "functional",
    "reduce_from": "functional",
    "reduce_scatter": "functional",
    "split_to": "functional",
}

__all__ = [
    "all_gather",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter",
    "split_to",
]

__getattr__ = lazy_names(__name__, _HOMES)
