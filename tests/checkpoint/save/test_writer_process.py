"""Shards written by a process: what it writes, what becomes of it, and of a save without it.

The process is kept from finishing by SIGSTOP, and its failures are real ones.
"""

import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import load_directory, save_directory
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.checkpoint.save import file_writer
from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.errors import CheckpointError

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
)


class Mixed(nn.Module):
    """Tensors of many formats and shapes."""

    def __init__(self, size=33):
        super().__init__()
        for i, dtype in enumerate(DTYPES):
            self.register_buffer(f"buffer{i}", torch.randn(size, 5).to(dtype))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("strided", torch.randn(8, 6)[::2].T)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.large = nn.Parameter(torch.randn(300, size))


@contextmanager
def saver(**options):
    alone = Peers(alone=True)
    config = CheckpointConfig(mode="async", process="process", **options)
    made = Saver(config, alone, alone)
    try:
        yield made
    finally:
        made.close(timeout_s=60)


def pid_of(background):
    return background._process.pid


def started(background, path):
    """A saver whose process runs."""
    background.save(path, model_chunks(Mixed()), {})
    background.drain()
    return pid_of(background)


def assert_same(path, expected):
    module = Mixed(expected.large.shape[1])
    load_directory(path, module)
    for name, value in module.state_dict().items():
        assert value.dtype == expected.state_dict()[name].dtype
        assert torch.equal(plain(value), plain(expected.state_dict()[name])), name


def plain(tensor):
    """A form that can be compared."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()


def state_of(pid):
    """State letter of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_asked(background):
    """Return when the process has been told what to write."""

    def is_waiting_for_it():
        frame, functions = sys._current_frames().get(background._thread.ident), set()
        while frame is not None:
            functions.add(frame.f_code.co_name)
            frame = frame.f_back
        return functions >= {"_ask", "poll"}

    wait_for(is_waiting_for_it)


@contextmanager
def held(pid):
    """The process does not go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: state_of(pid) == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_every_format_comes_back_and_later_changes_do_not_show(tmp_path):
    with saver() as background:
        pid = started(background, tmp_path / "first.ckpt")
        module = Mixed()
        expected = Mixed()
        expected.load_state_dict(module.state_dict())
        with held(pid):
            background.save(tmp_path / "a.ckpt", model_chunks(module), {"global_step": 3})
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    tensor.zero_()
            assert not is_checkpoint(tmp_path / "a.ckpt")
        background.drain()
    assert_same(tmp_path / "a.ckpt", expected)
    assert read_manifest(tmp_path / "a.ckpt").step == 3


def test_the_tensors_may_grow_and_shrink(tmp_path):
    with saver() as background:
        modules = [Mixed(size) for size in (5, 5000, 50)]
        for i, module in enumerate(modules):
            background.save(tmp_path / f"{i}.ckpt", model_chunks(module), {})
        background.drain()
    for i, module in enumerate(modules):
        assert_same(tmp_path / f"{i}.ckpt", module)


def test_what_a_process_writes_is_what_a_thread_writes(tmp_path):
    module = Mixed()
    with saver() as background:
        background.save(tmp_path / "process.ckpt", model_chunks(module), {})
        background.drain()
    save_directory(tmp_path / "thread.ckpt", model_chunks(module), {})
    ours, theirs = (read_manifest(tmp_path / f"{n}.ckpt") for n in ("process", "thread"))
    assert ours.tensors == theirs.tensors
    # All but the archives' own checksums.
    assert {n: e.size for n, e in ours.files.items()} == {
        n: e.size for n, e in theirs.files.items()
    }


def test_incremental_checkpoints_are_whole(tmp_path):
    module = Mixed()
    copies = []
    with saver(incremental=True) as background:
        for i in range(4):
            background.check()
            with torch.no_grad():
                module.scalar.fill_(i)
            copies.append(Mixed())
            copies[-1].load_state_dict(module.state_dict())
            background.save(tmp_path / f"{i}.ckpt", model_chunks(module), {})
        background.drain()
    for i, expected in enumerate(copies):
        assert_same(tmp_path / f"{i}.ckpt", expected)


def test_a_killed_process_fails_one_save(tmp_path, caplog):
    with saver() as background, caplog.at_level(logging.WARNING):
        pid = started(background, tmp_path / "1.ckpt")
        with held(pid):
            background.save(tmp_path / "2.ckpt", model_chunks(Mixed()), {})
            wait_until_asked(background)
            os.kill(pid, signal.SIGKILL)
        background.drain()
        assert len(caplog.records) == 1
        message = caplog.records[0].getMessage()
        assert f"(pid {pid}) was killed by SIGKILL; the next save starts another" in message
        assert "2.ckpt" in message
        assert "\n" not in message
        assert os.listdir(tmp_path) == ["1.ckpt"]
        os.kill(started(background, tmp_path / "3.ckpt"), signal.SIGKILL)  # while it is idle
        wait_for(lambda: state_of(pid_of(background)) in "Z")
        module = Mixed()
        background.save(tmp_path / "4.ckpt", model_chunks(module), {})
        background.drain()
        assert len(caplog.records) == 1
    assert_same(tmp_path / "4.ckpt", module)


def test_a_save_in_flight_gives_way(tmp_path, monkeypatch):
    with saver(when_busy="supersede") as background:
        pid = started(background, tmp_path / "1.ckpt")
        with held(pid):
            background.save(tmp_path / "2.ckpt", model_chunks(Mixed()), {})
            wait_until_asked(background)
            connection = background._process._connection
            send = connection.send

            def send_and_wake(request):
                send(request)
                if request == file_writer.STOP:
                    os.kill(pid, signal.SIGCONT)

            monkeypatch.setattr(connection, "send", send_and_wake)
            module = Mixed()
            background.save(tmp_path / "3.ckpt", model_chunks(module), {})
        background.drain()
        assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "3.ckpt"]
        assert pid_of(background) == pid
    assert_same(tmp_path / "3.ckpt", module)


def test_errors_of_the_system_are_named(tmp_path):
    with saver(on_error="raise") as background:
        pid = started(background, tmp_path / "1.ckpt")
        limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, limit[1]))
        background.save(tmp_path / "2.ckpt", model_chunks(Mixed()), {})
        pattern = r"ckpt: \[Errno 27\] File too large \([\d,]+ bytes needed here, [\d,]+ free\)"
        with pytest.raises(CheckpointError, match=pattern):
            background.drain()
        assert os.listdir(tmp_path) == ["1.ckpt"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        assert started(background, tmp_path / "3.ckpt") == pid


def test_signals_to_the_whole_group_do_not_reach_it(tmp_path):
    with saver() as background:
        pid = started(background, tmp_path / "1.ckpt")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, number)
        assert started(background, tmp_path / "2.ckpt") == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def segments_of_this_process():
    """Other tests may run beside this one."""
    return [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


def test_nothing_accumulates_and_nothing_is_left(tmp_path):
    module = Mixed()
    segments = segments_of_this_process()
    gc.collect()  # files of earlier tests
    before = open_files()
    with saver() as background:
        pid = started(background, tmp_path / "a.ckpt")
        during = open_files(), len(os.listdir(f"/proc/{pid}/fd"))
        for step in range(50):
            background.check()
            background.save(tmp_path / "a.ckpt", model_chunks(module), {"global_step": step})
        background.drain()
        assert pid_of(background) == pid
        assert open_files() <= during[0]
        assert len(os.listdir(f"/proc/{pid}/fd")) == during[1]
        assert segments_of_this_process() == segments
    assert state_of(pid) == ""
    assert open_files() <= before
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert_same(tmp_path / "a.ckpt", module)


PARENT = """
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
memory = os.memfd_create("m")
arguments = map(str, (theirs.fileno(), memory, os.getpid(), 0))
command = [sys.executable, "-I", "-S", sys.argv[1], *arguments]
child = subprocess.Popen(command, pass_fds=(theirs.fileno(), memory))
helper = os.fork()  # like a worker of a DataLoader, it keeps our end of the connection open
if helper == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child.pid, helper, flush=True)
time.sleep(60)
"""


def test_it_does_not_outlive_the_training_process():
    command = [sys.executable, "-c", PARENT, file_writer.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid, helper = map(int, parent.stdout.readline().split())
        try:
            assert state_of(pid) not in ("", "Z")
            parent.kill()
            parent.wait()
            wait_for(lambda: state_of(pid) in ("", "Z"))
        finally:
            os.kill(helper, signal.SIGKILL)


def test_it_notices_the_end_of_the_connection():
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("test")
    command = (theirs.fileno(), memory, os.getpid(), 0)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", file_writer.__file__, *map(str, command)],
        pass_fds=(theirs.fileno(), memory),
    ) as process:
        theirs.close()
        ours.close()
        os.close(memory)
        assert process.wait(60) == 0


def killed_on_one_rank_job(path):
    dist.init_process_group("gloo")
    group = Peers(dist.new_group(backend="gloo"))
    config = CheckpointConfig(mode="async", process="process", on_error="raise")
    background = Saver(config, Peers(), group)
    pid = started(background, path / "1.ckpt")
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGSTOP)
    background.save(path / "2.ckpt", {f"rank{dist.get_rank()}": model_chunks(Mixed())["large"]}, {})
    if dist.get_rank() == 1:
        wait_until_asked(background)
        os.kill(pid, signal.SIGKILL)
    message = ""
    try:
        background.drain()
    except CheckpointError as error:
        message = str(error)
    background.save(path / "3.ckpt", model_chunks(Mixed()), {})
    background.drain()
    background.close()
    return message


def test_all_ranks_hear_of_it(pool, tmp_path):
    messages = pool.run(2, killed_on_one_rank_job, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1: " in messages[0]
    assert "was killed by SIGKILL" in messages[0]
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "3.ckpt"]
