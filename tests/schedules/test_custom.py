"""Schedules in files: what is read, what is passed over, what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.custom import dump_schedule, parse_schedule
from lightning_megatron.schedules.schedule import SCHEDULES, load_schedule, make_schedule
from lightning_megatron.schedules.simulate import simulate


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 8))
def test_written_and_read_again(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    rows = [[f"{a.stage}{a.kind.value}{a.microbatch}" for a in row] for row in schedule.actions]
    read = parse_schedule(rows)
    assert (read.actions, read.stage_ranks) == (schedule.actions, schedule.stage_ranks)
    assert (read.name, read.num_microbatches) == ("custom", m)


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    schedule = make_schedule("zbv", 2, 3)
    dump_schedule(schedule, path)
    assert load_schedule(path).actions == schedule.actions
    custom = make_schedule("custom", 2, 3, 2, table=path)
    assert custom.name == "custom"
    assert simulate(custom).step_time == simulate(schedule).step_time


def test_torchs_longer_format(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        " 1F0 ,(1F1;1B0)OVERLAP_F_B,1B1\n"
    )
    assert [" ".join(map(str, row)) for row in load_schedule(path).actions] == [
        "F0.0 F0.1 I0.0 W0.0 B0.1",
        "F1.0 F1.1 B1.0 B1.1",
    ]


def test_json_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps([["0F0", None, "0B0"], ["", "1F0", "1B0"]]))
    assert load_schedule(path).num_stages == 2


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([], "the table holds no action"),
        ([["0F0", "0B0", "zero"]], "rank 0: 'zero' is no action"),
        ([["0F0", "0X0"]], "rank 0: '0X0' is no action"),
        ([["0F0"]], "microbatch 0 on stage 0 has F; nearest valid: one F and either one B"),
        ([["0F0", "0F0", "0B0"]], "microbatch 0 on stage 0 has FFB"),
        ([["0F0", "0I0"]], "microbatch 0 on stage 0 has FI;"),
        ([["0F0", "0B0", "0F2", "0B2"]], "microbatch 1 on stage 0 has nothing"),
        ([["1F0", "1B0"]], "microbatch 0 on stage 0 has nothing"),
        ([["0F0"], ["0B0"]], "stage 0 stands on several ranks"),
        ([["0F0", "0B0"], []], "ranks hold 1, 0 stages"),
    ],
)
def test_refused(rows: list[list[str]], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_schedule(rows, "a.csv")
    assert any(fault in problem for problem in error.value.problems)
    assert all(problem.startswith("table='a.csv'") for problem in error.value.problems)


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", None), ("a.txt", "0F0,0B0"), ("a.json", "{"), ("b.json", "[1]")]
)
def test_unreadable_file(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="the table of a schedule is a .csv or .json file"):
        load_schedule(tmp_path / name)


def test_table_for_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    dump_schedule(make_schedule("1f1b", 2, 3), path)
    with pytest.raises(ConfigError) as error:
        make_schedule("custom", 4, 5, 2, table=path)
    remedies = [problem.rpartition(": ")[2] for problem in error.value.problems]
    assert remedies == ["pp=2", "num_microbatches=3", "stages_per_rank=1"]


def test_actions_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    """Rank 0 wants the first gradient before it makes the output for which rank 1 waits."""
    path = tmp_path / "circle.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    with pytest.raises(ConfigError, match=r"rank 1 stands at F1\.1.*nearest valid: actions in an"):
        make_schedule("custom", 2, 2, table=path)
