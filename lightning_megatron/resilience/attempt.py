"""Which attempt of a run this is, agreed by processes that may each have been started again.

torchrun keeps one store for the whole run and starts new workers around it after a failure. In that
store the keys of earlier attempts are still there: the addresses of dead processes, to which
the new ones then try to connect, and half-finished barriers. So every attempt gets a prefix of its
own. The number in it must be the same on all ranks, and must be new; but no process knows it:
``TORCHELASTIC_RESTART_COUNT`` counts the failures of one node only (a node that is made to restart
because another one failed may count differently: pytorch #108158), does not count restarts
that come of nodes that join or leave, and every key that a process could read to find out may have
been written by the dead.

So nothing is read that was there before. Every process of the new attempt draws a random *token*,
which no earlier process can have known, and all but rank 0 proceed like this::

    rank r                                       rank 0
    ------------------------------------------   ----------------------------------------------
    hello/r = token                              n = add(attempts, 1)
    wait for invitation/<token> -> n       <-    for each hello/r that is new: invitation/<it> = n
    accepted/n/<token> = 1                 ->    wait until the latest token of every rank accepted
    wait for go/n (or another invitation)  <-    go/n = who takes part

A stale ``hello`` makes rank 0 write an invitation that nobody reads. It goes on looking until each
rank's *latest* token has accepted, which only a process that lived after n was drawn can do. A rank
that dies meanwhile, or a rank 0 that does, is replaced by one with another token or another n, and
the others follow. The number grows by one with each rank 0 that has lived, so it also says how many
attempts there were. The price is four small keys a rank and attempt, and one round trip of polls.

The same exchange is the roll-call: at the deadline rank 0 knows who has not answered, and tells the
others, so that all name the same missing ranks.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron._torch import PrefixStore, Store
from lightning_megatron.errors import MissingRanksError

_KEY = "lightning_megatron/attempt"
_POLL_S = 0.01
_POLLS_PER_S = 20000
"""How many polls of all ranks together the store is asked to bear."""
_VERDICT_S = 1.0
"""How much longer than rank 0 the others wait, for it to say who is missing."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of the run."""

    host: str
    pid: int
    machine: str = ""
    """The same for processes that know each other by the same process ids."""

    @property
    def node(self) -> str:
        """The same for processes that need no network to reach each other."""
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
    """The same for all attempts that one launcher makes, and for those that resume from their
    checkpoints."""
    peers: tuple[Peer, ...]
    """The processes, by rank."""

    def to_json(self) -> str:
        """As text, for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Attempt":
        """What `to_json` gave."""
        fields = json.loads(text)
        return cls(**{**fields, "peers": tuple(Peer(**peer) for peer in fields["peers"])})

    def prefix(self) -> str:
        """Of all keys of this attempt."""
        return f"{_KEY} {self.number}"


def join(
    store: Store, rank: int, world_size: int, timeout_s: float, run_id: str | None = None
) -> Attempt:
    """Agree with the other ranks on the attempt; all ranks of the new attempt call this.

    Args:
        store: where they meet; it may hold whatever earlier attempts have left there.
        rank: of this process.
        world_size: how many ranks take part.
        timeout_s: how long to wait for all of them.
        run_id: of the launcher, if it has one.

    Raises:
        MissingRanksError: not all have come, on each of those that have.
    """
    store = PrefixStore(_KEY, store)
    if rank == 0:
        return _Host(store, world_size, run_id).gather(timeout_s)
    return _Guest(store, rank, world_size).arrive(timeout_s)


def _hello(rank: int, world_size: int) -> str:
    """Key of a rank's token; a process of an earlier, larger world never counts for a later one."""
    return f"hello/{world_size}/{rank}"


def _pause_s(world_size: int) -> float:
    return max(_POLL_S, world_size / _POLLS_PER_S)


class _Host:
    """Rank 0, which invites the others."""

    def __init__(self, store: Store, world_size: int, run_id: str | None) -> None:
        self._store, self._world_size = store, world_size
        self._number = int(store.add("attempts", 1)) - 1
        fresh = run_id or secrets.token_hex(8)
        self._run_id = store.compare_set("run_id", "", fresh).decode() or fresh
        self._latest: dict[int, str] = {}
        self._peers: dict[int, Peer] = {0: Peer.here()}

    def gather(self, timeout_s: float) -> Attempt:
        deadline = time.monotonic() + timeout_s
        while missing := self._missing():
            if time.monotonic() > deadline:
                here = [(rank, self._peers[rank]) for rank in sorted(self._peers)]
                present = [(rank, peer.host) for rank, peer in here if rank not in missing]
                text = describe_missing(missing, self._world_size, timeout_s, present)
                self._store.set(f"missing/{self._number}", text)
                raise MissingRanksError(text, missing)
            time.sleep(_pause_s(self._world_size))
        peers = tuple(self._peers[rank] for rank in range(self._world_size))
        attempt = Attempt(number=self._number, run_id=self._run_id, peers=peers)
        self._store.set(f"go/{self._number}", attempt.to_json())
        return attempt

    def _missing(self) -> list[int]:
        """Invite who has come since, and return who has not accepted."""
        missing = []
        for rank in range(1, self._world_size):
            if self._invite(rank) is None or not self._has_accepted(rank):
                missing.append(rank)
        return missing

    def _invite(self, rank: int) -> str | None:
        if not self._store.check([_hello(rank, self._world_size)]):
            return None
        hello = json.loads(self._store.get(_hello(rank, self._world_size)))
        token: str = hello.pop("token")
        if self._latest.get(rank) != token:
            self._latest[rank] = token
            self._peers[rank] = Peer(**hello)
            self._store.set(f"invitation/{token}", str(self._number))
        return token

    def _has_accepted(self, rank: int) -> bool:
        return bool(self._store.check([f"accepted/{self._number}/{self._latest[rank]}"]))


class _Guest:
    """Any other rank."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._token = secrets.token_hex(8)
        self._number: int | None = None
        hello = {"token": self._token, **asdict(Peer.here())}
        store.set(_hello(rank, world_size), json.dumps(hello))

    def arrive(self, timeout_s: float) -> Attempt:
        deadline = time.monotonic() + timeout_s + _VERDICT_S
        while True:
            self._follow_invitations()
            if self._number is not None:
                if self._store.check([f"go/{self._number}"]):
                    return Attempt.from_json(self._store.get(f"go/{self._number}"))
                if self._store.check([f"missing/{self._number}"]):
                    raise MissingRanksError(self._store.get(f"missing/{self._number}").decode())
            if time.monotonic() > deadline:
                text = describe_missing([0], self._world_size, timeout_s)
                raise MissingRanksError(text, [0])
            time.sleep(_pause_s(self._world_size))

    def _follow_invitations(self) -> None:
        key = f"invitation/{self._token}"
        if not self._store.check([key]):
            return
        number = int(self._store.get(key))
        if number != self._number:
            self._number = number
            self._store.set(f"accepted/{number}/{self._token}", "1")


def describe_missing(
    missing: Sequence[int],
    world_size: int,
    timeout_s: float,
    present: Sequence[tuple[int, str]] = (),
) -> str:
    """One sentence on the ranks that have not come.

    Args:
        missing: these.
        world_size: how many were to come.
        timeout_s: how long the others have waited.
        present: rank and host of those that have come, where that is known.
    """
    one = len(missing) == 1
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    by_host: dict[str, list[int]] = {}
    for rank, host in present:
        by_host.setdefault(host, []).append(rank)
    hosts = [f"{host} ({_count(len(ranks), 'rank')})" for host, ranks in by_host.items()]
    where = f" Here are: {', '.join(hosts[:16])}." if hosts else ""
    return (
        f"{'rank' if one else 'ranks'} {shown} of {world_size} "
        f"{'has' if one else 'have'} not connected within {round(timeout_s, 1):g} s "
        f"(ConnectionConfig.init_timeout_s).{where} Look at the output of "
        f"{'that process' if one else 'those processes'}: {'it' if one else 'they'} did not start, "
        "ended early, or still import or load"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def remember(store: Any, attempt: Attempt) -> Attempt:
    """Leave ``attempt`` in the store of the default group, for later Trainers of its processes."""
    store.set(_KEY, attempt.to_json())
    return attempt


def recall(store: Any) -> Attempt:
    """What was left there, or a new one if the group was made by somebody else."""
    if not store.check([_KEY]):
        fresh = Attempt(number=0, run_id=secrets.token_hex(8), peers=())
        store.compare_set(_KEY, "", fresh.to_json())
    return Attempt.from_json(store.get(_KEY))
