"""`GradientMonitor` sees one norm, clips by it, and skips steps, in every layout alike."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import GradientMonitor
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.clip import PercentileClip, UnitClip, ZScoreClip
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero import gradients
from tests.fault_tolerance.numbers.guarded import (
    BadGradient,
    Guarded,
    Manual,
    batches,
    differences,
    fit,
    state_of,
)
from tests.strategy.small import Small, assert_same, dp_of, full, loader, make_trainer, merged
from tests.strategy.test_clipping import Everything

RULES: dict[str, Any] = {
    "percentile": lambda: PercentileClip(40),
    "zscore": lambda: ZScoreClip(0.5, warmup=2),
    "units": lambda: UnitClip(ratio=0.02),
}


def monitored(
    layout: Mapping[str, Any], devices: int
) -> dict[str, tuple[dict[str, Tensor], list[float], int]]:
    """By rule: weights, norms, and how often a norm was computed."""
    found = {}
    computed = gradients.global_squares
    for name, rule in RULES.items():
        calls: list[Any] = []
        norms: list[float] = []

        def counted(*args: Any, calls: list[Any] = calls, norms: list[float] = norms) -> Tensor:
            calls.append(1)
            norms.append(float(computed(*args).sum().sqrt()))
            return computed(*args)

        gradients.global_squares = counted
        module = Everything()
        module.lr = 1.0  # so that the norm rises, too
        in_parts = {**layout, "gather_at_end": False}
        trainer = make_trainer(
            in_parts, devices, callbacks=[GradientMonitor(rule())], gradient_clip_val=1e3
        )
        trainer.fit(module, loader(dp=dp_of(devices, layout)))
        assert (
            float(trainer.callback_metrics["optim/grad_norm"])
            == norms[-1 if name != "units" else -2]
        )
        gradients.global_squares = computed
        tp = trainer.strategy.topology.tp
        shards = {r.name: r.shard for r in trainer.strategy.parallel.gradients.roles}
        weights = {}
        for key, parameter in module.named_parameters():
            value, shard = full(parameter), shards.get(key)
            if shard is not None and shard.dim is not None and tp.group is not None:
                pieces = [torch.empty_like(value) for _ in range(tp.size)]
                torch.distributed.all_gather(pieces, value.contiguous(), group=tp.group)
                value = torch.cat(pieces, shard.dim)
            if not key.endswith("placeholder"):
                weights[key] = value
        found[name] = weights, norms, len(calls)
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, tuple[dict[str, Tensor], list[float], int]]:
    """What one process finds."""
    return pool.run(1, monitored, {}, 1)[0]


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"zero": 3}),
        (2, {"pp": 2}),
        pytest.param(4, {"pp": 2, "zero": 1}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_rules_clip_every_layout_alike(
    pool: WorkerPool, devices: int, layout: dict[str, Any], alone: Any
) -> None:
    by_rank = pool.run(devices, monitored, layout, devices)
    for name, (weights, norms, calls) in alone.items():
        # After the rows were clipped one by one, gradient_clip_val needs the norm anew.
        assert calls == (8 if name == "units" else 4)
        for rank in by_rank:
            assert rank[name][1] == pytest.approx(norms, rel=1e-10)
            assert rank[name][2] == calls
        together = merged([rank[name][0] for rank in by_rank])
        assert_same({key: together[key] for key in weights}, weights)
    # All rules did something: they leave other weights than each other.
    kept = [torch.cat([w.flatten() for w in weights.values()]) for weights, _, _ in alone.values()]
    assert not any(torch.allclose(kept[i], kept[j], rtol=1e-4) for i, j in ((0, 1), (0, 2), (1, 2)))


class Overflowing(Small):
    """The loss of the second batch is infinite, on the first data-parallel rank only."""

    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch)
        bad = self.trainer.global_step == 1 and not getattr(self, "done", False)
        if bad and self.trainer.strategy.topology.batch.rank == 0:
            self.done = True
            return found * torch.inf
        return found


def overflowing(layout: Mapping[str, Any], devices: int, nonfinite: str) -> tuple[int, float, bool]:
    module, monitor = Overflowing(), GradientMonitor(nonfinite=nonfinite)
    trainer = make_trainer(layout, devices, callbacks=[monitor])
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    finite = all(bool(full(p).isfinite().all()) for p in module.parameters())
    return monitor.skipped, float(trainer.callback_metrics["optim/skipped_steps"]), finite


def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(pool: WorkerPool) -> None:
    assert pool.run(2, overflowing, {"zero": 2}, 2, "skip") == [(1, 1.0, True)] * 2
    with pytest.raises(Exception, match="step 1: the norm of the gradients is (inf|nan)"):
        pool.run(2, overflowing, {"zero": 2}, 2, "raise")


class Smooth(Guarded):
    """Nothing that a batch changes but the weights."""

    def between(self) -> nn.Module:
        return nn.Tanh()


class ByHand(Smooth, Manual):
    """The same without Lightning's optimization."""


@pytest.mark.parametrize(("make", "accumulate"), [(Smooth, 2), (ByHand, 1)])
def test_skip_leaves_out_accumulated_batches_and_steps_by_hand(
    make: type[Guarded], accumulate: int
) -> None:
    data, monitor = batches(6), GradientMonitor(nonfinite="skip")
    options: dict[str, Any] = {"make": make, "accumulate_grad_batches": accumulate}
    clean = fit({}, 1, data[:2] + data[2 + accumulate :], **options)
    bad = BadGradient([1 + accumulate], rank=0)
    lost = differences(state_of(fit({}, 1, data, bad, monitor, **options)), state_of(clean))
    assert set(lost) <= {"mean loss"}
    assert monitor.skipped == 1


def test_zscore_leaves_usual_norms_alone_and_goes_on_from_its_state() -> None:
    rule = ZScoreClip(2.0, beta=0.9, warmup=4)
    assert {rule.limit(norm) for norm in (1.0, 1.2, 0.8, 1.0)} == {math.inf}
    deviation = math.sqrt(0.02)
    other = ZScoreClip(2.0, beta=0.9, warmup=4)
    other.load_state_dict(rule.state_dict())
    assert rule.limit(1.1) == math.inf
    assert other.limit(3.0) == pytest.approx(1.0 + 4 * deviation**2 / 2.0)
    monitor, resumed = GradientMonitor(rule), GradientMonitor(ZScoreClip())
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.state_dict() == monitor.state_dict()


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="percentile=101: must lie in"):
        PercentileClip(101)
    with pytest.raises(ConfigError, match="nonfinite='stop'"):
        GradientMonitor(nonfinite="stop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it needs the gradients of a MegatronStrategy"):
        make_trainer(None, callbacks=[GradientMonitor()]).fit(Small(), loader())


def test_the_norm_is_logged_as_often_as_asked() -> None:
    class Noting(Small):
        def log_dict(self, dictionary: Any, **options: Any) -> None:
            logged.append(self.trainer.global_step)
            super().log_dict(dictionary, **options)

    logged: list[int] = []
    make_trainer({}, callbacks=[GradientMonitor(every=2)]).fit(Noting(), loader())
    assert logged == [0, 1, 3]  # of four steps the first, and each second
    with pytest.raises(ConfigError, match="every=0"):
        GradientMonitor(every=0)
