"""Entries in the store by which the ranks of an attempt find the one that failed first.

Thousands of ranks lose their connections at the same time and all look for the cause in one store,
which answers one request after the other. So no rank asks for each other rank. The keys are::

    <rank>          how the rank ended; the first value stays
    causes          number of ranks that failed themselves, or died and were seen by a neighbour
    causes/<n>      the n-th of them; after `_LISTED` they are only counted
    searches        number of ranks that look for the cause of an echo
    machine/<i>     machine i runs: a rank of it has posted, or answered a search
    told            number of ranks that are about to report to the user

A rank that searches reads ``causes``, less and less often, and the few new entries: a dozen
requests for any number of ranks.

A process that was killed posts nothing. Other ranks of its machine see that. If there are none, the
silence of the machine shows it: during a search, a thread of one rank of every machine answers
within `ANSWER_S`, however busy the rank is. The machines without an answer at the end of the search
are found by asking whether all of a set have answered, then by halves: ``2 log2(machines)``
requests for each, by one rank.
"""

import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.fault_tolerance.failures.root_cause import (
    describe_exit,
    exit_code_of_zombie,
    is_alive,
    oom_kills,
)
from lightning_megatron.launch.attempt import Peer
from lightning_megatron.launch.store_list import StoreList

ANSWER_S = 1.0
"""Seconds between two checks of one rank of each machine for a search."""
_KEY = "lightning_megatron/end"
_STORE_PATIENCE_S = 1.0
_SILENT_PATIENCE_S = 3.0
"""Seconds to wait for the store: for one request, and for the search of silent machines."""
_LISTED = 64
"""Most causes that are listed; all ranks may fail at the same time."""
_SHOWN = 8
"""Most machines and ranks that a message names."""
_ADDRESS = re.compile(r"\d+(?:\.\d+){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+:[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """End of a rank."""

    rank: int
    how: str
    """``"failed"`` (a cause), ``"echo"``, ``"left"`` (in order), ``"died"`` (seen by others) or
    ``"gone"`` (does not answer)."""
    what: str = ""
    """Description for people."""
    at: float = 0.0
    """Seconds since the epoch."""
    host: str = ""
    pid: int = 0
    who: str = ""
    """Name in the place of the rank, as of a machine; empty for a rank."""

    def __str__(self) -> str:
        who = self.who or f"rank {self.rank} ({self.host}, process {self.pid})"
        return f"{who} {self.what}"


class EndingBoard:
    """Posts and reads the ends of the ranks of an attempt; no rank waits for another.

    Args:
        store: store of the attempt.
        rank: global rank of this process.
        peers: all processes of the attempt, by rank.
        held_by_rank_0: whether the store ends with rank 0.
        address: address of this machine for others; empty if unknown.

    Attributes:
        local: processes of the other ranks of this machine.
        posted: end that this rank has posted.
        machines: ranks of each machine.
        answers: whether this rank answers searches for its machine.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        peers: tuple[Peer, ...],
        *,
        held_by_rank_0: bool = False,
        address: str = "",
    ) -> None:
        self._store = store
        self.rank = rank
        self.peers = peers
        # Number of the Trainer's run, the same on all ranks.
        self._run = store.add(f"{_KEY}/runs of {rank}", 1)
        by_machine: dict[str, list[int]] = {}
        for other, peer in enumerate(peers):
            by_machine.setdefault(peer.machine, []).append(other)
        self.machines = tuple(tuple(ranks) for ranks in by_machine.values())
        self._here = next((i for i, ranks in enumerate(self.machines) if rank in ranks), 0)
        mine = self.machines[self._here] if self.machines else ()
        self.local = {other: peers[other].pid for other in mine if other != rank}
        self.answers = len(self.machines) > 1 and mine[0] == rank
        if self.answers and address:
            store.set(self._name(f"address/{self._here}"), address)
        self.posted: Ending | None = None
        self._causes: dict[int, Ending] = {}
        self._listed = StoreList(store, self._name("causes"), most=_LISTED)
        self._ended: set[int] = set()
        self._answered = False
        self._gone = False
        self._held_by_rank_0 = held_by_rank_0
        self._ooms = oom_kills()

    # Posting --------------------------------------------------------------------------------------

    def post(self, how: str, what: str = "") -> None:
        """Post the end of this rank; only the first call counts. ``"echo"`` begins a search."""
        if self.posted is None:
            ending = Ending(
                rank=self.rank,
                how=how,
                what=what,
                at=time.time(),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self.posted = ending
            self._ask(lambda: self._post(ending))

    def _post(self, ending: Ending) -> None:
        text = json.dumps(asdict(ending))
        counts = self._store.compare_set(self._name(ending.rank), "", text).decode() == text
        if ending.how == "echo":
            self._store.add(self._name("searches"), 1)
        if len(self.machines) > 1:
            self._store.set(self._name(f"machine/{self._here}"), "")
        if counts and ending.how in ("failed", "died"):
            self._listed.append(text)

    def answer(self) -> None:
        """Answer for this machine during a search; one rank calls it every `ANSWER_S`."""

        def answer() -> None:
            if self._store.add(self._name("searches"), 0):
                self._store.set(self._name(f"machine/{self._here}"), "")
                self._answered = True

        if not self._answered:
            self._ask(answer)

    def _name(self, what: object) -> str:
        return f"{_KEY}/{self._run}/{what}"

    # Reading --------------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether the store does not answer any more."""
        return self._gone

    @property
    def holds_store(self) -> bool:
        """Whether the store ends with this rank."""
        return self._held_by_rank_0 and self.rank == 0

    def of(self, rank: int) -> Ending | None:
        """End that a rank has posted; None without one, or if the store is gone."""

        def read() -> Ending | None:
            key = self._name(rank)
            if not self._store.check([key]):
                return None
            return Ending(**json.loads(self._store.get(key)))

        found: Ending | None = self._ask(read)
        return found

    def causes(self, codes: Mapping[int, int] | None = None) -> list[Ending]:
        """Ranks that failed themselves, the first one first; posts deaths on this machine.

        Args:
            codes: exit codes or negative signals of processes that this one started, by rank.
        """
        self._ask(self._read_new)
        for rank, ending in self.dead(codes).items():
            if rank in self._causes or rank in self._ended:
                continue
            said = self.of(rank)
            if said is not None and said.how != "died":
                self._ended.add(rank)
            if said is None:
                self._ask(lambda ending=ending: self._post(ending))  # type: ignore[misc]
            if said is None or said.how in ("failed", "died"):
                self._causes[rank] = said or ending
        return sorted(self._causes.values(), key=lambda ending: ending.at)

    def _read_new(self) -> None:
        for text in self._listed.new():
            ending = Ending(**json.loads(text))
            self._causes.setdefault(ending.rank, ending)

    def deaths(self, codes: Mapping[int, int] | None = None) -> list[Ending]:
        """Processes of this machine that died; quick while there are none."""
        if not self.dead(codes).keys() - self._ended:
            return []
        return [ending for ending in self.causes(codes) if ending.how == "died"]

    def is_first_to_report(self) -> bool:
        """Whether no other rank has reported to the user yet; true if that is unknown."""
        return self._ask(lambda: self._store.add(self._name("told"), 1)) in (1, None)

    def _ask(self, call: Callable[[], Any], patience_s: float = _STORE_PATIENCE_S) -> Any:
        """Result of a call of the store; None if it takes too long, or the store is gone."""
        if self._held_by_rank_0 and 0 in self.local and not is_alive(self.local[0]):
            self._gone = True
        if self._gone:  # torch would print a stack for each try
            return None
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(call())
            except RuntimeError:
                self._gone = True

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(patience_s)
        return result[0] if result else None

    def dead(self, codes: Mapping[int, int] | None = None) -> dict[int, Ending]:
        """Processes of this machine that have ended.

        Args:
            codes: exit codes or negative signals of processes that this one started, by rank.
        """
        found = {}
        for rank, pid in self.local.items():
            code = (codes or {}).get(rank)
            if code is None and is_alive(pid):
                continue
            code = exit_code_of_zombie(pid) if code is None else code
            found[rank] = Ending(
                rank=rank,
                how="died",
                what=describe_exit(code) + self._memory_note(code),
                at=time.time(),
                host=self.peers[rank].host,
                pid=pid,
            )
        return found

    def _memory_note(self, code: int | None) -> str:
        killed = oom_kills() - self._ooms
        if killed <= 0 or code not in (None, -signal.SIGKILL):
            return ""
        return (
            f"; the kernel killed {killed} process{'' if killed == 1 else 'es'} of this control "
            "group for lack of memory"
        )

    # Silence --------------------------------------------------------------------------------------

    def report_silent_machines(self, error: str = "") -> list[Ending]:
        """Post and return the machines without an answer as the cause; empty if all answered.

        Args:
            error: message of this rank's exception, in which gloo names the address of the peer.
                It chooses among several silent machines.
        """
        found = self._ask(self._silent, _SILENT_PATIENCE_S)
        if found is None:
            return self._lost_with_rank_0()
        if not found:
            return []
        named = set(_ADDRESS.findall(error))
        silent = [one for one in found if one[1] in named] or found
        ranks = [rank for machine, _ in silent for rank in self.machines[machine]]
        who = [self._describe(self.machines[machine], address) for machine, address in silent]
        if len(silent) > 1:
            listed = ", ".join(who[:_SHOWN]) + (", ..." if len(who) > _SHOWN else "")
            who, what = [listed], "do not answer: they were killed, or their machines are off"
        elif len(ranks) > 1:
            what = "does not answer: its processes were killed, or it is off"
        else:
            what = "does not answer: it was killed, or its machine is off"
        peer = self.peers[ranks[0]]
        accused = Ending(
            rank=ranks[0],
            how="gone",
            what=f"{what} or cut off",
            at=time.time(),
            host=peer.host,
            pid=peer.pid,
            who=who[0],
        )
        self._ask(lambda: self._listed.append(json.dumps(asdict(accused))))
        return [accused]

    def _silent(self) -> list[tuple[int, str]]:
        """Machines without an answer, and their addresses."""
        names = {self._name(f"machine/{i}"): i for i in range(len(self.machines))}
        del names[self._name(f"machine/{self._here}")]
        found = []
        for name in _absent(self._store.check, list(names), _SHOWN + 1):
            key = self._name(f"address/{names[name]}")
            address = self._store.get(key).decode() if self._store.check([key]) else ""
            found.append((names[name], address))
        return found

    def _describe(self, ranks: Sequence[int], address: str) -> str:
        peer = self.peers[ranks[0]]
        if len(ranks) == 1:
            where = f"{peer.host}, {address}" if address else peer.host
            return f"rank {ranks[0]} ({where}, process {peer.pid})"
        listed = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
        return (
            f"{peer.host} ({address}; ranks {listed})"
            if address
            else f"{peer.host} (ranks {listed})"
        )

    def _lost_with_rank_0(self) -> list[Ending]:
        if not self._held_by_rank_0 or 0 in self.local or self.rank == 0:
            return []
        peer = self.peers[0]
        how = "has gone" if self._gone else "does not answer"
        what = f"{how}, and with it the store by which ranks find the first failure"
        return [Ending(rank=0, how="gone", what=what, at=time.time(), host=peer.host, pid=peer.pid)]


def _absent(check: Callable[[list[str]], bool], keys: list[str], most: int) -> list[str]:
    """Keys that a store does not have, at most ``most``."""
    if not keys or check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    found = _absent(check, keys[:half], most)
    if len(found) < most:
        found += _absent(check, keys[half:], most - len(found))
    return found


SEARCH_S = 2.0
"""Seconds to search for a cause; longer than any machine takes to answer."""
VERDICT_S = 3.0
"""Further seconds in which the others wait for the rank that finds silent machines."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Seconds between two requests: at first, and at last."""


def find_cause(
    board: EndingBoard, error: str, codes: Callable[[], Mapping[int, int]] = dict
) -> tuple[list[Ending], bool]:
    """Post an echo and search for its cause.

    Args:
        board: board of this rank.
        error: message of this rank's exception.
        codes: returns exit codes of the processes that this one started, by rank.

    Returns:
        Causes, the first one first, and whether this rank is to report to the user.
    """
    board.post("echo")
    causes = _search(board, codes, SEARCH_S)
    first = board.is_first_to_report()
    if not causes and len(board.machines) > 1:
        causes = board.report_silent_machines(error) if first else _search(board, codes, VERDICT_S)
    return causes, first


def _search(
    board: EndingBoard, codes: Callable[[], Mapping[int, int]], seconds: float
) -> list[Ending]:
    """Causes, as soon as there are any."""
    for _ in looks(seconds):
        causes = board.causes(codes())
        if causes or board.is_gone:
            return causes
    return []


def looks(seconds: float) -> Iterator[None]:
    """Yield when to ask the store: less and less often, at random times of its own."""
    own = random.Random()
    deadline, pause = time.monotonic() + seconds, _PAUSE_S
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause * own.uniform(0.7, 1.3), left))
        pause = min(1.6 * pause, _LONGEST_PAUSE_S)
