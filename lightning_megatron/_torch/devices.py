"""Where tensors are computed with: the host, or a device beside it.

A *device* runs what it is given later, in the order of its streams; the host goes on and must not
ask for a value. Which of the two it is, one function says (`on_host`), so that a test can let
tensors of the host go the way of a device's (`tests/_torch/device_branches.py`). Elsewhere
in the package no type of a device is compared, and ``torch.cuda`` is not named: what a kernel or
a library has for CUDA alone asks by the functions below. ``torch.accelerator`` and
``torch.get_device_module`` stand for every accelerator (2.11-2.13).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_host(device: torch.device) -> bool:
    """Whether a device is the host itself, where what is computed has ended when a call returns."""
    return device.type == "cpu"


def is_cuda(device: torch.device) -> bool:
    """Whether a device has CUDA's kernels, libraries and counters; ROCm's are called so as well."""
    return device.type == "cuda"


def device_module(device: torch.device) -> Any:
    """Module with the streams and events of a device's kind; the host's do nothing."""
    return torch.get_device_module(device)


def pins(device: torch.device) -> bool:
    """Whether host memory is to be page-locked, so that copies to and from it wait for nobody."""
    return not on_host(device) and torch.accelerator.is_available()


def from_host(
    numbers: Sequence[float | int | bool], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers that the host knows as a tensor on a device, for which the host does not wait.

    ``torch.tensor(numbers, device=device)`` waits until the device has done all that it was given.
    """
    held = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pins(device))
    return held.to(device, non_blocking=True)
