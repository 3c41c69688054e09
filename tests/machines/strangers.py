"""Modules as users write them, trained on several machines.

``python -m tests.machines.strangers OUT NAME...``

Under a launcher. Each module trains under each of `LAYOUTS`; rank 0 leaves what they trained, noted
and logged in the file OUT.
"""

import os
import sys
from typing import Any

import lightning as L
import torch

import lightning_megatron
from lightning_megatron import MegatronStrategy, ShardingConfig
from tests.parity.jobs import quiet_trainer
from tests.parity.strangers import STRANGERS

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "HSDP": {"zero": ShardingConfig(stage=3, dp_replicate=2)},
    "tp inside": {"tp": 2, "zero": 1},
    "tp across": {"tp": 4},
    "pp across": {"pp": 2, "tp": 2, "num_microbatches": 1},
    "pp": {"pp": 4, "num_microbatches": 1},
}


def train(options: Any, name: str, **trainer_options: Any) -> Any:
    """Whole weights, notes and logged values."""
    L.seed_everything(5, verbose=False)
    module = STRANGERS[name]()
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(strategy, **trainer_options)
    trainer.fit(module)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return lightning_megatron.gather(module), module.notes, logged


def main() -> None:
    out, *names = sys.argv[1:]
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    found = {
        (layout, name): train(options, name, devices=devices, num_nodes=nodes)
        for layout, options in LAYOUTS.items()
        for name in names
    }
    if os.environ["RANK"] == "0":
        torch.save(found, out)


if __name__ == "__main__":
    main()
