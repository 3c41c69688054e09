"""The ladder of options runs, tiny and on a CPU, and trains the same on every rung."""

import json
from pathlib import Path

import pytest

from benchmarks import ladder
from lightning_megatron.models.flops import count_parameters


@pytest.mark.slow
def test_every_rung_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder.main(["--model", "tiny", "--steps", "2", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "ladder.json").read_text())["rows"]
    assert [r["rung"] for r in rows] == [
        "plain Lightning",
        "eager",
        "+ selective recompute",
        "+ compile, no recompute",
        "+ chunked loss",
        "+ FP8",
    ]
    first = rows[0]["last loss"]
    for row in rows:
        assert row["last loss"] == pytest.approx(first, rel=0.01)
        assert row["tokens/s"] > 0
    assert "plain Lightning" in capsys.readouterr().out


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
