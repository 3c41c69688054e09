"""The table that Lightning prints before training is about the whole module."""

import io
import logging
from typing import Any

import pytest
import rich.console
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary
from torch import nn

from lightning_megatron import ConfigError, PipelineSequential
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, loader, make_trainer


class Tied(Small):
    """Built on the meta device; its first and last item share a weight."""

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        self.net = PipelineSequential(
            start=nn.Linear(WIDTH, WIDTH),
            layers=[nn.Sequential(ColumnParallelLinear(WIDTH, 8), RowParallelLinear(8, WIDTH))],
            end=nn.Linear(WIDTH, WIDTH),
        )
        self.net.end.weight = self.net.start.weight
        self.net.layers[0].requires_grad_(False)
        self.head = nn.Identity()


class Mixed(Small):
    """Has 160 parameters in a mixture, 144 of them in four experts."""

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.net = PipelineSequential(layers=[MixtureOfExperts(WIDTH, 3, 4)])
            self.head = nn.Identity()


class Table(logging.Handler):
    """The lines of Lightning's plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def table_job(
    layout: dict[str, Any] | None, devices: int, again: bool = False, kind: type[Small] = Tied
) -> str:
    """What is printed, with the columns of the trunk."""
    log = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.addHandler(table := Table())
    log.setLevel(logging.INFO)
    callbacks: list[Callback] = [ModelSummary(max_depth=2)]
    module = kind()
    for _ in range(1 + again):
        table.text = ""
        trainer = make_trainer(
            layout, devices, max_steps=0, enable_model_summary=True, callbacks=callbacks
        )
        trainer.fit(module, loader())
    log.removeHandler(table)
    assert not {"_summary", "summarize"} & vars(callbacks[0]).keys()
    return table.text


def cells(table: str) -> dict[str, list[str]]:
    """Rows by the name of the part, or of the sum."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    found = {row[1]: row[2:] for row in rows if len(row) > 1}
    for line in table.splitlines():
        number, _, name = line.partition(" ")
        if name.strip().endswith("params"):
            found[name.strip()] = [number]
    return found


def summary_job(layout: dict[str, Any], devices: int) -> str:
    """The table of the second Trainer, and that a module must not be built anew for it."""
    table = table_job(layout, devices, again=True)
    module, layout = Tied(), {**layout, "gather_at_end": False}
    make_trainer(layout, devices, max_steps=0).fit(module, loader())
    del module.head
    with pytest.raises(ConfigError, match="Tied.configure_model builds layers anew.*nearest valid"):
        make_trainer(layout, devices, max_steps=0).fit(module, loader())
    return table


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ({"tp": 2}, {("40", "64")}),
        ({"pp": 2}, {("0", "20"), ("76", "96")}),  # the first stage, or the last
        ({"zero": 3}, {("38", "50")}),
    ],
    ids=["tp", "pp", "zero 3"],
)
def test_it_counts_the_whole_and_this_rank(
    pool: WorkerPool, layout: dict[str, Any], held: set[tuple[str, str]]
) -> None:
    table = pool.run(2, summary_job, layout, 2)[0]
    found = cells(table)
    layers, all_held = found["net.layers"][2], found["all"][2]
    assert (layers, all_held) in held
    assert found["net.layers"] == ["ModuleList", "76", layers, "train"]
    assert found["net"] == ["PipelineSequential", "100", all_held, "train"]
    assert found["all"] == ["Tied", "100", all_held, "-"]
    sums = [found[f"{kind} params"] for kind in ("Trainable", "Non-trainable", "Total")]
    assert sums == [["24"], ["76"], ["100"]]
    assert "lops" not in table.lower()


@pytest.mark.parametrize(("layout", "held"), [({"ep": 2}, "88"), ({"tp": 2}, "160")], ids=str)
def test_experts_are_counted_whole(pool: WorkerPool, layout: dict[str, Any], held: str) -> None:
    found = cells(pool.run(2, table_job, layout, 2, kind=Mixed)[0])
    assert found["all"] == ["Mixed", "160", held, "-"]


def test_where_every_rank_holds_all_it_is_lightnings_own() -> None:
    ours, plain = table_job({}, 1), table_job(None, 1)
    assert cells(ours) == {
        name: row[:-1] if len(row) > 1 else row for name, row in cells(plain).items()
    }
    assert "Total Flops" in plain
    assert "lops" not in ours.lower()


def test_the_rich_table_says_nothing_of_operations_that_nobody_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = rich.console.Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    trainer = make_trainer(
        {}, max_steps=0, enable_model_summary=True, callbacks=[RichModelSummary(max_depth=1)]
    )
    trainer.fit(Tied(), loader())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Total params: 100" in text
    assert "Total FLOPs" not in text
