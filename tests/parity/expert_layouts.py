"""The layouts under which a mixture of experts is trained: data, chosen as in `layouts`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.topology.degrees import infer_degrees
from lightning_megatron.topology.expert_layout import ExpertConfig
from tests.parity.layouts import Layout
from tests.parity.reference import Architecture


@dataclass(frozen=True, kw_only=True)
class ExpertLayout(Layout):
    """One way to spread the training of a mixture."""

    ep: int = 1
    dispatch: Literal["once", "gather"] = "once"
    recompute: Literal["none", "full", "selective"] = "none"
    architecture: Architecture = "mixture"

    @property
    def legal(self) -> bool:
        if not super().legal:
            return False
        degrees = infer_degrees(
            self.world_size,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            dp_replicate=self.dp_replicate,
            zero=self.zero,
            ep=self.ep,
        )
        return degrees.pool % self.ep == 0 and not self._idle_options

    @property
    def _idle_options(self) -> bool:
        """Whether an option is given that changes nothing here."""
        return (
            (self.ep == 1 and self.dispatch != "once")
            or (self.pp == 1 and (self.schedule != "1f1b"))
            or (self.dp * self.cp * self.tp == 1 and self.zero != 1)
        )

    def strategy_options(self) -> dict[str, Any]:
        """Arguments of the strategy."""
        given = super().strategy_options()
        given["ep"] = ExpertConfig(degree=given["ep"], dispatch=given.pop("dispatch"))
        given["activations"] = ActivationConfig(recompute=given.pop("recompute"))
        return given

    def combinations(self) -> set[tuple[Any, ...]]:
        """The pairs of values that this layout puts to the test, and those of `TOGETHER`."""
        idle = {"schedule"} if self.pp == 1 else set()
        if self.ep == 1:
            idle.add("dispatch")
        alone = self.dp * self.cp * self.tp == 1
        if alone:
            idle |= {"zero", "dp_replicate"}
        values = [(name, getattr(self, name)) for name in VALUES if name not in idle]
        found: set[tuple[Any, ...]] = set(itertools.combinations(values, 2))
        return found if alone else found | {tuple(getattr(self, name) for name in TOGETHER)}


VALUES: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4),
    "tp": (1, 2),
    "pp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "dp_replicate": (1, 2),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "interleaved", "zbv"),
    "num_microbatches": (1, 2),
    "dispatch": ("once", "gather"),
    "recompute": ("none", "full", "selective"),
}

TOGETHER = ("ep", "tp", "zero")
"""Options that decide together over which ranks experts lie."""


def legal_expert_layouts(options: dict[str, tuple[Any, ...]], most: int) -> Iterator[ExpertLayout]:
    """All layouts with these values that need no more than ``most`` processes."""
    for values in itertools.product(*options.values()):
        layout = ExpertLayout(**dict(zip(options, values, strict=True)))
        if layout.world_size <= most and layout.legal:
            yield layout


SMALL = VALUES | {
    **dict.fromkeys(("ep", "dp"), (1, 2)),
    "zero": (0, 1, 3),
    "sequence_parallel": (False,),
    "schedule": ("1f1b", "zbv"),
    "dispatch": ("once",),
    "recompute": ("none", "full"),
}
"""Those whose pairs are covered by default, within four processes."""
EXPERT_LAYOUTS = (
    ExpertLayout(dp=2, zero=0, ep=2),
    ExpertLayout(tp=2, zero=0, ep=2),
    ExpertLayout(tp=2, zero=3, num_microbatches=2),
    ExpertLayout(tp=2, dp=2, dp_replicate=2),
    ExpertLayout(tp=2, pp=2, zero=0, recompute="full"),
    ExpertLayout(tp=2, pp=2, schedule="zbv", ep=2),
    ExpertLayout(tp=2, cp=2, zero=3, ep=2, recompute="full"),
    ExpertLayout(pp=2, cp=2, num_microbatches=2, ep=2, recompute="full"),
    ExpertLayout(pp=2, cp=2, zero=0, schedule="zbv", num_microbatches=2),
    ExpertLayout(pp=2, dp=2, zero=3, dp_replicate=2, ep=2),
    ExpertLayout(pp=2, dp=2, zero=3, dp_replicate=2, schedule="zbv", recompute="full"),
    ExpertLayout(cp=2, dp=2, dp_replicate=2, num_microbatches=2),
    ExpertLayout(dp=4, ep=4),
    ExpertLayout(tp=2, zero=2, ep=2, sequence_parallel=True, dispatch="gather"),
    ExpertLayout(pp=2, schedule="interleaved", recompute="selective"),
)
"""Two ranks for an axis and four for two of them, and each other value once."""
FURTHER = (
    ExpertLayout(tp=2, ep=2),
    ExpertLayout(tp=2, zero=0, ep=2, recompute="selective"),
    ExpertLayout(tp=2, zero=3),
    ExpertLayout(tp=2, zero=3, ep=2),
    ExpertLayout(cp=2, dp=2, zero=0, ep=4, dispatch="gather", recompute="full"),
    ExpertLayout(pp=2, cp=2, zero=3, schedule="zbv", recompute="full"),
    ExpertLayout(pp=2, dp=2, dp_replicate=2, recompute="selective"),
    ExpertLayout(pp=2, dp=2, zero=0, ep=2),
    ExpertLayout(pp=2, dp=2, zero=0, schedule="interleaved", recompute="selective"),
    ExpertLayout(pp=2, dp=2, zero=2, schedule="interleaved"),
    ExpertLayout(pp=2, dp=2, zero=3, schedule="interleaved", ep=2),
    ExpertLayout(tp=2, pp=2, sequence_parallel=True, schedule="zbv"),
    ExpertLayout(tp=2, pp=2, zero=2, recompute="full"),
    ExpertLayout(cp=2, dp=4, zero=2, ep=4, recompute="full"),
    ExpertLayout(pp=2, dp=4, dp_replicate=2, schedule="interleaved", ep=2, recompute="full"),
    ExpertLayout(
        pp=2,
        dp=4,
        zero=2,
        dp_replicate=2,
        schedule="zbv",
        num_microbatches=2,
        ep=2,
        dispatch="gather",
        recompute="selective",
    ),
    ExpertLayout(
        pp=2, dp=4, zero=3, num_microbatches=2, ep=4, dispatch="gather", recompute="selective"
    ),
    ExpertLayout(
        tp=2,
        cp=2,
        dp=2,
        zero=3,
        dp_replicate=2,
        sequence_parallel=True,
        ep=4,
        recompute="selective",
    ),
    ExpertLayout(tp=2, dp=4, zero=0, sequence_parallel=True, num_microbatches=2),
    ExpertLayout(
        tp=2,
        pp=2,
        cp=2,
        sequence_parallel=True,
        schedule="interleaved",
        num_microbatches=2,
        ep=4,
        dispatch="gather",
        recompute="full",
    ),
    ExpertLayout(tp=2, pp=2, cp=2, zero=2, sequence_parallel=True, ep=2, dispatch="gather"),
    ExpertLayout(tp=2, pp=2, dp=2, zero=0, schedule="zbv", ep=4),
    ExpertLayout(
        tp=2, pp=2, dp=2, zero=2, dp_replicate=2, schedule="zbv", num_microbatches=2, ep=4
    ),
)
"""Layouts of `make test-all`, which cover all pairs within eight processes."""
