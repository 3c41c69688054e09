"""What the metric says goes from node to node is what the interfaces of two machines send."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import needs_machines

ROOT = Path(__file__).parents[2]


@needs_machines
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("only", "lines"), [("flat", 3), ("HSDP", 2), ("across", 2)], ids=["flat", "hsdp", "pipeline"]
)
def test_metric_formula_and_interface_agree(tmp_path: Path, only: str, lines: int) -> None:
    command = [sys.executable, "-m", "benchmarks.node_traffic", "--steps", "4", "--only", only]
    subprocess.run([*command, "--output", str(tmp_path)], cwd=ROOT, check=True, timeout=280)
    table = (tmp_path / "node_traffic.md").read_text().splitlines()
    rows = [line.split(" | ") for line in table if only in line]
    assert len(rows) == lines
    for row in rows:
        formula, metric, interface = map(float, row[2:5])
        assert metric == pytest.approx(formula, rel=0.01)
        # Headers, what ranks agree on beside the layers, and gloo's reduce-scatter, an all-reduce.
        assert metric < interface < (1.55 if "reduce-scatter" in row[1] else 1.05) * metric
