"""Mixtures over sequences that cp ranks share, inside of a trunk and behind one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.context_split import SplitContext
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.expert_layout import ExpertDispatch
from lightning_megatron.whole.splits import whole
from tests.layers.context import on_context
from tests.layers.experts.test_dispatch_layouts import dispatch_topology, finished
from tests.layers.parity import close, local_part

HIDDEN = 6


class Net(nn.Module):
    """A mixture inside of a trunk, and one that takes its output, split over tp as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = RouterConfig(balance_weight=0.5, z_loss=0.1)
        sizes = {"num_experts": 4, "top_k": 2, "shared_size": 4, "router": router}
        self.trunk = PipelineSequential(
            SplitContext(),
            MixtureOfExperts(HIDDEN, 4, **sizes),
            ColumnParallelLinear(HIDDEN, HIDDEN),
        )
        self.behind = MixtureOfExperts(HIDDEN, 4, **sizes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.behind(self.trunk(x))
        return y


CASES = {
    "cp": ({"cp": 2, "ep": 2}, 5),
    "one position": ({"cp": 2, "ep": 2}, 1),
    "cp and tp": ({"cp": 2, "tp": 2, "ep": 4}, 7),
    "experts of two of four": ({"cp": 2, "tp": 2, "ep": 2}, 8),
}


def _check(name: str, kind: ExpertDispatch) -> None:
    degrees, length = CASES[name]
    topology = dispatch_topology(degrees, False, kind)
    plain = Net()
    parallel = on_context(plain, topology)
    topology.context.begin(0, forget=True)
    x = torch.randn(2, length, HIDDEN, dtype=torch.float64)
    upstream = torch.randn_like(x)
    expected = plain(x)
    expected.backward(upstream)
    found = whole(parallel(x))
    close("output", found, expected)
    found.backward(upstream)
    for key, parameter in parallel.named_parameters():
        grad = finished(parallel, key, parameter, topology)
        whole_grad = plain.get_parameter(key).grad
        assert whole_grad is not None
        close(f"gradient of {key}", grad, local_part(parallel, key, whole_grad, parameter))


@pytest.mark.parametrize("kind", ["once", "gather"])
@pytest.mark.parametrize("name", CASES)
def test_mixtures_over_parts_of_sequences(pool: Any, name: str, kind: ExpertDispatch) -> None:
    pool.run(4 if "tp" in CASES[name][0] else 2, _check, name, kind)
