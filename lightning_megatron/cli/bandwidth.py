"""Program of one process that measures all-reduces on this machine.

``python -m lightning_megatron.cli.bandwidth BACKEND RANK PROCESSES FOLDER`` meets its peers by a
file in the folder and prints, on rank 0, seconds per all-reduce of few and of many bytes. It reads
nothing of the environment and listens on the loopback interface only.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_megatron import env
from lightning_megatron.launch.interfaces import loopback

LARGE_BYTES = 16 << 20
_TIMEOUT_S = 60
_ROUNDS = 5


def main(backend: str, rank: int, processes: int, folder: str) -> None:
    """Measure, as one of the ranks."""
    env.use_interface(loopback(), explicit=True)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # barriers have no tensor that says which
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    small, large = _measure(device, 8), _measure(device, LARGE_BYTES)
    if rank == 0:
        print(json.dumps({"small_s": small, "large_s": large}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measure(device: torch.device, size: int) -> float:
    """Seconds per all-reduce of so many bytes; the best of a few."""
    data = torch.ones(size // 4, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        begun = time.perf_counter()
        dist.all_reduce(data)
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
