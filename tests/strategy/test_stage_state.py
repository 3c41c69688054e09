"""Names of what steps change and no look can see, and what is refused of them.

`tests.parity.epoch_ends` has modules whose hooks read what steps fill.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_megatron import ConfigError, PipelineSequential
from lightning_megatron.strategy.stage_state import shared_names


class Module(pl.LightningModule):
    def __init__(self, names: Any) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"trunk": PipelineSequential(blocks=[nn.Linear(2, 2)])})
        self.shared_between_stages = names


@pytest.mark.parametrize("names", [(), ("table",), ["memory.queue", "net.other"]])
def test_names_are_those_of_the_module(names: Any) -> None:
    assert shared_names(Module(names)) == frozenset(names)


@pytest.mark.parametrize("names", ["table", ("table", 1), 3])
def test_what_is_no_tuple_of_names_is_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match=r"class Module: .*nearest valid: .*\('outputs',\)"):
        shared_names(Module(names))


def test_a_part_of_the_trunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 'net\.trunk\.blocks\.0': .*on one stage each"):
        shared_names(Module(("net.trunk.blocks.0",)))
