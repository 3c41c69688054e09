"""The page says what happened, however the run ended, and opens anywhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli import main
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.event_log import EventLogWriter
from lightning_megatron.monitoring.report.bars import time_spent
from lightning_megatron.monitoring.report.curves import thin_out, ticks
from lightning_megatron.monitoring.report.page import page, summarize
from lightning_megatron.monitoring.report.run_history import (
    RankFigures,
    RunHistory,
    read_run_history,
)
from lightning_megatron.monitoring.report.tables import ranks_table
from lightning_megatron.monitoring.report.text import duration, number, size
from lightning_megatron.run_log.events import event_file
from tests.checkpoint.damage import flip, save
from tests.monitoring.report.made_run import START, write_run
from tests.strategy.small import Small, loader, make_trainer

VOID = {"meta", "br"}


class WellFormed(HTMLParser):
    """Checks that all elements are closed, and keeps the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHistory]:
    """Of 10,000 steps of 4 ranks."""
    directory = tmp_path_factory.mktemp("long") / "run-7"
    write_run(directory, steps=10_000, ranks=4)
    yield read_run_history(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def long_page(history: RunHistory) -> str:
    return page(history)


def test_the_page_of_a_long_run(long_page: str) -> None:
    text = long_page
    assert len(text.encode()) < 200_000
    parsed = WellFormed(text)
    said = " ".join(" ".join(parsed.text).split())
    assert not parsed.tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?://|src=|@import|url\(", text)
    for expected in (
        "✓ Completed at step 10,000.",
        "2 restarts, 2,000 steps lost",
        "run-7",
        "attempt 3",
        "✕ no end",
        "2, then 3 more",
        "HangError: rank 2 hangs in forward",
        "the loss is NaN <b>on rank 1</b>",  # as text, not as an element
        "(1 not finite and left out)",
        "▲ 8.5 %",
        "▲ 2.40 GiB",
        "No space left on device: needs 1.2 GB",
        "perf/mfu < 0.5 for 20",
        "password=[redacted]",
        "pp=2, tp=2",
    ):
        assert expected in said, expected
    assert "hunter2" not in text


def test_the_times_add_up(history: RunHistory) -> None:
    times = time_spent(history)
    for attempt, following in zip(times, [*times[1:], None], strict=True):
        end = history.end - START if following is None else following.begin
        assert sum(attempt.parts.values()) == pytest.approx(end - attempt.begin, rel=1e-3)
    assert times[0].parts["start"] == pytest.approx(6)
    assert times[0].parts["gap"] == pytest.approx(9, abs=0.1)
    assert history.ledger.goodput(history.end) == pytest.approx(
        sum(t.parts["kept"] for t in times) / (history.end - START), rel=1e-3
    )
    assert sum(p.redone for p in history.points) == 2000
    assert [(m.number, m.kind, m.step, m.ranks[:1]) for m in history.incidents] == [
        (1, "silent", 4000, [1]),
        (2, "save", 5000, []),
        (3, "hang", 7000, [2]),
        (4, "failed", 7000, [2]),
        (5, "fault", 8000, [1]),
    ]
    assert history.ranks[1].steps == 11_999
    assert (history.ranks[3].host, history.ranks[3].share("data")) == (
        "node-1",
        pytest.approx(0.085, 0.1),
    )


@pytest.mark.parametrize(
    ("end", "later", "verdict"),
    [
        ("completed", 1e6, "✓ Completed at step 40."),
        (None, 5.0, "… Running at step 40."),
        (None, 500.0, "✕ Stopped without an end: killed, or standing still at step 40."),
        ("interrupted", 1.0, "■ Interrupted at step 40."),
        ("failed", 1.0, "✕ Failed at step 40."),
    ],
)
def test_how_it_ended(tmp_path: Path, end: str | None, later: float, verdict: str) -> None:
    write_run(tmp_path, steps=40, end=end)
    now = read_run_history(tmp_path).end + later
    history = read_run_history(tmp_path, now=now)
    assert verdict in " ".join(WellFormed(page(history)).text)
    assert len(history.incidents) == 5 + (end != "completed" and later != 5.0)


def test_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Killed(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

    child = os.fork()
    if child == 0:
        try:
            make_trainer(None, callbacks=[EventLogWriter(tmp_path)]).fit(Killed(), loader())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with event_file(tmp_path, 0).open("a") as file:
        file.write('{"v":1,"t":17')  # as a machine that lost its power may leave it
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "Running at step 3." in capsys.readouterr().out
    history = read_run_history(tmp_path, now=read_run_history(tmp_path).end + 1000)
    assert [(p.step, p.redone) for p in history.points] == [(1, False), (2, False), (3, False)]
    assert [(m.kind, m.step) for m in history.incidents] == [("silent", 3)]
    assert "✕ Stopped without an end" in " ".join(WellFormed(page(history)).text)


def test_which_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no events/rank_*.jsonl; nearest valid" in capsys.readouterr().err
    write_run(tmp_path, steps=40, run="older")
    older = event_file(tmp_path, 0).read_text()
    write_run(tmp_path, steps=60, run="newer")
    later = event_file(tmp_path, 0).read_text().replace('"t":17600', '"t":17700')
    event_file(tmp_path, 0).write_text(older + later)
    history = read_run_history(tmp_path)
    assert (history.run, history.other_runs, history.points[-1].step) == ("newer", ["older"], 60)
    assert read_run_history(tmp_path, "older").points[-1].step == 40
    assert read_run_history(tmp_path, "older").ledger.rank == 0
    event_file(tmp_path, 0).write_text(older)
    found = read_run_history(tmp_path, "newer")
    assert (found.ledger.rank, found.points[-1].step) == (1, 60)
    assert main(["report", str(tmp_path), "--run", "none"]) == 2
    assert "nearest valid: " in capsys.readouterr().err
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "page.html")]) == 2
    with pytest.raises(ConfigError, match="run=x"):
        read_run_history(tmp_path, "x")


def test_what_stands_on_the_disk(tmp_path: Path) -> None:
    write_run(tmp_path, steps=40)
    places = tmp_path / "runs"
    for step in (20, 24, 28, 32, 36, 40):
        save(places / f"step={step}.ckpt", step=step)
    flip(places / "step=24.ckpt" / "__0_0.distcp", 4000)
    with (places / "step=28.ckpt" / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    (places / "step=32.ckpt" / "manifest.json").unlink()
    (places / "step=36.ckpt").rename(places / "step=36.ckpt.corrupt")
    for options, sound, flipped in (
        ([], "✓ complete", "✓ complete"),
        (["--verify"], "✓ verified", "✕ damaged"),
    ):
        assert main(["report", str(tmp_path), *options]) == 0
        text = (tmp_path / "report.html").read_text("utf-8").split("<h2>Checkpoints")[1]
        assert "Attempt 2 went on from <code>runs/step=12.ckpt</code>, verified in 750 ms" in text
        rows = re.findall(r"<tr><td class=\"n\">(\d+)</td>(?:<td.*?</td>){2}<td>(.*?)</td>", text)
        assert dict(rows) == {
            **dict.fromkeys(("4", "8", "16"), "– deleted"),
            **{"12": "– deleted", "20": "–", "24": flipped, "28": "✕ damaged"},
            **{"32": "✕ torn", "36": "✕ damaged", "40": sound},
        }


def test_the_command_waits_for_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    code = (
        "import sys; from lightning_megatron.cli import main; "
        f"main(['report', {str(tmp_path)!r}]); "
        "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_without_anything_to_draw(tmp_path: Path) -> None:
    path = event_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('{"v":1,"t":5.0,"run":"a","rank":0,"step":0,"kind":"start"}\n')
    said = " ".join(WellFormed(page(read_run_history(tmp_path))).text)
    assert "No step was recorded." in said
    assert "Saves are recorded under MegatronStrategy only." in said


def write_short_run(directory: Path, *, saves: list[bool], end: str, steps: int = 9) -> None:
    """A run of one rank and of steps of one second, that saves after every third step."""
    lines, t = [], 100.0

    def write(kind: str, step: int, **fields: Any) -> None:
        event = {"v": 1, "t": t, "run": "short", "rank": 0, "step": step, "kind": kind, **fields}
        lines.append(json.dumps(event))

    write("start", 0, strategy="MegatronStrategy", world=1, host="a-node-with-a-very-long-name")
    for step in range(1, steps + 1):
        t += 1.0
        write("step", step, seconds=1.0, loss=0.53 + 0.07 * step)
        if step % 3 == 0:
            ok = saves[step // 3 - 1] if saves else None
            path = f"{directory.absolute()}/experiments/with-a-long-name/version_0/step={step}.ckpt"
            error = f"{path}: [Errno 28] No space left on device: '{path}'"
            fields = {"path": path, "seconds": 0.2, "stall": 0.1, "bytes": 10}
            if ok is not None:
                write("save", step, ok=ok, error=None if ok else error, **fields)
    error = f"CheckpointError: {error}"
    write("end", steps, status=end, exit_code=1, error=None if end == "completed" else error)
    path = event_file(directory, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("saves", "end", "expected"),
    [
        (
            [False, False, False],
            "failed",
            "Goodput 0.0 %: 0 ms of 9 s went into steps that count; 0 restarts, 9 steps lost. "
            "No checkpoint was written (3 saves failed).",
        ),
        ([], "failed", "9 steps lost. No checkpoint was written."),
        ([], "interrupted", "9 steps lost. No checkpoint was written."),
        (
            [True, True, False],
            "failed",
            "Goodput 66.7 %: 6 s of 9 s went into steps that count; 0 restarts, 3 steps lost. "
            "The newest checkpoint holds step 6 (1 save failed).",
        ),
        ([True, True, True], "failed", "0 steps lost. The newest checkpoint holds step 9."),
        ([False] * 3, "completed", "0 steps lost. No checkpoint was written (3 saves failed)."),
        ([True, True, True], "completed", "0 steps lost."),
        ([True, False, True], "completed", "0 steps lost. 1 save failed."),
    ],
)
def test_steps_that_no_checkpoint_holds_are_lost(
    tmp_path: Path, saves: list[bool], end: str, expected: str
) -> None:
    write_short_run(tmp_path, saves=saves, end=end)
    said = summarize(read_run_history(tmp_path))
    assert said.endswith(expected)


def test_a_run_of_which_nothing_was_saved_is_not_praised(tmp_path: Path) -> None:
    write_short_run(tmp_path, saves=[False] * 3, end="completed")
    history = read_run_history(tmp_path)
    assert summarize(history).startswith("✕ Completed without a checkpoint at step 9. Goodput ")
    assert '<div class="verdict bad">' in page(history)
    write_short_run(tmp_path, saves=[False, False, True], end="completed")
    history = read_run_history(tmp_path)
    assert summarize(history).startswith("✓ Completed at step 9. ")
    assert '<div class="verdict good">' in page(history)


def test_shares_of_a_step_add_up(history: RunHistory) -> None:
    rank = history.ranks[3]
    rank.sections |= {"validation": 1e6, "checkpoint": 1e6}  # lie between steps
    named = ("data", "forward", "backward")
    shares = [rank.share(name) or 0.0 for name in named]
    assert rank.share_beside(named) == pytest.approx(rank.share("optimizer"))
    assert sum(shares) + (rank.share_beside(named) or 0.0) == pytest.approx(1)


def test_stages_of_a_pipeline_are_no_outliers() -> None:
    ranks = [RankFigures(rank) for rank in range(2)]
    for figures, forward in zip(ranks, (1.0, 3.0), strict=True):
        sections = {"data": forward, "forward": forward, "backward": 6 - 2 * forward}
        figures.add({"kind": "step", "step": 4, "t": 5.0, "seconds": 6.0, "sections": sections})
    for pipeline, marked in ((False, 3), (True, 1)):
        table = ranks_table(ranks, 5.0, pipeline=pipeline)
        assert sum("▲" in cell for row in table.rows for cell in row) == marked
        assert [row[-1] for row in table.rows] == ["step, step 4"] * 2
    assert ranks_table(ranks, 17.0).rows[0][-1] == "step, step 4, 12 s before the end"


def test_every_failed_save_is_listed_and_each_text_names_a_path_once(tmp_path: Path) -> None:
    write_short_run(tmp_path, saves=[False, False, False], end="failed")
    history = read_run_history(tmp_path)
    text = page(history)
    assert [(incident.kind, incident.step) for incident in history.incidents] == [
        ("save", 3), ("save", 6), ("save", 9), ("failed", 9),
    ]  # fmt: skip
    faults = text.split("<h2>What went wrong")[1].split("</table>")[0]
    for count in (1, 2, 3):
        place = f"experiments/with-a-long-name/version_0/step={3 * count}.ckpt"
        assert f"save {count} of 3 that failed: {place}: [Errno 28] No space left" in faults
    assert all(row.count(".ckpt") <= 1 for row in text.split("<tr>") if "Errno" in row)
    head = re.search(r'<div class="verdict bad">.*?</div>', text)
    assert head is not None
    assert head[0].count("step=9.ckpt") == 1
    assert "✕ failed</span>, see 3</td>" in text.split("<h2>Checkpoints")[1]


class Tables(HTMLParser):
    """The characters of the widest cell of each column, by table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[dict[int, int]] = []
        self.column, self.open, self.text = 0, False, ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append({})
        elif tag == "tr":
            self.column = 0
        elif tag in ("td", "th"):
            # Heads, and the cells of class t, are broken where there is a space.
            self.breaks = tag == "th" or ("class", "t") in attrs
            self.open, self.text = True, ""

    def handle_data(self, data: str) -> None:
        self.text += data if self.open else ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            needed = 16 if self.breaks else len(self.text)
            needed = max(map(len, self.text.split()), default=0) if tag == "th" else needed
            widths = self.tables[-1]
            widths[self.column] = max(widths.get(self.column, 0), needed)
            self.column, self.open = self.column + 1, False


def test_tables_fit_on_a_page_of_1100_pixels(tmp_path: Path, long_page: str) -> None:
    write_short_run(tmp_path, saves=[True, False, True], end="failed")
    for text in (page(read_run_history(tmp_path)), long_page):
        for widths in Tables(text).tables:
            # 7.5 pixels a character and 10.5 of padding a column, within margins of 44.
            assert sum(7.5 * width + 10.5 for width in widths.values()) <= 1100 - 2 * 44, widths
    text = page(read_run_history(tmp_path)).split("<h2>Checkpoints")[1]
    assert text.count("<br") == 0
    assert 'class="t"' not in text.split("</table>")[0]  # such cells would be of several lines
    path = "experiments/with-a-long-name/version_0/step=9.ckpt"
    assert f'<span title="{path}">experiments/with…ion_0/step=9.ckpt</span>' in text


def test_curves_of_validations_and_of_the_learning_rate(
    history: RunHistory, long_page: str
) -> None:
    text = long_page
    titles = re.findall(r"<figcaption>(.*?)[ ]?<|<figcaption>(.*?)</fig", text)
    assert [first or second for first, second in titles] == [
        "Loss", "Validation, val_loss", "Validation, val_acc", "Learning rate, optim/lr",
        "Time of a step",
    ]  # fmt: skip
    assert text.count('<span class="axis">step</span>') == 5
    assert text.count("over steps 1 to 10000") == 5  # validations and faults below each other
    assert "mean of the steps around" in text
    assert [r.step for r in history.readings["val_loss"] if r.redone] == [4000]


def test_the_page_of_a_short_run_explains_what_is_drawn(tmp_path: Path) -> None:
    write_short_run(tmp_path, saves=[True, True, True], end="completed")
    text = page(read_run_history(tmp_path))
    assert 'class="band"' not in text
    assert "mean of the steps" not in text
    assert "from the smallest" not in text
    figure = text.split("<figcaption>Loss")[1].split("</figure>")[0]
    at = re.findall(r'<span class="y" style="bottom:(.*?)%">(.*?)</span>', figure)
    assert (at[0], at[-1]) == (("0.00", "0.6"), ("100.00", "1.2"))  # losses from 0.6 to 1.16
    steps = re.findall(r'<span class="x" style="left:(.*?)%">(.*?)</span>', figure)
    assert (steps[0], steps[-1]) == (("0.00", "1"), ("100.00", "9"))
    columns = re.search(r'<dl class="facts" style="--columns:(\d)">(.*?)</dl>', text)
    assert columns is not None
    assert (columns[2].count("<dt>"), columns[1]) == (7, "4")  # one place stays empty
    assert "No fault, hang, rollback or failed save was recorded." in text
    for riddle in ("Counts", "Done again", "Noticed after", "Nothing that was written down"):
        assert riddle not in text


def test_thinning_keeps_peaks_and_the_mean() -> None:
    values = [(step, 100.0 if step == 555 else 1.0) for step in range(1, 1001)]
    buckets = thin_out([*values, (700, float("nan"))], 1, 1000, 10)
    assert len(buckets) == 10
    assert [b.high for b in buckets] == [1.0] * 5 + [100.0] + [1.0] * 4
    assert buckets[5].mean == pytest.approx(1.99)
    assert [b.step for b in buckets[:2]] == [50.5, 150.5]
    assert len(thin_out(values[:7], 1, 7, 10)) == 7


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (0.13, 0.48, [0.2, 0.3, 0.4]),
        (5, 5, [5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_numbers_for_readers() -> None:
    seconds = (None, 0.0354, 14.23, 61, 3605, 90000)
    shown = ["–", "35.4 ms", "14.2 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]
    assert [duration(s) for s in seconds] == shown
    numbers = (None, 1234567.0, 0.12345, 1e-7, float("nan"), -float("inf"))
    assert [number(v) for v in numbers] == ["–", "1,234,567", "0.1235", "1e-07", "NaN", "−∞"]
    assert [size(v) for v in (0, 999, 1_500_000)] == ["–", "999 B", "1.5 MB"]


def test_an_end_that_a_lost_peer_caused_is_no_second_fault(tmp_path: Path) -> None:
    write_short_run(tmp_path, saves=[True] * 3, end="failed")
    path = event_file(tmp_path, 0)
    lost = {"v": 1, "t": 109.5, "run": "short", "rank": 0, "step": 9, "kind": "fault"}
    lost |= {"what": "peer lost", "rank_of_fault": 1, "detail": "rank 1 was killed by SIGKILL"}
    path.write_text(path.read_text() + json.dumps(lost | {"action": "end"}) + "\n")
    history = read_run_history(tmp_path)
    fault, end = history.incidents
    assert (end.ends, end.follows, end.text) == (True, 1, "follows from 1: lost its connections")
    assert "No space left" not in page(history)
    assert "Rank 1: peer lost: rank 1 was killed by SIGKILL" in " ".join(
        WellFormed(page(history)).text
    )


def test_experts_have_a_curve_and_a_table_of_layers(tmp_path: Path) -> None:
    write_short_run(tmp_path, saves=[True] * 3, end="completed")
    path = event_file(tmp_path, 0)
    layers = {f"moe_layers/dead_experts/trunk.layers.{i}.mlp": float(i) for i in (2, 10)}
    layers["moe_layers/dropped_fraction/trunk.layers.10.mlp"] = 0.125
    window = {"v": 1, "t": 108.9, "run": "short", "rank": 0, "step": 8, "kind": "window"}
    window["metrics"] = {"moe/load_max_over_mean": 1.75, **layers}
    path.write_text(path.read_text() + json.dumps(window) + "\n")
    history = read_run_history(tmp_path)
    text = page(history)
    assert "<figcaption>Most used expert over the mean, moe/load_max_over_mean" in text
    section = text.split("Experts in the last window")[1].split("</section>")[0]
    assert "trunk.layers.2.mlp" in section
    assert section.index("trunk.layers.2.mlp") < section.index("trunk.layers.10.mlp")
    assert "12.5 %" in section
    assert text.count("trunk.layers.10.mlp") == 1, "not once more among all metrics"
