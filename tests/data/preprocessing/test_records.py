"""Records of ranges of a file: each once, whoever reads which range."""

import gzip
import random
from pathlib import Path

import pytest

from lightning_megatron.data.preprocessing import records
from lightning_megatron.data.preprocessing.records import TextRanges


def expected(text: bytes, separator: bytes) -> list[tuple[int, bytes]]:
    """Records by the rule: one begins behind every occurrence of the separator."""
    size = len(separator)
    starts = [0, *(i + size for i in range(len(text)) if text[i : i + size] == separator)]
    ends = [max(a, b - size) for a, b in zip(starts, starts[1:], strict=False)] + [len(text)]
    pairs = zip(starts, ends, strict=True)
    return [(start, text[start:end]) for start, end in pairs if start < len(text)]


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"ab", b"aba"])
@pytest.mark.parametrize("compressed", [False, True])
def test_every_record_once(
    tmp_path: Path, separator: bytes, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    path = tmp_path / "text"
    for _ in range(60):
        monkeypatch.setattr(records, "_CHUNK", draw.choice([1, 2, 3, 100]))
        text = bytes(draw.choice(b"ab\n") for _ in range(draw.randint(0, 60)))
        path.write_bytes(gzip.compress(text) if compressed else text)
        edges = sorted({0, len(text), *(draw.randint(0, len(text)) for _ in range(5))})
        ranges = list(zip(edges, edges[1:], strict=False))
        for order in (ranges, draw.sample(ranges, len(ranges))):
            reader = TextRanges(str(path), compressed, separator)
            found = [record for start, stop in order for record in reader.records(start, stop)]
            reader.close()
            assert sorted(found) == expected(text, separator)


def test_ascending_ranges_never_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Going back in a compressed file means to unpack it again from its beginning.
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d" % i * 50 + b"\n" for i in range(200))))
    rewinds = []
    monkeypatch.setattr(gzip.GzipFile, "rewind", lambda self: rewinds.append(1), raising=False)
    reader = TextRanges(str(path), True, b"\n")
    found = [r for start in range(0, 30_000, 64) for r in reader.records(start, start + 64)]
    assert len(found) == 200
    assert rewinds == []
