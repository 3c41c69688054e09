"""Sums of gradients that data parallelism does not know of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import _COALESCED, ParameterRole, _sum_gradients

LARGE = _COALESCED + 3
GIVEN: dict[str, list[float | None]] = {
    "both": [1.0, 2.0],
    "one": [None, 4.0],
    "none": [None, None],
    "narrow": [256.0, 4.0],
    "large": [1.0, 5.0],
    "large_of_one": [3.0, None],
}


def sums_job(names: list[str], mean: bool) -> tuple[dict[str, Any], int, bool]:
    """Gradients by name, how often the host asked the device, and whether memory stayed."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    roles = []
    for name in names:
        dtype = torch.bfloat16 if name == "narrow" else torch.float32
        size = LARGE if name.startswith("large") else 3
        parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
        value = GIVEN[name][rank]
        parameter.grad = None if value is None else torch.full_like(parameter, value)
        roles.append(ParameterRole(name=name, parameter=parameter))
    before = [role.parameter.grad for role in roles]
    asked = 0
    original = Tensor.tolist

    def counted(self: Tensor) -> Any:
        nonlocal asked
        asked += 1
        return original(self)

    Tensor.tolist = counted  # type: ignore[method-assign, assignment]
    try:
        _sum_gradients(roles, dist.group.WORLD, mean=mean)
    finally:
        Tensor.tolist = original  # type: ignore[method-assign]
    found = {}
    for role in roles:
        gradient = role.parameter.grad
        if gradient is not None:
            assert bool((gradient == gradient[0]).all())
        found[role.name] = None if gradient is None else float(gradient[0])
    kept = all(b is None or b is r.parameter.grad for r, b in zip(roles, before, strict=True))
    return found, asked, kept


def test_sums_and_means_over_ranks(pool: WorkerPool) -> None:
    names = list(GIVEN)
    for mean in (False, True):
        share = 0.5 if mean else 1.0
        expected = {
            name: None if values == [None, None] else share * sum(v or 0.0 for v in values)
            for name, values in GIVEN.items()
        }
        for found, _, kept in pool.run(2, sums_job, names, mean):
            assert found == expected
            assert kept


def test_a_rank_with_all_gradients_does_not_wait_for_its_device(pool: WorkerPool) -> None:
    full = [name for name, values in GIVEN.items() if None not in values]
    assert [asked for _, asked, _ in pool.run(2, sums_job, full, False)] == [0, 0]
    assert [asked for _, asked, _ in pool.run(2, sums_job, [*full, "one"], False)] == [1, 0]
