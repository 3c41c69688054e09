"""Copies from a GPU, which run beside training."""

from collections.abc import Iterator

import pytest
import torch

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.save.host_copy import HostCopy
from lightning_megatron.errors import CheckpointError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CYCLES = 500_000_000
"""What the device is kept busy with, a few tenths of a second."""


def sources() -> dict[str, Chunk]:
    return {
        "weight": whole(torch.full((1 << 24,), 1.0, device="cuda")),
        "buffer": whole(torch.full((8,), 1.0, device="cuda"), identical=False),
    }


@pytest.fixture
def copy() -> Iterator[HostCopy]:
    made = HostCopy()
    yield made
    made.close()


def test_the_host_goes_on_and_updates_wait(copy: HostCopy) -> None:
    chunks = sources()
    copy.take(chunks, chunks)  # allocates
    copy.complete()
    torch.cuda._sleep(CYCLES)
    copies = copy.take(chunks, chunks)
    assert all(chunk.tensor.is_pinned() for chunk in copies.values())
    assert not torch.cuda.current_stream().query()  # the host was not stopped
    chunks["buffer"].tensor.fill_(2.0)  # by the next forward
    copy.before_update()
    chunks["weight"].tensor.fill_(2.0)
    copy.complete()
    torch.cuda.synchronize()
    assert all(bool((chunk.tensor == 1.0).all()) for chunk in copies.values())


def test_a_write_before_the_update_is_noticed(copy: HostCopy) -> None:
    chunks = sources()
    torch.cuda._sleep(CYCLES)
    copy.take(chunks, chunks)
    chunks["weight"].tensor.fill_(2.0)
    with pytest.raises(CheckpointError, match="changed outside of the optimizer step"):
        copy.complete()
    torch.cuda.synchronize()
