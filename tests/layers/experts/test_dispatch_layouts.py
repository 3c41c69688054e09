"""A mixture gives one process's outputs and gradients however tokens are divided among ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.expert_layout import ExpertConfig, ExpertDispatch
from lightning_megatron.topology.mesh import Topology
from tests.comm import lockstep
from tests.layers.parity import close, distribute, finished_gradient, local_part

HIDDEN = 6
# name: degrees, whether with sequence parallelism, shape of the samples of each data rank
CASES: dict[str, tuple[dict[str, int], bool, list[tuple[int, ...]]]] = {
    "other batch sizes": ({"dp_shard": 2, "ep": 2}, False, [(3, 5), (1, 5)]),
    "no sample": ({"dp_shard": 2, "ep": 2}, False, [(2, 4), (0, 4)]),
    "tp, odd": ({"tp": 2, "ep": 2}, False, [(3, 5)]),
    "tp, experts whole": ({"tp": 2}, False, [(2, 3)]),
    "tp, one token": ({"tp": 2, "ep": 2}, False, [(1, 1)]),
    "tp, rows alone": ({"tp": 2, "ep": 2}, False, [(7,)]),
    "sequence parallelism": ({"tp": 2, "ep": 2}, True, [(3, 4)]),
    "tp and dp": ({"tp": 2, "dp_shard": 2, "ep": 4}, False, [(1, 3), (2, 5)]),
    "ep of two, of tp and dp": ({"tp": 2, "dp_shard": 2, "ep": 2}, True, [(1, 2), (2, 6)]),
    "images, whole over cp": ({"cp": 2, "ep": 2}, False, [(2, 3, 2)]),
}

ON_SIXTEEN: dict[str, tuple[dict[str, int], bool, list[tuple[int, ...]]]] = {
    "dp": ({"dp_shard": 16, "ep": 16}, False, [(i % 3, 2) for i in range(16)]),
    "tp and dp": ({"tp": 4, "dp_shard": 4, "ep": 8}, True, [(i, 4) for i in range(1, 5)]),
}


def _mixture(experts: int = 4) -> MixtureOfExperts:
    torch.manual_seed(0)
    router = RouterConfig(balance="none")
    return MixtureOfExperts(
        HIDDEN, 4, num_experts=experts, top_k=2, shared_size=8, shared_gate=True, router=router
    ).double()


def dispatch_topology(degrees: dict[str, int], sequence: bool, kind: ExpertDispatch) -> Topology:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    experts = ExpertConfig(degree=degrees.get("ep", 1), dispatch=kind)
    return Topology(
        Degrees(**degrees), torch.device("cpu"), sequence_parallel=sequence, experts=experts
    )


def finished(module: nn.Module, name: str, parameter: Tensor, topology: Topology) -> Tensor:
    """Gradient after the sum over tp, if there is one, and the mean over ranks."""
    grad = finished_gradient(module, name, parameter, topology)
    owner, _, local = name.rpartition(".")
    shard = module.get_submodule(owner).tensor_shards[local]
    axis = topology.experts.mean if shard.axis == "ep" else topology.dense.mean
    if axis.group is not None:
        dist.all_reduce(grad, group=axis.group)
    return grad / axis.size


def _check(
    degrees: dict[str, int],
    sequence: bool,
    shapes: list[tuple[int, ...]],
    kind: ExpertDispatch,
    experts: int = 4,
) -> None:
    topology = dispatch_topology(degrees, sequence, kind)
    plain = _mixture(experts)
    samples = [torch.randn(*shape, HIDDEN, dtype=torch.float64) for shape in shapes]
    upstream = [torch.randn_like(x) for x in samples]
    for x, grad in zip(samples, upstream, strict=True):
        plain(x.requires_grad_()).backward(grad)

    def own(x: Tensor) -> Tensor:
        return x.chunk(topology.tp.size, 1)[topology.tp.rank] if sequence else x

    place = topology.batch.rank
    parallel = distribute(copy.deepcopy(_mixture(experts)), topology)
    x = own(samples[place].detach()).clone().requires_grad_()
    y = parallel(x)
    close("output", y, own(plain(samples[place])))
    y.backward(own(upstream[place]))
    close("gradient of the input", x.grad, own(samples[place].grad))
    for key, parameter in parallel.named_parameters():
        found = finished(parallel, key, parameter, topology) * topology.batch.size
        expected = local_part(parallel, key, plain.get_parameter(key).grad, parameter)
        close(f"gradient of {key}", found, expected)


@pytest.mark.parametrize("kind", ["once", "gather"])
@pytest.mark.parametrize("name", CASES)
def test_a_mixture_gives_what_one_process_gives(pool: Any, name: str, kind: ExpertDispatch) -> None:
    processes = 4 if name in ("tp and dp", "ep of two, of tp and dp") else 2
    pool.run(processes, _check, *CASES[name], kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param("dp", "once", marks=pytest.mark.thorough), ("tp and dp", "gather")],
)
def test_a_mixture_on_sixteen_ranks(name: str, kind: ExpertDispatch) -> None:
    lockstep.run(16, _check, *ON_SIXTEEN[name], kind, 16)
