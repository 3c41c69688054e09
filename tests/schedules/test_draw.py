"""Images and traces of timelines."""

import builtins
import json
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


def test_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = simulate(make_schedule("zbv", 3, 4))
    draw_timeline(timeline, tmp_path / "zbv.svg")
    text = (tmp_path / "zbv.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in (
        "rank 2",
        "backward, weight half",
        "zbv: step time 26 forwards of a stage, bubble 7.7%",
        "time (forwards of a stage); numbers are microbatches",
        "first stage of a rank",
        "second stage (paler)",
    ):
        assert f"<!-- {words}" in text  # letters are drawn as paths, with the text in a comment
    assert "<!-- backward -->" not in text  # a kind that does not occur
    numbers = [text.count(f"<!-- {i} -->") for i in range(4)]
    assert min(numbers) >= 3 * 2 * 3  # forward, input and weight half on each of the stages
    draw_timeline(simulate(make_schedule("1f1b", 3, 4)), tmp_path / "1f1b.svg", unit="s")
    text = (tmp_path / "1f1b.svg").read_text()
    assert "second stage" not in text
    assert "<!-- time (s); numbers are microbatches -->" in text


def test_a_large_picture_grows_in_height_and_leaves_numbers_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_timeline(simulate(make_schedule("interleaved", 8, 64, 4)), tmp_path / "large.svg")
    text = (tmp_path / "large.svg").read_text()
    for stage in range(32):  # a line for each, so no shades are needed
        assert f"<!-- rank {stage % 8}, stage {stage} -->" in text
    assert "<!-- time (forwards of a stage) -->" in text
    assert text.count("<!-- 63 -->") == 0
    assert "opacity: 0." not in text
    width, height = size(text)
    assert width <= 24 * 72
    assert height >= 32 * 72 / 4
    draw_timeline(simulate(make_schedule("1f1b", 8, 4)), tmp_path / "small.svg")
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
