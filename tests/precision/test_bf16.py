"""Options of the bfloat16 precisions: stochastic rounding, and the format of the reduction."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import Bf16MixedPrecision, Bf16TruePrecision, ConfigError
from lightning_megatron.optim import AdamW
from lightning_megatron.precision.bf16 import round_stochastically
from lightning_megatron.testing import WorkerPool
from tests.strategy import small


def test_rounding_is_true_on_average() -> None:
    draw = torch.Generator().manual_seed(0)
    low, gap = 1.0, 2.0**-7
    for sign in (1.0, -1.0):
        for part in (0.0, 0.125, 0.5, 0.9):
            value = sign * (low + part * gap)
            found = round_stochastically(torch.full((20_000,), value), draw).double()
            assert set(found.abs().tolist()) <= {low, low + gap}
            # Four standard deviations of the mean of so many.
            bound = 4 * gap * (part * (1 - part) / 20_000) ** 0.5
            assert abs(float(found.mean()) - value) <= bound + 1e-12


def test_rounding_keeps_what_is_no_number() -> None:
    values = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(round_stochastically(values).float(), values)
    assert round_stochastically(torch.tensor([torch.nan])).isnan().all()


class Slow(small.Small):
    """Weights of 1 with a gradient of 1, and steps of 2**-10: 16 of them are 1/64."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net = small.PipelineSequential(nn.Linear(16, 16, bias=False))
        self.optimizer = optimizer
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = len(batch[0])
        return self.net(torch.full((rows, 16), 1 / rows, dtype=torch.bfloat16)).float().sum()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=2.0**-10)


def slow_job(
    stochastic: bool, options: dict[str, Any], devices: int, optimizer: str = "SGD"
) -> dict[str, Tensor]:
    trainer = small.make_trainer(
        options,
        devices,
        precision=None,
        plugins=[Bf16TruePrecision(stochastic_rounding=stochastic)],
        max_epochs=16,
        limit_train_batches=1,
    )
    module = Slow(optimizer)
    trainer.fit(module, small.loader(dp=devices))
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    return small.weights(module)


def test_small_steps_count(pool: WorkerPool) -> None:
    for weight in pool.run(1, slow_job, False, {}, 1)[0].values():
        assert (weight == 1.0).all()
    for optimizer in ("SGD", "AdamW"):
        for weight in pool.run(1, slow_job, True, {}, 1, optimizer)[0].values():
            moved = 1 - float(weight.double().mean())
            # Below 1 neighbours are 2**-8 apart: a step is one chance in four of one. The mean of
            # 256 weights after 16 steps has a deviation of 2**-8 * sqrt(16 * 3 / 16 / 256).
            assert moved == pytest.approx(1 / 64, abs=4 * 2.0**-8 / 8)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicas_round_alike(pool: WorkerPool, zero: int) -> None:
    first, second = pool.run(2, slow_job, True, {"zero": zero}, 2)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert weight.unique().numel() > 2
        # Shards draw bits of their own.
        assert not torch.equal(weight[:8], weight[8:])


def resume_job(path: Path) -> None:
    def fit(epochs: int, start: str | None = None, stochastic: bool = True) -> Any:
        module = Slow("AdamW")
        trainer = small.make_trainer(
            {},
            precision=None,
            plugins=[Bf16TruePrecision(stochastic_rounding=stochastic)],
            max_epochs=epochs,
            limit_train_batches=1,
        )
        torch.manual_seed(0)
        trainer.fit(module, small.loader(), ckpt_path=start)
        return trainer, small.weights(module)

    import lightning.pytorch as pl

    pl.seed_everything(1, verbose=False)
    _, whole = fit(8)
    trainer, _ = fit(4)
    trainer.save_checkpoint(path / "a.ckpt")
    _, resumed = fit(8, str(path / "a.ckpt"))
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name])
    # State is in float32 there, which torch's optimizers do not take beside narrow weights.
    trainer, _ = fit(8, str(path / "a.ckpt"), stochastic=False)
    for state in trainer.optimizers[0].state.values():
        assert state["exp_avg"].dtype == torch.bfloat16


def test_a_resumed_run_rounds_as_one_that_went_on(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, resume_job, tmp_path)


def test_optimizers_of_whole_matrices_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="optimizer=Muon of torch: the step runs on float32 copies"):
        pool.run(1, slow_job, True, {}, 1, "Muon")


class Single(small.Small):
    def loss(self, batch: Any) -> Tensor:
        return super().loss([t.float() for t in batch])


def reduced_job(reduce_dtype: Any) -> tuple[set[str], dict[str, Tensor]]:
    plugin = Bf16MixedPrecision(reduce_dtype)
    trainer = small.make_trainer({"zero": 1}, 2, precision=None, plugins=[plugin], max_epochs=1)
    module = Single()
    rounded: set[str] = set()

    def look(optimizer: Any) -> None:
        for p in module.parameters():
            grad = p.grad
            rounded.add(str(torch.equal(grad, grad.bfloat16().float())))

    module.on_before_optimizer_step = look  # type: ignore[method-assign]
    trainer.fit(module, small.loader(dp=2))
    return rounded, small.weights(module)


def test_the_format_of_the_reduction_can_be_chosen(pool: WorkerPool) -> None:
    (wide, weights), *_ = pool.run(2, reduced_job, "fp32")
    (narrow, others), *_ = pool.run(2, reduced_job, "bf16")
    assert "False" in wide
    assert narrow == {"True"}
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=2e-2, atol=2e-3)
    with pytest.raises(ConfigError, match="must be 'fp32' or 'bf16'"):
        Bf16MixedPrecision("fp16")  # type: ignore[arg-type]


def test_optimizer_that_cannot_round_at_random_is_told_which_can() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    plugin: Any = Bf16TruePrecision(stochastic_rounding=True)
    refused = "optimizer=AdamW of lightning_megatron.*nearest valid: torch.optim.AdamW"
    with pytest.raises(ConfigError, match=refused):
        plugin.optimizer_step(AdamW([weight]), None, None)
