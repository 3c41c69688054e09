"""``schedule="auto"``: simulate every schedule with the model's own times, take the fastest.

Which schedule is best depends on what the papers assume away: how the times of forward, input half
and weight half compare, how even the stages are, how slow the transfers, how many microbatches
there are and how much memory is left for activations. All of that is known once a few steps have
been measured, and simulating all candidates takes less time than one step of training.

The choice is a pure function of its arguments, so ranks that pass the same numbers agree.

>>> costs = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0).split(2)
>>> choice = choose_schedule(4, 16, {2: costs}, names=("interleaved", "zbv", "v-min"))
>>> choice.schedule.name
'zbv'
>>> print(choice.table())
schedule     stages/rank  step time  bubble  peak activation
zbv                    2       49.5    3.0%                4
interleaved            2       52.5    8.6%              5.5
v-min                  2       53.5   10.3%                2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.schedule import (
    SCHEDULES,
    Schedule,
    default_stages_per_rank,
    make_schedule,
    schedule_problems,
)
from lightning_megatron.schedules.simulate import peak_live_activations, simulate

_Costs = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one microbatch on each stage, for some number of stages per rank.

    Numbers count for every stage, sequences hold one for each.
    """

    forward: _Costs
    """Time of the forward, in any unit."""
    backward_input: _Costs
    """Time of the half of the backward that makes the gradient of the stage's input."""
    backward_weight: _Costs
    """Time of the other half."""
    backward: _Costs | None = None
    """Time of a backward in one piece; that of the two halves by default."""
    send: _Costs = 0.0
    """Time of one transfer between neighbouring stages (boundary ``i`` lies behind stage ``i``)."""
    activation: _Costs = 1.0
    """Activations kept from forward to backward, in the unit of the memory limit."""

    def split(self, parts: int) -> "StageCosts":
        """Estimate the costs if every stage were cut into ``parts`` equal ones.

        Transfers keep their time; where it differs from boundary to boundary, the longest counts.
        """

        def cut(costs: _Costs) -> _Costs:
            if isinstance(costs, Sequence):
                return [cost / parts for cost in costs for _ in range(parts)]
            return costs / parts

        return replace(
            self,
            forward=cut(self.forward),
            backward_input=cut(self.backward_input),
            backward_weight=cut(self.backward_weight),
            backward=None if self.backward is None else cut(self.backward),
            send=max(self.send, default=0.0) if isinstance(self.send, Sequence) else self.send,
            activation=cut(self.activation),
        )


@dataclass(frozen=True)
class Candidate:
    """One schedule, simulated."""

    name: str
    """Name in the options of users."""
    stages_per_rank: int
    """Parts of the network on each rank."""
    step_time: float
    """Time of a step, in the unit of the costs."""
    bubble_fraction: float
    """Idle share of the ranks' time."""
    peak_activation: tuple[float, ...]
    """Most that each rank keeps at a time, in the unit of `StageCosts.activation`."""
    fits: bool
    """Whether that is within the limit on every rank."""


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and what else there was."""

    schedule: Schedule
    """The fastest that fits."""
    candidates: tuple[Candidate, ...]
    """All that were simulated: those that fit first, then by step time."""

    def table(self, unit: str = "") -> str:
        """Candidates as lines of text; what does not fit is marked.

        Args:
            unit: of the step times, named in the head of their column.
        """
        time = f"step time ({unit})" if unit else "step time"
        rows = [("schedule", "stages/rank", time, "bubble", "peak activation")]
        rows += [
            (
                candidate.name,
                str(candidate.stages_per_rank),
                f"{candidate.step_time:.6g}",
                f"{candidate.bubble_fraction:.1%}",
                f"{max(candidate.peak_activation):.6g}" + ("" if candidate.fits else " too much"),
            )
            for candidate in self.candidates
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def choose_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: Mapping[int, StageCosts],
    memory_limit: float | Sequence[float] | None = None,
    names: Sequence[str] = SCHEDULES,
    limit_name: str = "memory_limit",
) -> Choice:
    """Choose the fastest schedule whose activations fit.

    Of schedules that are equally fast the one that keeps least is taken, and of those the one that
    stands first in `SCHEDULES`.

    Args:
        num_ranks: degree of pipeline parallelism.
        num_microbatches: pieces of the batch.
        costs: by number of stages per rank, the costs of each of the ``num_ranks`` times that many
            stages. Schedules that need another number of stages per rank are not considered.
        memory_limit: most that a rank can keep, for all ranks or one for each; by default anything
            fits.
        names: schedules to consider.
        limit_name: what the user knows the limit by.

    Raises:
        ConfigError: when no schedule fits, with the one that comes nearest, or none can be made for
            these numbers of stages per rank.
    """
    found = []
    for name in names:
        for stages_per_rank, each in costs.items():
            if not _considered(name, num_ranks, num_microbatches, stages_per_rank):
                continue
            schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank)
            found.append((schedule, _simulated(schedule, each, memory_limit)))
    if not found:
        raise ConfigError(
            f"schedule='auto', stages_per_rank={sorted(costs)}: none of {', '.join(names)} runs "
            f"with these numbers of stages per rank; nearest valid: stages_per_rank=1"
        )
    found.sort(key=lambda pair: _rank_of(pair[1]))  # stable, so ties keep the order of names
    best, candidate = found[0]
    if not candidate.fits:
        raise _nothing_fits([candidate for _, candidate in found], memory_limit, limit_name)
    return Choice(best, tuple(candidate for _, candidate in found))


def _considered(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> bool:
    """Whether the schedule exists for so many stages and is not another one by then."""
    other_name = name in ("interleaved", "breadth-first") and stages_per_rank == 1
    enough = stages_per_rank >= default_stages_per_rank(name) and not other_name
    return enough and not schedule_problems(name, num_ranks, num_microbatches, stages_per_rank)


def _simulated(
    schedule: Schedule, costs: StageCosts, memory_limit: float | Sequence[float] | None
) -> Candidate:
    timeline = simulate(
        schedule,
        forward=costs.forward,
        backward=costs.backward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        send=costs.send,
    )
    weights = _per_item("activation", costs.activation, schedule.num_stages)
    peaks = tuple(peak_live_activations(row, dict(enumerate(weights))) for row in schedule.actions)
    limits = _limits(memory_limit, schedule.num_ranks)
    return Candidate(
        schedule.name,
        schedule.stages_per_rank,
        timeline.step_time,
        timeline.bubble_fraction,
        peaks,
        all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)),
    )


def _rank_of(candidate: Candidate) -> tuple[bool, float, float]:
    # Rounded: sums of the same times in another order must not decide.
    return (
        not candidate.fits,
        float(f"{candidate.step_time:.9g}"),
        float(f"{max(candidate.peak_activation):.9g}"),
    )


def _nothing_fits(
    candidates: Sequence[Candidate], memory_limit: float | Sequence[float] | None, name: str
) -> ConfigError:
    limits = _limits(memory_limit, len(candidates[0].peak_activation))

    def excess(candidate: Candidate) -> float:
        return max(a - b for a, b in zip(candidate.peak_activation, limits, strict=True))

    nearest = min(candidates, key=excess)
    peaks = nearest.peak_activation
    needed = list(peaks) if isinstance(memory_limit, Sequence) else max(peaks)
    return ConfigError(
        f"schedule='auto', {name}={memory_limit!r}: no schedule keeps its activations within the "
        f"limit; nearest valid: {name}={needed!r} for schedule={nearest.name!r} with "
        f"stages_per_rank={nearest.stages_per_rank}, or smaller microbatches, or recomputation"
    )


def _limits(memory_limit: float | Sequence[float] | None, num_ranks: int) -> list[float]:
    unlimited = float("inf")
    return _per_item("memory_limit", unlimited if memory_limit is None else memory_limit, num_ranks)


def _per_item(name: str, given: float | Sequence[float], count: int) -> list[float]:
    values = list(given) if isinstance(given, Sequence) else [float(given)] * count
    if len(values) != count:
        raise ValueError(f"{name} holds {len(values)} numbers; {count} are needed")
    return values
