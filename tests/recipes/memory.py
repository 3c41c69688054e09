"""Memory of a GPU by the formulas of docs/choosing-a-layout.md, as the page has them."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.topology.degrees import Degrees

PAGE = Path(__file__).parents[2] / "docs" / "choosing-a-layout.md"
CHUNK = 1024
"""Tokens whose logits are in memory at once under `LanguageModel(chunked_loss=True)`."""


@cache
def page() -> dict[str, Any]:
    """Names that the first program of the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "def memory(" in block), names)
    return names


def gigabytes(config: Any, options: LayoutOptions, degrees: Degrees, tokens: int) -> list[str]:
    """GB of state, of activations and of the logits of a chunk, on the fullest rank."""
    sizes = degrees.tp, degrees.pp, options.zero.stage, degrees.dp, options.activations.recompute
    state, activations, _ = page()["memory"](config, *sizes, tokens)
    [*_, logits] = page()["memory"](config, *sizes, CHUNK)
    return [f"{number:.1f}" for number in (state, activations, logits)]
