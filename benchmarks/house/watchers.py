"""What each part that looks at user code costs in a step, measured by switching it off.

One training run per case, a small transformer: its steps take turns, with everything as it is and
with one watcher switched off, round after round; who begins a round, changes. A watcher is switched
off by taking its functions out on all ranks, between two steps, outside of what is timed. So a
ratio is *the step with the watcher to the step without*, of the two in the same round: median,
standard error of the median, and the middle half. ``nothing`` is a control: both steps are the
same, so its ratio says what chance does on this machine.

A step is from the end of one training batch to the end of the next. Its wall time is that of the
slowest rank, its processor time the sum over ranks.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Model, Tokens, ratio_and_error
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(hidden_size=64, num_layers=4, num_heads=4)
BATCH, LENGTH = 8, 32
WARM_UP = 10
"""Steps before the first round."""

ON, CONTROL = "as it is", "nothing"
_without: set[str] = set()
"""Watchers that are switched off in this process now."""


class Plain(Model):
    """A step that logs its loss, and mentions no weights."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LooksInHooks(Plain):
    """One with a hook that may look at weights, and does not."""

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class LooksInSteps(Plain):
    """One whose step mentions weights, and leaves them alone."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx < 0:
            self.log("norm", sum(p.norm() for p in self.parameters()))
        return super().training_step(batch, batch_idx)


class KeepsOutputs(Plain):
    """One whose hook around a batch reads what the step has kept: 4,096 numbers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.kept: list[Tensor] = []

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept = [loss.detach().expand(4096).clone()]
        return loss

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        assert self.kept or self.trainer.world_size > 1


class Switch:
    """A watcher that can be switched off between steps.

    Args:
        names: its functions as ``module:Class.function``, each with what stands in for it.
    """

    def __init__(self, **names: Callable[..., Any]) -> None:
        self.names = names

    def install(self, name: str, stack: ExitStack) -> bool:
        """Have its functions obey `_without`; False if this checkout has no such functions.

        Args:
            name: of the watcher.
            stack: puts them back at its end.
        """
        for place, instead in self.names.items():
            path, function = place.rsplit(".", 1)
            try:
                owner = _found(path)
                original = getattr(owner, function)
            except (ImportError, AttributeError):
                return False
            stack.enter_context(patch.object(owner, function, _obeying(name, original, instead)))
        return True

    def switch(self, strategy: Any, *, on: bool) -> None:
        """What else is to be done when it is switched."""


class SwitchParts(Switch):
    """The classes that weights have which know their places, for which they get plain ones."""

    @override
    def install(self, name: str, stack: ExitStack) -> bool:
        with suppress(ImportError, AttributeError):
            return _found("whole.weights:WeightParts") is not None
        return False

    @override
    def switch(self, strategy: Any, *, on: bool) -> None:
        watch = strategy.weight_watch
        if on:
            watch._parts = type(watch._parts)(self._mode, watch._run.module)
            watch._stages = self._stages
        else:
            self._mode, self._stages = list(watch._parts._parts), watch._stages
            watch._parts.end()
            watch._stages = None
        if self._stages is not None:
            self._stages.alive = self._stages.sees_all = on


def _found(place: str) -> Any:
    """What is called ``module:Class`` or ``module:`` in the package."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(f"lightning_megatron.{module}")
    return getattr(found, name) if name else found


def _obeying(
    name: str, original: Callable[..., Any], instead: Callable[..., Any]
) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (instead if name in _without else original)(*args, **kwargs)

    return chosen


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no_context(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


def _share_nothing(replay: Any, hook: str, recorder: Any, extra: Sequence[Any] = ()) -> list[Any]:
    """`LogReplay.share` without collectives and logs: other stages have a loss of 0."""
    return list(extra)


def switches() -> dict[str, Switch]:
    """All watchers that can be switched off, by name."""
    return {
        "WeightParts": SwitchParts(),
        "StepState": Switch(
            **{
                "strategy.stage_state:StepState.begin_step": _nothing,
                "strategy.stage_state:StepState.end_step": _nothing,
            }
        ),
        "LeftBehind": Switch(**{"strategy.left_behind:LeftBehind.watched": _no_context}),
        "LogReplay": Switch(**{"strategy.microbatch_logging:LogReplay.share": _share_nothing}),
    }


CASES: Mapping[str, tuple[dict[str, Any], type[Plain], tuple[str, ...]]] = {
    "one process, 4 microbatches": ({"num_microbatches": 4}, Plain, ("LogReplay",)),
    "tp=2, nobody looks at weights": ({"tp": 2}, Plain, ("WeightParts",)),
    "tp=2, a hook may look at weights": ({"tp": 2}, LooksInHooks, ("WeightParts",)),
    "tp=2, the step mentions weights": ({"tp": 2}, LooksInSteps, ("WeightParts",)),
    "pp=2, 4 microbatches": (
        {"pp": 2, "num_microbatches": 4},
        Plain,
        ("WeightParts", "StepState", "LeftBehind", "LogReplay"),
    ),
    "pp=2, a hook reads what the step keeps": (
        {"pp": 2, "num_microbatches": 4},
        KeepsOutputs,
        ("StepState", "LeftBehind"),
    ),
    "pp=2, a hook may look at weights": (
        {"pp": 2, "num_microbatches": 4},
        LooksInHooks,
        ("WeightParts",),
    ),
}
"""Options of the strategy, module, and the watchers that are switched off in turn."""

NOT_SWITCHED = (
    "Without WeightParts a hook that looks at weights sees those of its own stage, or its parts. "
    "`ContextCheck` runs under cp at the first call of a trunk, and in none of these steps. "
    "SplitTensor, the microbatch recorder of logs (LogRecorder) and the tables of rules cannot be "
    "switched off: without them the step computes something else. Without LogReplay the stages "
    "before the last do not get the loss, so its ratio has the waiting for that message in it."
)


class Turns(pl.Callback):
    """Switches watchers off in turn, and takes the time of every step."""

    def __init__(self, known: Mapping[str, Switch], names: Sequence[str], rounds: int) -> None:
        self._switches = known
        self._names = names
        self.order = list(_order(names, rounds))
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        self._began: tuple[float, float] | None = None
        self._steps = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        now = time.perf_counter(), time.process_time()
        self._steps += 1
        at = self._steps - WARM_UP
        if self._began is not None:
            took = now[0] - self._began[0], now[1] - self._began[1]
            name = self.order[at - 1]
            self.seconds[name].append(took)
            if name in self._switches:
                _without.discard(name)
                self._switches[name].switch(trainer.strategy, on=True)
        if 0 <= at < len(self.order):
            name = self.order[at]
            if name in self._switches:
                _without.add(name)
                self._switches[name].switch(trainer.strategy, on=False)
            trainer.strategy.barrier()
            self._began = time.perf_counter(), time.process_time()


def _order(names: Sequence[str], rounds: int) -> Iterator[str]:
    for turn in range(rounds):
        first = turn % len(names)
        yield from [*names[first:], *names[:first]]


def run(case: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every step on this rank, by variant."""
    options, kind, watchers = CASES[case]
    known = switches()
    with ExitStack() as stack:
        known = {name: known[name] for name in watchers if known[name].install(name, stack)}
        turns = Turns(known, [ON, CONTROL, *known], rounds)
        steps = WARM_UP + len(turns.order)
        trainer = pl.Trainer(
            strategy=MegatronStrategy(**options),
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            max_steps=steps,
            callbacks=[turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = Tokens(BATCH * steps, LENGTH, 256)
        trainer.fit(kind(CONFIG), DataLoader(data, batch_size=BATCH))
    return turns.seconds


def rows(rounds: int, chosen: str = "") -> Iterator[dict[str, Any]]:
    """The table, a row for each watcher in each case."""
    for case, (options, _, watchers) in CASES.items():
        if chosen not in case:
            continue
        ranks = options.get("tp", 1) * options.get("pp", 1)
        with WorkerPool(ranks, timeout=570) as pool:
            found = pool.run(ranks, run, case, rounds)
        wall, processor = (
            {n: _over_ranks([seconds[n] for seconds in found], i, over) for n in found[0]}
            for i, over in ((0, max), (1, sum))
        )
        for name in (CONTROL, *watchers):
            row = {"case": case, "watcher": name, "steps": rounds}
            if name not in wall:
                yield row | {"wall with / without": "not in this checkout"}
                continue
            difference = [a - b for a, b in zip(processor[ON], processor[name], strict=True)]
            yield row | {
                "step, wall (ms)": round(1e3 * _median(wall[ON]), 2),
                "step, processor (ms)": round(1e3 * _median(processor[ON]), 2),
                "wall with / without": ratio_and_error(wall[ON], wall[name]),
                "processor with / without": ratio_and_error(processor[ON], processor[name]),
                "processor (us a step)": round(1e6 * _median(difference)),
            }


def _over_ranks(
    by_rank: Sequence[Sequence[tuple[float, float]]],
    index: int,
    over: Callable[[Iterator[float]], float],
) -> list[float]:
    return [over(step[index] for step in steps) for steps in zip(*by_rank, strict=True)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--case", default="")
    given = parser.parse_args()
    measured = importlib.import_module("benchmarks.house.watchers")
    for found_row in measured.rows(given.rounds, given.case):
        print(json.dumps(found_row), flush=True)
        print(found_row, file=sys.stderr, flush=True)
