"""The layouts under which the model is trained: data, chosen so that they cover all pairs.

The full product of the options below has more than two thousand legal members within eight
processes. The tables cover every pair of option values that some legal layout has (a value counts
only where it makes a difference: a ZeRO stage needs `dp > 1`, a schedule `pp > 1`). By default they
cover those of degrees of two within four processes; `tests.parity.test_schedules` has the pairs of
schedules.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.reference import HEADS, Architecture

MOST_PROCESSES = 8
BATCH = 8
Kind = Literal["ring", "gather", "ulysses", "both"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread the training over processes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 1
    dp_replicate: int = 1
    kind: Kind = "ring"
    """Exchange of keys and values under cp; ``both`` is a ring of groups that exchange heads."""
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    num_microbatches: int = 1
    architecture: Architecture = "llama"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def legal(self) -> bool:
        return (
            self.world_size <= MOST_PROCESSES
            and self.dp * self.num_microbatches <= BATCH
            and (self.tp > 1 or not self.sequence_parallel)
            and (self.dp_replicate == 1 or (self.zero > 0 and self.dp % self.dp_replicate == 0))
            and (self.kind not in ("ulysses", "both") or HEADS // self.tp % self._exchanging == 0)
            and (self.kind != "both" or self.cp == 4)
            and (self.kind == "ring" or self.cp > 1)
        )

    @property
    def _exchanging(self) -> int:
        """Ranks that exchange heads."""
        return self.cp if self.kind == "ulysses" else 2

    def strategy_options(self) -> dict[str, Any]:
        """Arguments of the strategy."""
        given = asdict(self)
        del given["dp"], given["architecture"]
        kind, cp = given.pop("kind"), given.pop("cp")
        if cp > 1:
            both = kind == "both"
            given["cp"] = ContextConfig(
                degree=cp, kind="ring" if both else kind, ulysses=2 if both else None
            )
        zero = ShardingConfig(stage=given.pop("zero"), dp_replicate=given.pop("dp_replicate"))
        pp = PipelineConfig(degree=given.pop("pp"), schedule=given.pop("schedule"))
        return {**given, "pp": pp, "zero": zero}

    def pairs(self) -> set[frozenset[tuple[str, Any]]]:
        """The pairs of values that this layout puts to the test."""
        idle = {"schedule"} if self.pp == 1 else set()
        if self.cp == 1:
            idle |= {"kind"}
        if self.dp * self.cp == 1:
            idle |= {"zero", "dp_replicate"}
        values = [(name, value) for name, value in asdict(self).items() if name not in idle]
        return {frozenset(pair) for pair in itertools.combinations(values, 2)}

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(changed) or "single"


VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 4),
    "cp": (1, 2, 4),
    "kind": ("ring", "gather", "ulysses", "both"),
    "zero": (0, 1, 2, 3),
    "dp_replicate": (1, 2),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "gpipe"),
    "num_microbatches": (1, 2, 4),
    "architecture": ("llama", "gpt"),
}


SMALL = VALUES | {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "num_microbatches"), (1, 2)),
    "kind": ("ring", "ulysses"),
    "zero": (0, 1, 3),
    "schedule": ("1f1b",),
}
"""Those whose pairs are covered by default, within four processes."""


def legal_layouts(options: dict[str, tuple[Any, ...]], most: int) -> Iterator[Layout]:
    """All layouts with these values that need no more than ``most`` processes."""
    for values in itertools.product(*options.values()):
        layout = Layout(**dict(zip(options, values, strict=True)))
        if layout.world_size <= most and layout.legal:
            yield layout


LAYOUTS = (
    Layout(),
    Layout(dp=2, dp_replicate=2, num_microbatches=2, architecture="gpt"),
    Layout(pp=2, cp=2),
    Layout(pp=2, cp=2, zero=3, kind="ulysses", num_microbatches=2, architecture="gpt"),
    Layout(pp=2, dp=2, zero=0),
    Layout(pp=2, dp=2, dp_replicate=2),
    Layout(tp=2, pp=2, zero=0, sequence_parallel=True, num_microbatches=2),
    Layout(tp=2, dp=2, zero=3, dp_replicate=2, sequence_parallel=True),
    Layout(tp=2, cp=2, zero=0, num_microbatches=2),
    Layout(tp=2, cp=2, zero=0, kind="ulysses", sequence_parallel=True, architecture="gpt"),
    Layout(tp=2, cp=2, sequence_parallel=True, num_microbatches=2, architecture="gpt"),
    Layout(cp=2, dp=2, zero=3, dp_replicate=2),
    Layout(cp=2, dp=2, dp_replicate=2, kind="ulysses"),
    Layout(cp=2, zero=2, kind="gather"),
    Layout(dp=2, zero=2, num_microbatches=4),
    Layout(tp=4, num_microbatches=4),
    Layout(pp=3, schedule="gpipe", num_microbatches=4, architecture="gpt"),
    Layout(dp=4, zero=3, dp_replicate=2),
    Layout(cp=4, kind="both", zero=3),
)
"""Two ranks for an axis and four for two of them; each larger degree and other value once."""
FURTHER = (
    Layout(pp=2, dp=2, zero=2, dp_replicate=2, num_microbatches=4),
    Layout(tp=2, dp=2, zero=0, sequence_parallel=True, num_microbatches=4),
    Layout(pp=3, dp=2, zero=3, dp_replicate=2, num_microbatches=2, architecture="gpt"),
    Layout(tp=2, pp=3, sequence_parallel=True, num_microbatches=4),
    Layout(pp=2, dp=4, zero=0, architecture="gpt"),
    Layout(pp=2, dp=4, zero=3, dp_replicate=2, schedule="gpipe"),
    Layout(pp=4, dp=2, dp_replicate=2, schedule="gpipe"),
    Layout(tp=2, dp=4, zero=3, sequence_parallel=True),
    Layout(tp=2, pp=4, sequence_parallel=True, schedule="gpipe"),
    Layout(tp=4, dp=2, dp_replicate=2, sequence_parallel=True, architecture="gpt"),
    Layout(tp=4, dp=2, zero=0, num_microbatches=2),
    Layout(tp=4, pp=2, num_microbatches=4, architecture="gpt"),
    Layout(tp=4, pp=2, schedule="gpipe", num_microbatches=4),
    Layout(pp=3, cp=2, kind="gather", schedule="gpipe", num_microbatches=4),
    Layout(pp=3, cp=2, zero=0, schedule="gpipe", architecture="gpt"),
    Layout(
        pp=3, cp=2, zero=2, kind="ulysses", schedule="gpipe", num_microbatches=4, architecture="gpt"
    ),
    Layout(cp=2, dp=4, dp_replicate=2, kind="ulysses"),
    Layout(
        cp=2, dp=4, zero=2, dp_replicate=2, kind="gather", num_microbatches=2, architecture="gpt"
    ),
    Layout(cp=2, dp=4, zero=3, dp_replicate=2),
    Layout(pp=4, cp=2, zero=0, kind="ulysses", num_microbatches=2, architecture="gpt"),
    Layout(pp=4, cp=2, zero=2, schedule="gpipe", num_microbatches=4),
    Layout(pp=4, cp=2, zero=3, kind="gather"),
    Layout(tp=2, cp=2, dp=2, dp_replicate=2),
    Layout(
        tp=2,
        pp=2,
        cp=2,
        kind="ulysses",
        sequence_parallel=True,
        schedule="gpipe",
        num_microbatches=2,
        architecture="gpt",
    ),
    Layout(tp=2, pp=2, cp=2, zero=3, kind="gather", sequence_parallel=True, num_microbatches=2),
    Layout(tp=4, cp=2, zero=2, kind="gather", num_microbatches=2),
    Layout(tp=4, cp=2, zero=3, sequence_parallel=True, num_microbatches=4),
    Layout(cp=4, zero=3, kind="ulysses", num_microbatches=4, architecture="gpt"),
    Layout(cp=4, dp=2, zero=0, kind="gather", architecture="gpt"),
    Layout(cp=4, dp=2, zero=3, dp_replicate=2, kind="both", num_microbatches=4),
    Layout(pp=2, cp=4, kind="both", num_microbatches=4),
    Layout(
        pp=2, cp=4, zero=0, kind="both", schedule="gpipe", num_microbatches=2, architecture="gpt"
    ),
    Layout(pp=2, cp=4, zero=0, num_microbatches=2, architecture="gpt"),
    Layout(tp=2, cp=4, zero=2, kind="both", sequence_parallel=True, architecture="gpt"),
    Layout(num_microbatches=2, architecture="gpt"),
    Layout(dp=4, dp_replicate=2, architecture="gpt"),
    Layout(pp=3, dp=2, zero=0, schedule="gpipe", num_microbatches=2),
    Layout(pp=3, dp=2, dp_replicate=2),
    Layout(pp=3, dp=2, zero=2, schedule="gpipe", num_microbatches=4, architecture="gpt"),
    Layout(tp=2, pp=3, sequence_parallel=True, num_microbatches=4, architecture="gpt"),
    Layout(pp=2, dp=4, zero=0),
    Layout(pp=4, dp=2, zero=0, schedule="gpipe", num_microbatches=4),
    Layout(pp=4, dp=2, dp_replicate=2, schedule="gpipe", num_microbatches=4, architecture="gpt"),
    Layout(
        pp=4, dp=2, zero=2, dp_replicate=2, schedule="gpipe", num_microbatches=2, architecture="gpt"
    ),
    Layout(pp=4, dp=2, zero=3, num_microbatches=4, architecture="gpt"),
    Layout(tp=2, dp=4, zero=2, sequence_parallel=True),
    Layout(tp=2, dp=4, zero=3, dp_replicate=2, num_microbatches=2, architecture="gpt"),
    Layout(
        tp=2,
        pp=2,
        dp=2,
        sequence_parallel=True,
        schedule="gpipe",
        num_microbatches=2,
        architecture="gpt",
    ),
    Layout(tp=4, dp=2, zero=0, sequence_parallel=True, num_microbatches=4, architecture="gpt"),
    Layout(tp=4, dp=2, dp_replicate=2, sequence_parallel=True),
    Layout(
        tp=4,
        dp=2,
        zero=2,
        dp_replicate=2,
        sequence_parallel=True,
        num_microbatches=2,
        architecture="gpt",
    ),
    Layout(tp=4, dp=2, zero=3, dp_replicate=2, sequence_parallel=True, num_microbatches=2),
    Layout(tp=4, pp=2, schedule="gpipe", architecture="gpt"),
)
"""Layouts of `make test-all`, which cover all pairs within eight processes."""
