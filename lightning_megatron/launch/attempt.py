"""Attempt: one start of the processes of a run, with its number and processes (`rendezvous`)."""

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "lightning_megatron/attempt"
"""Prefix of the keys that have to do with attempts."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of the run."""

    host: str
    pid: int
    machine: str = ""
    """Key of the machine and pid namespace; equal for processes that see each other's pids."""

    @property
    def node(self) -> str:
        """Key of the node; equal for processes that reach each other without a network."""
        kernel = self.machine.partition(" ")[0]
        return f"{self.host} {kernel}"

    @classmethod
    def here(cls) -> "Peer":
        """This process."""
        machine = socket.gethostname()
        with suppress(OSError):  # other systems than Linux
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(host=socket.gethostname(), pid=os.getpid(), machine=machine)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all processes of a run."""

    number: int
    """0 for the first, and larger for each further one (by more than one where a start failed)."""
    run_id: str
    """Id of the run: equal for all attempts of one launcher, and for those that resume from their
    checkpoints."""
    peers: tuple[Peer, ...]
    """The processes, by rank."""

    def to_json(self) -> str:
        """Text for a store; each machine is written once, as every rank reads it."""
        places: dict[tuple[str, str], int] = {}
        peers = [(places.setdefault((p.host, p.machine), len(places)), p.pid) for p in self.peers]
        fields = {"number": self.number, "run_id": self.run_id}
        return json.dumps({**fields, "places": list(places), "peers": peers})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Attempt":
        """Attempt from the text of `to_json`."""
        fields = json.loads(text)
        places = fields.pop("places")
        found = []
        for place, pid in fields.pop("peers"):
            host, machine = places[place]
            found.append(Peer(host=host, pid=pid, machine=machine))
        return cls(**fields, peers=tuple(found))

    def prefix(self) -> str:
        """Prefix of all keys of this attempt."""
        return f"{KEY} {self.number}"


def remember(store: Any, attempt: Attempt) -> Attempt:
    """Leave ``attempt`` in the store of the default group, for later Trainers of its processes."""
    store.set(KEY, attempt.to_json())
    return attempt


def recall(store: Any) -> Attempt:
    """Attempt that `remember` kept; a new one if other code made the process group."""
    if not store.check([KEY]):
        fresh = Attempt(number=0, run_id=secrets.token_hex(8), peers=())
        store.compare_set(KEY, "", fresh.to_json())
    return Attempt.from_json(store.get(KEY))
