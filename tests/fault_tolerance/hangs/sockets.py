"""The listening sockets of processes, as the kernel tells them."""

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def listening_addresses(pids: Iterable[int] | None = None) -> list[tuple[str, int]]:
    """Where ``pids`` (by default this process) listen: address and port of every TCP socket."""
    wanted = {inode for pid in pids or [os.getpid()] for inode in _sockets(pid)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in wanted:
                    address, port = fields[1].split(":")
                    found.append((_address(address), int(port, 16)))
    return found


def _sockets(pid: int) -> set[str]:
    inodes = set()
    with suppress(FileNotFoundError, PermissionError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> str:
    """From groups of four bytes, each in the order of a little-endian machine."""
    groups = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(groups)))
