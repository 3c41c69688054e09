"""Which backend serves a device, and what it cannot do there."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.strategy.processes.connection import ConnectionConfig, splits
from lightning_megatron.topology.context_layout import ContextConfig, ContextKind

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("nccl", GPU, True),
        ("cpu:gloo,cuda:nccl", GPU, True),
        ("gloo", GPU, False),  # two ranks on one GPU
        ("cpu:gloo,cuda:gloo", GPU, False),
        ("gloo", torch.device("cpu"), False),
        ("mpi", torch.device("cpu"), False),
    ],
)
def test_a_group_is_bound_to_a_device_where_its_backend_splits(
    backend: str, device: torch.device, expected: bool
) -> None:
    """A bound group of gloo has an attribute error for the ranks outside of each further group."""
    assert splits(backend, device) is expected


@pytest.mark.parametrize(
    ("backend", "device", "kind", "refused"),
    [
        ("gloo", GPU, "auto", True),
        ("gloo", GPU, "ring", True),
        ("gloo", GPU, "gather", False),
        ("gloo", GPU, "ulysses", False),
        ("cpu:gloo,cuda:nccl", GPU, "ring", False),
        (None, GPU, "ring", False),
        ("gloo", torch.device("cpu"), "ring", False),
    ],
)
def test_a_ring_over_gloo_is_refused_on_devices(
    backend: str | None, device: torch.device, kind: ContextKind, refused: bool
) -> None:
    config = ConnectionConfig(backend=backend)
    problems = config.problems(device=device, cp=ContextConfig(degree=2, kind=kind))
    assert [p for p in problems if "a ring passes messages" in p] == problems
    assert bool(problems) == refused
    assert all("nearest valid: kind='gather'" in problem for problem in problems)


def test_options_of_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are split from the default one copy its options."""
    config = ConnectionConfig(timeout_s=70, max_channels=4)
    assert (config.nccl_options() is None) == (not dist.is_nccl_available())

    def options() -> Any:
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None))

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    found = config.nccl_options()
    assert found is not None
    assert (found._timeout, found.is_high_priority_stream) == (timedelta(seconds=70), True)
    assert found.config.max_ctas == 4
    plain = ConnectionConfig(high_priority=False).nccl_options()
    assert plain is not None
    assert not plain.is_high_priority_stream
    assert plain.config.max_ctas is None
    (problem,) = ConnectionConfig(max_channels=0).problems()
    assert problem.startswith("connection.max_channels=0: must be positive; nearest valid")
