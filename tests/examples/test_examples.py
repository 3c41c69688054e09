"""The scripts of examples/, run as by `torchrun`, and what they say about layouts."""

import runpy
from pathlib import Path

import pytest

from lightning_megatron.testing import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str) -> dict[str, float]:
    """Metrics that the script of this rank ends with."""
    metrics = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](args)
    return {name: float(value) for name, value in metrics.items()}


def short(batches: int) -> dict[str, str]:
    """Environment in which Lightning takes so many batches an epoch, and shows no progress."""
    return {
        "PL_TRAINER_LIMIT_TRAIN_BATCHES": str(batches),
        "PL_TRAINER_ENABLE_PROGRESS_BAR": "False",
        "PL_TRAINER_ENABLE_MODEL_SUMMARY": "False",
    }


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {"own_module", "finetune_hugging_face", "contrastive"}
    assert all(len(path.read_text().splitlines()) <= 90 for path in EXAMPLES.glob("*.py"))


def test_own_module_has_the_same_loss_and_accuracy_under_two_layouts(pool: WorkerPool) -> None:
    ranks = pool.run(4, run, "own_module", env=short(12))
    [alone] = pool.run(1, run, "own_module", "--tp", "1", "--pp", "1", env=short(12))
    for metrics in ranks:
        assert metrics == pytest.approx(alone, rel=1e-3)
    assert alone["accuracy"] > 0.95


def test_a_hugging_face_model_learns_under_zero_3(pool: WorkerPool) -> None:
    pytest.importorskip("transformers")
    metrics = pool.run(2, run, "finetune_hugging_face", "--steps", "12")
    assert metrics[0]["train_loss"] < 4.0  # of 5.5, where guessing is


def test_contrastive_loss_is_that_of_one_device(pool: WorkerPool) -> None:
    two = pool.run(2, run, "contrastive", env=short(8))
    [one] = pool.run(1, run, "contrastive", "--devices", "1", env=short(8))
    assert two[0]["found"] > 0.9
    assert two[0]["train_loss"] == pytest.approx(one["train_loss"], abs=0.1)
