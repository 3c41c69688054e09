"""Lightning makes a module from a checkpoint in memory; state_dicts have versions of modules."""

from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_megatron._lightning.saving import module_from, versions_in, with_versions


class Sized(pl.LightningModule):
    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.depth = depth
        self.layer = nn.Linear(width, 1)


def checkpoint(**more: Any) -> dict[str, Any]:
    module = Sized(3)
    return {
        Sized.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams),
        "state_dict": {**module.state_dict(), **more},
    }


def test_module_from() -> None:
    saved = checkpoint()
    module = module_from(Sized, saved, strict=None, depth=2)
    assert isinstance(module, Sized)
    assert module.depth == 2
    assert (module.layer.weight == saved["state_dict"]["layer.weight"]).all()


def test_module_from_is_strict() -> None:
    saved = checkpoint(more=nn.Linear(1, 1).weight)
    with pytest.raises(RuntimeError, match="more"):
        module_from(Sized, saved, strict=None)
    module_from(Sized, saved, strict=False)


def test_versions_are_those_of_a_module() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    state = module.state_dict()
    found = versions_in(state)
    assert found["0"] == 2
    again = with_versions(OrderedDict(state), found)
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    assert versions_in({}) == {}
