"""All-reduces of growing size between the ranks that torchrun starts: seconds and bytes a second.

    torchrun --nproc-per-node 2 -m benchmarks.bandwidth

Over NCCL where each rank of a machine has a GPU, else over gloo. *Bus* is what each rank sends a
second, ``2 (p - 1) / p`` times the size over the time: the speed of a link, whatever the number of
ranks p. Each time is the best of ten.
"""

import os
import time

import torch
import torch.distributed as dist

from lightning_megatron import env
from lightning_megatron.launch.interfaces import loopback

SIZES = tuple(8 << (3 * power) for power in range(9))
"""Bytes, from 8 to 128 MiB."""
ROUNDS = 10


def seconds(tensor: torch.Tensor) -> float:
    """Least seconds of an all-reduce."""
    wait = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        wait()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        wait()
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    """Measure, as one of the ranks, and print a table on rank 0."""
    local, per_machine, ranks = (
        int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
    on_gpus = torch.cuda.device_count() >= per_machine
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if per_machine == ranks:
        env.use_interface(loopback(), explicit=False)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}, {ranks} ranks, {per_machine} on each machine\n")
        print("| bytes | us | bus, GB/s |\n|---|---|---|")
    for size in SIZES:
        taken = seconds(torch.zeros(size // 4, device=device))
        if dist.get_rank() == 0:
            bus = 2 * (ranks - 1) / ranks * size / taken / 1e9
            print(f"| {size:,} | {1e6 * taken:,.0f} | {bus:.3g} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
