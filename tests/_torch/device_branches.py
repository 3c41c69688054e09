"""Send tensors of the host the way of a device's: branches that no CPU takes, with real numbers.

``on_host`` answers no within `device_branches`, so that results are not looked at, messages between
stages go through `DeviceChannel`, copies to and from the host over streams (which do nothing on the
host) and so on. The backend stays gloo. What it cannot show is work that is late: see
docs/limits.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_megatron._torch import devices


@contextmanager
def device_branches() -> Iterator[None]:
    """Context in which no device is the host."""
    with mock.patch.object(devices, "HOSTS", frozenset()):
        yield


def on_a_device(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a worker's job within `device_branches`."""
    with device_branches():
        return job(*args, **kwargs)
