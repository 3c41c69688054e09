"""Refusals that a process decides alone, before it connects: seen in the test's own process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatron import ConfigError


def refusal(fit: Callable[[], Any], world_size: int, rank: int = 0) -> ConfigError:
    """Error by which a run is refused on one of ``world_size`` ranks, of which no other exists.

    Args:
        fit: makes a Trainer and calls it.
        world_size: processes of the run, all on this machine.
        rank: which of them this process stands for.
    """
    started = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,  # where nobody listens
        "TORCHELASTIC_RUN_ID": "refused",
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    formed = dist.group.WORLD  # one process may train before, in this one
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.items():
            patch.setenv(name, str(value))
        patch.setattr(rank_zero_only, "rank", rank, raising=False)
        with pytest.raises(ConfigError) as raised:
            fit()
    assert dist.group.WORLD is formed, "a process group formed"
    return raised.value
