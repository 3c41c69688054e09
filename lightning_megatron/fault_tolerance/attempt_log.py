"""Record of the last step of each attempt of a run, which survives a ``kill -9``.

Rank 0 writes one small file for each attempt in ``RUN_DIR/attempts``. It is one record of fixed
size, overwritten in place by a single write after each step: some microseconds and no flush, as the
system keeps what a killed process wrote. (After a crash of the machine the last steps may be
missing, and count as not reached.)
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FOLDER = "attempts"
_SIZE, _WHY = 1024, 300


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt."""

    run: str
    """Id of the run, as one launcher knows it."""
    number: int
    continues: str = ""
    """Id of the run whose checkpoint this attempt went on from, if that is another one."""
    began: float = 0.0
    """Seconds since the epoch."""
    step: int = -1
    """Optimizer steps done since training began; -1 if no step was done in this attempt."""
    end: str = ""
    """``"finished"``, ``"stopped"`` (by a signal), ``"failed"``; empty if it was killed."""
    why: str = ""
    """Cause of the failure in a few words."""


class AttemptLog:
    """The record of this attempt, beside those of the ones before it.

    Args:
        run_dir: directory of the run.
        run: id of the run.
        number: number of the attempt.
    """

    def __init__(self, run_dir: str | os.PathLike[str], run: str, number: int) -> None:
        folder = Path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.earlier = read_attempts(run_dir)
        self._record = AttemptRecord(run=run, number=number, began=time.time())
        self._step = self._record.step
        self._file = os.open(
            folder / f"{len(self.earlier):05d}_{run}_{number}.json", os.O_WRONLY | os.O_CREAT, 0o644
        )
        self._write()

    @property
    def record(self) -> AttemptRecord:
        """Present content of the file."""
        return replace(self._record, step=self._step)

    def reached(self, step: int) -> None:
        """Record a step; called after every step."""
        if step > self._step:
            self._step = step
            self._put()

    def update(self, continues: str = "", end: str = "", why: str = "") -> None:
        """Record further facts; an empty argument changes nothing."""
        was = self._record
        short = "".join(c if c.isprintable() and c.isascii() else " " for c in why[:_WHY])
        self._record = replace(
            was,
            continues=continues or was.continues,
            end=end or was.end,
            why=short or was.why,
        )
        self._write()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _write(self) -> None:
        if self._file >= 0:
            fields = asdict(self._record)
            del fields["step"]
            self._head = json.dumps(fields)[:-1]
            self._put()

    def _put(self) -> None:
        # A step changes one number; the rest is kept as text.
        text = f'{self._head}, "step": {self._step}}}'.ljust(_SIZE - 1) + "\n"
        os.pwrite(self._file, text.encode(), 0)

    def chain(self) -> list[AttemptRecord]:
        """Earlier attempts of this run, or of runs that it continues; the oldest first."""
        runs = {self.record.run, self.record.continues} - {""}
        for earlier in reversed(self.earlier):
            if earlier.run in runs and earlier.continues:
                runs.add(earlier.continues)
        return [earlier for earlier in self.earlier if earlier.run in runs]


def read_attempts(run_dir: str | os.PathLike[str]) -> list[AttemptRecord]:
    """Attempts recorded in the directory, the oldest first; unreadable files are left out."""
    found = []
    with suppress(OSError):
        for path in sorted((Path(run_dir) / FOLDER).glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                found.append(AttemptRecord(**json.loads(path.read_text())))
    return found


def cycles_without_progress(attempts: list[AttemptRecord]) -> int:
    """Number of last attempts in a row without a new step."""
    cycles, best = 0, 0
    for attempt in attempts:
        further = attempt.step > best
        best = max(best, attempt.step)
        cycles = 0 if further or attempt.end in ("finished", "stopped") else cycles + 1
    return cycles
