"""`lightning-megatron schedule`: timeline, figures, files, mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from lightning_megatron.schedules.custom import dump_schedule
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["schedule", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--schedule", "zbv", "--pp", "2", "--microbatches", "3")
    assert code == 0
    assert out.splitlines() == [
        "zbv: 2 ranks with 2 stages each, 3 microbatches",
        "rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ...",
        "rank 1  ...F0 f0 F1 f1 i0 w0 I0 F2 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2",
        "F forward; I backward, input half; W backward, weight half; "
        "small letters: the second stage of a rank; numbers: microbatches",
        "step time 9.5 forwards of a rank, bubble 5.3% of it; 9 when steps flow into each other",
        "a rank holds activations of up to so many microbatches, rank by rank: 2 2",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, "--schedule", name, "--pp", "3", "--microbatches", "5")
    assert code == 0
    assert out.startswith(f"{name}: 3 ranks")


def test_times_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--pp", "2", "--microbatches", "2", "--forward", "1", "3", "--backward-input", "2"]
    code, out, _ = run(capsys, *args, "--backward-weight", "1", "--send", "0.5", "--width", "30")
    assert code == 0
    assert (
        "step time 17 in the unit of --forward, " in out
    )  # 1 + 0.5, twice 3 + 3 on rank 1, 0.5, and 3 on rank 0
    rows = [line for line in out.splitlines() if line.startswith("rank")]
    assert all(len(row) <= len("rank 0  ") + 30 for row in rows)


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg, trace = (str(tmp_path / name) for name in ("a.png", "a.svg", "a.json"))
    code, out, _ = run(
        capsys, "--pp=2", "--microbatches=2", "--png", png, "--svg", svg, "--trace", trace
    )
    assert code == 0
    assert out.splitlines()[-3:] == [f"wrote {path}" for path in (png, svg, trace)]
    assert all(Path(path).stat().st_size for path in (png, svg))
    assert json.loads(Path(trace).read_text())["traceEvents"]


def test_auto(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--schedule=auto", "--pp=4", "--microbatches=12", "--send=0.1"]
    _, out, _ = run(capsys, *args, "--memory-limit=3")
    assert out.startswith("schedule ")
    assert "\n\nv-half: 4 ranks with 2 stages each" in out
    step_time = out.splitlines()[1].split()[2]
    assert "  step time (forwards of a rank)  " in out.splitlines()[0]
    assert f"\nstep time {step_time} forwards of a rank, " in out
    _, again, _ = run(capsys, "--schedule=v-half", *args[1:])
    assert f"\nstep time {step_time} forwards of a rank, " in again
    _, out, _ = run(capsys, *args, "--stages-per-rank=1")
    assert "\n\nzb-h2: 4 ranks with 1 stage each" in out


def test_the_text_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    args = ["--schedule=interleaved", "--pp=4", "--microbatches=16", "--stages-per-rank=4"]
    _, out, _ = run(capsys, *args)
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 60
    assert not re.search(
        r"\d", "".join(row.removeprefix(f"rank {i}") for i, row in enumerate(rows))
    )
    assert "F forward; B backward; numbers: stage.microbatch" in lines
    hint = next(line for line in lines if "--width" in line)
    needed = re.findall(r"--width (\d+)", hint)[0]
    _, wide, _ = run(capsys, *args, "--width", needed)
    # In the unit of the table of `auto`: a microbatch on all stages of a rank.
    assert "a rank holds activations of up to so many microbatches, rank by rank: 4.75 " in wide
    assert "F12.15" in wide


def test_custom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    dump_schedule(make_schedule("v-min", 2, 2), path)
    code, out, _ = run(capsys, "--schedule=custom", f"--table={path}")
    assert code == 0
    assert out.startswith("custom: 2 ranks with 2 stages each, 2 microbatches")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schedule=zvb", "--pp=2", "--microbatches=2"], "nearest valid: schedule='zbv'"),
        (["--schedule=no", "--pp=2", "--microbatches=2"], "dualpipev, custom, auto; nearest"),
        (["--schedule=atuo", "--pp=2", "--microbatches=2"], "nearest valid: schedule='auto'"),
        (["--pp=2"], "--microbatches not given: the layout is needed"),
        (["--pp=0", "--microbatches=2"], "nearest valid: pp=1"),
        (["--pp=2", "--microbatches=2", "--forward", "1", "2", "3"], "forward holds 3 times"),
        (["--pp=2", "--microbatches=2", "--svg=a.docx"], "nearest valid: a .png or .svg file"),
        (["--pp=2", "--microbatches=2", "--trace=/nowhere/a.json"], "No such file"),
        (["--schedule=custom", "--table=/nowhere/a.csv"], "No such file"),
        (["--schedule=custom", "--pp=2", "--microbatches=2"], "a path to a .csv or .json file"),
        (
            ["--schedule=auto", "--pp=4", "--microbatches=8", "--memory-limit=1"],
            "nearest valid: memory_limit=2.0 for schedule='v-min'",
        ),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, _, err = run(capsys, *args)
    assert code == 2
    assert err.startswith("lightning-megatron: ")
    assert message in err


def test_table_that_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, _, err = run(capsys, "--schedule=custom", f"--table={path}")
    assert code == 2
    assert "rank 0 stands at B0.0, which waits for B1.0 of rank 1" in err


def test_needs_no_torch() -> None:
    code = (
        "import sys; from lightning_megatron.cli import main; "
        "main(['schedule', '--pp=2', '--microbatches=2']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
