"""What handlers and DataLoader workers do, in processes of their own."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_megatron.fault_tolerance.signals import (
    StopFlag,
    WorkerStart,
    interrupt_once,
    name_of,
    shield,
)

FORK = multiprocessing.get_context("fork")


def run(body: Callable[..., None], *args: Any) -> int:
    """Exit code of a forked process that calls ``body``."""
    process = FORK.Process(target=body, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def installed(**options: Any) -> StopFlag:
    torch.set_num_threads(1)
    flag = StopFlag(exit_code=42)
    for name, value in options.items():
        setattr(flag, name, value)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, flag)
    flag.watch({signal.SIGTERM, signal.SIGINT})
    return flag


C, MUTEX = ctypes.CDLL(None), ctypes.create_string_buffer(128)


def hang() -> None:
    """In code that neither returns to Python nor is interrupted, without Python's lock."""
    for _ in range(2):
        C.pthread_mutex_lock(MUTEX)


def strike(flag: StopFlag, then: Callable[[], None], number: int = signal.SIGTERM) -> None:
    """Signal this process, and call ``then`` when that was noted longer ago than copies come."""

    def strikes() -> None:
        time.sleep(0.2)  # the main thread hangs
        os.kill(os.getpid(), number)
        while flag._since is None:
            time.sleep(0.01)
        time.sleep(0.2)
        then()

    threading.Thread(target=strikes, daemon=True).start()


def again(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def first_signal_is_noted() -> None:
    flag = installed(same_s=5.0)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # passed on by a launcher
    time.sleep(0.2)
    flag.release()
    os._exit(flag.number)


def second_signal_meets_a_process_that_hangs() -> None:
    strike(installed(same_s=0.1), again)
    hang()


def second_interrupt_meets_a_process_that_hangs() -> None:
    """It counts sooner than another second signal."""
    flag = installed(same_s=600.0, same_interrupt_s=0.1)
    strike(flag, lambda: again(signal.SIGINT), signal.SIGINT)
    hang()


def a_terminal_and_a_launcher_interrupt() -> None:
    flag = installed(same_s=0.0, same_interrupt_s=600.0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    sys.setswitchinterval(60)  # a thread that is not waited for does not come to its end
    flag.release()
    os._exit(flag.number if "signals" not in [t.name for t in threading.enumerate()] else 9)


def grace_ends_for_a_process_that_hangs() -> None:
    strike(installed(grace_s=0.2), lambda: None)
    hang()


def a_handler_runs_late() -> None:
    """The main thread may be busy for longer than copies of a signal are apart."""
    flag = installed(same_s=0.1)
    strike(flag, lambda: C.pthread_mutex_unlock(MUTEX))
    hang()
    os._exit(flag.number)


def the_run_before_was_never_torn_down() -> None:
    installed()
    second_signal_meets_a_process_that_hangs()


def children_are_signalled_twice() -> None:
    """By a `Pool.terminate`, say."""
    flag = installed(same_s=0.1)
    for _ in range(2):
        _fork_and_strike()
        time.sleep(0.5)
    os._exit(flag.number or 5)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (the_run_before_was_never_torn_down, 42),
        (children_are_signalled_twice, 5),
        (first_signal_is_noted, int(signal.SIGTERM)),
        (a_handler_runs_late, int(signal.SIGTERM)),
        (second_signal_meets_a_process_that_hangs, 42),
        (second_interrupt_meets_a_process_that_hangs, 130),
        (a_terminal_and_a_launcher_interrupt, int(signal.SIGINT)),
        (grace_ends_for_a_process_that_hangs, 42),
    ],
)
def test_a_process_that_is_signalled(body: Callable[[], None], code: int) -> None:
    assert run(body) == code


def _child_of_a_run() -> None:
    flag = installed()
    code = _fork_and_strike()
    os._exit(99 if flag.number else -code)


def _fork_and_strike() -> int:
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_dies_of_its_signals_as_ever() -> None:
    assert run(_child_of_a_run) == signal.SIGTERM


def _work(ready: Any) -> None:
    shield(None)(0)
    ready.set()
    time.sleep(300)


def test_a_worker_takes_signals_from_its_parent_only() -> None:
    ready = FORK.Event()
    worker = FORK.Process(target=_work, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(120)
    for name in ("TERM", "USR1", "USR2", "INT"):  # by a process that is not its parent
        subprocess.run(["sh", "-c", f"kill -{name} {worker.pid}"], check=True)
    time.sleep(0.2)
    assert worker.is_alive()
    worker.terminate()
    worker.join(120)
    assert worker.exitcode == 0


def test_a_loaders_own_function_is_called_once() -> None:
    called: list[int] = []
    wrapped = shield(shield(called.append))
    assert isinstance(wrapped, WorkerStart)
    assert wrapped.first == called.append


def test_the_first_interrupt_is_the_only_one() -> None:
    """Else the second breaks off what the first has begun."""
    assert run(_interrupted_twice) == 7


def _interrupted_twice() -> None:
    signal.signal(signal.SIGINT, interrupt_once)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)


def test_names() -> None:
    assert (name_of(15), name_of(200)) == ("SIGTERM", "signal 200")
