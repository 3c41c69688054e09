"""The first process of a machine: ``python -I -S init.py JSON``, see `machine`.

It prepares its mount namespace, then starts and signals processes as lines on its standard input
say, and tells on its standard output how they end. When it ends, the kernel kills all processes of
its namespace: it does so when its input ends, as when the test is killed, and after ``limit_s``.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def prepare(settings: dict[str, Any]) -> None:
    """Host name and mounts."""
    socket.sethostname(settings["name"])
    mount("--bind", settings["hosts"], "/etc/hosts")
    mount("-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm")
    for own, place in settings["disks"]:
        mount("--bind", own, place)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


class Init:
    """Starts processes, and reaps them and their orphans."""

    def __init__(self) -> None:
        self.started: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        """By process id: the number of the run."""

    def tell(self, **what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    def obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "start":
            self.start(order)
        else:
            with suppress(ProcessLookupError):
                os.kill(order["pid"], order["number"])
            self.tell(done=order["run"])

    def start(self, order: dict[str, Any]) -> None:
        with open(order["log"], "ab") as log:
            try:
                process = subprocess.Popen(
                    order["command"],
                    env=order["env"],
                    cwd=order["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                self.tell(done=order["run"], pid=0)
                self.tell(ended=order["run"], code=127)
                return
        self.started[process.pid] = order["run"], process
        self.tell(done=order["run"], pid=process.pid)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.started:
                run, process = self.started.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                self.tell(ended=run, code=process.returncode)


def main() -> None:
    settings = json.loads(sys.argv[1])
    deadline = time.monotonic() + settings["limit_s"]
    prepare(settings)
    wakes, awakens = os.pipe()
    os.set_blocking(awakens, False)
    signal.set_wakeup_fd(awakens)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    init = Init()
    init.tell(ready=True)
    waiting = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([0, wakes], [], [], left)
        if wakes in ready:
            os.read(wakes, 4096)
            init.reap()
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                init.obey(json.loads(line))
    Path(settings["overdue"]).touch()


if __name__ == "__main__":
    main()
