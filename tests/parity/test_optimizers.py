"""Every optimizer trains in every layout what it trains in one process."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import GradientMonitor, gather
from lightning_megatron.optim.adafactor import Adafactor
from lightning_megatron.optim.adamw import AdamW
from lightning_megatron.optim.clip import UnitClip
from lightning_megatron.optim.lion import Lion
from lightning_megatron.optim.muon import Muon
from lightning_megatron.optim.param_groups import muon_groups
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.checkpoint.test_experts import Mixture
from tests.parity import prove, reference, users_optimizers
from tests.parity.jobs import Outcome, ParityModule, merge_stages, quiet_trainer, whole_parameters
from tests.parity.reference import Architecture, Data

STEPS = 3
"""The first has no moments, and a run is interrupted before the last."""
OPTIMIZERS: dict[str, Callable[[L.LightningModule], Optimizer]] = {
    "lion": lambda m: Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
    "adafactor": lambda m: Adafactor(m.parameters(), lr=3e-2, weight_decay=0.1),
    "muon": lambda m: Muon(muon_groups(m, 0.1), lr=1e-2, eps=1e-5),
    "muon, bfloat16": lambda m: Muon(
        muon_groups(m, 0.1), lr=1e-2, eps=1e-5, scale="spectral", ns_dtype=torch.bfloat16
    ),
    "torch adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=3e-2),
    "torch sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
}
OURS = ("adafactor", "muon")
COUPLED = (*OURS, "torch adafactor")
"""An element's update depends on others, which may lie elsewhere."""
NARROW: dict[str, Callable[[L.LightningModule], Optimizer]] = {
    "adamw": lambda m: AdamW(m.parameters(), lr=1e-3, eps=1e-5, state_dtype="int8"),
    "narrow lion": lambda m: Lion(m.parameters(), lr=1e-3, state_dtype="bfloat16"),
    "narrow muon": lambda m: Muon(muon_groups(m, 0.1), lr=1e-3, eps=1e-5, state_dtype="int8"),
}
"""In float32."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"tp": 2}),
    "tp=2 sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "dp=2 zero 0": (2, {"zero": 0}),
    "dp=2 zero 1": (2, {"zero": 1}),
    "dp=2 zero 3": (2, {"zero": 3}),
    "dp=4 hybrid zero 2": (4, {"zero": ShardingConfig(stage=2, min_numel=1, dp_replicate=2)}),
    "tp=2 dp=2 zero 3": (4, {"tp": 2, "zero": 3}),
    "cp=2 dp=2 zero 1": (4, {"cp": 2, "zero": 1}),
}


OF_ALL = ("tp=2",)
"""Layouts of all optimizers; the others, of those that are coupled."""
GOES_ON = {
    "tp=2 dp=2 zero 3": "cp=2 dp=2 zero 1",
    "cp=2 dp=2 zero 1": "pp=2",
    "pp=2": "dp=2 zero 3",
}
THOROUGH = (
    *("tp=2 dp=2 zero 3", "cp=2 dp=2 zero 1", "tp=2 sequence parallel"),
    "dp=4 hybrid zero 2",
)
BY_ANOTHER = ("dp=2 zero 3",)
"""Layouts in which another run goes on: only `make test-all` begins there, too."""


class Chosen(ParityModule):
    """The parity module with one of the optimizers."""

    def __init__(self, name: str, architecture: Architecture) -> None:
        super().__init__(architecture, Data(steps=STEPS))
        self.name = name

    def configure_optimizers(self) -> Optimizer:
        return (OPTIMIZERS | NARROW)[self.name](self)


class Interruption(L.Callback):
    """Saves in the middle of the run, or leaves it alone."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.path and trainer.global_step == STEPS - 1:
            trainer.save_checkpoint(self.path)


def run_once(
    strategy_options: dict[str, Any],
    name: str,
    load: str = "",
    save: str = "",
    architecture: Architecture = "llama",
) -> Outcome:
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**strategy_options)
    module, precision = Chosen(name, architecture), "64-true"
    if name in NARROW:
        module.model.float()
        precision = "32-true"
    callback = Interruption(f"{save}/{name}" if save else "")
    trainer = quiet_trainer(
        strategy, gradient_clip_val=reference.CLIP, callbacks=[callback], precision=precision
    )
    trainer.fit(module, ckpt_path=f"{load}/{name}" if load else None)
    assert trainer.global_step == STEPS
    return Outcome(weights=whole_parameters(module.model, strategy.topology))


def job(
    strategy_options: dict[str, Any], names: Iterable[str] = tuple(OPTIMIZERS), **options: Any
) -> dict[str, Outcome]:
    return {name: run_once(strategy_options, name, **options) for name in names}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    """The runs of one process."""
    found: dict[str, Outcome] = pool.run(1, job, {})[0]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH + BY_ANOTHER))
        for name in LAYOUTS
    ],
)
def test_trains_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], tmp_path: Path, layout: str
) -> None:
    """And two runs go on under other layouts from what they have saved."""
    world, options = LAYOUTS[layout]
    after = GOES_ON.get(layout)
    files = {} if after is None else {"save": str(tmp_path)}
    names = tuple(OPTIMIZERS) if layout in OF_ALL else COUPLED
    expected = {name: alone[name] for name in names}
    check(pool.run(world, job, options, names, **files), expected)
    if after is not None:
        world, options = LAYOUTS[after]
        check(pool.run(world, job, options, names, load=str(tmp_path)), expected)


EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep=2 tp=2 zero 1": (2, {"ep": 2, "tp": 2}),
    "ep=2 zero 3": (4, {"ep": 2, "zero": 3}),
    "ep=4 tp=2 zero 2": (8, {"ep": 4, "tp": 2, "zero": 2}),
    "ep=2 zero 0": (4, {"ep": 2, "zero": 0}),
    "ep=4 tp=2 zero 3": (8, {"ep": 4, "tp": 2, "zero": 3}),
    "ep=2 hybrid zero 1": (4, {"ep": 2, "zero": ShardingConfig(stage=1, dp_replicate=2)}),
    "tp=2 zero 1": (2, {"tp": 2}),
}
EXPERTS_GO_ON = {
    "ep=2 tp=2 zero 1": "tp=2 zero 1",
    "ep=4 tp=2 zero 2": "ep=2 zero 0",
    "ep=4 tp=2 zero 3": "tp=2 zero 1",
}


@pytest.fixture(scope="module")
def experts_alone(pool: WorkerPool) -> dict[str, Outcome]:
    """The runs of one process with a mixture of experts."""
    found: dict[str, Outcome] = pool.run(1, job, {}, COUPLED, architecture="mixture")[0]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            name,
            marks=[pytest.mark.thorough] * (name != "ep=2 zero 3"),
        )
        for name in EXPERTS
    ],
)
def test_trains_experts_as_in_one_process(
    pool: WorkerPool, experts_alone: dict[str, Outcome], tmp_path: Path, layout: str
) -> None:
    """Each expert's matrices are orthogonalised, and scaled by rows and columns, by themselves."""
    world, options = EXPERTS[layout]
    after = EXPERTS_GO_ON.get(layout)
    files = {} if after is None else {"save": str(tmp_path)}
    names = COUPLED if layout != "ep=2 zero 3" else OURS
    expected = {name: experts_alone[name] for name in names}
    mixture: dict[str, Any] = {"architecture": "mixture"}
    check(pool.run(world, job, options, names, **mixture, **files), expected)
    if after is not None:
        world, options = EXPERTS[after]
        check(pool.run(world, job, options, names, **mixture, load=str(tmp_path)), expected)


class Uneven(Mixture):
    """Four matrices `[4, 6]` divide along their rows over four ranks; those of `[6, 4]` do not."""

    def configure_optimizers(self) -> Optimizer:
        return Muon(muon_groups(self, 0.1), lr=1e-2, eps=1e-5)


def uneven_job(options: dict[str, Any], dp: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    tokens = torch.randint(12, (24, 6), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens), batch_size=8 // dp)
    trainer = quiet_trainer(MegatronStrategy(**options), use_distributed_sampler=True)
    trainer.fit(module := Uneven(), loader)
    return gather(module)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks_without_a_matrix_of_some_stacks(pool: WorkerPool, zero: int) -> None:
    expected = pool.run(1, uneven_job, {}, 1)[0]
    found = pool.run(8, uneven_job, {"ep": 2, "zero": zero}, 8)[0]
    for name, value in expected.items():
        assert relative(found[name], value) <= 1e-10, name


class RowNorms(L.Callback):
    """Largest share of a row's norm that the norm of its gradient has, over all experts."""

    def __init__(self) -> None:
        self.largest = 0.0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for layer in module.model.trunk.layers:
            for p in layer.mlp.experts.parameters():
                shares = p.grad.norm(dim=-1) / p.norm(dim=-1).clamp(min=1e-3)
                self.largest = max(self.largest, float(shares.max()))


def clipping_job(options: dict[str, Any]) -> Outcome:
    L.seed_everything(1, verbose=False)
    strategy, norms = MegatronStrategy(**options), RowNorms()
    module = ParityModule("mixture", Data(steps=STEPS))
    monitor = GradientMonitor(UnitClip(ratio=1e-3, exclude=()))
    alone = not options  # elsewhere the norm of a part of a weight is refused
    trainer = quiet_trainer(strategy, callbacks=[monitor, norms] if alone else [monitor])
    trainer.fit(module)
    weights = whole_parameters(module.model, strategy.topology)
    return Outcome(weights=weights, extra=norms.largest)


def test_clips_the_rows_of_each_expert(pool: WorkerPool) -> None:
    alone = pool.run(1, clipping_job, {})[0]
    assert 0.9e-3 < alone.extra <= 1.0001e-3
    for world, options in ((2, {"ep": 2, "zero": 0}), (2, {"ep": 2, "tp": 2, "zero": 2})):
        weights = merge_stages(pool.run(world, clipping_job, options))
        for name, expected in alone.weights.items():
            assert relative(weights[name], expected) <= 1e-10, name


def narrow_names(case: str) -> list[str]:
    """Of a mixture, by default, the one that takes experts by themselves."""
    return ["narrow muon"] if case == "mixture" else list(NARROW)


NARROW_RUNS: dict[str, tuple[Architecture, list[tuple[int, dict[str, Any], dict[str, str]]]]] = {
    "llama": (
        "llama",
        [(2, {"zero": 1}, {"save": "saved"}), (2, {"tp": 2}, {"load": "saved"})],
    ),
    "mixture": (
        "mixture",
        [
            (2, {"ep": 2, "tp": 2}, {"save": "saved"}),
            (2, {"ep": 2, "zero": 0}, {"load": "saved"}),
        ],
    ),
    "llama, tp and zero 1": (
        "llama",
        [
            (4, {"tp": 2, "zero": 1}, {"save": "saved"}),
            (2, {"zero": 0}, {"load": "saved"}),
            LAYOUTS["pp=2"] + ({},),
        ],
    ),
    "mixture, ep over tp": (
        "mixture",
        [
            (4, {"ep": 4, "tp": 2}, {"save": "saved"}),
            (2, {"ep": 2, "zero": 0}, {"load": "saved"}),
        ],
    ),
}
"""Architecture, and processes, layout and the directory that a run saves to or goes on from."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case != "llama")) for case in NARROW_RUNS],
)
def test_narrow_state_is_near_and_equal_on_copies(
    pool: WorkerPool, tmp_path: Path, case: str
) -> None:
    architecture, runs = NARROW_RUNS[case]
    names = narrow_names(case)
    expected = pool.run(1, job, {}, names, architecture=architecture)[0]
    for world, options, files in runs:
        where = {kind: str(tmp_path / name) for kind, name in files.items()}
        by_rank = pool.run(world, job, options, names, architecture=architecture, **where)
        for name, outcome in expected.items():
            weights = merge_stages([found[name] for found in by_rank])  # copies equal to the bit
            for key, weight in outcome.weights.items():
                # Three steps of 1e-3 each, against weights of 0.3. Of a sign near nothing rounding
                # decides, and few tokens of an expert make small moments.
                error = (weights[key] - weight).abs()
                measure = error.mean() if name == "narrow lion" else error.max()
                assert float(measure) < (1e-3 if "experts" in key else 6e-4), (name, key)
                assert float(error.mean()) < 6e-5, (name, key)


def check(by_rank: list[dict[str, Outcome]], alone: dict[str, Outcome]) -> None:
    for name, expected in alone.items():
        weights = merge_stages([found[name] for found in by_rank])
        for key, weight in expected.weights.items():
            error = relative(weights[key], weight)
            assert error <= 1e-10, f"{name}, {key}: relative error {error:.1e}"


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def part_of_run(
    kind: type[L.LightningModule], options: dict[str, Any] | str, save: str, load: str | None
) -> dict[str, Tensor]:
    """Train one epoch and save, or go on for another."""
    L.seed_everything(5, verbose=False)
    module = kind().double()
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = prove.quiet_trainer(strategy, max_epochs=2 if load or not save else 1)
    trainer.fit(module, ckpt_path=load)
    if save:
        trainer.save_checkpoint(save)
    return gather(module)


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        (users_optimizers.LooksAhead, {"zero": 1}, {"pp": 2, "num_microbatches": 1}),
        (users_optimizers.SharpnessByHand, {"tp": 2}, {"zero": 3}),
        pytest.param(
            users_optimizers.NormOfAll,
            *({"pp": 2, "num_microbatches": 1}, {"pp": 2, "num_microbatches": 1}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_state_inside_of_optimizers_goes_on_under_another_layout(
    pool: WorkerPool, tmp_path: Path, kind: Any, first: Any, then: Any
) -> None:
    [alone] = pool.run(1, part_of_run, kind, "auto", "", None)
    pool.run(2, part_of_run, kind, first, str(tmp_path / "half"), None)
    for found in pool.run(2, part_of_run, kind, then, "", str(tmp_path / "half")):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
