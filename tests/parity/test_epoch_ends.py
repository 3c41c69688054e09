"""What a module computes at the end of an epoch is true on every stage of a pipeline."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.strategy.stage_state import _meant_by_both
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.epoch_ends import (
    WIDTH,
    AfterBatches,
    BetweenBatches,
    ByHand,
    NamedByStage,
    NotedByRank,
    ReadByName,
    ReadByOther,
    WithFunctions,
    WithMeter,
)
from tests.parity.jobs import quiet_trainer

Found = tuple[dict[str, Tensor], dict[str, float], dict[str, Any]]


def job(options: dict[str, Any] | str, directory: str) -> Found:
    """Weights, logged values and decisions of a run with callbacks that monitor a value."""
    L.seed_everything(3, verbose=False)
    module = ByHand()
    best = ModelCheckpoint(directory, "{epoch}-{val:.6f}-{acc:.4f}", "val", save_top_k=1)
    stop = EarlyStopping("val", min_delta=0.02, patience=0)
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(
        strategy, max_epochs=6, enable_checkpointing=True, callbacks=[best, stop]
    )
    callbacks = len(trainer.callbacks)
    trainer.fit(module)
    assert len(trainer.callbacks) == callbacks
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    decisions = {
        "epochs": trainer.current_epoch,
        "best": Path(best.best_model_path).name,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "temperature": module.temperature,
    }
    return lightning_megatron.gather(module), logged, decisions


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What plain Lightning gives."""
    found: Found = pool.run(1, job, "auto", str(tmp_path_factory.mktemp("plain")))[0]
    assert 1 < found[2]["epochs"] < 6, "early stopping has to decide something"
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, {"pp": 2}),
    "V": (2, {"pp": PipelineConfig(degree=2, schedule="zbv", partition=[1, 1, 1, 1])}),
    "pp and tp": (4, {"pp": 2, "tp": 2, "num_microbatches": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epoch_ends_are_those_of_plain_lightning(
    pool: WorkerPool, alone: Found, tmp_path: Path, layout: str
) -> None:
    weights, logged, decisions = alone
    without_logits = {name: value for name, value in logged.items() if name != "logits"}
    ranks, options = LAYOUTS[layout]
    found = pool.run(ranks, job, options, str(tmp_path))
    for ours, ours_logged, ours_decisions in found:
        assert ours_decisions == decisions
        # A MeanMetric adds in float32.
        assert ours_logged.pop("logits") == pytest.approx(logged["logits"], abs=1e-7)
        assert ours_logged == pytest.approx(without_logits, abs=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


class CallsTrunk(ByHand):
    def on_train_epoch_end(self) -> None:
        self.trunk(torch.zeros(1, WIDTH, dtype=torch.float64))


def trunk_job() -> None:
    """Call the trunk where it cannot be."""
    quiet_trainer(MegatronStrategy(pp=2)).fit(CallsTrunk())


def test_a_trunk_in_parts_is_not_called_outside_of_a_step(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"called outside of a step.*train with pp=1"):
        pool.run(2, trunk_job)


Logged = tuple[list[dict[str, float]], list[str]]


class LastValues(L.Callback):
    """What is logged after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        logged = trainer.callback_metrics
        self.seen.append({k: float(logged[k]) for k in BetweenBatches.LOGGED if k in logged})


def between_job(options: dict[str, Any] | str, directory: str) -> Logged:
    """Logged values after each batch, and checkpoints that one of them names and chooses."""
    L.seed_everything(3, verbose=False)
    values = LastValues()
    best = ModelCheckpoint(
        directory, "{step}-{running:.6f}", "running", every_n_train_steps=2, save_top_k=2
    )
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(
        strategy, max_epochs=2, enable_checkpointing=True, callbacks=[values, best]
    )
    trainer.fit(BetweenBatches())
    return values.seen, sorted(Path(path).name for path in best.best_k_models)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_after_a_batch_see_what_the_step_has_filled_on_every_stage(
    pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    [(values, names)] = pool.run(1, between_job, "auto", str(tmp_path / "plain"))
    assert len({tuple(v.items()) for v in values}) == len(values) == 6
    ranks, options = LAYOUTS[layout]
    for ours, ours_names in pool.run(ranks, between_job, options, str(tmp_path / "ours")):
        assert ours_names == names
        # Numbers that are logged as such are float32.
        assert ours == [pytest.approx(expected, abs=1e-5) for expected in values]


FILLING: tuple[type[AfterBatches], ...] = (
    NamedByStage,
    WithMeter,
    WithFunctions,
    ReadByOther,
    ReadByName,
)


def noted_by(kind: type[AfterBatches], options: dict[str, Any] | str) -> list[Any]:
    """What hooks around the batches of a run have noted."""
    L.seed_everything(3, verbose=False)
    module = kind()
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    quiet_trainer(strategy).fit(module)
    return module.noted


def noted_by_each(options: str) -> dict[str, list[Any]]:
    return {kind.__name__: noted_by(kind, options) for kind in FILLING}


@pytest.fixture(scope="module")
def noted_alone(pool: WorkerPool) -> dict[str, list[Any]]:
    """The same in plain Lightning."""
    found: dict[str, list[Any]] = pool.run(1, noted_by_each, "auto")[0]
    return found


@pytest.mark.parametrize("kind", FILLING)
def test_hooks_after_a_batch_read_what_steps_fill_in_any_way(
    pool: WorkerPool, noted_alone: dict[str, list[Any]], kind: type[AfterBatches]
) -> None:
    expected = noted_alone[kind.__name__]
    assert len(set(expected)) == 3
    for noted in pool.run(2, noted_by, kind, {"pp": 2}):
        assert noted == pytest.approx(expected, abs=1e-12)


def test_what_only_hooks_fill_stays_that_of_each_rank(pool: WorkerPool) -> None:
    assert pool.run(2, noted_by, NotedByRank, {"pp": 2}) == [[0] * 3, [1] * 3]


class Unshareable(ByHand):
    """Hooks read a container that holds, further in, what no process can give to another."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Any]] = {"val": []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = float(self.trunk(batch[0]).sum())
        self.calls["val"].append(lambda: value)

    def on_validation_epoch_end(self) -> None:
        self.log("val", sum(call() for call in self.calls["val"]))


def unshareable_job() -> None:
    quiet_trainer(MegatronStrategy(pp=2), max_epochs=1).fit(Unshareable())


def test_what_hooks_use_and_nothing_can_carry_is_refused_by_name(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"self\.calls: steps fill and hooks use"):
        pool.run(2, unshareable_job)


def test_names_that_code_makes_up_meet_all_that_other_code_mentions() -> None:
    literal, made_up = frozenset({"meter", "log"}), frozenset({"getattr", "loss"})
    assert _meant_by_both(literal, frozenset({"meter", "loss"})) == {"meter"}
    assert _meant_by_both(literal, made_up) == _meant_by_both(made_up, literal) == literal
