"""A look at gradients anywhere is a look at those that are whole from the start, in any layout."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_megatron import CompileConfig, ConnectionConfig, PipelineSequential, ShardingConfig
from lightning_megatron.layers import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.whole.divided_gradient import LooksWhole
from tests.strategy.small import WIDTH, Small, dp_of, loader, make_trainer


class Looking(Small):
    """Notes every gradient behind the step, and sums of those that it has cleared or changed."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = PipelineSequential(
            first=nn.Linear(WIDTH, WIDTH),
            block=MixtureOfExperts(WIDTH, 5, num_experts=4, top_k=2)
            if experts
            else nn.Sequential(
                ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)
            ),
            norm=nn.LayerNorm(WIDTH),
            head=nn.Linear(WIDTH, 3),
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[float] = []
        self.kinds: set[bool] = set()

    def loss(self, batch: Any) -> Any:
        out = self.net(batch[0].unsqueeze(1).to(self.scale.dtype)).squeeze(1)
        return (out * self.scale - batch[1][:, :3]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_train_batch_end(self, *_: Any) -> None:
        LOOK[0](self)


def look(module: Any) -> None:
    last = next(reversed(list(module.parameters())))
    module.kinds.add(last.grad.shape == last.shape)  # the last one first
    module.seen.append(float(clip_grad_norm_(module.net.parameters(), 1e9)))
    module.seen += [float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None]


LOOK = [look]


class WholeFromTheStart(Looking):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.scale.grad is not None
        self.scale.grad.detach_()  # torch refuses it of a view


def looking_job(
    layout: Mapping[str, Any], devices: int, whole: bool, options: Mapping[str, Any]
) -> tuple[list[float], bool, list[float]]:
    module = (WholeFromTheStart if whole else Looking)(experts="ep" in layout)
    if options.get("precision", "64-true") == "64-true":
        module.double()
    trainer = make_trainer(layout, devices, **options)
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    assert module.kinds == {True}
    marked = any(isinstance(p, LooksWhole) for p in module.parameters())
    return module.seen, marked, [float(p.detach().double().sum()) for p in module.parameters()]


NARROW = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        pytest.param({"zero": 1}, 2, NARROW, id="bf16-mixed"),
        pytest.param({"zero": 2}, 2, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(
            {"zero": 1, "compile": CompileConfig(backend="aot_eager")}, 2, {}, id="compile"
        ),
        pytest.param({"zero": 1, "tp": 2}, 4, {}, id="tp"),
        pytest.param({"zero": 1, "pp": 2}, 4, {}, id="pp"),
        pytest.param({"zero": 2, "tp": 2}, 4, NARROW, id="tp, bf16-mixed"),
        pytest.param({"zero": 2, "ep": 2, "num_microbatches": 2}, 4, {}, id="ep"),
        pytest.param({"zero": ShardingConfig(stage=1, dp_replicate=2)}, 4, {}, id="hybrid"),
    ],
)
def test_gradients_are_those_of_a_hook_that_exists_to_see_them(
    pool: WorkerPool, layout: Mapping[str, Any], ranks: int, options: Mapping[str, Any]
) -> None:
    expected = pool.run(ranks, looking_job, layout, ranks, True, options)
    found = pool.run(ranks, looking_job, layout, ranks, False, options)
    rounding = 1e-10 if not options else 2e-2
    for (seen, marked, weights), (whole_seen, _, whole_weights) in zip(
        found, expected, strict=True
    ):
        assert not marked
        assert seen
        assert seen == pytest.approx(whole_seen, rel=rounding, abs=rounding)
        assert weights == pytest.approx(whole_weights, rel=rounding, abs=rounding)


class LooksAlone(Small):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            LOOK_AT_STATE[1](self)


class Watching(Small):
    """Counts what is gathered."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_start(self) -> None:
        self.asked: list[str] = []
        for rows in self.trainer.strategy.parallel.data.rows.values():  # type: ignore[attr-defined]
            rows.bring_gradient = lambda: self.asked.append("gathered")
        LOOK_AT_STATE[0](self)


def expect_marked(module: Any) -> None:
    assert all(isinstance(p, LooksWhole) for p in module.parameters())


def read_one(module: Any) -> None:
    assert next(module.parameters()).grad is not None


LOOK_AT_STATE = [expect_marked, read_one]


def idle_job(layout: Mapping[str, Any], devices: int) -> list[str]:
    module = Watching().double()
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "val_check_interval": 2}
    trainer = make_trainer(layout, devices, **options, num_sanity_val_steps=0)
    batches = loader(dp=dp_of(devices, layout))
    trainer.fit(module, batches, batches)
    assert "zero_grad" not in vars(module)
    return module.asked


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_gathered_for_nobody(pool: WorkerPool, compiled: bool) -> None:
    """By optimizers, by Lightning, or by a compiler that makes another graph."""
    more = {"compile": CompileConfig(backend="aot_eager")} if compiled else {}
    for zero in (1, 2):
        assert pool.run(2, idle_job, {"zero": zero, **more}, 2) == [[], []]


def alone_job() -> None:
    layout = {"zero": 1, "connection": ConnectionConfig(timeout_s=4)}
    make_trainer(layout, 2).fit(LooksAlone().double(), loader(dp=2))


def test_a_rank_that_looks_alone_is_told_so(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="`.grad` was read .*nearest valid"):
        pool.run(2, alone_job)
