"""How a run begins: names, command lines, and several Trainers in one process.

The launchers are in `tests/launched`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_megatron import MegatronStrategy, PipelineConfig, ShardingConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import (
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    merged,
    weights,
)


def test_the_strategy_is_known_by_name() -> None:
    trainer = pl.Trainer(strategy="megatron", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, MegatronStrategy)
    assert trainer.strategy.options.tp == 1


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
def test_lightning_cli_parses_every_option() -> None:
    """Plain values and nested dataclasses alike."""
    options = {
        "tp": "1",
        "pp.degree": "1",
        "pp.schedule": "gpipe",
        "pp.partition": "[2, 2]",
        "zero.stage": "3",
        "zero.dp_replicate": "1",
        "zero.min_numel": "10",
        "zero.wrap": "[Linear]",
        "sequence_parallel": "false",
        "num_microbatches": "2",
        "activations.recompute": "full",
        "compile.scope": "block",
        "connection.timeout_s": "20",
    }
    args = ["--trainer.strategy=MegatronStrategy", "--trainer.accelerator=cpu"]
    args += ["--trainer.devices=1", "--trainer.logger=false"]
    args += [f"--trainer.strategy.{name}={value}" for name, value in options.items()]
    cli = LightningCLI(
        Small, args=args, run=False, save_config_callback=None, seed_everything_default=False
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    given = strategy.options
    assert given.num_microbatches == 2
    assert given.pp == PipelineConfig(degree=1, schedule="gpipe", partition=[2, 2])
    assert given.zero == ShardingConfig(stage=3, wrap=["Linear"], min_numel=10)
    assert given.activations.recompute == "full"
    assert given.compile.scope == "block"
    assert strategy._connection.timeout_s == 20


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
def test_lightning_cli_takes_numbers(tmp_path: Path) -> None:
    """On the command line and in files, where a later option of an axis joins those before."""
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {strategy: {class_path: MegatronStrategy, init_args: {pp: 2}}}")
    later = (
        f"--config={file}",
        "--trainer.strategy.pp.degree=4",
        "--trainer.strategy.pp.schedule=zbv",
    )
    number = "--trainer.strategy=MegatronStrategy", "--trainer.strategy.pp=2"
    for args, pp in (
        ([f"--config={file}"], PipelineConfig(degree=2)),
        (number, PipelineConfig(degree=2)),
        (later, PipelineConfig(degree=4, schedule="zbv")),
    ):
        cli = LightningCLI(
            Small,
            args=[*args, "--trainer.accelerator=cpu", "--trainer.logger=false"],
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
        )
        assert cli.trainer.strategy.options.pp == pp


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
def test_lightning_cli_names_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--trainer.strategy=MegatronStrategy", "--trainer.strategy.tpp=2"]
    with pytest.raises(SystemExit) as error:
        LightningCLI(
            Small, args=args, run=False, save_config_callback=None, seed_everything_default=False
        )
    assert error.value.code == 2
    assert "tpp" in capsys.readouterr().err


def two_layouts(
    first: Mapping[str, Any], second: Mapping[str, Any], devices: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = []
    for layout in (first, second):
        module = Small()
        data = loader(dp=dp_of(devices, layout))
        make_trainer(layout, devices, gradient_clip_val=0.1).fit(module, data)
        results.append(weights(module))
    return results[0], results[1]


def fit_plain() -> dict[str, Tensor]:
    module = Small()
    make_trainer(None, 1, gradient_clip_val=0.1).fit(module, loader())
    return weights(module)


@pytest.fixture(scope="module")
def trained_twice(pool: WorkerPool) -> Any:
    return pool.run(1, fit_plain_twice)[0]


@pytest.mark.parametrize(
    ("devices", "first", "second"),
    [
        (2, {"pp": 2}, {"zero": 3}),
        pytest.param(4, {"tp": 2}, {"pp": 2, "zero": 0}, marks=pytest.mark.thorough),
    ],
)
def test_two_trainers_with_different_layouts_do_not_see_each_other(
    pool: WorkerPool, devices: int, first: dict[str, Any], second: dict[str, Any]
) -> None:
    [plain] = pool.run(1, fit_plain)
    results = pool.run(devices, two_layouts, first, second, devices)
    for number in (0, 1):
        assert_same(merged([result[number] for result in results]), plain)


def fit_twice(layouts: list[dict[str, Any]], devices: int) -> dict[str, Tensor]:
    module = Small()
    for layout in layouts:
        make_trainer(layout, devices).fit(module, loader(dp=dp_of(devices, layout)))
    return weights(module)


def fit_plain_twice() -> dict[str, Tensor]:
    module = Small()
    for _ in range(2):
        make_trainer(None, 1).fit(module, loader())
    return weights(module)


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, pytest.param({"zero": 1}, marks=pytest.mark.thorough), {"zero": 3}]
)
def test_a_module_goes_on_under_a_second_trainer_of_the_same_layout(
    pool: WorkerPool, trained_twice: Any, layout: dict[str, Any]
) -> None:
    assert_same(merged(pool.run(2, fit_twice, [layout, layout], 2)), trained_twice)


def test_a_module_that_is_whole_may_change_its_layout(pool: WorkerPool, trained_twice: Any) -> None:
    assert_same(merged(pool.run(2, fit_twice, [{"zero": 1}, {"zero": 3}], 2)), trained_twice)


def changes_job() -> list[str]:
    """What two Trainers of other layouts say of a module, where a layout spreads it."""
    pipeline: dict[str, Any] = {"pp": 2}
    changes: list[Any] = [
        (pipeline, {"zero": 1}),
        (pipeline, {"tp": 2}),
        ({"zero": 3}, {"zero": 2}),
    ]
    said = []
    for first, other in changes:
        with pytest.raises(ConfigError, match="earlier Trainer") as error:
            fit_twice([{**each, "gather_at_end": False} for each in (first, other)], 2)
        said.append(str(error.value))
    return said


def test_a_module_cannot_change_its_layout(pool: WorkerPool) -> None:
    one, other = pool.run(2, changes_job)
    assert one == other
