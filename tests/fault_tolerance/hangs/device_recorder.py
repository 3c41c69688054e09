"""A flight recorder as on GPUs, over gloo: torch's second one, and waits that no hook sees.

On GPUs the collectives of training are in NCCL's recorder and gloo's has none of them;
``Work.wait`` returns at once, and the host stands still later, where it needs a number.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.fault_tolerance.hangs import watchdog
from tests.fault_tolerance.hangs.hanging import Hanging

_c10d: Any = torch._C._distributed_c10d
_dump: Any = getattr(_c10d, "_dump_fr_trace_json", None)
NOTHING = json.dumps({"version": "2.10", "pg_status": {}, "entries": []})


def as_nccl(text: str, *, p2p: bool) -> str:
    """Records of gloo's as those that NCCL's recorder has of the same collectives.

    Args:
        text: gloo's.
        p2p: record them as messages between two ranks, which no other rank has to begin.
    """
    found = json.loads(text)
    for entry in found.get("entries", ()):
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
        entry["is_p2p"] = p2p
        entry["state"] = "completed" if entry["state"] == "completed" else "scheduled"
    return json.dumps(found)


def _unseen(began: Callable[[], float], ended: Callable[[float], None]) -> Callable[[], None]:
    return lambda: None


@contextmanager
def nccls(*, p2p: bool = False) -> Iterator[None]:
    """Context in which all collectives are in NCCL's recorder, and nothing in gloo's."""

    def of_device(**how: bool) -> str:
        return as_nccl(_dump(**how), p2p=p2p)

    with ExitStack() as patches:
        replace = patches.enter_context
        replace(mock.patch.object(_c10d, "_dump_nccl_trace_json", of_device, create=True))
        replace(mock.patch.object(_c10d, "_dump_fr_trace_json", return_value=NOTHING))
        replace(mock.patch.object(watchdog, "watch_waits", _unseen))
        yield


class HangingOnDevice(Hanging):
    """Sums its loss over the ranks in each step, and reads the sum at once, as by ``item()``."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        work: Any = dist.all_reduce(loss.detach().clone(), async_op=True)
        until = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)  # cudaStreamSynchronize
        return loss
