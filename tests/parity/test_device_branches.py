"""What only a device does, with real numbers: the parity selection within `device_branches`.

Regathers of sequence parallelism, messages by `DeviceChannel`, a group on the host beside that of
the device, routing without a look at scores, sums of inputs' gradients.
"""

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.comm.point_to_point import DeviceChannel
from lightning_megatron.layers import linear_functions
from lightning_megatron.layers.experts import routing
from lightning_megatron.layers.experts.grouped import TorchGroupedGemm
from lightning_megatron.testing import WorkerPool
from lightning_megatron.testing.failures import WorkerError
from tests._torch.device_branches import device_branches, on_a_device
from tests.parity import expert_layouts, layouts
from tests.parity.expert_layouts import ExpertLayout
from tests.parity.jobs import train_job
from tests.parity.layouts import Layout
from tests.parity.reference import Data, reference_curve
from tests.parity.test_matrix import check

LAYOUTS = (
    Layout(tp=2, zero=0, sequence_parallel=True),
    Layout(tp=2, pp=2, sequence_parallel=True, schedule="zb-h1", num_microbatches=2),
    Layout(pp=2, cp=2, zero=2, num_microbatches=2),
    Layout(dp=2, zero=3, architecture="gpt"),
    ExpertLayout(dp=2, ep=2, zero=1, num_microbatches=2),
)


def data_of(layout: Layout) -> Data:
    return Data(steps=2) if layout.cp == 1 else Data(steps=2, lengths=(8, 7))


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in (*layouts.LAYOUTS, *expert_layouts.EXPERT_LAYOUTS)
            if one.world_size <= 4
        ),
    ],
    ids=str,
)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: Layout) -> None:
    data, options, architecture = data_of(layout), layout.strategy_options(), layout.architecture
    outcomes = pool.run(
        layout.world_size,
        *(on_a_device, train_job, options, architecture, data),
    )
    check(outcomes, reference_curve(architecture, data))


# Planted faults: each stands in a branch of devices alone, so no other test would find it ---------


def sends_too_early() -> Any:
    """A message leaves before its tensors have been computed."""
    send = DeviceChannel.send

    def early(self: DeviceChannel, tree: Any) -> None:
        send(self, tree_map(lambda x: x * 0 if isinstance(x, Tensor) else x, tree))

    return mock.patch.object(DeviceChannel, "send", early)


def gathers_a_part_again() -> Any:
    """The input of a layer is gathered again for its weights' gradient, and is not what it was."""
    gather = linear_functions.start_gather

    def other(x: Tensor, *args: Any, after: Tensor | None = None, **kwargs: Any) -> Any:
        return gather(x if after is None else x.roll(1, 1), *args, after=after, **kwargs)

    return mock.patch.object(linear_functions, "start_gather", other)


def takes_the_next_best() -> Any:
    """Tokens go to other experts than the best."""
    maxima = routing._maxima
    return mock.patch.object(routing, "_maxima", lambda x, k: maxima(x, k + 1)[:, 1:])


def forgets_a_sum() -> Any:
    """The gradient of a projection of the same input is not added."""
    original = TorchGroupedGemm.input_gradient

    def forgets(self: Any, gradient: Tensor, weight: Tensor, counts: Any, total: Any = None) -> Any:
        return original(self, gradient, weight, counts) if total is None else total

    return mock.patch.object(TorchGroupedGemm, "input_gradient", forgets)


def reads_an_old_buffer() -> Any:
    """A message is read where the one before it still lies."""
    receive, before = DeviceChannel.receive, []

    def old(self: DeviceChannel) -> Any:
        before.append(receive(self))
        return before[-2] if len(before) > 1 else before[-1]

    return mock.patch.object(DeviceChannel, "receive", old)


def faulty_job(fault: Any, *args: Any) -> Any:
    """A training within `device_branches` with a planted fault."""
    with fault(), device_branches():
        return train_job(*args)


@pytest.mark.parametrize(
    ("fault", "world", "options", "architecture"),
    [
        (sends_too_early, 2, {"pp": 2}, "llama"),
        (gathers_a_part_again, 2, {"tp": 2, "sequence_parallel": True}, "llama"),
        (takes_the_next_best, 1, {}, "mixture"),
        (forgets_a_sum, 1, {}, "mixture"),
        (reads_an_old_buffer, 2, {"pp": 2, "num_microbatches": 2}, "llama"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_finds(
    pool: WorkerPool, fault: Any, world: int, options: dict[str, Any], architecture: Any
) -> None:
    """The selection finds each planted fault, which changes nothing on the host."""
    data = Data(steps=2)
    with pytest.raises((AssertionError, WorkerError)):
        check(
            pool.run(world, faulty_job, fault, options, architecture, data),
            reference_curve(architecture, data),
        )
