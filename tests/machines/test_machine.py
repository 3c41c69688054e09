"""The machines that other tests rely on: they talk, lose each other, and leave nothing behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.machines import Machines, needs_machines

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

TALK = """
import pathlib, socket, sys
address, = sys.argv[1:]
if socket.gethostname() == "node0":
    listening = socket.create_server((address, 4321))
    print("listening", flush=True)
    peer, who = listening.accept()
    print(who[0], flush=True)
else:
    peer = socket.create_connection((address, 4321), timeout=60)
peer.settimeout(0.5)
while True:
    peer.sendall(socket.gethostname().encode())
    try:
        said = peer.recv(100)
    except TimeoutError:
        print("silence", flush=True)
        continue
    if not said:
        break
    print("heard", said.decode()[:5], flush=True)
"""


def test_machines_talk_until_the_cable_is_cut(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        first, second = machines
        host = first.start([sys.executable, "-c", TALK, "node0"])
        host.wait_for("listening")
        guest = second.start([sys.executable, "-c", TALK, first.address])
        guest.wait_for("heard node0")
        assert second.address in host.output
        for silently in (False, True):
            second.cut(silently=silently)
            before = guest.output.count("silence")
            guest.wait_for("silence\n" * (before + 1))
            before = guest.output.count("heard")
            second.mend()
            until = time.monotonic() + 120
            while guest.output.count("heard") == before and time.monotonic() < until:
                time.sleep(0.05)
            assert guest.output.count("heard") > before
            guest.log.write_text("heard node0\n")
        guest.signal(signal.SIGKILL)
        assert guest.wait()[0] == -signal.SIGKILL
        assert host.wait()[0] in (0, 1)  # its peer's kernel closes the connection


def test_two_of_three_lose_each_other(tmp_path: Path) -> None:
    """Both still reach the third."""
    ask = (
        "import socket, sys; socket.create_connection((sys.argv[1], 4321), timeout=5); print('ok')"
    )
    serve = "import socket, time; s = socket.create_server(('', 4321)); print('up'); time.sleep(99)"

    def reach(asking: int, asked: int) -> bool:
        run = machines[asking].start([sys.executable, "-c", ask, machines[asked].address])
        return run.wait()[1] == "ok\n"

    with Machines(3, tmp_path) as machines:
        for machine in machines:
            machine.start([sys.executable, "-c", serve]).wait_for("up")
        assert reach(1, 2)
        machines[1].lose(machines[2])
        assert [reach(1, 2), reach(2, 1), reach(1, 0), reach(2, 0)] == [False, False, True, True]
        machines[1].find(machines[2])
        assert reach(2, 1)


@pytest.mark.parametrize(
    ("hosts", "own", "other"),
    [
        ("proper", "10.77.0.1", "10.77.0.2"),
        ("debian", "127.0.1.1", "10.77.0.2"),
        ("none", "unknown", "unknown"),
    ],
)
def test_names(tmp_path: Path, hosts: str, own: str, other: str) -> None:
    code = """
import os, socket
def find(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "unknown"
print(socket.gethostname(), find("node0"), find("node1"), len(os.listdir("/dev/shm")))
print(len([name for name in os.listdir("/proc") if name.isdigit()]), "processes")
"""
    disk = tmp_path / "disk"
    with Machines(2, tmp_path, hosts=hosts, private=[disk]) as machines:  # type: ignore[arg-type]
        said = machines[0].run([sys.executable, "-c", code])
        assert said == f"node0 {own} {other} 0\n2 processes\n"
        for machine in machines:
            machine.run(["sh", "-c", f"hostname > {disk}/name; touch /dev/shm/mine"])
        assert [(machines.disk(i, disk) / "name").read_text() for i in (0, 1)] == [
            "node0\n",
            "node1\n",
        ]
        assert list(disk.iterdir()) == []


def test_nothing_is_left(tmp_path: Path) -> None:
    """A machine that is stopped as a whole, one that is off, and one that is at its limit."""
    mark = f"until={time.time()}"
    before = Path("/proc/net/dev").read_text().count(":")
    sleep = ["sh", "-c", f": {mark}; sleep 1000 & sleep 1000"]
    with Machines(2, tmp_path) as machines:
        runs = [machine.start(sleep) for machine in machines]
        machines[0].signal_all(signal.SIGSTOP)
        machines[1].power_off()
        with pytest.raises(TimeoutError, match="gone with its machine"):
            runs[1].wait()
        with pytest.raises(TimeoutError, match="did not end in 0.1 s"):
            runs[0].wait(0.1)
        assert any(mark in line for line in processes())
    with Machines(1, tmp_path, limit_s=10) as machines:
        run = machines[0].start(sleep)
        with pytest.raises(TimeoutError, match="was at its `limit_s`"):
            run.wait()
    assert not any(mark in line for line in processes())
    assert Path("/proc/net/dev").read_text().count(":") == before


def processes() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{name}/cmdline").read_text())
        except OSError:
            continue
    return found
