"""Faults as data: the kind, rank, step, section and number of times.

A fault has a text, so that it fits into a command, an environment variable and a report::

    kill:rank=1,step=5,section=backward
    slow:rank=0,step=3,amount=50,steps=20 ; nan_loss:probability=0.01,seed=7,times=every

A seed decides all that the text leaves open: the rank of ``rank=any``, and whether a fault with a
probability strikes in a step. The same text gives the same faults. `chaos.actions` has the code of
each kind, and `ChaosMonkey` runs it.

A fault that kills the run at step 5 would strike at step 5 again after the restart. `FaultLog`
prevents that: a directory that outlives the processes has one small file for each injection,
written *before* it.

`random_faults` draws a list with exponential times between two faults, as where each of many parts
may fail at any time.
"""

import difflib
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_megatron.errors import ConfigError, raise_if_any

Section = Literal["start", "data", "forward", "backward", "optimizer", "checkpoint", "validation"]
SECTIONS: tuple[Section, ...] = get_args(Section)
ANY = "any"
ALL = "all"
FOREVER = float("inf")
_STEP_SECTIONS: tuple[Section, ...] = ("data", "forward", "backward", "optimizer")
"""Sections that every step has."""
_SETTLED = 5
"""Batches of an attempt before faults with `Fault.at_s` may strike."""


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """Properties of a kind of fault."""

    does: str
    """Description for people."""
    amount: float = 0.0
    """Default of `Fault.amount`."""
    section: Section = "forward"
    """Default of `Fault.section`."""
    fixed: bool = False
    """Whether it can strike in this section only."""
    lasts: bool = False
    """Whether it may go on for several steps."""
    ends: bool = False
    """Whether this process does not survive it."""


KINDS: dict[str, FaultKind] = {
    "kill": FaultKind(does="SIGKILL to itself", ends=True),
    "segfault": FaultKind(does="reads from address 0", ends=True),
    "abort": FaultKind(does="abort(), as a failed assertion of a C++ library does", ends=True),
    "exit": FaultKind(does="leaves at once with exit code AMOUNT", amount=1, ends=True),
    "exception": FaultKind(does="raises InjectedFaultError", ends=True),
    "hang": FaultKind(does="sleeps for AMOUNT seconds", amount=FOREVER),
    "gil": FaultKind(does="holds the interpreter's lock for AMOUNT seconds", amount=FOREVER),
    "stop": FaultKind(does="SIGSTOP to itself, and SIGCONT after AMOUNT seconds", amount=FOREVER),
    "sigterm": FaultKind(does="SIGTERM to itself"),
    "slow": FaultKind(
        does="AMOUNT milliseconds more in each of STEPS steps", amount=50, lasts=True
    ),
    "nan_loss": FaultKind(does="loss times NaN", fixed=True, lasts=True),
    "nan_gradient": FaultKind(
        does="gradient of an activation times NaN", section="backward", fixed=True, lasts=True
    ),
    "spike": FaultKind(does="loss, and so its gradients, times AMOUNT", amount=100, lasts=True),
    "bitflip": FaultKind(does="one bit of one weight of this rank flips", section="optimizer"),
    "worker_kill": FaultKind(does="SIGKILL to a DataLoader worker of this rank", section="data"),
    "corrupt": FaultKind(does="one bit of the newest checkpoint flips", section="data"),
    "disk_full": FaultKind(
        does="for STEPS steps this rank's part of a checkpoint meets a full disk",
        section="checkpoint",
        lasts=True,
    ),
    "readonly": FaultKind(
        does="for AMOUNT seconds nothing can be written to the directories of checkpoints "
        "(for root, whom permissions do not bind, files take their places)",
        amount=10,
        section="data",
    ),
}


class InjectedFaultError(RuntimeError):
    """Error of a fault of the kind ``exception``."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Rank, step and section of a process, by which faults are due."""

    rank: int
    world_size: int
    step: int
    """Optimizer steps done before this batch."""
    section: str
    attempt: int = 0
    """Restarts of the run so far."""
    elapsed_s: float = 0.0
    """Seconds since the first start of the run."""
    batches: int = 0
    """Batches trained on in this attempt."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Raises:
        ConfigError: a value is out of range.
    """

    kind: str
    """One of `KINDS`."""
    rank: int | Literal["any", "all"] = "any"
    """Global rank, from the end if negative; the seed chooses one for ``any``."""
    step: int | None = None
    """First step in which it may strike; None: any."""
    section: str = ""
    """Part of the step; by default the kind's."""
    probability: float = 1.0
    """Probability that it strikes in a step in which it may."""
    at_s: float = 0.0
    """Seconds since the first start of the run before which it does not strike. Such faults do not
    strike in the first batches of an attempt either: all that became due between two attempts would
    strike together, after each restart."""
    amount: float = -1.0
    """Seconds, milliseconds or a factor, by kind; by default the kind's."""
    steps: int = 1
    """Number of steps that it lasts, for kinds that last."""
    times: int = 1
    """Number of times on a rank, restarts included; 0: no limit."""
    attempt: int | None = None
    """Only attempt in which it strikes; None: all."""
    seed: int = 0
    """Seed of all that is drawn."""

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
            return [
                f"must be one of {', '.join(KINDS)}; nearest valid: {_nearest(self.kind, KINDS)!r}"
            ]
        kind, found = KINDS[self.kind], []
        if self.section and self.section not in SECTIONS:
            close = _nearest(self.section, SECTIONS)
            found.append(
                f"section={self.section!r}: must be one of {', '.join(SECTIONS)}; "
                f"nearest valid: {close!r}"
            )
        elif kind.fixed and self.section not in ("", kind.section):
            found.append(
                f"section={self.section!r}: must be the {kind.section}; "
                f"nearest valid: section={kind.section!r}"
            )
        if isinstance(self.rank, str) and self.rank not in (ANY, ALL):
            found.append(
                f"rank={self.rank!r}: must be a number, 'any' or 'all'; nearest valid: 'any'"
            )
        if not 0 < self.probability <= 1:
            found.append(
                f"probability={self.probability}: must be above 0, at most 1; nearest valid: 1"
            )
        if self.steps < 1:
            found.append(f"steps={self.steps}: must be at least 1; nearest valid: 1")
        elif self.steps > 1 and not kind.lasts:
            found.append(
                f"steps={self.steps}: must be 1, as this kind does not last; nearest valid: 1"
            )
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
        """Whether it ends the process."""
        return KINDS[self.kind].ends

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """The ranks on which it strikes.

        Raises:
            ConfigError: there is no such rank.
        """
        if self.rank == ALL:
            return tuple(range(world_size))
        if isinstance(self.rank, str):
            return (_draw(self.seed, self.kind, "rank") % world_size,)
        if not -world_size <= self.rank < world_size:
            raise ConfigError(
                f"fault '{self}': rank={self.rank}: must be one of {world_size} ranks; nearest "
                f"valid: rank={world_size - 1}"
            )
        return (self.rank % world_size,)

    def is_due(self, now: RunPosition) -> bool:
        """Whether it may strike now, `times` left aside."""
        return (
            now.section == self.section
            and now.rank in self.ranks(now.world_size)
            and self.attempt in (None, now.attempt)
            and (self.step is None or now.step >= self.step)
            and now.elapsed_s >= self.at_s
            and (not self.at_s or now.batches >= _SETTLED)
            and self._chance(now)
        )

    def _chance(self, now: RunPosition) -> bool:
        if self.probability >= 1:
            return True
        drawn = _draw(self.seed, self.kind, now.section, now.rank, now.step, now.attempt)
        return drawn / 2**63 < self.probability


def parse_faults(text: str) -> list[Fault]:
    """Read faults from text: ``kind:name=value,...``, separated by semicolons or white space.

    Raises:
        ConfigError: the text has faults, all of which it names.

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


def random_faults(
    kinds: str, *, mean_s: float, duration_s: float, seed: int, first_s: float = 0.0
) -> list[Fault]:
    """Draw faults at random times.

    Args:
        kinds: text of the faults to choose from, with equal odds; rank and section are drawn where
            the text leaves them open.
        mean_s: mean seconds between two faults.
        duration_s: seconds from the start of the run after which none is injected.
        seed: seed of all that is drawn.
        first_s: seconds before the first fault, at least.

    Raises:
        ConfigError: there is no fault to choose from, or a time is not positive.

    Example:
        >>> faults = random_faults("kill slow", mean_s=30, duration_s=120, seed=1)
        >>> all(0 <= fault.at_s <= 120 for fault in faults)
        True
    """
    problems = []
    templates = parse_faults(kinds)
    if not templates:
        problems.append("kinds='': no fault to choose from; nearest valid: kinds='kill'")
    if not mean_s > 0:
        problems.append(f"mean_s={mean_s}: must be positive; nearest valid: 60")
    if not duration_s > 0:
        problems.append(f"duration_s={duration_s}: must be positive; nearest valid: 600")
    raise_if_any(problems)
    chance, now, faults = random.Random(seed), first_s, []
    while (now := now + chance.expovariate(1 / mean_s)) < duration_s:
        template = chance.choice(templates)
        section = chance.choice(_STEP_SECTIONS)
        kind = KINDS[template.kind]
        open_section = not kind.fixed and template.section == kind.section
        faults.append(
            replace(
                template,
                at_s=round(now, 1),
                seed=chance.getrandbits(31),
                section=section if open_section else template.section,
            )
        )
    return faults


def _parse(entry: str) -> Fault:
    kind, _, rest = entry.partition(":")
    known = {field.name: field.type for field in fields(Fault) if field.name != "kind"}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"fault {entry!r}: {part!r} must be NAME=VALUE with one of {', '.join(known)}; "
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
        raise ConfigError(
            f"fault {entry!r}: {name}={value!r}: must be a number; nearest valid: 1"
        ) from None


def _nearest(word: str, words: Sequence[str] | Mapping[str, Any]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _draw(seed: int, *names: object) -> int:
    """Draw a number of 63 bits that depends on all arguments."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class FaultLog:
    """Files with the faults that were injected into a run, which survive restarts.

    Args:
        directory: is made when first needed.
        rank: global rank; every rank has files of its own.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self._rank = rank
        self._mine: set[str] = set()

    def claim(self, index: int, fault: Fault, now: RunPosition) -> bool:
        """Write that a fault is about to strike; False if it struck `Fault.times` times."""
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
        """Return the time of the first start in seconds since 1970; now, if none is recorded."""
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
        """Delete the files of earlier processes of this rank, as another run begins."""
        for path in self.directory.glob(f"rank{self._rank:05d}-*.json"):
            if path.name not in self._mine:
                path.unlink(missing_ok=True)

    def _name(self, index: int, fault: Fault) -> str:
        # Another fault at the same place of the list is not the one of before.
        mark = hashlib.sha256(str(fault).encode()).hexdigest()[:8]
        return f"rank{self._rank:05d}-{index:03d}-{fault.kind}-{mark}"


def read_injected(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all injected faults in the order of time."""
    injected = []
    for path in directory.glob("rank*.json"):
        try:
            injected.append(json.loads(path.read_text()))
        except ValueError:  # killed while it was written, by somebody else
            continue
    return sorted(injected, key=lambda fault: float(fault["t"]))


def _record(fault: Fault, now: RunPosition) -> dict[str, Any]:
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
