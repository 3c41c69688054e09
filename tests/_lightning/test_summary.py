"""Lightning's summary asks for what `_lightning.summary` answers."""

import logging
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from typing_extensions import override

from lightning_megatron._lightning.summary import (
    Summary,
    format_table,
    replace_printing,
    replace_summary,
    restore_summary,
    summary_depth,
)
from tests._lightning.running import Module, make_trainer


class Ours(Summary):
    total_parameters = 1200
    trainable_parameters = 1000
    model_size = 3.5
    total_training_modes = {"train": 2, "eval": 1}
    total_flops = 0

    @override
    def columns(self) -> list[tuple[str, list[str]]]:
        return [("Name", ["a part"]), ("Params", ["1.2 K"])]


def test_replace_summary_and_restore_summary(caplog: pytest.LogCaptureFixture) -> None:
    callback = ModelSummary()
    asked: list[Any] = []

    def make(*args: Any) -> Ours:
        asked.append(args)
        return Ours()

    replace_summary(callback, make)
    trainer, module = make_trainer(callback), Module()
    with caplog.at_level(logging.INFO, "lightning.pytorch.callbacks.model_summary"):
        trainer.fit(module)
    assert asked == [(trainer, module)]
    assert "a part" in caplog.text
    restore_summary(callback)
    assert not {"_summary", "summarize"} & vars(callback).keys()


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_replace_printing(kind: type[ModelSummary]) -> None:
    callback = kind()
    shown: list[Any] = []
    replace_summary(callback, lambda trainer, module: Ours())
    replace_printing(callback, lambda *args, **options: shown.append((args, options)))
    make_trainer(callback).fit(Module())
    [(args, options)] = shown
    assert args == (Ours().columns(), 1200, 1000, 3.5, {"train": 2, "eval": 1})
    assert options["total_flops"] == 0


def test_summary_depth() -> None:
    assert summary_depth(ModelSummary(max_depth=3)) == 3


def test_format_table() -> None:
    table = format_table(1200, 1000, 3.5, {"train": 2, "eval": 1}, 0, *Ours().columns())
    assert "a part" in table
    assert "total flops" in table.lower()  # the line that is left out where nobody has counted
