"""Modules whose own formats, or layers, do not go with narrow copies of their parameters."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from lightning_megatron import ShardingConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy import small

W = small.WIDTH


class Both(nn.Module):
    """A layer of two inputs, given one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(W, W, W)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.float(), x.float())  # one format is all it takes
        return out


class Encoder(nn.TransformerEncoderLayer):
    """Of samples that are a sequence of one."""

    def __init__(self) -> None:
        super().__init__(W, 2, 8, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None])[0]


class WithEmpty(nn.Linear):
    """A layer with a parameter that has no element."""

    def __init__(self) -> None:
        super().__init__(W, W)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


BLOCKS: dict[str, Any] = {
    # Torch's own encoder adds up in float32 and normalises that.
    "encoder": Encoder,
    "group norm": lambda: nn.GroupNorm(1, W),
    "batch norm": lambda: nn.BatchNorm1d(W),
    "spectral norm": lambda: spectral_norm(nn.Linear(W, W)),
    "orthogonal": lambda: orthogonal(nn.Linear(W, W)),
    "bilinear": Both,
    "empty": WithEmpty,
}


class Layers(small.Small):
    """A linear layer, the block in question, and another linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(W, W), BLOCKS[kind](), nn.Linear(W, W))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([t.float() for t in batch])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def fit(
    layout: dict[str, Any] | None, devices: int, module: Any, precision: str, batches: int = 2
) -> dict[str, Tensor]:
    trainer = small.make_trainer(
        layout, devices, precision=precision, limit_train_batches=batches, limit_val_batches=1
    )
    trainer.fit(module, small.loader(dp=devices), small.loader(dp=devices))
    return small.weights(module)


def layers_job(
    layout: dict[str, Any] | None, devices: int, kinds: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    return {kind: fit(layout, devices, Layers(kind), "bf16-mixed") for kind in kinds}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, dict[str, Tensor]]:
    """Under Lightning's own strategy."""
    return pool.run(1, layers_job, None, 1, list(BLOCKS))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_autocast_leaves_alone(
    pool: WorkerPool, alone: dict[str, dict[str, Tensor]], devices: int
) -> None:
    kinds = list(BLOCKS) if devices == 1 else ["encoder", "spectral norm", "empty"]
    found = pool.run(devices, layers_job, {"zero": 3}, devices, kinds)[0]
    for kind in kinds:
        for name, weight in found[kind].items():
            assert weight.dtype == alone[kind][name].dtype == torch.float32
            torch.testing.assert_close(weight, alone[kind][name], rtol=1e-2, atol=1e-2)


class Turns(small.Small):
    """Two networks that are trained in turns; the second is frozen when it runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(W, W)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = (t.to(next(self.parameters()).dtype) for t in batch)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.other(self.net(x)), y))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


class Half(small.Small):
    """Its weights are in bfloat16, whatever the precision of the run; ``but`` names another."""

    def __init__(self, but: str = "") -> None:
        super().__init__()
        for name, layer in self.net.layers.named_children():
            if name != but:
                layer.bfloat16()

    def loss(self, batch: Any) -> Tensor:
        return super().loss([t.bfloat16() for t in batch])


def formats_job(layout: dict[str, Any] | None, devices: int) -> list[dict[str, Tensor]]:
    return [
        fit(layout, devices, Turns(), "bf16-mixed"),
        fit(layout, devices, Turns(), "bf16-true"),
        fit(layout, devices, Half(), "bf16-mixed"),
        fit(layout, devices, Half(), "32-true"),
    ]


def test_parameters_of_other_formats_and_such_as_are_frozen_first(pool: WorkerPool) -> None:
    expected = pool.run(1, formats_job, None, 1)[0]
    for weights, others in zip(pool.run(2, formats_job, {}, 2)[0], expected, strict=True):
        for name, weight in weights.items():
            assert weight.dtype == others[name].dtype
            torch.testing.assert_close(weight, others[name], rtol=2e-2, atol=1e-2)


def later_job(precision: str, zero: int, tp: int = 1) -> None:
    module = small.Small()
    for layout, kind in (({"tp": tp}, "64-true"), ({"zero": zero, "tp": tp}, precision)):
        batches = int(kind == "64-true" and "zero" not in layout)
        layout = {**layout, "gather_at_end": False}
        trainer = small.make_trainer(layout, tp, precision=kind, limit_train_batches=batches)
        trainer.fit(module, small.loader())


@pytest.mark.parametrize(("precision", "zero"), [("32-true", 1), ("64-true", 3)])
def test_a_later_trainer_cannot_change_the_formats_of_parts(
    pool: WorkerPool, precision: str, zero: int
) -> None:
    """What every rank holds whole is free again after a run."""
    pool.run(1, later_job, precision, zero)
    message = f"zero={zero}, precision='{precision}': an earlier Trainer .* zero=1, .*'64-true'"
    with pytest.raises(Exception, match=message):
        pool.run(2, later_job, precision, zero, 2)


class Penalty(small.Small):
    """Adds the weights to the loss."""

    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.sync = sync

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + 0.1 * sum(p.square().sum() for p in self.parameters())
        if self.sync:
            self.log("loss", loss, sync_dist=True)
        return loss


def penalty_job(zero: int, sync: bool) -> dict[str, Tensor]:
    return fit({"zero": zero}, 2, Penalty(sync), "64-true")


def test_a_penalty_on_shards_is_one_on_the_whole(pool: WorkerPool) -> None:
    [expected, _] = pool.run(2, penalty_job, 1, True)
    for found in pool.run(2, penalty_job, 3, True):
        small.assert_same(found, expected)


class FromRows(Penalty):
    """Its loss is made of a row of a weight, which under ZeRO 3 one rank has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch) + next(self.parameters())[0].sum()
        return loss


def rows_job(zero: int) -> dict[str, Tensor]:
    return fit({"zero": zero}, 2, FromRows(False), "64-true")


def test_a_loss_of_rows_is_one_of_the_whole(pool: WorkerPool) -> None:
    [expected, _] = pool.run(2, rows_job, 1)
    for found in pool.run(2, rows_job, 3):
        small.assert_same(found, expected)


def mixture_job(zero: Any) -> None:
    one_unit = ShardingConfig(stage=zero, min_numel=1_000_000)
    fit({"zero": one_unit}, 2, Half(but="2"), "bf16-mixed")


def test_a_unit_of_several_formats_is_refused(pool: WorkerPool) -> None:
    """Below ZeRO 3 there are no units, and formats mix."""
    pool.run(2, mixture_job, 2)
    message = (
        r"parameters in several formats in one unit of ZeRO: .*layers.* in bfloat16, .*float32"
    )
    with pytest.raises(Exception, match=message):
        pool.run(2, mixture_job, 3)
