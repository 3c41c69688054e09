"""Adaptive recomputation against what a user would set by hand: peak of the activations, and time.

Promise: whatever limit ``recompute="adaptive"`` is given, the blocks stay under it, and a step is
at most 3 % slower than that of the best setting by hand that fits: none, selective, full, or one of
these for each n-th block. What fits is told by the same count for both (`knapsack.needed`).

At several limits, on one process: the *peak* of the blocks' activations under the plan, counted by
a tracker of tensor storages over one step into gradients that exist (what is outside of blocks, and
the backward's own tensors, are known from a step that recomputes nothing, and taken off); and the
time of forward and backward, all settings taking turns step by step, by two clocks: that of the
wall, and the time of this process on the processor, which other work on the machine moves less. A
ratio is the median of those of the steps of one round, with its standard error and, in brackets,
the middle half. Sequences are short, to have many rounds: 3 % are told from nothing if the error is
1 to 2 %. A plan that does what a setting does, in another order, and the last row of each table,
one setting beside itself, show how far that is to be trusted. The best by hand is chosen by the
processor's clock from the same steps, so it is by luck a little better than it is.

Freed memory stays with the process, as with the allocator of a GPU: to get it back from Linux costs
more time than the settings differ by.

    python -m benchmarks.adaptive                  # 3 minutes
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import (
    Model,
    arguments,
    fit,
    keep_freed_memory,
    ratio_and_error,
    report,
    take_turns_by,
)
from benchmarks.recomputation import CONFIGS, LiveBytes, step_of, stepper
from lightning_megatron import ActivationConfig, MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.parallel.activations.checkpointing import recompute_each
from lightning_megatron.parallel.activations.knapsack import BlockCosts, RecomputeMode, needed
from lightning_megatron.testing import WorkerPool
from lightning_megatron.tuning.recomputation import AdaptiveMemory

LENGTH = 128
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
LIMITS = (0.1, 0.35, 0.65, 0.9)
"""Of the way from what the blocks take if all are recomputed to what they take if none is."""
ROUNDS = 50
TARGET = 1.03
AGAIN = "full, by hand again"
_DECIDED = 4
"""Batches until the plan is made and in force."""


def by_hand(layers: int) -> dict[str, tuple[ActivationConfig, list[RecomputeMode]]]:
    """Settings that a user would try, and what they mean for each block."""
    found: dict[str, tuple[ActivationConfig, list[RecomputeMode]]] = {
        "none": (ActivationConfig(), ["none"] * layers),
        "selective": (ActivationConfig(recompute="selective"), ["selective"] * layers),
        "full": (ActivationConfig(recompute="full"), ["full"] * layers),
    }
    for every in range(2, layers):
        for mode in ("selective", "full"):
            config = ActivationConfig(recompute=mode, every=every)
            ways: list[RecomputeMode] = [mode if i % every == 0 else "none" for i in range(layers)]
            found[f"{mode}, every {every}"] = config, ways
    return found


def planned(
    config: TransformerConfig, length: int, **limit: float
) -> tuple[Model, list[BlockCosts], list[RecomputeMode]]:
    """A model under the plan for a limit, what was measured of its blocks, and the plan."""
    module = Model(config)
    strategy = MegatronStrategy(activations=ActivationConfig(recompute="adaptive", **limit))  # type: ignore[arg-type]
    fit(module, strategy, _DECIDED, 1, length)
    [adaptive] = [tuner for tuner in strategy.tuners if isinstance(tuner, AdaptiveMemory)]
    assert adaptive.ways is not None
    costs = [block.costs for block in adaptive.measured.values()]
    kept = {w: ActivationConfig(recompute=w).kept for w in ("selective", "full")}
    again = {module.get_submodule(n): kept[w] for n, w in adaptive.ways.items() if w != "none"}
    recompute_each(module, again)  # after a run blocks are as they were before it
    return module, costs, list(adaptive.ways.values())


def peak(module: Model, length: int) -> int:
    """The most bytes of tensors made during a step that are alive at a time, without gradients."""
    step = step_of(module, length)
    step()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    with LiveBytes() as live:
        step()
    return live.most


def compare(
    config: TransformerConfig,
    rounds: int,
    length: int = LENGTH,
    limits: Sequence[float] = LIMITS,
) -> list[dict[str, Any]]:
    """A row for every limit, and one for a setting beside itself."""
    free, costs, _ = planned(config, length, limit_fraction=0.9)
    hand = by_hand(len(costs))
    sizes = {name: needed(costs, ways) for name, (_, ways) in hand.items()}
    outside = peak(free, length) - sizes["none"]
    steps = {name: stepper(config, memory, length) for name, (memory, _) in hand.items()}
    plans: dict[str, tuple[float, int, list[RecomputeMode]]] = {}
    for part in limits:
        limit = sizes["full"] + part * (sizes["none"] - sizes["full"])
        module, _, ways = planned(config, length, limit_gib=limit / 2**30)
        name = f"adaptive at {part}"
        steps[name] = step_of(module, length)
        plans[name] = limit, peak(module, length) - outside, ways
    steps[AGAIN] = stepper(config, ActivationConfig(recompute="full"), length)
    seconds = take_turns_by(steps, rounds, list(CLOCKS.values()))
    middle = {name: statistics.median(times) for name, (times, _) in seconds.items()}
    rows = []
    for name, (limit, most, ways) in plans.items():
        fitting = [other for other in hand if sizes[other] <= limit]
        best = min(fitting, key=lambda other: middle[other])
        rows.append(
            {
                "limit, MiB": round(limit / 2**20, 2),
                "peak, MiB": round(most / 2**20, 2),
                "plan": ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(ways)),
                **_times(seconds, middle, name, f"{best} ({sizes[best] / 2**20:.1f} MiB)", best),
                "target": TARGET,
                "others that fit, ms": ", ".join(
                    f"{other} {1e3 * middle[other]:.1f}" for other in fitting if other != best
                )
                or "-",
            }
        )
    control = dict.fromkeys(rows[0], "-") | {"plan": AGAIN, "target": 1}
    return [*rows, control | _times(seconds, middle, AGAIN, "full", "full")]


def _times(
    seconds: dict[str, list[list[float]]],
    middle: dict[str, float],
    name: str,
    title: str,
    best: str,
) -> dict[str, Any]:
    ratios = {
        f"ratio, {clock}": ratio_and_error(ours, theirs)
        for clock, ours, theirs in zip(CLOCKS, seconds[name], seconds[best], strict=True)
    }
    ms = {"ms": round(1e3 * middle[name], 1)}
    return {**ms, "best by hand": title, "its ms": round(1e3 * middle[best], 1), **ratios}


def measured(config: TransformerConfig, rounds: int) -> list[dict[str, Any]]:
    """The same, in a process of its own."""
    keep_freed_memory()
    return compare(config, rounds)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=ROUNDS, steps=1)
    rows = []
    with WorkerPool(1, timeout=600) as pool:
        for kind, config in CONFIGS.items():
            for row in pool.run(1, measured, config, options.rounds)[0]:
                rows.append({"attention": kind, **row})
    title = (
        f"Adaptive recomputation against settings by hand: 4 layers, h=256, 8 heads, 1 x {LENGTH} "
        f"tokens, {options.rounds} rounds, milliseconds of the processor"
    )
    report("adaptive", title, rows, options.output)


if __name__ == "__main__":
    main()
