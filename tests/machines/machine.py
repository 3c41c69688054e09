"""`Machines` from outside: makes namespaces and the network between them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import pytest

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
LIMIT_S = 1500.0
PATIENCE_S = 300.0
"""How long a process may take, on a machine that does much else."""
_ANSWER_S = 120.0
"""How long a machine may take for what takes it a millisecond."""
_NOWHERE = "02:00:00:00:00:fe"
"""Address of a network card that no machine has."""

Hosts = Literal["proper", "debian", "none"]


@cache
def missing() -> str:
    """What this machine lacks to make others; empty if nothing."""
    if sys.platform != "linux":
        return "Linux"
    if os.geteuid():
        return "root"
    for program in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"the program `{program}`"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        + ["ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1"],
        capture_output=True,
        text=True,
        timeout=_ANSWER_S,
        check=False,
    )
    return "" if not tried.returncode else f"namespaces ({tried.stderr.strip()})"


needs_machines = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
"""Skips a test where machines cannot be made, and says for want of what."""


class Run:
    """A process that was started on a machine, and the output of it and its children.

    Attributes:
        pid: in the machine's own table of processes.
        code: exit code, or minus the signal; None while it runs.
        log: file with standard output and standard error.
    """

    def __init__(self, machine: "Machine", number: int, log: Path) -> None:
        self.machine, self.number, self.log = machine, number, log
        self.pid = 0
        self.code: int | None = None
        self.ended_at = 0.0
        """By `time.monotonic`."""

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout: float = PATIENCE_S) -> tuple[int, str]:
        """Exit code and output, once it has ended.

        Raises:
            TimeoutError: it has not, within ``timeout`` seconds; with the end of its output.
        """
        self.machine.wait_until(lambda: self.code is not None, timeout, str(self))
        assert self.code is not None
        return self.code, self.output

    def wait_for(self, text: str, timeout: float = PATIENCE_S) -> None:
        """Return as soon as ``text`` stands in the output.

        Raises:
            TimeoutError: it does not come within ``timeout`` seconds, or the process ends without.
        """
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self.code is not None and text not in self.output or time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} from {self}:\n{self.output[-5000:]}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.machine.signal(self.pid, number)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.machine.name} ({self.log.name}, code {self.code})"


class Machine:
    """One of `Machines`.

    Attributes:
        index: 0 for the first.
        name: host name, ``node0`` for the first.
        address: 10.77.0.1 for the first.
        is_off: whether it was powered off.
    """

    def __init__(self, machines: "Machines", index: int) -> None:
        self._machines, self.index = machines, index
        self.name, self.address = f"node{index}", f"{NETWORK}.{index + 1}"
        self.is_off = False
        self._news = threading.Condition()
        self._runs: dict[int, Run] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._ready = False
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
            + ["--mount-proc", sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py"))]
            + [json.dumps(machines.settings(self))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    # Processes -----------------------------------------------------------------------------------

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> Run:
        """Start a process.

        Args:
            command: program and arguments.
            env: what its environment has beside that of the tests.
            cwd: where; the folder of the machines if None.
            log: for its output; a new file in the folder of the machines if None.
        """
        number = self._next()
        log = log or self._machines.folder / f"{self.name}-{number}.log"
        run = self._runs[number] = Run(self, number, log)
        where = str(cwd or self._machines.folder)
        order = {"command": list(command), "env": environment(env or {}), "cwd": where}
        answer = self._order(number, do="start", log=str(log), **order)
        run.pid = answer["pid"]
        return run

    def run(self, command: Sequence[str], **options: Any) -> str:
        """Output of a command that has to succeed; ``options`` are those of `start`."""
        run = self.start(command, **options)
        code, output = run.wait()
        assert code == 0, f"{run}: {output[-5000:]}"
        return output

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process by its id on this machine."""
        self._order(self._next(), do="signal", pid=pid, number=int(number))

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the machine at once."""
        self.signal(-1, number)

    # The cable -----------------------------------------------------------------------------------

    def cut(self, *, silently: bool = False) -> None:
        """Take the machine off the network, until `mend`.

        Args:
            silently: a switch loses all packets, and nobody sees it; else the cable is pulled, and
                the machine's own interface has no carrier.
        """
        how = "nomaster" if silently else "down"
        self._machines.switch(f"link set port{self.index} {how}")

    def mend(self) -> None:
        """Put the machine back on the network."""
        self._machines.switch(f"link set port{self.index} master bridge up")

    def lose(self, other: "Machine") -> None:
        """Let all that this machine sends to another one vanish, until `find`."""
        self.run(
            ["ip", "neigh", "replace", other.address, "lladdr", _NOWHERE]
            + ["dev", "eth0", "nud", "permanent"]
        )

    def find(self, other: "Machine") -> None:
        """Let what this machine sends to another one arrive again."""
        self.run(["ip", "neigh", "del", other.address, "dev", "eth0"])

    def power_off(self) -> None:
        """Cut the cable, and kill all processes: the others hear nothing of it."""
        self.cut()
        self.close()

    # Its own affairs -----------------------------------------------------------------------------

    def plug_in(self) -> None:
        """Give its end of the cable an address; called once, when the cable is there."""
        in_network(
            self._process.pid,
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
        )

    @property
    def network(self) -> int:
        """A process in its network namespace."""
        return self._process.pid

    def close(self) -> None:
        """End all its processes; what `power_off` does without cutting the cable first."""
        self.is_off = True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # by which the kernel kills the machine's first process
            self._process.wait()

    def await_ready(self) -> None:
        """Wait until it can start processes."""
        self.wait_until(lambda: self._ready, _ANSWER_S, f"first process of {self.name}")

    def wait_until(self, is_so: Any, timeout: float, what: str) -> None:
        """Wait for news that make ``is_so()`` true.

        Raises:
            TimeoutError: none does within ``timeout`` seconds, or before the machine ends.
        """
        with self._news:
            self._news.wait_for(lambda: is_so() or self._is_gone, timeout)
            if is_so():
                return
        late = "; the machine was at its `limit_s`" if self._machines.overdue(self) else ""
        outputs = "\n".join(f"--- {r}\n{r.output[-5000:]}" for r in self._runs.values())
        how = "is gone with its machine" if self._is_gone else f"did not end in {timeout:g} s"
        raise TimeoutError(f"{what} {how}{late}\n{outputs}")

    @property
    def _is_gone(self) -> bool:
        assert self._process.stdout is not None
        return self._process.stdout.closed

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _order(self, number: int, /, **order: Any) -> dict[str, Any]:
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"run": number, **order}) + "\n")
        pipe.flush()
        self.wait_until(lambda: number in self._answers, _ANSWER_S, f"{order['do']} on {self.name}")
        return self._answers.pop(number)

    def _listen(self) -> None:
        pipe: IO[str] | None = self._process.stdout
        assert pipe is not None
        for line in pipe:
            with self._news:
                self._hear(json.loads(line))
                self._news.notify_all()
        with self._news:
            pipe.close()
            self._news.notify_all()

    def _hear(self, news: dict[str, Any]) -> None:
        if "ready" in news:
            self._ready = True
        elif "done" in news:
            self._answers[news["done"]] = news
        else:
            run = self._runs[news["ended"]]
            run.code, run.ended_at = news["code"], time.monotonic()


class Machines:
    """Some machines at one switch, for the length of a ``with`` block.

    Args:
        count: how many.
        folder: for their outputs and disks, which stay; a temporary one if None.
        hosts: what their ``/etc/hosts`` have: the addresses of all (``"proper"``); the same, but
            ``127.0.1.1`` for the machine's own name, as Debian's installer writes it
            (``"debian"``); or no machine at all, not even itself (``"none"``).
        private: paths of directories of which each machine has its own, empty at first: as disks
            that are not shared.
        limit_s: seconds after which all machines end, whatever the test does.
    """

    def __init__(
        self,
        count: int,
        folder: Path | None = None,
        *,
        hosts: Hosts = "proper",
        private: Sequence[Path] = (),
        limit_s: float = LIMIT_S,
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="machines-"))
        self._temporary = folder is None
        self._hosts, self._private, self._limit_s = hosts, tuple(private), limit_s
        self._count = count
        self._machines: list[Machine] = []
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Machines":
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, index: int) -> Machine:
        return self._machines[index]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return len(self._machines)

    def disk(self, index: int, path: Path) -> Path:
        """Where the tests see the directory that machine ``index`` has at the private ``path``."""
        return self.folder / f"disk-of-node{index}" / str(path).strip("/").replace("/", "-")

    def close(self) -> None:
        """End all machines; what the ``with`` block does at its end."""
        for machine in self._machines:
            machine.close()
        if self._switch is not None:
            self._switch.communicate(timeout=_ANSWER_S)
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def switch(self, *commands: str) -> None:
        """Run commands of `ip` at the switch."""
        assert self._switch is not None
        in_network(self._switch.pid, *commands)

    def settings(self, machine: Machine) -> dict[str, Any]:
        """What a machine's first process is told."""
        hosts = self.folder / f"hosts-of-{machine.name}"
        hosts.write_text("\n".join(self._lines(machine)) + "\n")
        disks = []
        for path in self._private:
            own = self.disk(machine.index, path)
            own.mkdir(parents=True, exist_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            disks.append((str(own), str(path)))
        return {
            "name": machine.name,
            "hosts": str(hosts),
            "disks": disks,
            "limit_s": self._limit_s,
            "overdue": str(self._overdue(machine)),
        }

    def overdue(self, machine: Machine) -> bool:
        """Whether a machine has ended because of ``limit_s``."""
        return self._overdue(machine).exists()

    def _overdue(self, machine: Machine) -> Path:
        return self.folder / f"{machine.name}-overdue"

    def _lines(self, machine: Machine) -> list[str]:
        lines = ["127.0.0.1 localhost"]
        if self._hosts == "debian":
            lines.append(f"127.0.1.1 {machine.name}")
        if self._hosts != "none":
            others = [
                i for i in range(self._count) if self._hosts == "proper" or i != machine.index
            ]
            lines += [f"{NETWORK}.{i + 1} node{i}" for i in others]
        return lines

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._switch = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(self._count):
            self._machines.append(Machine(self, index))
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write("\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()  # it runs, so it is in its namespace
        for machine in self:
            machine.await_ready()
        commands = ["link add bridge type bridge", "link set bridge up"]
        for machine in self:
            port = f"port{machine.index}"
            peer = f"eth0 netns {machine.network}"
            commands += [
                f"link add {port} type veth peer name {peer}",
                f"link set {port} master bridge up",
            ]
        self.switch(*commands)
        for machine in self:
            machine.plug_in()


def in_network(process: int, *commands: str) -> None:
    """Run commands of `ip` in the network namespace of a process."""
    done = subprocess.run(
        ["nsenter", "--net", "--target", str(process), "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=_ANSWER_S,
        check=False,
    )
    assert done.returncode == 0, (commands, done.stderr)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process on a machine: those of the tests, but no launcher's."""
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    found = {k: v for k, v in os.environ.items() if k not in launchers}
    found |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**found, **more}
