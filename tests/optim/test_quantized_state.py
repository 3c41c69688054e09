"""QuantizedTensor state: small, right on average, and as good to train with."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.collective_io import load_directory
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.adamw import AdamW
from lightning_megatron.optim.lion import Lion
from lightning_megatron.optim.muon import Muon
from lightning_megatron.optim.quantized_state import StateFormat, generator_for, quantize, table
from tests.checkpoint.test_optimizer_state import save

FORMATS: list[StateFormat] = ["float32", "bfloat16", "int8"]


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )
    inputs = torch.randn(256, 16)
    return net, inputs, torch.stack([inputs[:, :4].prod(1), *inputs[:, :3].sin().T], 1)


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, steps: int
) -> float:
    for step in range(steps):
        rows = slice(32 * (step % 8), 32 * (step % 8) + 32)
        optimizer.zero_grad()
        (net(inputs[rows]) - targets[rows]).square().mean().backward()
        optimizer.step()
    return float((net(inputs) - targets).square().mean().detach())


@cache
def loss_of(make: Any, rate: float, steps: int, **options: Any) -> float:
    """Loss after training; of plain state once for all formats."""
    net, inputs, targets = problem()
    return train(net, make(net.parameters(), lr=rate, **options), inputs, targets, steps)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("make", "plain", "rate", "steps"),
    [(AdamW, torch.optim.AdamW, 3e-3, 160), (Lion, Lion, 1e-3, 80), (Muon, Muon, 1e-3, 80)],
)
def test_trains_to_the_loss_of_plain_state(
    make: Any, plain: Any, rate: float, steps: int, kind: StateFormat
) -> None:
    found = loss_of(make, rate, steps, state_dtype=kind)
    expected = loss_of(plain, rate, steps)
    assert found == pytest.approx(expected, rel=1e-3 if kind == "float32" else 0.1)


@pytest.mark.parametrize(("kind", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1 + 4 / 256)])
@pytest.mark.parametrize(("make", "averages"), [(AdamW, 2), (Lion, 1), (Muon, 1)])
def test_bytes_per_parameter(make: Any, averages: int, kind: StateFormat, size: float) -> None:
    p = nn.Parameter(torch.randn(256, 64))
    optimizer = make([p], state_dtype=kind)
    p.grad = torch.randn_like(p)
    optimizer.step()
    held = sum(v.numel() * v.element_size() for k, v in optimizer.state[p].items() if k != "step")
    assert held / p.numel() == averages * size


@pytest.mark.parametrize("signed", [True, False])
def test_stored_values_are_near_and_right_on_average(signed: bool) -> None:
    assert len(table(torch.device("cpu"), signed=signed)) <= 256
    torch.manual_seed(0)
    values = torch.randn(4096) if signed else torch.randn(4096).abs()
    nearest = quantize(values, "int8", signed=signed).dequantize()
    assert float(((nearest - values).abs() / values.abs().amax()).max()) < 0.03
    again = quantize(nearest, "int8", signed=signed).dequantize()
    assert torch.equal(again, nearest)
    for kind in ("int8", "bfloat16"):
        draws = [
            quantize(
                values, kind, signed=signed, generator=generator_for("w", i, values.device)
            ).dequantize()
            for i in range(200)
        ]
        error = (torch.stack(draws).mean(0) - values).abs()
        spread = torch.stack(draws).std(0) / 200**0.5
        # An element close to what can be stored may never have been drawn the other way.
        rare = 0.03 * (0.06 * values.abs().amax() if kind == "int8" else values.abs() / 128)
        assert float((error > 5 * spread + rare).float().mean()) < 0.001


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_moment_that_shrinks_slowly_does_shrink(kind: StateFormat) -> None:
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, betas=(0.9, 0.999), state_dtype=kind)
    p.grad = torch.ones(4096)
    optimizer.step()
    before = optimizer.dequantized_state(optimizer.state[p])["exp_avg_sq"].mean()
    others = torch.ones(4096, dtype=torch.bool)
    others[::256] = False
    p.grad = torch.zeros(4096)
    p.grad[~others] = 1.0  # keeps the scales
    for _ in range(100):
        optimizer.step()
    after = optimizer.dequantized_state(optimizer.state[p])["exp_avg_sq"][others].mean()
    assert float(after / before) == pytest.approx(0.999**100, rel=0.05)


@pytest.mark.parametrize(
    ("make", "plain", "kind"),
    [
        *((AdamW, torch.optim.AdamW, kind) for kind in FORMATS),
        (Lion, Lion, "bfloat16"),
        (Muon, Muon, "int8"),
        *(
            pytest.param(make, make, kind, marks=pytest.mark.thorough)
            for make in (Lion, Muon)
            for kind in FORMATS
        ),
    ],
)
def test_run_goes_on_bit_for_bit_and_in_any_format(
    tmp_path: Path, make: Any, plain: Any, kind: StateFormat
) -> None:
    net, inputs, targets = problem()
    optimizer = make(net.parameters(), lr=1e-3, state_dtype=kind)
    train(net, optimizer, inputs, targets, 8)
    save(tmp_path / "narrow.ckpt", net, optimizer)
    expected = train(net, optimizer, inputs, targets, 8)

    def go_on(path: Path, make: Any, **options: Any) -> tuple[float, nn.Module, Any]:
        net = problem()[0]
        optimizer = make(net.parameters(), lr=1e-3, **options)
        load_directory(path, net, [optimizer])
        return train(net, optimizer, inputs, targets, 8), net, optimizer

    assert go_on(tmp_path / "narrow.ckpt", make, state_dtype=kind)[0] == expected
    found, net, optimizer = go_on(tmp_path / "narrow.ckpt", plain)
    assert found == pytest.approx(expected, rel=0.05)
    save(tmp_path / "plain.ckpt", net, optimizer)
    expected = train(net, optimizer, inputs, targets, 8)
    found, *_ = go_on(tmp_path / "plain.ckpt", make, state_dtype=kind)
    assert found == pytest.approx(expected, rel=0.05)


def test_state_of_another_optimizer_is_not_made_up_for(tmp_path: Path) -> None:
    net, inputs, targets = problem()
    lion = Lion(net.parameters(), state_dtype="int8")
    train(net, lion, inputs, targets, 2)
    save(tmp_path / "lion.ckpt", net, lion)
    optimizer = AdamW(net.parameters())
    with pytest.raises(ConfigError, match=r"has the state of Lion, which .* AdamW"):
        load_directory(tmp_path / "lion.ckpt", net, [optimizer])


def test_wrong_options() -> None:
    makers: tuple[Any, ...] = (AdamW, Lion, Muon)
    wide = [nn.Parameter(torch.ones(1, dtype=torch.float64))]
    for make in makers:
        with pytest.raises(ConfigError, match="state_dtype='int4'"):
            make([nn.Parameter(torch.ones(1))], state_dtype="int4")
        with pytest.raises(ConfigError, match="parameters are in float64"):
            make(wide, state_dtype="bfloat16")


def test_second_moments_do_not_become_nothing() -> None:
    """What divides is rounded up where zero is the nearest value, at random or not."""
    values = torch.full((300,), 1e-12)
    values[0] = 1.0
    for generator in (None, generator_for("weight", 1, values.device)):
        stored = quantize(values, "int8", signed=False, generator=generator)
        assert (stored.dequantize()[:250] > 0).all()
    assert (quantize(values * 0, "int8", signed=False).dequantize() == 0).all()
