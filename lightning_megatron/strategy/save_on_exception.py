"""Saving while the run breaks off.

ModelCheckpoint(save_on_exception=True) saves when training ends with an error, and saving is
collective. An interrupt, or an error that comes of the data, reaches all ranks; but where one rank
fails alone its peers wait for it in a collective of training, with which those of the save would
pair up: all of them would hang until the timeout, and nobody would read the error. So the ranks
first ask each other, by way of the store through which they found each other, which no collective
blocks.
"""

import time

import torch.distributed as dist

from lightning_megatron._torch import default_store

PATIENCE_S = 20.0
"""How long a rank that fails waits for the others to fail as well."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Between two looks at the store, which thousands of ranks ask: at first, and at last."""
_KEY = "lightning_megatron/ending"


def all_ranks_end() -> bool:
    """Whether all ranks call this for the same time; waits for them, but not for ever."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    deadline = time.monotonic() + PATIENCE_S
    try:
        store = default_store()
        number = store.add(f"{_KEY}/rank {dist.get_rank()}", 1)
        key = f"{_KEY}/{number}"
        count = store.add(key, 1)
        pause = _PAUSE_S
        while count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            count = store.add(key, 0)
    except RuntimeError:  # whoever held the store is gone
        return False
    return bool(count >= dist.get_world_size())
