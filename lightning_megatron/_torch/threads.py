"""Threads of torch's kernels on the CPU."""

import ctypes
from contextlib import suppress
from pathlib import Path

_HARD = 2
"""``omp_pause_hard`` of OpenMP 5: end the threads and forget them."""


def end_kernel_threads() -> None:
    """End the threads that kernels on the CPU share out work to; the next kernel starts new ones.

    A fork has none of them, but GNU's OpenMP, which torch's wheels for Linux bring along, would
    wait for them in its first kernel, for ever (https://gcc.gnu.org/PR58378). torch has no function
    for this (2.11-2.13). Other implementations of OpenMP see to forks themselves.
    """
    with suppress(OSError, AttributeError):
        loaded = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libgomp" in line
        }
        for path in loaded:
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)
