"""What the quick starts share: the strategy that they run with, and the numbers they leave.

A quick start is `main` of a module beside this one: a script as the project's own pages show it, on
small data that it makes itself. `main` gets a `Quickstart`, from which it takes the Trainer's
strategy, and to which it tells, part by part, the numbers that are the same under every strategy.
"""

import random
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron import CheckpointConfig, MegatronStrategy

PARTS = ("train", "load", "predict", "use", "resume")
"""What a quick start does, in this order: it trains, loads what it saved as the project loads,
predicts, uses the trained module in the same script, and resumes for another epoch."""

PLAIN, DDP = "plain", "ddp"
"""Of Lightning's own strategies: one process, and two."""

Numbers = dict[str, Any]


@dataclass
class Quickstart:
    """One run of a quick start, on one rank."""

    name: str
    """`PLAIN`, `DDP`, or ``zero=2``."""
    folder: Path
    """The run's own, the same on all ranks."""
    numbers: dict[str, Numbers] = field(default_factory=dict)
    """By part."""
    errors: dict[str, str] = field(default_factory=dict)
    """Tracebacks of the parts that failed."""

    def __post_init__(self) -> None:
        warnings.filterwarnings("ignore")
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    @property
    def ranks(self) -> int:
        return 1 if self.name == PLAIN else 2

    def strategy(self) -> MegatronStrategy | str:
        """Of a Trainer: what a user changes."""
        if self.name in (PLAIN, DDP):
            return {PLAIN: "auto", DDP: "ddp_find_unused_parameters_true"}[self.name]
        stage: Any = int(self.name.removeprefix("zero="))
        # Projects read checkpoints by themselves. With zero=3 they are directories by default.
        format: Any = "file" if stage == 3 else "auto"
        return MegatronStrategy(zero=stage, checkpoint=CheckpointConfig(format=format))

    def batch_size(self, whole: int) -> int:
        """Samples in a loader's batch, so that all ranks together take as many as one process."""
        return whole // self.ranks

    def options(self, **options: Any) -> dict[str, Any]:
        """Of a Trainer that uses these ranks and prints nothing."""
        return {
            "strategy": self.strategy(),
            "accelerator": "cpu",
            "devices": self.ranks,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }

    def barrier(self) -> None:
        """Wait for the other rank, where one of them writes."""
        if self.ranks > 1:
            dist.barrier()

    @contextmanager
    def part(self, name: str) -> Iterator[Numbers]:
        """Collect the numbers of a part, or its error; the script goes on behind it."""
        assert name in PARTS
        numbers: Numbers = {}
        try:
            yield numbers
        except Exception:  # the test shows it
            self.errors[name] = traceback.format_exc()
        else:
            self.numbers[name] = numbers


def weights(module: nn.Module) -> Numbers:
    """Copies of what a module's `state_dict` has."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
