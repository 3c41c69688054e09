"""What the files about schedules draw is what the schedules do."""

import importlib

import pytest

from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule
from lightning_megatron.schedules.simulate import render, simulate

DRAWINGS = {
    "gpipe": ("breadth_first", 4, 6),
    "breadth-first": ("breadth_first", 3, 3),
    "1f1b": ("one_f_one_b", 4, 6),
    "interleaved": ("one_f_one_b", 3, 3),
    "zb-h1": ("zero_bubble", 4, 6),
    "zb-h2": ("zero_bubble", 4, 7),
    "zbv": ("v_shaped", 3, 4),
    "v-half": ("v_shaped", 3, 4),
    "v-min": ("v_shaped", 4, 3),
    "dualpipev": ("dual_pipe", 3, 4),
}
"""File, ranks and microbatches."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_drawing(name: str) -> None:
    file, p, m = DRAWINGS[name]
    lecture = importlib.import_module(f"lightning_megatron.schedules.{file}").__doc__
    drawing = render(simulate(make_schedule(name, p, m)), short=True)
    indented = "\n".join(f"    {line}" for line in drawing.splitlines())
    assert f"::\n\n{indented}\n\n" in (lecture or "")
