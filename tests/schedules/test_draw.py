"""Images and traces of timelines."""

import builtins
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.draw import draw_timeline, write_trace
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.schedules.simulate import simulate


def test_trace(tmp_path: Path) -> None:
    timeline = simulate(make_schedule("zb-h1", 3, 4), send=0.5)
    write_trace(timeline, tmp_path / "trace.json", unit=1e6)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank, spans in enumerate(timeline.spans):
        drawn = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"] for event in drawn] == [str(span.action) for span in spans]
        assert [event["ts"] for event in drawn] == [span.start * 1e6 for span in spans]
        assert [event["dur"] for event in drawn] == [1e6] * len(spans)
        assert drawn[0]["args"] == {"stage": rank, "microbatch": 0}
        name = f"live activations, rank {rank}"
        live = [e["args"]["live"] for e in events if e["ph"] == "C" and e["name"] == name]
        assert max(live) == timeline.peak_live[rank]
        assert live[-1] == 0
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert {event["pid"] for event in events} == {0}


def size(text: str) -> tuple[float, float]:
    """Width and height of a drawing, in points."""
    root = ElementTree.fromstring(text)
    return float(root.attrib["width"][:-2]), float(root.attrib["height"][:-2])


def texts(path: Path) -> list[str]:
    """Texts of a drawing."""
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = simulate(make_schedule("zbv", 3, 4))
    draw_timeline(timeline, tmp_path / "zbv.svg")
    found = texts(tmp_path / "zbv.svg")
    kinds = ("forward", "backward, input half", "backward, weight half")
    for words in (
        "rank 2",
        "zbv: 3 ranks, 4 microbatches",
        "step time 26 forwards of a stage, bubble 7.7%, "
        "a rank holds activations of up to 3 microbatches",
        "time (forwards of a stage); numbers are microbatches",
        *(f"{kind}, {which} stage" for kind in kinds for which in ("first", "second")),
        "idle",
    ):
        assert words in found
    assert "backward" not in found  # a kind that does not occur
    assert all(found.count(str(i)) >= 3 * 2 * 3 for i in range(4))  # kinds, stages, ranks
    draw_timeline(timeline, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "zbv.svg").read_bytes()
    draw_timeline(simulate(make_schedule("1f1b", 3, 4)), tmp_path / "1f1b.svg", unit="s")
    found = texts(tmp_path / "1f1b.svg")
    assert not any("second stage" in text for text in found)
    assert "time (s); numbers are microbatches" in found


def colours(path: Path) -> set[str]:
    return set(re.findall(r"fill: (#[0-9a-f]{6})", path.read_text())) - {"#ffffff"}


def test_every_colour_is_in_the_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, stages, shades in (("zbv", 2, 6), ("interleaved", 3, 2), ("1f1b", 1, 2)):
        path = tmp_path / f"{name}.svg"
        draw_timeline(simulate(make_schedule(name, 2, 4, stages)), path)
        assert len(colours(path)) == shades + 1, name
        text = path.read_text()
        legend = text[text.index('id="legend_1"') :]
        assert set(re.findall(r"fill: (#[0-9a-f]{6})", legend)) == colours(path)


def test_of_a_large_timeline_the_middle_is_left_out_and_the_picture_says_so(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    timeline = simulate(make_schedule("interleaved", 4, 64, 4))
    draw_timeline(timeline, tmp_path / "cut.svg")
    found = texts(tmp_path / "cut.svg")
    for stage in range(16):  # a line for each, so no shades are needed
        assert f"rank {stage % 4}, stage {stage}" in found
    said = next(text for text in found if text.startswith("time (forwards of a stage); "))
    part = re.fullmatch(r".*; ([\d.]+) to ([\d.]+) are left out", said)
    assert part is not None
    begin, end = map(float, part.groups())
    assert 0.1 * timeline.step_time > timeline.step_time - end > 20
    assert 1.5 * (timeline.step_time - end) == pytest.approx(begin, abs=1)
    assert "0" in found  # numbers of the beginning and of the end
    assert "63" in found
    draw_timeline(timeline, tmp_path / "whole.svg", whole=True)
    found = texts(tmp_path / "whole.svg")
    assert "time (forwards of a stage)" in found
    assert "63" not in found
    for name in ("cut", "whole"):
        width, height = size((tmp_path / f"{name}.svg").read_text())
        assert width <= 14 * 72
        assert height >= 16 * 72 / 4
    draw_timeline(simulate(make_schedule("1f1b", 2, 4)), tmp_path / "small.svg")
    assert size((tmp_path / "small.svg").read_text())[1] < height / 2


def test_unknown_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"nearest valid: a \.png or \.svg file"):
        draw_timeline(simulate(make_schedule("1f1b", 2, 2)), tmp_path / "a.docx")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-megatron\[monitor\]'"):
        draw_timeline(simulate(make_schedule("1f1b", 2, 2)), tmp_path / "a.png")
