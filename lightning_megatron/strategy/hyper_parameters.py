"""Modules among hyper-parameters, as a checkpoint is to hold them.

``save_hyperparameters`` keeps what a module was made of, and that may be networks which the run
trains. A process that loads the checkpoint wants them whole, in their format at rest, and of their
own classes.
"""

import copy
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.fsdp import forget_units
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.forward_wrapper import unwrap_all
from lightning_megatron.whole.memory import as_within
from lightning_megatron.zero.fully_sharded import FullySharded

_KEY = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY


def with_modules_at_rest(checkpoint: dict[str, Any], parallel: ParallelModule) -> dict[str, Any]:
    """Return a checkpoint with copies of networks that the run has narrowed or spread; collective.

    Args:
        checkpoint: as Lightning has collected it.
        parallel: the module of the run on its layout.
    """
    data, given = parallel.data, checkpoint.get(_KEY, {})
    changed = {p for p, rows in data.rows.items() if rows.is_wider}
    changed |= {p for p in parallel.module.parameters() if isinstance(p, DTensor)}
    parts = {
        name: value
        for name, value in given.items()
        if isinstance(value, nn.Module) and not changed.isdisjoint(value.parameters())
    }
    if not parts or parallel.topology.pp.size > 1:
        return checkpoint
    is_new = data.widen()
    with as_within(()):  # a copy that a hook of the user's makes is whole
        copies = copy.deepcopy(parts)
    if is_new:
        data.narrow()
    for made in copies.values():
        unwrap_all(made)
        if isinstance(data, FullySharded):
            forget_units(made, data.units)
    return {**checkpoint, _KEY: type(given)({**given, **copies})}
