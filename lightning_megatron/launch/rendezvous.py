"""Rendezvous: the processes of a run agree on an attempt, its ranks and its options.

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

Rank 0 does not ask for rank after rank while it waits: whoever has written a key adds his rank to a
list, ``news/<i>``, and rank 0 polls the length of that. As a process may die between the two, it
also looks at all of them now and then, and once at the end. So 4,096 ranks make some ten requests
each, and their polls, which become rarer.

The same exchange finds out, before any process group forms, what would let the run stand still:

* At the deadline rank 0 knows who has not answered, and tells the others in ``verdict/n``, so that
  all name the same missing ranks.
* The invitation carries a hash of the options of rank 0. A rank with another one reads them, and
  reports which differ. So 4,096 ranks that were given the same exchange nothing more.
* A process looks once a second whether its ``hello`` still stands, and renews it. Where two came
  as the same rank, each finds that of the other again after it has renewed its own; a process that
  died does not come back. If the others can go on without one of them, ``go`` says with which.
* Whatever else a process finds wrong with itself it reports as well (`report`), even if it cannot
  take part: its rank is out of range, say. Rank 0 makes all reports one verdict.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_megatron._torch.groups import PrefixStore, Store
from lightning_megatron.errors import ConfigError, MissingRanksError
from lightning_megatron.launch.attempt import KEY, Attempt, Peer
from lightning_megatron.launch.store_list import StoreList

_POLL_S = 0.01
_POLLS_PER_S = 20000
"""Polls per second of all ranks together, at first."""
_LONGEST_PAUSE_S, _LATER_POLLS_PER_S = 0.1, 4000
"""Longest pause between two polls, and polls per second after ranks have waited for a while."""
_SWEEP_S, _SWEPT_PER_S = 0.5, 500
"""Seconds between two checks of all ranks by rank 0: the least, and ranks per second."""
_VERDICT_S = 1.0
"""Seconds that the others wait longer than rank 0, which reports the missing ranks."""
_RENEWAL_S = 1.0
"""Seconds between two checks for another process with the same rank."""
_COLLECT_S = 1.0
"""Seconds that rank 0 waits for further reports after the first."""
_FAREWELL_S = 3.0
"""Seconds that rank 0, which may hold the store, waits until the others have read its report."""
_NEWS, _REPORTS = "news", "reports"
"""Names of lists in the store: ranks that have written a key, and what is wrong with them."""
_SHOWN = 16
"""Most ranks or hosts that a message lists."""


def join(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    run_id: str | None = None,
    *,
    options: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Attempt:
    """Agree with the other ranks on the attempt; all ranks of the new attempt call this.

    Args:
        store: store of the run; it may have keys of earlier attempts.
        rank: global rank of this process.
        world_size: number of ranks.
        timeout_s: seconds to wait for all of them.
        run_id: id of the launcher, if it has one.
        options: options that must be equal on all ranks, by name.
        fresh: whether only this attempt uses the store, as one that rank 0 holds.

    Raises:
        ConfigError: options or the number of ranks differ, two processes came as one rank, or one
            has reported a fault; on each of those that have come.
        MissingRanksError: not all have come, on each of those that have.
    """
    store = PrefixStore(KEY, store)
    if rank == 0:
        return _Host(store, world_size, options or {}, run_id, fresh).gather(timeout_s)
    return _Guest(store, rank, world_size, options or {}, fresh).arrive(timeout_s)


def report(store: Store, rank: int, problems: Sequence[str]) -> None:
    """Report to all ranks, through rank 0, why this process cannot take part."""
    _report(PrefixStore(KEY, store), rank, problems=list(problems))


def dismiss(store: Store, world_size: int, problems: Sequence[str], timeout_s: float) -> None:
    """Tell those who come why rank 0 cannot take part, in place of `join`.

    Args:
        store: that rank 0 holds.
        world_size: how many ranks take part.
        problems: of rank 0.
        timeout_s: how long to wait for ranks that neither come nor report problems of their own.
    """
    _Host(PrefixStore(KEY, store), world_size, {}, None, True).dismiss(problems, timeout_s)


def _report(store: Store, rank: int, **what: Any) -> None:
    text = json.dumps({"rank": rank, "host": Peer.here().host, **what})
    StoreList(store, _REPORTS).append(text)


def _hello(rank: int, world_size: int) -> str:
    """Key of a rank's token; a process of an earlier, larger world never counts for a later one."""
    return f"hello/{world_size}/{rank}"


def _pause_s(world_size: int) -> float:
    return max(_POLL_S, world_size / _POLLS_PER_S)


def _call(store: Store, rank: int) -> None:
    """Have rank 0 look at a rank."""
    StoreList(store, _NEWS).append(str(rank))


def _digest(options: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]


class _Presence:
    """The claim of a process to be a rank."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.token = secrets.token_hex(8)
        self.peer = Peer.here()
        self._store = store
        self._rank = rank
        self._key = _hello(rank, world_size)
        self._text = json.dumps({"token": self.token, **asdict(self.peer)})
        self._rival: str | None = None
        self._next = time.monotonic() + _RENEWAL_S
        store.set(self._key, self._text)
        _call(store, rank)

    def is_due(self) -> bool:
        """Whether it is time again to `renew` it."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _RENEWAL_S
        return True

    def renew(self) -> str | None:
        """Claim the rank again if somebody else has; what is wrong if he does so, too."""
        found = self._store.get(self._key).decode()
        if found == self._text:
            return None
        self._store.set(self._key, self._text)
        _call(self._store, self._rank)
        known, self._rival = self._rival, found
        return self.contested_by(found) if found == known else None

    def contested_by(self, hello: str) -> str:
        """Sentence on two processes that are the same rank; the same from both."""
        fields = json.loads(hello)
        both = sorted([(self.peer.host, self.peer.pid), (fields["host"], fields["pid"])])
        return _duplicate_rank(self._rank, both)


def _duplicate_rank(rank: int, both: Iterable[tuple[str, int]]) -> str:
    named = " and ".join(f"process {pid} on {host}" for host, pid in both)
    return (
        f"two processes have the rank {rank}: {named}. Each node needs another NODE_RANK (for "
        "torchrun --node-rank), from 0 to the number of nodes less 1, and each run a MASTER_PORT "
        "of its own"
    )


class _Host:
    """Rank 0, which invites the others."""

    def __init__(
        self,
        store: Store,
        world_size: int,
        options: Mapping[str, str],
        run_id: str | None,
        fresh: bool,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._options = options
        self._number = int(store.add("attempts", 1)) - 1
        # Those before it are of the dead, unless this is the first.
        self._reports = StoreList(store, _REPORTS, from_now=bool(self._number) and not fresh)
        fresh_id = run_id or secrets.token_hex(8)
        self._run_id = store.compare_set("run_id", "", fresh_id).decode() or fresh_id
        self._invitation = f"{self._number} {_digest(options)}"
        self._latest: dict[int, str] = {}
        self._present: set[str] = set()
        """Tokens of the processes that wait for rank 0."""
        self._news = StoreList(store, _NEWS, from_now=True)
        self._next_sweep = 0.0
        self._missing = set(range(1, world_size))
        """Ranks whose latest token has not accepted, as far as they have been looked at."""
        self._presence = _Presence(store, 0, world_size)
        self._peers: dict[int, Peer] = {0: self._presence.peer}
        store.set(f"options/{self._number}", json.dumps(dict(options)))
        store.set("host", json.dumps({"number": self._number, "world_size": world_size}))

    def gather(self, timeout_s: float) -> Attempt:
        deadline = time.monotonic() + timeout_s
        while not self._are_all_there():
            self._look_for_faults()
            if time.monotonic() > deadline:
                missing = sorted(self._missing)
                here = [(rank, self._peers[rank]) for rank in sorted(self._peers)]
                present = [(rank, peer.host) for rank, peer in here if rank not in missing]
                text = describe_missing(missing, self._world_size, timeout_s, present)
                self._publish({"missing": missing, "text": text})
                raise MissingRanksError(text, missing)
            time.sleep(_POLL_S)
        peers = tuple(self._peers[rank] for rank in range(self._world_size))
        attempt = Attempt(number=self._number, run_id=self._run_id, peers=peers)
        self._store.set(f"go/{self._number}", attempt.to_json())
        return attempt

    def dismiss(self, problems: Sequence[str], timeout_s: float) -> None:
        deadline, reports = time.monotonic() + timeout_s, self._new_reports()
        while not self._are_all_there() and time.monotonic() < deadline:
            if len(self._missing) <= len(reports):
                break
            time.sleep(_POLL_S)
            reports += self._new_reports()
        self._invite_reporters(reports)
        here = {"host": self._presence.peer.host, "problems": problems}
        self._publish({"problems": _placed(here)})

    def _are_all_there(self) -> bool:
        """Whether all have accepted; invites who has come since."""
        ranks = {int(rank) for rank in self._news.new()} & set(range(1, self._world_size))
        if time.monotonic() >= self._next_sweep:
            ranks = set(range(1, self._world_size))
            self._news.forget_unwritten()
        self._look_at(ranks)
        if not self._missing:
            self._look_at(set(range(1, self._world_size)))
        if len(ranks) == self._world_size - 1:
            self._next_sweep = time.monotonic() + max(_SWEEP_S, self._world_size / _SWEPT_PER_S)
        return not self._missing

    def _look_at(self, ranks: set[int]) -> None:
        there = {rank for rank in ranks if self._invite(rank) is not None}
        self._missing -= ranks
        self._missing |= {r for r in ranks if r not in there or not self._has_accepted(r)}

    def _invite(self, rank: int) -> str | None:
        if not self._store.check([_hello(rank, self._world_size)]):
            return None
        hello = json.loads(self._store.get(_hello(rank, self._world_size)))
        token: str = hello.pop("token")
        if self._latest.get(rank) != token:
            self._latest[rank] = token
            self._peers[rank] = Peer(**hello)
            self._store.set(f"invitation/{token}", self._invitation)
        return token

    def _has_accepted(self, rank: int) -> bool:
        token = self._latest[rank]
        if not self._store.check([f"accepted/{self._number}/{token}"]):
            return False
        self._present.add(token)
        return True

    def _look_for_faults(self) -> None:
        """Raise if the ranks cannot come together."""
        if self._presence.is_due():
            contested = self._presence.renew() or self._left_by_others()
            if contested is not None:
                _report(self._store, 0, problems=[contested])
        reports = self._new_reports()
        if not reports:
            return
        until = time.monotonic() + _COLLECT_S
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            self._are_all_there()  # who comes now shall hear of it, too
            reports += self._new_reports()
        problems = self._problems(reports)
        self._invite_reporters(reports)
        self._publish({"problems": problems})
        raise ConfigError(problems)

    def _invite_reporters(self, reports: Sequence[dict[str, Any]]) -> None:
        """Let those hear the verdict whose place another process had before they were seen."""
        for token in {one["token"] for one in reports if "token" in one} - self._present:
            self._store.set(f"invitation/{token}", self._invitation)
            self._present.add(token)

    def _left_by_others(self) -> str | None:
        """Problem if the others continue with another rank 0; None otherwise."""
        latest = int(self._store.add("attempts", 0)) - 1
        if latest <= self._number or not self._store.check([f"go/{latest}"]):
            return None
        other = Attempt.from_json(self._store.get(f"go/{latest}")).peers[0]
        mine = self._presence.peer
        return _duplicate_rank(0, sorted([(mine.host, mine.pid), (other.host, other.pid)]))

    def _new_reports(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._reports.new()]

    def _problems(self, reports: Sequence[dict[str, Any]]) -> list[str]:
        problems = [problem for one in reports for problem in _placed(one)]
        alike: dict[str, list[dict[str, Any]]] = {}
        for one in reports:
            if "differing" in one:
                alike.setdefault(json.dumps(one["differing"]), []).append(one)
        here = [(0, self._presence.peer.host)]
        for differing, those in alike.items():
            there = sorted({(one["rank"], one["host"]) for one in those})
            problems.append(describe_differing(json.loads(differing), there, here))
        return problems

    def _publish(self, verdict: dict[str, Any]) -> None:
        """Tell those who have come, and let them read it: the store may end with this process."""
        self._store.set(f"verdict/{self._number}", json.dumps(verdict))
        until = time.monotonic() + _FAREWELL_S
        while time.monotonic() < until:
            if int(self._store.add(f"told/{self._number}", 0)) >= len(self._present):
                return
            time.sleep(_POLL_S)


class _Guest:
    """Any other rank."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        options: Mapping[str, str],
        fresh: bool,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._fresh = fresh
        self._number: int | None = None
        self._has_reported = False  # and waits for what rank 0 makes of it
        self._presence = _Presence(store, rank, world_size)

    def arrive(self, timeout_s: float) -> Attempt:
        deadline = time.monotonic() + timeout_s + _VERDICT_S
        pause = _pause_s(self._world_size)
        longest = max(_LONGEST_PAUSE_S, self._world_size / _LATER_POLLS_PER_S)
        while True:
            due = self._presence.is_due()
            if self._number is None or due:
                self._follow_invitations()
            if self._number is not None:
                if self._store.check([f"go/{self._number}"]):
                    return self._take_part()
                if self._store.check([f"verdict/{self._number}"]):
                    self._end()
            if due and not self._has_reported:
                self._look_for_faults()
            if time.monotonic() > deadline:
                text = describe_missing([0], self._world_size, timeout_s)
                raise MissingRanksError(text, [0])
            time.sleep(pause)
            pause = min(1.2 * pause, longest)

    def _follow_invitations(self) -> None:
        key = f"invitation/{self._presence.token}"
        if not self._store.check([key]):
            return
        number, digest = self._store.get(key).decode().split()
        if int(number) == self._number:
            return
        self._number = int(number)
        if digest == _digest(self._options):
            self._store.set(f"accepted/{number}/{self._presence.token}", "1")
            _call(self._store, self._rank)
        else:
            self._compare(self._number)

    def _compare(self, number: int) -> None:
        """Report in what the options differ from those of rank 0."""
        theirs = json.loads(self._store.get(f"options/{number}"))
        mine, names = self._options, [*theirs, *(n for n in self._options if n not in theirs)]
        pairs = {name: [mine.get(name, "unset"), theirs.get(name, "unset")] for name in names}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        self._report(differing=differing)

    def _report(self, **what: Any) -> None:
        self._has_reported = True
        _report(self._store, self._rank, token=self._presence.token, **what)

    def _look_for_faults(self) -> None:
        contested = self._presence.renew()
        if contested is not None:
            self._report(problems=[contested])
        elif self._fresh and self._number is None and self._store.check(["host"]):
            host = json.loads(self._store.get("host"))
            if host["world_size"] != self._world_size:  # so it will not invite this rank
                self._number = host["number"]
                sizes = [str(self._world_size), str(host["world_size"])]
                theirs = json.loads(self._store.get(f"options/{self._number}"))
                if theirs == dict(self._options):
                    self._report(differing={"the number of processes": sizes})
                else:
                    self._compare(host["number"])

    def _take_part(self) -> Attempt:
        attempt = Attempt.from_json(self._store.get(f"go/{self._number}"))
        other, mine = attempt.peers[self._rank], self._presence.peer
        if other != mine:
            both = sorted([(mine.host, mine.pid), (other.host, other.pid)])
            raise ConfigError(_duplicate_rank(self._rank, both))
        return attempt

    def _end(self) -> None:
        """Raise what rank 0 has found."""
        verdict = json.loads(self._store.get(f"verdict/{self._number}"))
        self._store.add(f"told/{self._number}", 1)
        if "problems" in verdict:
            raise ConfigError(verdict["problems"])
        raise MissingRanksError(verdict["text"], verdict["missing"])


def _placed(reported: Mapping[str, Any]) -> list[str]:
    """The problems of a process, with the name of its machine."""
    host, problems = reported["host"], reported.get("problems", ())
    return [text if host in text else f"{host}: {text}" for text in problems]


# Sentences ----------------------------------------------------------------------------------------


def describe_differing(
    differing: Mapping[str, Sequence[str]],
    there: Sequence[tuple[int, str]],
    here: Sequence[tuple[int, str]],
) -> str:
    """One sentence on options that are not the same on all ranks.

    Args:
        differing: the value there and the value here, by the name of the option.
        there: rank and host of those that have the first.
        here: rank and host of those that have the second.
    """
    one = ", ".join(f"{name}={values[0]}" for name, values in differing.items())
    other = ", ".join(f"{name}={values[1]}" for name, values in differing.items())
    return (
        f"the ranks were given different options: {one} on {named_ranks(there)}, {other} on "
        f"{named_ranks(here)}; nearest valid: start all of them with the same"
    )


def named_ranks(ranks: Sequence[tuple[int, str]]) -> str:
    """Ranks and their hosts: ``ranks 2, 3 (node1)``."""
    numbers = [str(rank) for rank, _ in ranks[:_SHOWN]]
    more = ", ..." if len(ranks) > _SHOWN else ""
    hosts = list(dict.fromkeys(host for _, host in ranks))
    where = ", ".join(hosts[:_SHOWN]) + (", ..." if len(hosts) > _SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(numbers)}{more} ({where})"


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
    shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    by_host: dict[str, list[int]] = {}
    for rank, host in present:
        by_host.setdefault(host, []).append(rank)
    hosts = [f"{host} ({_count(len(ranks), 'rank')})" for host, ranks in by_host.items()]
    where = f" Here are: {', '.join(hosts[:_SHOWN])}." if hosts else ""
    return (
        f"{'rank' if one else 'ranks'} {shown} of {world_size} "
        f"{'has' if one else 'have'} not connected within {round(timeout_s, 1):g} s "
        f"(ConnectionConfig.init_timeout_s).{where} Look at the output of "
        f"{'that process' if one else 'those processes'}: {'it' if one else 'they'} did not start, "
        "ended early, or still import or load"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
