"""``microbatch_size="auto"``: all ranks halve together, and nothing is left of what did not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from lightning_megatron.tuning.fit_memory import FittingMicrobatch
from tests.strategy.small import WIDTH, Small, assert_same, make_trainer, merged, samples, weights

GLOBAL = 32


class Exhausting(torch.autograd.Function):
    """Has no memory for the backward of more than so many samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: int) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        if len(gradient) > ctx.limit:
            raise torch.OutOfMemoryError("no memory for the backward")
        return gradient, None


class Statistics(nn.Module):
    """Running mean, as batch norms keep it, of any number of samples."""

    track_running_stats = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        self.batches += 1
        return x


class Limited(Small):
    """Has memory for so many samples on one rank, in the forward or in the backward.

    Its random numbers, running statistics and sums of what is logged are what a step leaves behind.
    """

    def __init__(self, limits: Mapping[int, int], where: str) -> None:
        super().__init__()
        self.limits, self.where = limits, where
        self.statistics = Statistics()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        limit = self.limits.get(self.global_rank, 1000)
        if self.where == "later" and self.trainer.global_step < 1:
            limit = 1000  # the optimizer has no state yet
        x = self.statistics(batch[0]) + 0.1 * torch.rand(())
        out = self.net(x)
        if self.where != "backward" and len(x) > limit:
            raise torch.OutOfMemoryError("no memory for the forward")
        if self.where == "backward":
            out = Exhausting.apply(out, limit)
        loss = ((out - batch[1]) ** 2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    devices: int, size: Any, limits: Mapping[int, int], where: str, zero: int
) -> tuple[dict[str, Tensor], Any, int]:
    module = Limited(limits, where)
    layout = {"zero": zero, "microbatch_size": size, "global_batch_size": GLOBAL}
    trainer = make_trainer(layout, devices)
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(samples(2 * GLOBAL)))
    kept = dict(module.statistics.named_buffers()) | {"loss": trainer.callback_metrics["loss"]}
    strategy: Any = trainer.strategy
    found = size if size != "auto" else strategy.fitting.size
    return weights(module), {name: value.clone() for name, value in kept.items()}, found


@pytest.mark.parametrize(
    ("devices", "zero", "where"),
    [(1, 0, "forward"), (2, 1, "forward"), (2, 2, "backward"), (2, 0, "later")],
)
def test_one_rank_out_of_memory(pool: WorkerPool, devices: int, zero: int, where: str) -> None:
    last = devices - 1
    results = pool.run(devices, train, devices, "auto", {last: 3}, where, zero)
    size = 2  # of 32 or 16
    assert [found for *_, found in results] == [size] * devices
    if where == "later":  # the first step ran with whole batches
        return
    plain = pool.run(devices, train, devices, size, {}, where, zero)
    for (held, kept, _), (expected, other, _) in zip(results, plain, strict=True):
        for name, value in {**expected, **other}.items():
            # ZeRO 2 sums a batch on trial over microbatches first, and over ranks then.
            precise = 1e-12 if zero == 2 else 0.0
            torch.testing.assert_close({**held, **kept}[name], value, rtol=precise, atol=precise)


class Made:
    """Memory of a device that is made up: so many samples fit, and the module says how many ran."""

    def __init__(self, module: "Measured", fit: int) -> None:
        self.module = module
        self.total = round((100 + 10 * fit) / 0.9)

    def peak_of(self, call: Any) -> int:
        self.module.sizes.clear()
        call()
        return 100 + 10 * max(self.module.sizes)


class Measured(Limited):
    """Notes the sizes of its microbatches."""

    def __init__(self, fit: int) -> None:
        super().__init__({}, "forward")
        self.fit, self.sizes = fit, list[int]()

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.fitting is not None:
            strategy.fitting.memory = Made(self, self.fit)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def measure(devices: int, size: Any, fits: Sequence[int]) -> tuple[dict[str, Tensor], Any]:
    trainer = make_trainer({"zero": 2, "microbatch_size": size, "global_batch_size": 32}, devices)
    module = Measured(fits[trainer.global_rank])
    trainer.fit(module, DataLoader(samples(64)))
    assert max(module.sizes) == 4
    return weights(module), module.statistics.batches.item()


def test_first_size_by_measurement(pool: WorkerPool) -> None:
    found, plain = (pool.run(2, measure, 2, size, [7, 100]) for size in ("auto", 4))
    for (held, batches), (expected, count) in zip(found, plain, strict=True):
        assert batches == count  # what was measured has left nothing
        assert_same(held, expected)


def test_no_memory_for_one_sample(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="no memory for a single sample"):
        pool.run(2, train, 2, "auto", {1: 0}, "forward", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero": 3}, "zero=3: parameters are gathered amid"),
        ({"pp": 2}, "pp=2: ranks communicate amid"),
        ({"num_microbatches": 2}, "give only one"),
        ({"global_batch_size": 7}, "nearest valid: 6 or 8"),
        ({"global_batch_size": 0}, "at least 1"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    trainer = make_trainer({"microbatch_size": "auto", **options}, 2)
    with pytest.raises(ConfigError, match=text):
        trainer.fit(Small(), DataLoader(samples(), batch_size=4))


def test_accumulation_is_the_strategys() -> None:
    trainer = make_trainer({"global_batch_size": 8}, 2, accumulate_grad_batches=4)
    with pytest.raises(ConfigError, match="accumulate_grad_batches=4: the size is that of an opt"):
        trainer.fit(Small(), DataLoader(samples(), batch_size=4))


def test_gradients_that_a_callback_accumulates_later() -> None:
    later = GradientAccumulationScheduler({1: 2})
    trainer = make_trainer({"microbatch_size": "auto"}, 2, callbacks=[later])
    with pytest.raises(ConfigError, match="'auto', GradientAccumulationScheduler: earlier batches"):
        trainer.fit(Small(), DataLoader(samples(), batch_size=4))


def test_ranks_share_the_global_batch(pool: WorkerPool) -> None:
    [(one, *_)] = pool.run(1, plainly, 1, {})
    several = pool.run(4, plainly, 4, {"pp": 2})
    assert_same(merged([held for held, _ in several]), one)
    assert {size for _, size in several} == {4}


def plainly(devices: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    module, seen = Small(), []
    module.on_train_batch_start = lambda batch, index: seen.append(len(batch[0]))  # type: ignore
    trainer = make_trainer({"global_batch_size": 8, **options}, devices)
    trainer.fit(module, DataLoader(samples(), batch_size=3, shuffle=True))
    return weights(module), seen[0]


class Gathering(Small):
    """Asks the other ranks for their samples in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self.loss(batch), sync_grads=True).mean()


def test_gathering_in_a_step() -> None:
    trainer = make_trainer({"microbatch_size": "auto"})
    with pytest.raises(ConfigError, match=r"training_step calls self.all_gather, in which a rank"):
        trainer.fit(Gathering(), DataLoader(samples(), batch_size=4))


def test_unequal_parts_of_the_global_batch(pool: WorkerPool) -> None:
    [(one, _)] = pool.run(1, plainly, 1, {})
    several = pool.run(2, plainly, 2, {"batch_shares": [3, 1]})
    assert [size for _, size in several] == [6, 2]
    assert_same(merged([held for held, _ in several]), one)


class Batch:
    """Runs where microbatches have at most so many samples."""

    def __init__(self, fitting: FittingMicrobatch, limit: int) -> None:
        self.fitting, self.limit = fitting, limit

    def attempt(self, args: Sequence[Any]) -> None:
        assert self.fitting.size is not None
        if self.fitting.size > self.limit:
            raise torch.OutOfMemoryError("no memory")

    def discard(self) -> None: ...


def test_a_smaller_size_is_on_trial_as_often_as_the_first() -> None:
    said: list[str] = []
    fitting = FittingMicrobatch(
        torch.device("cpu"), None, lambda: lambda: None, alone=True, say=said.append
    )

    def trials(width: int, limit: int) -> int:
        count, args, batch = 0, [torch.zeros(8, width)], Batch(fitting, limit)
        while fitting.begin(args, batch, None):
            fitting.run(args, batch)
            count += 1
        return count

    first = trials(10, 8)
    assert first > 1
    assert (trials(11, 4), fitting.size) == (first, 4)
