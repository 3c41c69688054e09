"""Faults as data: what is to go wrong, on which rank, in which step and section, how often.

A fault is written as text, so that it fits into a command, an environment variable and a report::

    kill:rank=1,step=5,section=backward
    slow:rank=0,step=3,amount=50,steps=20 ; nan_loss:probability=0.01,seed=7,times=every

Nothing here happens by chance. A rank that is left open, and whether a fault with a probability
strikes in a step, are functions of its seed: the same rehearsal twice is the same rehearsal.
The acts themselves are in testing/injury.py, and `callbacks.ChaosMonkey` is who commits them.

A rehearsal must end, although a fault that kills the run at step 5 meets step 5 again after the
restart. `FaultMemory` keeps, in a directory that outlives the processes, what has been done: one
small file a deed, made *before* it.
"""

import difflib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_megatron.errors import ConfigError

Section = Literal["start", "data", "forward", "backward", "optimizer", "checkpoint", "validation"]
SECTIONS: tuple[Section, ...] = get_args(Section)
ANY = "any"
ALL = "all"
FOREVER = float("inf")
_SETTLED = 5
"""Batches of an attempt before faults strike that wait for a time."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a kind of fault."""

    does: str
    """In words."""
    amount: float = 0.0
    """How much of it, unless the fault says otherwise."""
    section: Section = "forward"
    """Where it strikes, unless the fault says otherwise."""
    fixed: bool = False
    """Whether it can strike there only."""
    lasts: bool = False
    """Whether it may go on for several steps."""
    ends: bool = False
    """Whether this process does not survive it."""


KINDS: dict[str, Kind] = {
    "kill": Kind(does="SIGKILL to itself", ends=True),
    "segfault": Kind(does="reads from address 0", ends=True),
    "abort": Kind(does="abort(), as a failed assertion of a C++ library does", ends=True),
    "exit": Kind(does="leaves at once with exit code AMOUNT", amount=1, ends=True),
    "exception": Kind(does="raises InjectedFaultError", ends=True),
    "hang": Kind(does="sleeps for AMOUNT seconds", amount=FOREVER),
    "gil": Kind(does="holds the interpreter's lock for AMOUNT seconds", amount=FOREVER),
    "stop": Kind(does="SIGSTOP to itself, and SIGCONT after AMOUNT seconds", amount=FOREVER),
    "sigterm": Kind(does="SIGTERM to itself"),
    "slow": Kind(does="AMOUNT milliseconds more in each of STEPS steps", amount=50, lasts=True),
    "nan_loss": Kind(does="loss times NaN", fixed=True, lasts=True),
    "nan_gradient": Kind(
        does="gradient of an activation times NaN", section="backward", fixed=True, lasts=True
    ),
    "spike": Kind(does="loss, and so its gradients, times AMOUNT", amount=100, lasts=True),
    "bitflip": Kind(does="one bit of one weight of this rank flips", section="optimizer"),
    "worker_kill": Kind(does="SIGKILL to a DataLoader worker of this rank", section="data"),
    "corrupt": Kind(does="one bit of the newest checkpoint flips", section="data"),
    "disk_full": Kind(
        does="for STEPS steps this rank's part of a checkpoint meets a full disk",
        section="checkpoint",
        lasts=True,
    ),
    "readonly": Kind(
        does="for AMOUNT seconds nothing can be written to the directories of checkpoints "
        "(for root, whom permissions do not bind, files take their places)",
        amount=10,
        section="data",
    ),
}


class InjectedFaultError(RuntimeError):
    """What a fault of the kind ``exception`` raises."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a process is in its run."""

    rank: int
    world_size: int
    step: int
    """Optimizer steps done before this batch."""
    section: str
    attempt: int = 0
    """How often the run has been restarted."""
    elapsed_s: float = 0.0
    """Since the run first started."""
    batches: int = 0
    """Trained on in this attempt."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Raises:
        ConfigError: a value that means nothing, with the nearest that does.
    """

    kind: str
    """One of `KINDS`."""
    rank: int | Literal["any", "all"] = "any"
    """Global rank, from the end if negative; ``any`` is one that the seed chooses."""
    step: int | None = None
    """Strikes at the first opportunity in or after this step; None: at the first of all."""
    section: str = ""
    """Part of the step; by default what fits the kind."""
    probability: float = 1.0
    """With which it strikes at an opportunity."""
    at_s: float = 0.0
    """Seconds since the start of the run (attempts included) before which it does not strike; nor
    does it in the first batches of an attempt, for those that came due between two attempts would
    meet the next one together, over and over."""
    amount: float = -1.0
    """Seconds, milliseconds or a factor, as the kind has it; by default the kind's."""
    steps: int = 1
    """How many steps it lasts, if the kind does."""
    times: int = 1
    """How often on a rank, restarts included; 0 is every time."""
    attempt: int | None = None
    """The only attempt in which it strikes; None: in all of them."""
    seed: int = 0
    """Of everything left to chance."""

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError([f"fault {self.kind!r}: {problem}" for problem in problems])
        kind = KINDS[self.kind]
        if not self.section:
            object.__setattr__(self, "section", kind.section)
        if self.amount < 0:
            object.__setattr__(self, "amount", kind.amount)

    def _problems(self) -> list[str]:
        if self.kind not in KINDS:
            return [f"there is {', '.join(KINDS)}; nearest valid: {_nearest(self.kind, KINDS)!r}"]
        kind, found = KINDS[self.kind], []
        if self.section and self.section not in SECTIONS:
            close = _nearest(self.section, SECTIONS)
            found.append(
                f"section={self.section!r}: must be one of {', '.join(SECTIONS)}; "
                f"nearest valid: {close!r}"
            )
        elif kind.fixed and self.section not in ("", kind.section):
            found.append(
                f"section={self.section!r}: it strikes in the {kind.section}; "
                f"nearest valid: section={kind.section!r}"
            )
        if isinstance(self.rank, str) and self.rank not in (ANY, ALL):
            found.append(f"rank={self.rank!r}: must be a number, 'any' or 'all'; nearest: 'any'")
        if not 0 < self.probability <= 1:
            found.append(f"probability={self.probability}: must be within 0 and 1; nearest: 1")
        if self.steps < 1:
            found.append(f"steps={self.steps}: must be at least 1; nearest valid: 1")
        elif self.steps > 1 and not kind.lasts:
            found.append(f"steps={self.steps}: it strikes at once; nearest valid: 1")
        if self.times < 0:
            found.append(f"times={self.times}: must be 0 (every time) or more; nearest valid: 1")
        return found

    def __str__(self) -> str:
        """The fault as the text that `parse_faults` reads."""
        options = []
        for field in fields(self):
            value = getattr(self, field.name)
            default = field.default
            if field.name in ("section", "amount"):
                default = getattr(KINDS[self.kind], field.name)
            if field.name != "kind" and value != default:
                options.append(f"{field.name}={value}")
        return ":".join([self.kind, ",".join(options)]) if options else self.kind

    @property
    def ends_process(self) -> bool:
        """Whether the process that it strikes does not survive it."""
        return KINDS[self.kind].ends

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """The ranks that it strikes.

        Raises:
            ConfigError: there is no such rank.
        """
        if self.rank == ALL:
            return tuple(range(world_size))
        if isinstance(self.rank, str):
            return (_draw(self.seed, self.kind, "rank") % world_size,)
        if not -world_size <= self.rank < world_size:
            raise ConfigError(
                f"fault '{self}': rank={self.rank}, but there are {world_size}; nearest valid: "
                f"rank={world_size - 1}"
            )
        return (self.rank % world_size,)

    def is_due(self, now: Moment) -> bool:
        """Whether it strikes at this opportunity, if it has not done so often enough."""
        return (
            now.section == self.section
            and now.rank in self.ranks(now.world_size)
            and self.attempt in (None, now.attempt)
            and (self.step is None or now.step >= self.step)
            and now.elapsed_s >= self.at_s
            and (not self.at_s or now.batches >= _SETTLED)
            and self._chance(now)
        )

    def _chance(self, now: Moment) -> bool:
        if self.probability >= 1:
            return True
        drawn = _draw(self.seed, self.kind, now.section, now.rank, now.step, now.attempt)
        return drawn / 2**63 < self.probability


def parse_faults(text: str) -> list[Fault]:
    """Read faults from text: ``kind:name=value,...``, separated by semicolons or white space.

    Raises:
        ConfigError: with everything that is wrong in it.

    Example:
        >>> [str(fault) for fault in parse_faults("kill:rank=1,step=5; hang:section=data")]
        ['kill:rank=1,step=5', 'hang:section=data']
    """
    faults: list[Fault] = []
    problems: list[str] = []
    for entry in text.replace(";", " ").split():
        try:
            faults.append(_parse(entry))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return faults


def _parse(entry: str) -> Fault:
    kind, _, rest = entry.partition(":")
    known = {field.name: field.type for field in fields(Fault) if field.name != "kind"}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"fault {entry!r}: {part!r} is not one of {', '.join(known)} with a value; "
                f"nearest valid: {_nearest(name, known)}=..."
            )
        values[name] = _value(entry, name, value)
    return Fault(kind=kind, **values)


def _value(entry: str, name: str, value: str) -> Any:
    if name == "section" or (name == "rank" and value in (ANY, ALL)):
        return value
    if value == "every" and name in ("times", "attempt"):
        return 0 if name == "times" else None
    try:
        return float(value) if name in ("probability", "amount", "at_s") else int(value)
    except ValueError:
        raise ConfigError(f"fault {entry!r}: {name}={value!r} is not a number") from None


def _nearest(word: str, words: Sequence[str] | Mapping[str, Any]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _draw(seed: int, *names: object) -> int:
    """A number of 63 bits that depends on all of these."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class FaultMemory:
    """What has been done to a run, kept where restarts find it.

    Args:
        directory: made when it is first needed.
        rank: whose deeds these are; every rank keeps its own.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self._rank = directory, rank
        self._mine: set[str] = set()

    def claim(self, index: int, fault: Fault, now: Moment) -> bool:
        """Note that a fault is about to strike; False if it has done so often enough."""
        self.directory.mkdir(parents=True, exist_ok=True)
        number = 0
        while fault.times == 0 or number < fault.times:
            name = f"{self._name(index, fault)}.{number:04d}.json"
            try:
                with (self.directory / name).open("x") as file:
                    file.write(json.dumps(_record(fault, now)) + "\n")
            except FileExistsError:
                number += 1
                continue
            self._mine.add(name)
            return True
        return False

    def started(self) -> float:
        """When the run first started, in seconds since 1970; now, if nobody knows."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "started"
        fresh = self.directory / f"started.{self._rank}.{os.getpid()}"
        fresh.write_text(repr(time.time()))
        try:
            os.link(fresh, path)  # complete or not at all, and the first wins
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return float(path.read_text())

    def forget(self) -> None:
        """Forget what earlier processes of this rank did: another run begins."""
        for path in self.directory.glob(f"rank{self._rank:05d}-*.json"):
            if path.name not in self._mine:
                path.unlink(missing_ok=True)

    def _name(self, index: int, fault: Fault) -> str:
        # Other faults than before are others, although they have the same place in the list.
        mark = hashlib.sha256(str(fault).encode()).hexdigest()[:8]
        return f"rank{self._rank:05d}-{index:03d}-{fault.kind}-{mark}"


def read_deeds(directory: Path) -> list[dict[str, Any]]:
    """What was done to a run, in order of time."""
    deeds = []
    for path in directory.glob("rank*.json"):
        try:
            deeds.append(json.loads(path.read_text()))
        except ValueError:  # killed while it was written, by somebody else
            continue
    return sorted(deeds, key=lambda deed: float(deed["t"]))


def _record(fault: Fault, now: Moment) -> dict[str, Any]:
    return {
        "v": 1,
        "t": time.time(),
        "mono": time.monotonic(),
        "what": fault.kind,
        "fault": str(fault),
        "rank": now.rank,
        "step": now.step,
        "section": now.section,
        "attempt": now.attempt,
        "pid": os.getpid(),
    }
