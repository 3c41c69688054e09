"""Events outlive their process, bring nothing down, and hold no secrets."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.run_log.events import EventLog, event_file, read_events
from lightning_megatron.run_log.redact import redact


def opened(directory: Path, rank: int = 0) -> EventLog:
    log = EventLog(rank)
    log.identify(run="r", attempt=2)
    log.open(directory)
    return log


def test_an_event_is_one_json_line(tmp_path: Path) -> None:
    log = opened(tmp_path, 3)
    log.step = 7
    log.write("save", path="a/b.ckpt", seconds=0.25, ok=True, error=None, sections={"data": 1.5})
    (line,) = (tmp_path / "events" / "rank_00003.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("t") > 1e9
    assert event.pop("mono") >= 0
    assert event == {
        **{"v": 1, "run": "r", "attempt": 2, "rank": 3, "step": 7, "kind": "save"},
        **{"path": "a/b.ckpt", "seconds": 0.25, "ok": True, "error": None},
        "sections": {"data": 1.5},
    }


def test_early_events_are_kept_until_there_is_a_directory(tmp_path: Path) -> None:
    log = EventLog()
    for i in range(503):
        log.write("fault", number=i)
    log.identify(rank=1, run="later", attempt=1)
    log.open(tmp_path)
    log.open(tmp_path)
    log.write("end")
    events = [json.loads(line) for line in event_file(tmp_path, 1).read_text().splitlines()]
    assert [e["kind"] for e in events] == ["forgotten"] + ["fault"] * 500 + ["end"]
    assert events[0]["count"] == 3
    assert [e["number"] for e in events[1:-1]] == list(range(3, 503))
    assert {(e["run"], e["attempt"], e["rank"]) for e in events} == {("later", 1, 1)}


def test_attempts_append_and_ranks_are_read_together(tmp_path: Path) -> None:
    for attempt in range(2):
        for rank in (1, 0):
            log = EventLog(rank)
            log.identify(run="r", attempt=attempt)
            log.open(tmp_path)
            log.write("start")
            log.close()
    found = [(e["attempt"], e["rank"]) for e in read_events(tmp_path)]
    assert found == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert [e["attempt"] for e in read_events(tmp_path, rank=1)] == [0, 1]
    assert read_events(tmp_path / "nowhere") == []


def test_a_run_that_goes_on_from_another_says_so(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.identify(run="r")
    log.identify(run="older")
    assert [(e["kind"], e["run"], e["was"]) for e in read_events(tmp_path)] == [
        ("renamed", "older", "r")
    ]


def test_a_killed_process_leaves_all_lines(tmp_path: Path) -> None:
    code = (
        "import os, signal; from lightning_megatron.run_log.events import EventLog\n"
        f"log = EventLog(); log.open({str(tmp_path)!r})\n"
        "for i in range(100): log.write('step', number=i)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [e["number"] for e in read_events(tmp_path)] == list(range(100))


def test_a_torn_line_is_left_out_and_spoils_no_other(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.write("start")
    log.write("step")
    log.close()
    path = event_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-9])
    opened(tmp_path).write("start")
    with path.open("ab") as file:
        file.write(b'[]\n{}\n\xff\xfe\n{"t": 1, "rank": 0}\n{"t": 1')
    assert [e["kind"] for e in read_events(tmp_path)] == ["start", "start"]


def test_of_other_ranks_the_steps_before_other_events_will_do(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = opened(tmp_path, rank)
        for kind in ("start", "step", "step", "fault", "start", "step", "step"):
            log.write(kind)
    found = [(e["rank"], e["kind"]) for e in read_events(tmp_path, steps_of=0)]
    kinds = {rank: [kind for r, kind in found if r == rank] for rank in (0, 1)}
    assert kinds[0] == ["start", "step", "step", "fault", "start", "step", "step"]
    assert kinds[1] == ["start", "step", "fault", "start", "step"]


def test_followers_hear_of_events_and_bring_nothing_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, heard = opened(tmp_path), []

    def broken(event: object) -> None:
        raise RuntimeError("not now")

    log.subscribe(heard.append)
    log.subscribe(heard.append)
    log.subscribe(broken)
    log.write("start")
    log.unsubscribe(heard.append)
    log.unsubscribe(broken)
    log.unsubscribe(broken)
    log.write("end")
    assert [e["kind"] for e in heard] == ["start"]
    assert [e["kind"] for e in read_events(tmp_path)] == ["start", "end"]
    assert "not now" in caplog.text


def test_a_full_disk_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = opened(tmp_path)
    log.write("start")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        size = event_file(tmp_path, 0).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, hard))
        for _ in range(3):
            log.write("step")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    log.write("end")
    assert [e["kind"] for e in read_events(tmp_path)] == ["start", "end"]
    assert log.failures == 3
    assert len(caplog.records) == 1
    assert "rank_00000.jsonl" in caplog.text


def test_no_directory_and_no_field_bring_training_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    (tmp_path / "events").write_text("a file")
    log = opened(tmp_path)
    log.write("start", bad=Bad())
    log.write("start", path=tmp_path, numbers=(1, float("nan"), float("-inf")), text="\ud800é")
    assert log.failures == 2
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    (tmp_path / "events").unlink()
    log.open(tmp_path)
    (event,) = read_events(tmp_path)
    assert event["numbers"] == [1, "NaN", "-Infinity"]
    assert event["path"] == str(tmp_path)
    with pytest.raises(ConfigError, match="s3://bucket/run: events are appended"):
        log.open("s3://bucket/run")


def test_no_file_is_open_in_programs_that_training_starts(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log._file is not None
    assert not os.get_inheritable(log._file)


SECRETS = [
    "password=hunter2hunter2",
    "api_key: 'hunter2 hunter2'",
    '{"secret": "hunter2hunter2"}',
    "WANDB_API_KEY=hunter2hunter2",
    "--token hunter2hunter2",
    "--hub-token=hunter2hunter2",
    "Authorization: Bearer hunter2hunter2",
    "sent bearer hunter2hunter2",
    "https://me:hunter2hunter2@host/path",
    "GET /?token=hunter2hunter2&a=1",
    "hf_hunter2hunter2hunter2",
    "ghp_hunter2hunter2hunter2",
    "sk-hunter2-hunter2hunter2",
    "AKIAHUNTER2HUNTER2",
    "eyJhunter2hunter2.eyJhunter2hunter2.hunter2hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_in_texts_are_left_out(tmp_path: Path, text: str) -> None:
    opened(tmp_path).write("fault", detail=f"it failed: {text}", nested={"a": [text]})
    written = event_file(tmp_path, 0).read_text()
    assert "hunter2hunter2" not in written.lower()
    assert written.count("[redacted]") == 2
    assert "it failed: " in written


def test_fields_that_are_named_like_secrets_are_left_out(tmp_path: Path) -> None:
    fields = {"api_key": "x", "HF_TOKEN": 12345, "tokens": 64, "nested": {"Password": ["x"]}}
    opened(tmp_path).write("fault", **fields)
    (event,) = read_events(tmp_path)
    assert event["api_key"] == event["HF_TOKEN"] == event["nested"]["Password"] == "[redacted]"
    assert event["tokens"] == 64


@pytest.mark.parametrize(
    "text",
    [
        "perf/tokens_per_s: 1200, 64 tokens",
        "ValueError: expected 3 tokens: got 4",
        "author: me; authored=1",
        "/home/me/token_files/a.py line 3",
        "tcp://127.0.0.1:29500",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def test_long_texts_are_cut() -> None:
    assert len(redact("x" * 10**6)) < 21_000
