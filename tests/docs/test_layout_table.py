"""The tables of docs/choosing-a-layout.md are what its formulas give."""

import re
from typing import Any

import pytest

from lightning_megatron import TransformerConfig
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "choosing-a-layout.md").read_text()
GPUS = (1, 8, 16, 64)
_LLAMA = {"vocab_size": 128_256, "num_kv_heads": 8, "mlp_size": 8192, "max_seq_len": 8192}
_QWEN = {"vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "max_seq_len": 8192}
MODELS = {
    "0.1B": TransformerConfig.preset("gpt2-124m", vocab_size=50_304),
    "1B": TransformerConfig(
        **_LLAMA, hidden_size=2048, num_layers=16, num_heads=32, tied_embeddings=True
    ),
    "3B": TransformerConfig(
        **_LLAMA, hidden_size=3072, num_layers=28, num_heads=24, tied_embeddings=True
    ),
    "8B": TransformerConfig.preset("llama3-8b"),
    "14B": TransformerConfig(
        **_QWEN, hidden_size=5120, num_layers=40, num_heads=40, mlp_size=17_408
    ),
    "32B": TransformerConfig(
        **_QWEN, hidden_size=5120, num_layers=64, num_heads=64, mlp_size=25_600
    ),
    "70B": TransformerConfig.preset("llama3-70b"),
}


@pytest.fixture(scope="module")
def formulas() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for code in re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, found)
    return found


def row(first: str) -> list[str]:
    """Cells behind the first one of the row that begins with it."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("name", MODELS)
def test_table_by_model_and_cluster(formulas: dict[str, Any], name: str) -> None:
    for gpus, cell in zip(GPUS, row(name), strict=True):
        narrow = ""
        found = formulas["search"](MODELS[name], gpus)
        if found is None:
            found, narrow = formulas["search"](MODELS[name], gpus, moments=2.03), ", int8"
        if found is None:
            assert cell == "no" or cell.startswith("offload"), (name, gpus)
            continue
        tp, pp, zero, copies, mode, size, gb = found
        assert copies == 1
        parts = [f"tp={tp}"] * (tp > 1) + [f"pp={pp}"] * (pp > 1)
        parts += [f"zero={zero}"] * (gpus > tp * pp or not parts) + [f"mb={size}"]
        parts += [mode] * (mode != "none")
        assert cell == f"{', '.join(parts)}{narrow} ({gb} GB)", (name, gpus)


def test_worked_example(formulas: dict[str, Any]) -> None:
    table = PAGE[PAGE.index("## Worked example") : PAGE.index("## Bytes per parameter")]
    rows = [line for line in table.splitlines() if re.match(r"\| \*?\*?`(tp|zero)=", line)]
    assert len(rows) == 9
    for line in rows:
        layout, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        given = {key: int(value) for key, value in re.findall(r"(\w+)=(\d)", layout)}
        tp, pp, zero = given.get("tp", 1), given.get("pp", 1), given["zero"]
        copies = given.get("dp_replicate", 1)
        mode = next((m for m in ("full", "selective") if m in layout), "none")
        d = 16 // (tp * pp * copies)
        llama = formulas["llama"]
        gb = formulas["memory"](llama, tp, pp, zero, d, mode, 8192)
        assert [int(n) for n in numbers[:4]] == pytest.approx([*gb, sum(gb)], abs=0.51), layout
        time = formulas["seconds"](llama, tp, pp, zero, d, copies, mode, 8192, 1, 512)
        assert numbers[4] == ("-" if sum(gb) > 80 else f"{time:.1f}"), layout
