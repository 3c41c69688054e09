"""Copies over streams of their own wait for whom they must, and are waited for.

Each planted fault, a wait that is missing in front of or behind a copy, is found.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint.chunks import whole
from lightning_megatron.checkpoint.save import host_copy
from lightning_megatron.checkpoint.save.host_copy import HostCopy
from lightning_megatron.errors import CheckpointError
from lightning_megatron.parallel.activations import offload
from lightning_megatron.parallel.activations.offload import Offloader, _Passage
from tests._torch import pretend_streams
from tests._torch.device_branches import device_branches
from tests._torch.pretend_streams import PretendStreams, Unordered
from tests.parallel.activations.test_offload import MODES, offloaded, step

Fault = Callable[[], AbstractContextManager[Any]]


def train(mode: str = "all that blocks keep") -> None:
    with device_branches(), mock.patch.object(offload, "pins", bool), PretendStreams():
        net, offloader = offloaded(MODES[mode])
        step(net, offloader)
        step(net, offloader)


@pytest.mark.parametrize("mode", MODES)
def test_activations_are_there_when_they_are_used(mode: str) -> None:
    train(mode)


def copy_to_the_host() -> None:
    """A checkpoint is copied beside training, which updates weights before and after its end."""
    with (
        device_branches(),
        mock.patch.object(host_copy, "pins", bool),
        mock.patch.object(Tensor, "is_pinned", bool),
        PretendStreams(),
    ):
        copy, weight, buffer = HostCopy(), torch.ones(8), torch.ones(8)
        chunks = {"weight": whole(weight), "buffer": whole(buffer, identical=False)}
        for update_first in (True, False, True):
            found = copy.take(chunks, chunks)
            buffer.fill_(2.0)  # by the next forward
            if update_first:
                copy.before_update()
                weight.fill_(2.0)
            copy.complete()
            for chunk in found.values():
                chunk.tensor.sum()  # by the thread that writes
            copy.before_update()
            weight.fill_(2.0)


def test_copies_of_a_checkpoint_are_what_training_had() -> None:
    copy_to_the_host()


# Planted faults -----------------------------------------------------------------------------------


def waits_for_no_stream() -> AbstractContextManager[Any]:
    """Copies begin before what they copy has been computed."""
    return mock.patch.object(pretend_streams._Stream, "wait_stream")


def waits_for_no_event() -> AbstractContextManager[Any]:
    """Memory is written before a copy of it has ended."""
    return mock.patch.object(pretend_streams._Stream, "wait_event")


def does_not_wait_for_what_comes_back() -> AbstractContextManager[Any]:
    return mock.patch.object(offload._Stored, "arrived", lambda self: self.device)


def fetches_what_is_not_there() -> AbstractContextManager[Any]:
    """A copy to the device does not wait for the copy to the host."""
    fetch = Offloader._fetch

    def early(self: Offloader, passage: _Passage) -> None:
        passage.sent = None
        fetch(self, passage)

    return mock.patch.object(Offloader, "_fetch", early)


def lets_go_too_early() -> AbstractContextManager[Any]:
    """Memory of the device is freed while it is copied."""
    send = Offloader._send

    def early(self: Offloader, passage: _Passage) -> None:
        send(self, passage)
        passage.let_go()

    return mock.patch.object(Offloader, "_send", early)


def frees_memory_under_a_copy() -> AbstractContextManager[Any]:
    def nothing(*_: Any) -> None:  # a Mock would keep the tensor
        pass

    return mock.patch.object(PretendStreams, "_record_stream", nothing)


def does_not_hold_up_updates() -> AbstractContextManager[Any]:
    return mock.patch.object(host_copy._Transfer, "hold_up_writers")


def reads_before_the_end() -> AbstractContextManager[Any]:
    return mock.patch.object(pretend_streams._Event, "synchronize")


@pytest.mark.parametrize(
    ("fault", "work"),
    [
        (waits_for_no_stream, train),
        (waits_for_no_event, train),
        (does_not_wait_for_what_comes_back, train),
        (fetches_what_is_not_there, train),
        (lets_go_too_early, train),
        (frees_memory_under_a_copy, train),
        (waits_for_no_stream, copy_to_the_host),
        (waits_for_no_event, copy_to_the_host),
        (does_not_hold_up_updates, copy_to_the_host),
        (reads_before_the_end, copy_to_the_host),
    ],
    ids=lambda value: value.__name__,
)
def test_finds(fault: Fault, work: Callable[[], None]) -> None:
    with fault(), pytest.raises((Unordered, CheckpointError)):
        work()
