"""Responses of `NumberGuard`, and their conditions on the Trainer."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, get_args

Response = Literal["raise", "skip", "rollback", "rerun"]
SpikeResponse = Literal["log", "skip", "rollback", "rerun"]
AfterRerun = Literal["raise", "skip", "rollback"]


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """Steps that ``rollback`` goes back, and batches that it skips."""

    steps: int = 100
    """Least age of the restored state in updates, unless training is younger. Two copies of weights
    and optimizer state are kept in host memory, a new one every so many updates."""
    skip_batches: int = 200
    """Batches to skip: those since the copy, and the next ones."""
    max_rollbacks: int = 3
    """Rollbacks after which the next fault ends the run."""

    def problems(self) -> list[str]:
        """Problems of the values."""
        return [
            f"rollback.{name}={getattr(self, name)}: must be at least {least}; nearest valid: "
            f"{name}={least}"
            for name, least in (("steps", 1), ("skip_batches", 0), ("max_rollbacks", 1))
            if getattr(self, name) < least
        ]


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Response to each kind of fault."""

    nonfinite: Response
    spike: SpikeResponse | None
    after_rerun: AfterRerun

    @property
    def all(self) -> AbstractSet[str]:
        """All responses that may occur."""
        first: set[str] = {self.nonfinite, *([self.spike] if self.spike else [])}
        return first | {self.after_rerun} if "rerun" in first else first

    @property
    def undoes_batches(self) -> bool:
        """Whether what a batch has changed may have to be undone."""
        return bool(self.all & {"skip", "rollback", "rerun"})

    def to(self, what: str) -> str:
        """Response to a spike or, for other values of ``what``, to a number that is not finite."""
        return (self.spike or "log") if what == "spike" else self.nonfinite

    def problems(self) -> list[str]:
        """Responses that do not exist."""
        legal: dict[str, tuple[Any, ...]] = {
            "nonfinite": get_args(Response),
            "spike": (None, *get_args(SpikeResponse)),
            "after_rerun": get_args(AfterRerun),
        }
        return [
            f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, choices))}; "
            f"nearest valid: {name}={choices[0]!r}"
            for name, choices in legal.items()
            if getattr(self, name) not in choices
        ]

    def problems_with(self, *, automatic: bool, accumulate: int, monitor: str | None) -> list[str]:
        """Options of a run that do not allow these responses.

        Args:
            automatic: whether Lightning steps the optimizer.
            accumulate: batches per optimizer step.
            monitor: option ``nonfinite`` of the `GradientMonitor`; None without one.
        """
        problems = []
        beyond = self.all & {"rollback", "rerun"}
        if not automatic and (beyond or self.spike):
            problems.append(
                f"NumberGuard(nonfinite={self.nonfinite!r}, spike={self.spike!r}) under manual "
                "optimization: a batch that steps the optimizer itself cannot be undone; "
                "nearest valid: nonfinite='raise' or 'skip', spike=None"
            )
        if "rerun" in beyond and accumulate > 1:
            problems.append(
                f"NumberGuard with 'rerun', accumulate_grad_batches={accumulate}: only the "
                "last of the accumulated batches could run again; nearest valid: "
                "accumulate_grad_batches=1 with larger batches, which "
                "MegatronStrategy(num_microbatches=...) splits"
            )
        if monitor not in (None, "keep", self.nonfinite):
            problems.append(
                f"NumberGuard(nonfinite={self.nonfinite!r}) and GradientMonitor(nonfinite="
                f"{monitor!r}): both respond to the same fault; nearest valid: "
                "GradientMonitor(nonfinite='keep')"
            )
        return problems
