"""Messages between pipeline stages."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron._torch.groups import default_store
from lightning_megatron.comm.point_to_point import (
    LOOKAHEAD,
    Channel,
    DeviceChannel,
    InlineChannel,
    describe,
    rebuild,
)
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.meter import Meter

TAG = 5
KINDS = ("inline", "device")


def open_channel(kind: str) -> Channel:
    """The channel between ranks 0 and 1; gloo stands in for a device's backend."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    inline = InlineChannel(1 - dist.get_rank(), group, TAG)
    if kind == "inline":
        return inline
    device_group = dist.new_group([0, 1])
    return DeviceChannel(1 - dist.get_rank(), device_group, inline, torch.device("cpu"))


def transfer(channel: Channel, steps: list[list[Any]]) -> list[list[Any]]:
    """Send everything from rank 0 to rank 1; returns what arrived."""
    arrived = []
    for messages in steps:
        channel.expect(len(messages))
        if dist.get_rank() == 0:
            for message in messages:
                channel.send(message)
            channel.flush()
        else:
            channel.prepost()
            arrived.append([channel.receive() for _ in messages])
    return arrived


def same(found: Any, expected: Any) -> bool:
    """Equal structure, types, number formats, flags and values."""
    if isinstance(expected, Tensor):
        return (
            isinstance(found, Tensor)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
            and found.requires_grad == expected.requires_grad
            and torch.equal(found, expected)
        )
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def trees() -> list[Any]:
    """Everything that may pass between stages."""
    draw = torch.Generator().manual_seed(0)
    grid = torch.randn(3, 4, generator=draw)
    return [
        grid,
        grid.clone().requires_grad_(),
        grid.T,  # not contiguous
        grid.to(torch.bfloat16),
        grid.to(torch.float64).requires_grad_(),
        grid > 0,
        (grid * 10).to(torch.int64),
        (grid * 10).to(torch.uint8),
        torch.complex(grid, grid),
        torch.tensor(3.5),  # no dimension
        torch.empty(0, 4),  # no elements
        None,
        (grid, None, [grid > 0, (1, 2.5, True, "text")]),
        {"x": grid.clone().requires_grad_(), "more": {"mask": grid > 0, "depth": 3}, "none": None},
        [],
        (),
        {},
        [None, grid[:0], torch.tensor(True)],
    ]


def every_tree_job(kind: str) -> list[int]:
    """Indices of the trees that did not arrive as they were sent."""
    expected = [trees(), trees()[::-1]]
    arrived = transfer(open_channel(kind), expected)
    return [
        index
        for step, sent in zip(arrived, expected, strict=False)
        for index, (found, tree) in enumerate(zip(step, sent, strict=True))
        if not same(found, tree)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tree_arrives(pool: WorkerPool, kind: str) -> None:
    assert pool.run(2, every_tree_job, kind) == [[], []]


def sizes_job(kind: str, steps: list[list[int]]) -> bool:
    sent = [[torch.arange(float(n)) for n in step] for step in steps]
    arrived = transfer(open_channel(kind), sent)
    return all(same(a, s) for a, s in zip(arrived, sent, strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_grow_and_shrink(pool: WorkerPool, kind: str) -> None:
    """Longer than any before in the first, second and last place; then short ones again."""
    steps = [
        [10, 10, 10, 10],
        [5000, 10, 7000, 9000, 20_000, 10],
        [1],
        [30_000, 40_000],
        [50_000],
        [3, 60_000, 3, 3, 70_000, 80_000, 90_000, 100_000, 3],
        [],
        [100_000] * 5,
    ]
    assert all(pool.run(2, sizes_job, kind, steps))


def reuse_job(kind: str) -> list[float]:
    """The sender overwrites the tensor as soon as `send` returns."""
    channel = open_channel(kind)
    count, tensor = 6, torch.zeros(2000)
    channel.expect(count)
    if dist.get_rank() == 1:
        channel.prepost()
        return [channel.receive().mean().item() for _ in range(count)]
    for value in range(count):
        tensor.fill_(value)
        channel.send(tensor)
    tensor.fill_(-1)
    channel.flush()
    return []


def test_a_sent_tensor_may_change_at_once(pool: WorkerPool) -> None:
    assert pool.run(2, reuse_job, "inline")[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def late_job() -> float:
    """Seconds that rank 0 waited for rank 1, which comes late once rank 0 looks at the clock."""
    dist.init_process_group("gloo")
    store, now = default_store(), time.perf_counter

    def told() -> float:
        store.set("waits", "")
        return now()

    meter = Meter()
    channel = InlineChannel(1 - dist.get_rank(), dist.new_group([0, 1]), TAG, meter)
    channel.expect(1)
    if dist.get_rank() == 0:
        channel.send(torch.zeros(1000))
        with patch.object(time, "perf_counter", told):
            channel.flush()
    else:
        store.wait(["waits"])
        time.sleep(0.2)
        channel.prepost()
        channel.receive()
    return meter.exposed_s


def test_a_sender_that_waits_for_its_receiver_knows_how_long(pool: WorkerPool) -> None:
    assert pool.run(2, late_job)[0] > 0.1


def both_ways_job(kind: str) -> bool:
    """Activations one way, gradients the other, of different lengths, at the same time."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    out, back = (InlineChannel(1 - rank, group, tag) for tag in (1, 2))
    sends, receives = (out, back) if rank == 0 else (back, out)
    good = True
    for step in range(4):
        count = 3 + step
        sends.expect(count)
        receives.expect(count)
        receives.prepost()
        for index in range(count):
            sends.send(torch.full((1000 * (index + 1) * (rank + 1),), float(index)))
        for index in range(count):
            found = receives.receive()
            good &= found.shape == (1000 * (index + 1) * (2 - rank),)
            good &= bool((found == index).all())
        sends.flush()
    return good


def test_both_directions_at_once(pool: WorkerPool) -> None:
    assert all(pool.run(2, both_ways_job, "inline"))


def posted_job(count: int) -> list[int]:
    """How many receives are posted before and during a step."""
    channel = open_channel("inline")
    assert isinstance(channel, InlineChannel)
    channel.expect(count)
    if dist.get_rank() == 0:
        for _ in range(count):
            channel.send(torch.ones(3))
        channel.flush()
        return []
    channel.prepost()
    posted = [len(channel._posted)]
    for _ in range(count):
        channel.receive()
        posted.append(len(channel._posted))
    return posted


def test_receives_are_posted_ahead_and_none_is_left(pool: WorkerPool) -> None:
    assert pool.run(2, posted_job, 5)[1] == [LOOKAHEAD, 2, 2, 2, 1, 0]


def received_is_leaf_job(kind: str) -> bool:
    channel = open_channel(kind)
    message = {"x": torch.ones(3, requires_grad=True) * 2, "y": torch.ones(3)}
    arrived = transfer(channel, [[message]])
    if dist.get_rank() == 0:
        return True
    x, y = arrived[0][0]["x"], arrived[0][0]["y"]
    (x * 3).sum().backward()
    return x.is_leaf and torch.equal(x.grad, torch.full((3,), 3.0)) and not y.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_received_tensors_collect_gradients(pool: WorkerPool, kind: str) -> None:
    assert all(pool.run(2, received_is_leaf_job, kind))


@pytest.mark.parametrize("tree", trees(), ids=lambda tree: type(tree).__name__)
def test_description_is_plain_and_can_be_undone(tree: Any) -> None:
    leaves: list[Tensor] = []
    structure = describe(tree, leaves)
    assert leaves == [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    rest = iter(leaves)
    take: Callable[..., Tensor] = lambda dtype, shape, grad: next(rest)  # noqa: E731
    assert same(rebuild(structure, take), tree)


@pytest.mark.parametrize(
    ("tree", "name"),
    [(object(), "object"), ({1: torch.ones(1)}, "dict"), ((torch.ones(1), {1, 2}), "set")],
)
def test_what_cannot_pass_is_named(tree: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"produced a {name}; between stages pass tensors"):
        describe(tree, [])


class Handed:
    """Stands in for the channel between hosts: a queue in one process."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, tree: Any) -> None:
        self.messages.append(tree)

    def receive(self) -> Any:
        return self.messages.pop(0)


def test_what_nccl_cannot_send_passes_between_devices() -> None:
    """Every tensor of the device goes as bytes, those in host memory between the hosts.

    The meta device stands in for a GPU.
    """
    gpu, sent, asked = torch.device("meta"), [], []
    channel = DeviceChannel(1, Any, Handed(), gpu)  # type: ignore[arg-type]
    kinds = (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.uint8, torch.bfloat16)
    tree = {
        "device": [torch.empty(2, 3, dtype=kind, device=gpu) for kind in kinds],
        "number": torch.empty((), dtype=torch.int16, device=gpu),
        "lengths": torch.tensor([3, 5]),
        "mask": (torch.ones(2, requires_grad=True), "text"),
    }
    post = {
        "isend": lambda payload, *_: sent.append(payload) or Done(),
        "irecv": lambda payload, *_: asked.append(payload) or Done(),
    }
    with patch.multiple(dist, **post):
        channel.send(tree)
        found = channel.receive()
    assert all(payload.dtype == torch.uint8 and payload.is_meta for payload in sent + asked)
    assert [len(payload) for payload in asked] == [len(payload) for payload in sent]
    assert [leaf.dtype for leaf in found["device"]] == list(kinds)
    assert found["device"][0].is_meta
    assert found["number"].shape == ()
    assert same(found["lengths"], tree["lengths"])
    assert same(found["mask"], tree["mask"])


class Done:
    """Stands in for a transfer that is over."""

    def wait(self) -> None: ...


def device_over_gloo_job() -> Any:
    """Where tensors arrive that the sender had on its device, and in host memory."""
    dist.init_process_group("gloo")
    rank, gpu = dist.get_rank(), torch.device("meta")
    group = dist.new_group([0, 1])
    # A sender whose tensors are on its device; one of another device has them in host memory.
    senders = [InlineChannel(1 - rank, group, tag, device=d) for tag, d in ((1, None), (2, gpu))]
    receivers = [InlineChannel(1 - rank, group, tag, device=gpu) for tag in (1, 2)]
    with torch.device("meta"):  # as `torch.set_default_device` would have it
        message = torch.ones(3, device="cpu", requires_grad=True)
        return [
            [(x.device.type, x.requires_grad) for x in step]
            for pair in zip(senders, receivers, strict=True)
            for step in transfer(pair[rank], [[message]])
        ]


def test_a_device_without_a_backend_of_its_own_gets_its_tensors(pool: WorkerPool) -> None:
    """Under backend="gloo" messages between GPUs go through host memory."""
    assert pool.run(2, device_over_gloo_job)[1] == [[("meta", True)], [("cpu", True)]]
