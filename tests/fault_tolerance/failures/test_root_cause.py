"""Who began it: by exceptions, by what ranks posted, and by the process table."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_megatron.fault_tolerance.failures.board import Ending, EndingBoard
from lightning_megatron.fault_tolerance.failures.peer_watch import PeerWatch
from lightning_megatron.fault_tolerance.failures.root_cause import (
    describe_exit,
    exit_code_of_zombie,
    is_alive,
    is_echo,
    oom_kills,
)
from lightning_megatron.launch.attempt import Peer

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:1"


@pytest.mark.parametrize(
    ("exception", "echo"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("Read error [127.0.0.1]:5: Connection reset by peer"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError(GLOO), False),
    ],
)
def test_echoes_are_told_from_causes(exception: BaseException, echo: bool) -> None:
    assert is_echo(exception) is echo


def test_an_echo_may_be_the_cause_of_another_exception() -> None:
    outer = RuntimeError("microbatch 3 failed")
    outer.__cause__ = RuntimeError(GLOO)
    assert is_echo(outer)


class Job:
    """Three ranks: this process, and two others."""

    def __init__(self) -> None:
        self.others = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
        here = Peer.here()
        self.peers = (
            here,
            *(Peer(host=here.host, pid=p.pid, machine=here.machine) for p in self.others),
        )
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.boards = [EndingBoard(self.store, rank, self.peers) for rank in range(3)]

    def end(self, rank: int, number: int = signal.SIGKILL) -> None:
        process = self.others[rank - 1]
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    for process in job.others:
        process.kill()
        process.wait()


def test_nobody_is_accused_while_all_live(job: Job) -> None:
    assert job.boards[0].causes() == []
    assert job.boards[0].deaths() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_process_is_named_with_its_signal(job: Job, number: signal.Signals) -> None:
    job.end(2, number)
    [cause] = job.boards[0].causes()
    assert cause.rank == 2
    assert f"was killed by {number.name}" in str(cause)
    # A rank of another machine sees no process, but reads what was seen.
    far = EndingBoard.__new__(EndingBoard)
    vars(far).update(vars(job.boards[1]), local={})
    assert [c.rank for c in far.causes()] == [2]


def test_an_exception_counts_before_the_deaths_that_come_of_it(job: Job) -> None:
    job.boards[1].post("failed", "failed with ValueError: wrong")
    job.boards[2].post("echo")
    job.end(1)
    job.end(2)
    [cause] = job.boards[0].causes()
    assert cause.rank == 1
    assert "ValueError: wrong" in str(cause)


def test_who_leaves_in_order_is_no_cause(job: Job) -> None:
    job.boards[1].post("left")
    job.end(1)
    assert job.boards[0].causes() == []


def test_one_rank_tells(job: Job) -> None:
    assert [board.is_first_to_report() for board in job.boards] == [True, False, False]


def test_a_second_run_of_the_same_processes_begins_anew(job: Job) -> None:
    for board in job.boards:
        board.post("left")
    again = [EndingBoard(job.store, rank, job.peers) for rank in range(3)]
    assert [again[0].of(rank) for rank in range(3)] == [None] * 3


def test_exits_in_words() -> None:
    assert "exit code 3" in describe_exit(3)
    assert "without an error" in describe_exit(None)
    assert "signal 62" in describe_exit(-62)


def test_memory_kills_are_read_from_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path, "0::/job\n") == 2
    old = tmp_path / "memory" / "old"
    old.mkdir(parents=True)
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom_kills(tmp_path, "4:cpu:/x\n3:memory:/old\n") == 1
    assert oom_kills(tmp_path, "0::/nowhere\n") == 0
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill 5\n")
    assert oom_kills(tmp_path, "9:name=systemd:/\n4:memory:/of/the/host\n0::/\n") == 5


def test_a_kill_for_want_of_memory_is_noted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatron.fault_tolerance.failures.board.oom_kills", lambda: 1000)
    job.end(1)
    assert "for lack of memory" in str(job.boards[0].causes()[0])


def test_the_watch_ends_a_process_that_does_not_notice(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_megatron.fault_tolerance.failures.peer_watch.GRACE_S", 0.3)
    left: list[int] = []
    watch = PeerWatch(job.boards[0].deaths, 0, leave=lambda: left.append(1))
    closed = PeerWatch(job.boards[1].deaths, 1, leave=lambda: left.append(2))
    time.sleep(0.6)
    assert left == []
    closed.close()
    job.end(2)
    deadline = time.monotonic() + 60
    while not left and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.close()
    time.sleep(0.6)
    assert left == [1]
    assert "[rank 0] === the run ends: rank 2" in capfd.readouterr().err


def test_the_watch_ends_with_its_run(job: Job) -> None:
    watch = PeerWatch(lambda: None, 0)
    watch._thread.join(60)
    assert not watch._thread.is_alive()


def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    assert not is_alive(2**22 + 1)
    monkeypatch.setattr(Path, "read_text", no_descriptor)
    assert is_alive(os.getpid())
    assert exit_code_of_zombie(os.getpid()) is None


def test_an_ending_reads_well() -> None:
    ending = Ending(rank=3, how="died", what="was killed by SIGKILL", host="node7", pid=12)
    assert str(ending) == "rank 3 (node7, process 12) was killed by SIGKILL"
