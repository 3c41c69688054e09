"""The record of what tests took: read, added up, kept and compared."""

from pathlib import Path

import pytest

from benchmarks import durations
from benchmarks.durations import Spent

REPORT = """<testsuites><testsuite>
<testcase classname="tests.benchmarks.test_durations" name="test_one[a]" time="2.5">
 <properties><property name="processor_s" value="1.5"/></properties></testcase>
<testcase classname="tests.benchmarks.test_durations.TestClass" name="test_two" time="0.5">
 <properties><property name="processor_s" value="0.25"/></properties></testcase>
<testcase classname="tests.test_errors" name="test_three" time="4">
 <properties><property name="processor_s" value="3"/></properties></testcase>
<testcase classname="tests.test_errors" name="test_skipped" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "tests.xml"
    path.write_text(REPORT)
    return path


def test_seconds_are_added_up_by_file_and_folder(report: Path) -> None:
    cases = durations.read(report)
    assert durations.add_up(cases, lambda case: case.file) == {
        "tests/test_errors.py": Spent(1, 4.0, 3.0),
        "tests/benchmarks/test_durations.py": Spent(2, 3.0, 1.75),
    }
    assert list(durations.add_up(cases, lambda case: durations.folder_of(case.file))) == [
        "tests",
        "tests/benchmarks",
    ]


def test_a_record_is_kept_and_what_grew_is_named(
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(durations, "KEPT", tmp_path / "kept.csv")
    monkeypatch.setattr(durations, "PAGE", tmp_path / "page.md")
    durations.PAGE.write_text(
        "Before.\n<!-- durations -->\nstale row\n<!-- end of durations -->\nAfter.\n"
    )
    durations.main([str(report), "--keep"])
    page = durations.PAGE.read_text()
    assert "| **all** | 3 | 4.8 | 7.0 |" in page
    assert "stale" not in page
    assert page.endswith("<!-- end of durations -->\nAfter.\n")
    report.write_text(REPORT.replace('value="3"', 'value="13"'))
    durations.main([str(report), "--cases", "1"])
    said = capsys.readouterr().out
    assert "tests/test_errors.py: 3.0 s, now 13.0 s" in said
    assert "test_durations.py: 1." not in said
    assert "| tests/test_errors.py::test_three | 1 | 13.0 | 4.0 |" in said
