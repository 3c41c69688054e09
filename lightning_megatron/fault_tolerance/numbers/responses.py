"""What may follow bad numbers, and what these choices ask of a run."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, get_args

Response = Literal["raise", "skip", "rollback", "rerun"]
SpikeResponse = Literal["log", "skip", "rollback", "rerun"]
AfterRerun = Literal["raise", "skip", "rollback"]


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """How far back ``rollback`` goes, and what it passes over."""

    steps: int = 100
    """Age of the state to return to, in updates, at least; less only where training is younger. Two
    copies of weights and optimizer state are kept on the host, made every so many updates."""
    skip_batches: int = 200
    """Batches that are not trained on: those since the copy was made, and the next ones."""
    max_rollbacks: int = 3
    """How often; then the run ends."""

    def problems(self) -> list[str]:
        """Faults of the numbers."""
        return [
            f"rollback.{name}={getattr(self, name)}: must be at least {least}; nearest valid: "
            f"{name}={least}"
            for name, least in (("steps", 1), ("skip_batches", 0), ("max_rollbacks", 1))
            if getattr(self, name) < least
        ]


@dataclass(frozen=True, kw_only=True)
class Responses:
    """What follows which fault."""

    nonfinite: Response
    spike: SpikeResponse | None
    after_rerun: AfterRerun

    @property
    def all(self) -> AbstractSet[str]:
        """Whatever may follow."""
        first: set[str] = {self.nonfinite, *([self.spike] if self.spike else [])}
        return first | {self.after_rerun} if "rerun" in first else first

    @property
    def undoes_batches(self) -> bool:
        """Whether what a batch has changed may have to be undone."""
        return bool(self.all & {"skip", "rollback", "rerun"})

    def to(self, what: str) -> str:
        """What follows a spike, or else something that is not finite."""
        return (self.spike or "log") if what == "spike" else self.nonfinite

    def problems(self) -> list[str]:
        """Answers that do not exist."""
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
        """What of a run does not allow these answers.

        Args:
            automatic: whether Lightning steps the optimizer.
            accumulate: batches per optimizer step.
            monitor: what a `GradientMonitor` does with gradients that are not finite, if any.
        """
        problems = []
        beyond = self.all & {"rollback", "rerun"}
        if not automatic and (beyond or self.spike):
            problems.append(
                f"NumberGuard(nonfinite={self.nonfinite!r}, spike={self.spike!r}) under manual "
                "optimization: a batch that steps by itself cannot be taken back; nearest valid: "
                "nonfinite='raise' or 'skip', spike=None"
            )
        if "rerun" in beyond and accumulate > 1:
            problems.append(
                f"NumberGuard with 'rerun', accumulate_grad_batches={accumulate}: the batches "
                "before the last are gone; nearest valid: accumulate_grad_batches=1 with larger "
                "batches, which MegatronStrategy(num_microbatches=...) cuts"
            )
        if monitor not in (None, "keep", self.nonfinite):
            problems.append(
                f"NumberGuard(nonfinite={self.nonfinite!r}) and GradientMonitor(nonfinite="
                f"{monitor!r}): one fault has one answer; nearest valid: "
                "GradientMonitor(nonfinite='keep')"
            )
        return problems
