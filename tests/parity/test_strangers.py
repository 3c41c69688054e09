"""What a user may write gives one process's numbers under every layout, or an error of ours.

Each module runs under each layout, and either everything it trained, noted and logged is what plain
Lightning gives in one process, or the run ends in an error that says what to write instead. A new
way to spread a model belongs in `LAYOUTS`, a new habit in `tests.parity.strangers`.
"""

from typing import Any

import lightning as L
import pytest
import torch

import lightning_megatron
from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import quiet_trainer
from tests.parity.strangers import STRANGERS

TOLERANCE = 1e-10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "num_microbatches": 1}),
    "all": (8, {"tp": 2, "pp": 2, "zero": 1, "num_microbatches": 1}),
}
REFUSED: dict[str, dict[str, str]] = {}
Found = tuple[dict[str, torch.Tensor], list[float], dict[str, float]]


def job(options: dict[str, Any] | str, names: list[str]) -> dict[str, Found | str]:
    """What each module trained, noted and logged, or how its run ended."""
    found: dict[str, Found | str] = {}
    for name in names:
        L.seed_everything(5, verbose=False)
        module = STRANGERS[name]()
        strategy = options if isinstance(options, str) else MegatronStrategy(**options)
        trainer = quiet_trainer(strategy, max_epochs=2)
        trainer.fit(module)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found[name] = lightning_megatron.gather(module), module.notes, logged
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    found: dict[str, Found] = pool.run(1, job, "auto", list(STRANGERS))[0]
    return found
