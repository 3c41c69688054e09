"""Errors of failed workers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of one rank."""

    rank: int
    """The rank in the run."""
    summary: str
    """One line: the exception, or how the process ended."""
    traceback: str = ""
    """The formatted traceback; empty when the process was killed or died."""
    output: str = ""
    """The end of what the rank wrote to standard output and standard error."""
    exception: BaseException | None = None
    """The exception itself, where it could be pickled."""
    time: float = math.inf
    """Time of the failure on the machine's clock, by which the cause comes before its echoes."""

    def __str__(self) -> str:
        """Return the failure as a block of text."""
        parts = [f"rank {self.rank}: {self.summary}", self.traceback.rstrip()]
        if self.output.strip():
            parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip()}")
        return "\n".join(part for part in parts if part)


class WorkerError(RuntimeError):
    """Failure of at least one rank of a run.

    Args:
        failures: of all ranks; the first in time is the likely cause, the others are mostly peers
            that lost their connection.

    Attributes:
        failures: the failures in order of time.
        rank: the rank that failed first.
    """

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures = sorted(failures, key=lambda failure: failure.time)
        self.rank = failures[0].rank
        blocks = [str(failures[0])]
        blocks += [f"also rank {f.rank}: {f.summary}" for f in failures[1:]]
        super().__init__("\n".join(blocks))
