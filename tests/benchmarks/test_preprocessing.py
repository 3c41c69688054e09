"""The table of preprocessing can still be made, and both sides make the same tokens."""

import json
from pathlib import Path

import pytest

from benchmarks import preprocessing

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


def test_both_make_the_same_tokens(tmp_path: Path) -> None:
    call = ["--megabytes", "0.05", "--rounds", "2", "--workers", "1", "--output", str(tmp_path)]
    preprocessing.main(call)  # ends with an error where tokens differ
    rows = json.loads((tmp_path / "preprocessing.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == [
        "Megatron-LM's algorithm, 1 worker",
        "batchless, 1 worker",
        "preprocess, 1 worker",
    ]
    assert all(float(row["M tokens"]) > 0 and row["k tokens/s per core"] > 0 for row in rows)
