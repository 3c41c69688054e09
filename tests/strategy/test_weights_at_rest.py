"""Hooks around epochs see float32 weights under mixed precision, as in plain Lightning.

The rates are so small that steps in 16 bits, which ranks round differently, move no weight by as
much as a rounding to 16 bits would.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import Fp16Precision, PipelineSequential, gather
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, dp_of, make_trainer, samples


class Coder(nn.Module):
    """Has more than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.decode(self.encode(x)))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def decode(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(h)
        return y


class AtRest(Small):
    """Notes what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = PipelineSequential(
            first=nn.Linear(WIDTH, WIDTH),
            coder=Coder(),
            block=nn.Sequential(ColumnParallelLinear(WIDTH, 8), RowParallelLinear(8, WIDTH)),
            head=nn.Linear(WIDTH, WIDTH),
        )
        self.lr = 1e-4
        self.seen: list[float] = []

    def probe(self) -> Tensor:
        return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)

    def look(self) -> None:
        raise NotImplementedError

    def on_train_start(self) -> None:
        self.look()

    def on_train_epoch_start(self) -> None:
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def on_validation_epoch_start(self) -> None:
        self.look()

    def on_validation_epoch_end(self) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()

    def note(self, value: Any) -> None:
        self.seen.append(float(value))


class Reads(AtRest):
    """Reads numbers and formats of weights."""

    def look(self) -> None:
        for p in self.parameters():
            self.note(p.detach().norm())
            self.note(p.dtype is torch.float32)
        self.note(sum(v.sum() for v in self.state_dict().values()))


class Calls(AtRest):
    """Calls layers, and methods of theirs."""

    def look(self) -> None:
        with torch.no_grad():
            self.note(self.net.first(self.probe()).square().mean())
            self.note(self.net.coder(self.probe()).square().mean())
            self.note(self.net.coder.encode(self.probe()).square().mean())
            self.note(self.net(self.probe()).square().mean())


class CallsTrunk(AtRest):
    """Calls what may be on several stages, in inference mode and without gradients."""

    def look(self) -> None:
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                self.note(self.net(self.probe()).square().mean())


class Infers(Calls):
    """The same in inference mode."""

    def look(self) -> None:
        with torch.inference_mode():
            super().look()
        super().look()


class Copies(AtRest):
    """Calls copies of layers in hooks and in steps."""

    def on_train_epoch_start(self) -> None:
        self.twin = [copy.deepcopy(self.net).to(self.device).eval()]

    def look(self) -> None:
        twin = copy.deepcopy(self.net.coder).to(self.device)
        with torch.inference_mode():
            self.note(twin(self.probe()).square().mean())
            self.note(twin.encode(self.probe()).square().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with torch.no_grad():
            aim = self.twin[0](x)
        return nn.functional.mse_loss(self.net(x), y + aim)


class Differentiates(AtRest):
    """Runs backwards."""

    def look(self) -> None:
        with torch.enable_grad():
            loss = self.net(self.probe()).square().mean()
            loss.backward()
        self.note(loss)
        for p in self.parameters():
            self.note(p.grad.norm())
        self.zero_grad()


class AsksAutograd(AtRest):
    """Asks for gradients."""

    def look(self) -> None:
        with torch.enable_grad():
            loss = self.net.coder(self.probe()).square().mean()
            for g in torch.autograd.grad(loss, list(self.net.coder.parameters())):
                self.note(g.norm())


class Writes(AtRest):
    """Changes weights, by less than a rounding to 16 bits."""

    def look(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1 - 2**-10)
            self.net.head.bias.data = self.net.head.bias.data + 2**-12
        self.note(sum(p.detach().sum() for p in self.parameters()))


KINDS = {
    k.__name__: k
    for k in (Reads, Calls, CallsTrunk, Infers, Copies, Differentiates, AsksAutograd, Writes)
}
Found = dict[str, tuple[list[float], dict[str, Tensor]]]


BF16, FP16 = "bf16-mixed", "float16"


def options_of(precision: str) -> dict[str, Any]:
    """Options of a Trainer; on CPUs Lightning makes bfloat16 of ``precision="16-mixed"``."""
    if precision == FP16:
        return {"precision": None, "plugins": Fp16Precision(initial_scale=1.0)}
    return {"precision": precision}


def look(
    layout: Mapping[str, Any] | None, devices: int, names: Sequence[str], precision: str
) -> Found:
    found: Found = {}
    options = {**options_of(precision), "max_epochs": 2, "limit_val_batches": 1}
    dataset = [(x.float(), y.float()) for x, y in samples()]
    for name in names:
        module = KINDS[name]()
        trainer = make_trainer(layout, devices, **options)
        own = DataLoader(dataset, batch_size=8 // dp_of(devices, layout or {}))
        trainer.fit(module, own, DataLoader(dataset, batch_size=8))
        found[name] = module.seen, gather(module)
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Found:
    found: Found = pool.run(1, look, None, 1, tuple(KINDS), BF16)[0]
    return found


FEW = ("Calls", "Copies", "Writes")
OF_STAGES = ("Reads", "CallsTrunk", "Writes")
"""What hooks of a pipeline may do."""


@pytest.mark.parametrize(
    ("devices", "layout", "names", "precision"),
    [
        (1, {}, (*KINDS,), BF16),
        (2, {"zero": 1}, (*KINDS,), BF16),
        (2, {"zero": 3}, ("Calls", "Infers", "Copies", "Differentiates"), BF16),
        (2, {"tp": 2}, FEW, BF16),
        (2, {"pp": 2}, OF_STAGES, BF16),
        pytest.param(1, {}, (*KINDS,), FP16, marks=pytest.mark.thorough),
        pytest.param(2, {"zero": 0}, (*KINDS,), BF16, marks=pytest.mark.thorough),
        pytest.param(2, {"zero": 2}, (*KINDS,), FP16, marks=pytest.mark.thorough),
        pytest.param(2, {"zero": 3}, ("Reads", *OF_STAGES), FP16, marks=pytest.mark.thorough),
        pytest.param(2, {"tp": 2}, (*KINDS,), FP16, marks=pytest.mark.thorough),
        pytest.param(4, {"pp": 2, "zero": 3}, OF_STAGES, BF16, marks=pytest.mark.thorough),
        pytest.param(4, {"tp": 2, "zero": 1}, (*KINDS,), BF16, marks=pytest.mark.thorough),
    ],
    ids=lambda value: f"{len(value)} kinds" if isinstance(value, tuple) else str(value),
)
def test_hooks_see_weights_as_in_plain_lightning(
    pool: WorkerPool,
    alone: Found,
    devices: int,
    layout: dict[str, Any],
    names: Sequence[str],
    precision: str,
) -> None:
    for found in pool.run(devices, look, layout, devices, names, precision):
        for name, (seen, weights) in found.items():
            expected, trained = alone[name]
            torch.testing.assert_close(seen, expected, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(weights, trained, rtol=2e-5, atol=2e-5)
