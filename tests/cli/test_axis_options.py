"""A number of an axis in a file, and other options of this axis on the command line."""

from pathlib import Path

import pytest

from lightning_megatron.cli.train import with_degrees

RECIPE = "trainer: {strategy: {class_path: MegatronStrategy, init_args: {pp: 2, cp: 4, zero: 3}}}"
PP, CP, ZERO = (f"--trainer.strategy.{axis}" for axis in ("pp", "cp", "zero"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([f"{PP}.schedule=zbv"], [f"{PP}.degree=2", f"{PP}.schedule=zbv"]),
        (
            [f"{PP}.schedule=zbv", f"{PP}=4"],
            [f"{PP}.degree=2", f"{PP}.schedule=zbv", f"{PP}.degree=4"],
        ),
        ([f"{ZERO}.dp_replicate", "2"], [f"{ZERO}.stage=3", f"{ZERO}.dp_replicate", "2"]),
        ([f"{CP}.kind=ring"], [f"{CP}.degree=4", f"{CP}.kind=ring"]),
        ([f"{PP}", "4"], [f"{PP}", "4"]),
        (["--trainer.max_steps=1"], ["--trainer.max_steps=1"]),
    ],
    ids=["one option", "and another number", "zero", "cp", "a number alone", "neither"],
)
def test_the_number_of_a_file_stays(tmp_path: Path, given: list[str], expected: list[str]) -> None:
    (file := tmp_path / "recipe.yaml").write_text(RECIPE)
    for first in ([f"--config={file}"], ["--config", str(file)]):
        assert with_degrees([*first, *given]) == [*first, *expected]


@pytest.mark.parametrize(
    "text", ["trainer: {strategy: {init_args: {pp: {degree: 2}}}}", "trainer: 3", "a: [", ""]
)
def test_a_file_without_a_number_adds_nothing(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "recipe.yaml").write_text(text)
    for path in (file, tmp_path / "nowhere.yaml"):
        args = ["--config", str(path), f"{PP}.schedule=zbv"]
        assert with_degrees(args) == args
