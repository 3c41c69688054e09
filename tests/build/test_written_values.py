"""Writes to tensors without memory are done again on one of them at a time."""

import numpy
import torch
from torch import nn

from lightning_megatron._torch.graphs import TorchDispatchMode, tree_flatten
from lightning_megatron.build.init import materialize
from lightning_megatron.build.init_tape import InitTape
from lightning_megatron.build.written_values import written_values
from lightning_megatron.layers.experts.stack import Experts

CPU = torch.device("cpu")


def record(build, write):
    """A module on the meta device, what was written to it, and the reason against it."""
    holder = nn.Module()
    tape = InitTape(holder)
    with torch.device("meta"), tape, torch.no_grad():
        holder.net = build()
        write(holder.net)
    return written_values(tape, holder), tape.reason


class Allocations(TorchDispatchMode):
    """Bytes that operators make within the block."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = storage
        return result

    def total(self):
        return sum(storage.nbytes() for storage in self.seen.values())


def test_a_value_takes_the_memory_of_its_own_parameter():
    def write(net):
        for layer in net:
            nn.init.normal_(layer.weight)
            layer.weight.mul_(0.5).clamp_(-1, 1)
        net[3].weight.copy_(net[2].weight)

    written, reason = record(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), write)
    assert reason is None
    assert set(written) == {f"net.{i}.weight" for i in range(8)}
    with Allocations() as seen:
        value = written.value("net.5.weight", 0, CPU)
    size = value.numel() * value.element_size()
    assert 0.3 < value.std() < 0.5
    assert seen.total() < 3 * size
    pair = [written.value(f"net.{i}.weight", 0, CPU) for i in (2, 3)]
    assert torch.equal(*pair)
    assert not torch.equal(value, pair[0])
    assert not torch.equal(value, written.value("net.5.weight", 1, CPU))


def test_experts_that_are_scaled_are_those_that_would_be_drawn():
    def build():
        return Experts(3, 4, 5)

    written, reason = record(build, lambda net: net.down.mul_(0.5))
    assert reason is None
    with torch.device("meta"):
        drawn = build()
    materialize(drawn, "net", seed=7, device="cpu")
    assert torch.equal(written.value("net.down", 7, CPU), drawn.down / 2)


def test_a_buffer_that_is_filled_again_is_read_in_time():
    buffer = numpy.zeros((4, 4), "f4")

    def write(net):
        for number, layer in enumerate(net):
            buffer[:] = number
            layer.weight.copy_(torch.from_numpy(buffer))

    written, reason = record(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), write)
    assert reason is None
    found = [float(written.value(f"net.{i}.weight", 0, CPU).mean()) for i in range(3)]
    assert found == [0, 1, 2]


def test_a_source_that_is_written_to_afterwards_needs_real_tensors():
    source = torch.zeros(4, 4, device="cpu")

    def write(net):
        net.weight.copy_(source)
        source.data.fill_(1.0)

    _, reason = record(lambda: nn.Linear(4, 4), write)
    assert "written to afterwards" in reason


def test_ranks_can_tell_that_they_wrote_alike():
    def signature(value):
        return record(lambda: nn.Linear(4, 4), lambda net: net.weight.fill_(value))[0].signature()

    def copied(value):
        source = torch.full((4, 4), value, device="cpu")
        return record(lambda: nn.Linear(4, 4), lambda n: n.weight.copy_(source))[0].signature()

    assert signature(1.0) == signature(1.0) != signature(2.0)
    assert copied(1.0) == copied(1.0) != copied(2.0)
