"""``pp.schedule="auto"``: the schedule that is fastest with the times of this very model.

Stages are placed in a V, two on each rank (or one, with ``stages_per_rank=1``), as the schedules of
one placement can follow each other without moving a parameter. The first step is left alone, the
next ones are measured; then every schedule of that placement is simulated with the measured times
and activations (`schedules.search`), and training goes on with the fastest that fits. As all
schedules compute the same gradients, the change does not show in the loss.
"""

from collections.abc import Callable

from typing_extensions import override

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.pipeline.timing import Bubble
from lightning_megatron.schedules.schedule import AUTO as AUTO  # others know it from here
from lightning_megatron.schedules.schedule import SCHEDULES, Schedule, make_schedule
from lightning_megatron.schedules.search import StageCosts, choose_schedule
from lightning_megatron.topology.axis import Axis
from lightning_megatron.tuning.tuner import Tuner

PLACED = {1: ("1f1b", "gpipe", "zb-h1", "zb-h2"), 2: ("zbv", "v-half", "v-min", "dualpipev")}
"""Schedules to choose from, by stages per rank; the first is used while measuring."""
_SKIPPED, _MEASURED = 1, 3
assert all(name in SCHEDULES for names in PLACED.values() for name in names)


def first_schedule(stages_per_rank: int | None, limited: bool) -> str:
    """Schedule until the choice: the one that keeps least, where memory is limited."""
    if stages_per_rank == 1:
        return PLACED[1][0]
    return "v-min" if limited else PLACED[2][0]


class AutoSchedule(Tuner):
    """Measures the first steps of a pipeline and chooses.

    Args:
        pipeline: runs the steps.
        pp: the ranks of the pipeline.
        stages_per_rank: 1 or 2.
        limit_gib: most activations that a rank may keep.
        report: called with the choice and the candidates, on every rank.

    Attributes:
        chosen: name of the chosen schedule; None until then.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pp: Axis,
        stages_per_rank: int,
        limit_gib: float | None,
        report: Callable[[str], None],
    ) -> None:
        self._pipeline = pipeline
        self._pp = pp
        self._stages = stages_per_rank
        self._limit = limit_gib
        self._report = report
        self._steps: list[Bubble] = []
        self._seen = 0
        self.chosen: str | None = None

    @property
    @override
    def outlives_layout(self) -> bool:
        return False

    @override
    def before_batch(self, *, accumulated: bool) -> None:
        if self.chosen is None and self._seen >= _SKIPPED:
            self._pipeline.measure(True)
            self._pipeline.activation_bytes = {}

    @override
    def after_batch(self, count: int) -> None:
        self._seen += 1
        if self.chosen is not None or self._seen <= _SKIPPED:
            return
        measured = self._pipeline.bubble()
        if measured is None:
            return  # the batch ran once more, and the first run was measured
        self._steps.append(measured)
        own = self._pipeline.activation_bytes or {}
        self._pipeline.measure(False)
        self._pipeline.activation_bytes = None
        if len(self._steps) == _MEASURED:
            self._choose(count, self._gather(own))

    def _gather(self, own: dict[int, int]) -> list[int]:
        by_rank: list[dict[int, int]] = Peers.over(self._pp).all_gather(own)
        merged = {stage: size for held in by_rank for stage, size in held.items()}
        return [merged[stage] for stage in sorted(merged)]

    def _choose(self, count: int, activations: list[int]) -> None:
        def least(part: str) -> list[float]:
            # The least of several: what is longer was disturbed.
            return [
                min(times) for times in zip(*(getattr(b, part) for b in self._steps), strict=True)
            ]

        costs = StageCosts(
            forward=least("forward"),
            backward=least("backward"),
            backward_input=least("backward_input"),
            backward_weight=least("backward_weight"),
            activation=[size / 2**30 for size in activations],
        )
        # Pipelines of other data-parallel and tp ranks have measured other times.
        costs = Peers().broadcast(costs)
        try:
            choice = choose_schedule(
                self._pp.size,
                count,
                {self._stages: costs},
                self._limit,
                PLACED[self._stages],
                limit_name="activation_gib",
            )
        except ConfigError as error:
            raise ConfigError(*(f"pp.{problem}" for problem in error.problems)) from None
        name = choice.schedule.name
        self.chosen = name

        def make(number: int) -> Schedule:
            return make_schedule(name, self._pp.size, number)

        self._pipeline.use(make)
        self._report(f'pp.schedule="auto" takes {name} from now on:\n{choice.table("s")}')
