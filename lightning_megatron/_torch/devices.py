"""Which work of a device the host sees, and what devices have beside kernels.

A *device* runs what it is given later, in the order of its streams; the host goes on and must not
ask for a value. Whether tensors are on such a device, one function says (`on_host`), so that a test
can send tensors of the host the way of a device's (`tests/_torch/device_branches.py`). Elsewhere in
the package no type of a device is compared and ``torch.cuda`` is not named: what has CUDA's kernels
or counters alone asks by the functions below. The others stand for every accelerator of torch
(``torch.accelerator``, ``torch.get_device_module``, 2.11-2.13).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

HOSTS = frozenset({"cpu"})
"""Types of devices that work at once; tests take the host out."""


def on_host(device: torch.device) -> bool:
    """Whether what is computed on a device has ended when a call returns, and can be looked at."""
    return device.type in HOSTS


def in_host_memory(device: torch.device) -> bool:
    """Whether the memory of a device, and its kernels, are those of the host."""
    return device.type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Whether a device has CUDA's kernels and counters; torch calls those of ROCm so as well."""
    return device.type == "cuda"


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def current_cuda_device() -> torch.device:
    """Device to which ``tensor.cuda()`` moves."""
    return torch.device("cuda", torch.cuda.current_device())


def cuda_devices() -> int:
    """Number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def cuda_is_initialized() -> bool:
    """Whether this process has used CUDA, so that its forks cannot."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device_module(device: torch.device) -> Any:
    """Module with the streams, events and counters of a device's kind; the host's do nothing."""
    return torch.get_device_module(device)


def random_numbers_kept(*devices: torch.device) -> AbstractContextManager[None]:
    """Context that leaves the default generators of the host and of devices of a kind alone."""
    beside = [device for device in devices if hasattr(device_module(device), "get_rng_state")]
    kind = beside[0].type if beside else "cpu"
    return torch.random.fork_rng(devices=beside, device_type=kind)


def pins(device: torch.device) -> bool:
    """Whether host memory is to be page-locked, so that copies to and from it wait for nobody."""
    return not on_host(device) and torch.accelerator.is_available()


def from_host(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that the host knows as a tensor on a device, for which the host does not wait.

    ``torch.tensor(numbers, device=device)`` waits until the device has done all it was given.
    """
    held = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pins(device))
    return held.to(device, non_blocking=True)


def scalar_on(device: torch.device, number: float | Tensor, dtype: torch.dtype) -> Tensor:
    """A number of the host, or a tensor of one element wherever it is, on a device."""
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    return from_host([number], dtype, device)[0]
