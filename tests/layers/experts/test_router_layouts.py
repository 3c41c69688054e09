"""Routing, its losses and its counts are those of one process in every layout."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.layers import auxiliary_loss
from lightning_megatron.layers.context_split import GatherContext, SplitContext
from lightning_megatron.layers.experts.decisions import company
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.parallel.activations.checkpointing import recompute
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from tests.layers.context import on_context
from tests.layers.experts.test_layer_alone import LOSSES, VARIANTS, H, build
from tests.layers.parity import close, local_part

SAMPLES = 4
LAYOUTS = {
    "tp=2": {"tp": 2},
    "tp=2 sp": {"tp": 2, "sequence_parallel": True},
    "cp=2": {"cp": 2},
    "cp=2 contiguous, ep=2": {"cp": 2, "ep": 2, "order": "contiguous"},
    "dp=2": {"dp_shard": 2},
    "cp=2 tp=2 sp, ep=4": {"cp": 2, "tp": 2, "sequence_parallel": True, "ep": 4},
    "cp=2 tp=2": {"cp": 2, "tp": 2},
    "dp=2 cp=2": {"cp": 2, "dp_shard": 2},
    "dp=2 tp=2, ep=2": {"tp": 2, "dp_shard": 2, "ep": 2},
}
THOROUGH = ("cp=2 tp=2", "dp=2 cp=2", "dp=2 tp=2, ep=2")
"""Layouts whose axes others have, and two of which one has together."""
CHECKED = {
    name: VARIANTS[name]
    for name in ("mixtral", "deepseek", "batch", "capacity", "capacity by position", "room for one")
} | {
    "added by the step": (2, {"inject": False, **LOSSES}),
    "of batches, added by the step": (2, {"inject": False, "balance": "batch", **LOSSES}),
}


def make_topology(*, sequence_parallel=False, order="auto", **degrees):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    given = Degrees(**degrees)
    return Topology(
        given,
        torch.device("cpu"),
        sequence_parallel=sequence_parallel,
        context=ContextConfig(degree=given.cp, order=order),
    )


def trunk_of(moe):
    return PipelineSequential(SplitContext(), moe, GatherContext())


def alone(moe):
    return moe


def loss_of(y, w):
    return (y * w).cos().sum((1, 2)).mean()


def _same(layout, lengths, around):
    topology = make_topology(**layout)
    for name in CHECKED:
        for length, masked in zip(lengths, (False, True), strict=True):
            try:
                _compare(topology, around, name, length, masked)
            except AssertionError as error:
                raise AssertionError(f"{name}, {length=}, {masked=}: {error}") from error


def _compare(topology, around, name, length, masked):
    plain = around(build(*CHECKED[name]))
    parallel = on_context(plain, topology)
    generator = torch.Generator().manual_seed(length)
    x, w = torch.randn(2, SAMPLES, length, H, dtype=torch.float64, generator=generator)
    mask = torch.rand(SAMPLES, length, generator=generator) < 0.7
    mask[0] = False
    given = {"token_mask": mask} if masked else {}
    expected = plain(x.requires_grad_(), **given)
    whole_added = _added(plain)
    (loss_of(expected, w) + whole_added).backward()

    topology.context.begin(0, forget=True)
    own = slice(topology.batch.rank, None, topology.batch.size)
    mine = x.detach()[own].clone().requires_grad_()
    given = {"token_mask": mask[own]} if masked else {}
    y = parallel(mine, **given)
    close("output", y.detach(), expected.detach()[own])
    added = _added(parallel)
    (loss_of(y, w[own]) + added).backward()
    close("auxiliary loss", _mean(added.detach(), topology.batch), whole_added.detach())
    sent = _mean(mine.grad, topology.cp) / topology.batch.size
    close("gradient of the input", sent, x.grad[own])
    for key, parameter in parallel.named_parameters():
        whole = plain.get_parameter(key).grad
        close(
            f"gradient of {key}",
            _finished(parallel, key, topology),
            local_part(parallel, key, whole, parameter),
        )
    _same_counts(*(_router(module) for module in (plain, parallel)), topology)


def _added(trunk):
    """Auxiliary loss that the step adds."""
    return torch.zeros(()).double() if _router(trunk).config.inject else auxiliary_loss(trunk)


def _router(trunk):
    return next(module for module in trunk.modules() if isinstance(module, Router))


def _finished(module, key, topology):
    owner, _, local = key.rpartition(".")
    shard = module.get_submodule(owner).tensor_shards[local]
    grad = module.get_parameter(key).grad.clone()
    if shard.sum_gradients:
        dist.all_reduce(grad, group=topology.tp.group)
    return _mean(grad, topology.experts.mean if shard.axis == "ep" else topology.loss)


def _mean(x, axis):
    return _sum(x, axis) / axis.size


def _sum(x, *axes):
    x = x.clone()
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)
    return x


def _same_counts(plain, parallel, topology):
    axes = (topology.loss, topology.tp)
    expected, found = plain.statistics.now(), parallel.statistics.now()
    close("counts", _sum(found.counts_e, *axes), expected.counts_e)
    assert found.totals.keys() == expected.totals.keys()
    for key, value in expected.totals.items():
        close(key, _sum(found.totals[key], *axes), value)
    if plain.bias is not None:
        close("counts of the step", _sum(parallel.step_counts_e, *axes), plain.step_counts_e)


def _ranks(options):
    return math.prod(n for axis, n in options.items() if axis in ("tp", "cp", "dp_shard"))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n in THOROUGH)) for n in LAYOUTS],
)
def test_layouts(pool, layout):
    options = LAYOUTS[layout]
    divisible = "sequence_parallel" in options and "cp" not in options
    pool.run(_ranks(options), _same, options, (2, 8) if divisible else (1, 13), trunk_of)


def test_whole_sequences_outside_of_a_trunk(pool):
    """All cp ranks route the same tokens there, which count once."""
    pool.run(2, _same, {"cp": 2}, (5, 5), alone)


def _noise():
    """All tokens are alike, and each rank has half of them."""
    topology = make_topology(tp=2)
    moe = on_context(build(2, {"noise": 1.0, "balance": "none"}), topology)
    x = torch.zeros(2, 8, H, dtype=torch.float64)
    found = []
    moe.router.register_forward_hook(lambda *given: found.append(given[-1][0].weights_tk))
    for _ in range(2):
        torch.manual_seed(1)
        moe(x)
    assert torch.equal(*found)
    both = [torch.empty_like(found[0]) for _ in range(2)]
    dist.all_gather(both, found[0].detach(), group=topology.tp.group)
    assert not (both[0] == both[1]).any()


def test_tp_ranks_draw_their_own_noise(pool):
    pool.run(2, _noise)


def _company():
    """Rank 1 has no batch left, and runs one again."""
    topology = make_topology(dp_shard=2)
    options = {"balance": "batch", "inject": False, "bias_update": 0.1, **LOSSES}
    plain = build(2, options)
    parallel = on_context(plain, topology)
    x = torch.randn(2, 5, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain(x)
    with company() if topology.batch.rank else nullcontext():
        parallel(x)
    own, both = auxiliary_loss(plain), auxiliary_loss(parallel)
    assert own.requires_grad
    assert both.requires_grad
    if topology.batch.rank:
        assert parallel.router.statistics.counts_e is parallel.router.step_counts_e is None
        return
    alone, shared = (moe.router.statistics.totals["balance_loss"] for moe in (plain, parallel))
    close("balance, which is a mean over two ranks", shared, 2 * alone)


def test_rank_that_keeps_others_company_counts_in_no_batch(pool):
    pool.run(2, _company)


def _recomputed():
    """Both lengths have parts of the same size."""
    topology = make_topology(cp=2)
    moe, before = build(*CHECKED["capacity"]), nn.Linear(H, H).double()  # padding is not zero
    plain = PipelineSequential(SplitContext(), before, moe, GatherContext())
    parallel = on_context(plain, topology)
    recompute(parallel, [m for m in parallel.modules() if isinstance(m, MixtureOfExperts)])
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(2, n, H, dtype=torch.float64, generator=generator) for n in (7, 8)]
    topology.context.begin(0, forget=True)
    for module in (plain, parallel):
        sum(module(x).cos().sum() for x in xs).backward()
    for key in ("router.weight", "experts.up"):
        [(name, parameter)] = [(n, p) for n, p in plain.named_parameters() if n.endswith(key)]
        close(f"gradient of {key}", _finished(parallel, name, topology), parameter.grad)


def test_recomputation_of_an_earlier_call(pool):
    pool.run(2, _recomputed)
