"""The ladder of options runs, tiny and on a CPU, and trains the same on every rung."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import ladder
from benchmarks.harness import write
from lightning_megatron.models.flops import count_parameters


@pytest.mark.slow
@pytest.mark.thorough
def test_every_rung_trains_and_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--model", "tiny", "--steps", "2", "--output", str(tmp_path)]
    ladder.main([*call, "--seconds", "0"])
    path = tmp_path / "ladder_tiny.json"
    [begun] = json.loads(path.read_text())["rows"]
    assert "6 rungs are left" in capsys.readouterr().out
    ladder.main(call)
    rows = json.loads(path.read_text())["rows"]
    assert [r["rung"] for r in rows] == [
        "plain Lightning",
        "eager",
        "+ selective recompute",
        "+ compile, no recompute",
        "+ chunked loss",
        "+ FP8",
        "+ FP8 in the first and last block",
    ]
    assert rows[0] == begun
    assert [r["in FP8"] for r in rows[-3:]] == ["0 %", "28 %", "85 %"]
    first = rows[0]["last loss"]
    for row in rows:
        assert row["last loss"] == pytest.approx(first, rel=0.01)
        assert row["tokens/s"] > 0
    assert "are left" not in capsys.readouterr().out


def test_what_failed_or_was_measured_elsewhere_is_measured_again(tmp_path: Path) -> None:
    lines = [{"rung": "eager", "ms/step": 1.0}, {"rung": "+ FP8", "ms/step": "failed: OSError"}]
    write("ladder_tiny", "here", lines, tmp_path, threads=3)
    assert "threads per process 3" in (tmp_path / "ladder_tiny.md").read_text()
    assert ladder.earlier("ladder_tiny", "elsewhere", tmp_path) == []
    assert ladder.earlier("ladder_1b", "here", tmp_path) == []
    assert ladder.earlier("ladder_tiny", "here", tmp_path) == lines
    assert list(ladder.measured(lines)) == ["eager"]


def test_the_gpu_target_runs_on_a_python_that_is_there(tmp_path: Path) -> None:
    """Nothing is built or fetched, and what fails does not keep the rest from running."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\nexit 1\n')
    python.chmod(0o755)
    found = subprocess.run(
        ["make", "gpu", f"GPU_PYTHON={python}", "OUTPUT=/kept", "TORCH=0"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    ran = [line.split()[1:] for line in found.stdout.splitlines() if line.startswith("ran")]
    assert [command[:2] for command in ran] == [["-m", "pytest"]] + [
        ["-m", "benchmarks.ladder"]
    ] * 2
    assert [command[-4:] for command in ran[1:]] == [
        ["--model", model, "--output", "/kept"] for model in ("1b", "8b")
    ]


def test_the_large_shape_takes_the_layers_that_fit() -> None:
    layers = []
    for gib in (78, 139, 10_000):
        config = ladder.workload("8b", gib * 2**30).config
        layers.append(config.num_layers)
        state = ladder.BYTES_PER_PARAMETER * count_parameters(config).total
        assert state <= ladder.STATE_SHARE * gib * 2**30 + 2**20
    assert 1 < layers[0] < layers[1] < layers[2] == 32
    one = count_parameters(ladder.workload("1b", 0).config).total
    assert 1.1e9 < one < 1.3e9
