"""A trunk alone: an ``nn.Sequential`` whose items have names and may be replaced."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential


class Scaled(nn.Module):
    """An item that takes a keyword argument."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale


def test_a_replaced_item_runs_and_the_old_one_does_not() -> None:
    """Adapters, compiled blocks and synchronised batch norms are put in after construction."""
    trunk = PipelineSequential(first=nn.Identity(), layers=[nn.Identity(), nn.Identity()])
    x = torch.ones(2, 3)
    torch.testing.assert_close(trunk(x), x)
    trunk.layers[1] = Scaled()
    torch.testing.assert_close(trunk(x, scale=3.0), 3 * x)
    trunk.first = nn.Linear(3, 4)
    trunk.layers[1] = nn.Linear(4, 5)
    assert trunk(x).shape == (2, 5)
    trunk.keep([range(1), range(1, 3)], [0])
    assert trunk.stage_items[0](x).shape == (2, 4)


def test_a_copy_runs_its_own_items() -> None:
    trunk = PipelineSequential(nn.Linear(3, 3))
    twin = copy.deepcopy(trunk)
    with torch.no_grad():
        twin.get_submodule("0").weight.zero_()
        twin.get_submodule("0").bias.zero_()
    x = torch.ones(1, 3)
    assert twin(x).abs().sum() == 0
    assert trunk(x).abs().sum() > 0


@pytest.mark.parametrize("name", ["items", "forward", "train"])
def test_a_name_that_hides_a_method_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*nearest valid: {name}_"):
        PipelineSequential(**{name: nn.Identity()})
