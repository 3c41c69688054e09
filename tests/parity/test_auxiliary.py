"""Auxiliary losses of layers have the gradient of one process under every way to run a step."""

import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megatron import PipelineConfig, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import (
    CausalSelfAttention,
    ColumnParallelLinear,
    MixtureOfExperts,
    RouterConfig,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    auxiliary_loss,
)
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.experts.auxiliary import inject
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import GlobalBatches
from tests.strategy.small import assert_same, make_trainer, merged, weights

WIDTH, BATCH, STEPS, LR, WORDS = 4, 8, 4, 0.1, 12


class Loaded(ParallelLayer):
    """A layer of which each token has an auxiliary loss: the square of its logits' logsumexp."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(WIDTH, WIDTH))
        self.collects = False
        self.found: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        loss_b = logits.logsumexp(-1).square().mean(-1)
        tokens_b = torch.full(x.shape[:1], float(x.shape[1]), dtype=torch.float64)
        y = x + torch.tanh(logits)
        if self.collects:
            self.found.append((loss_b, tokens_b))
            return y
        seeds = None if self.topology is None else self.topology.auxiliary_seeds
        return inject(y, loss_b, tokens_b, 1, seeds) if self.training else y


def batches() -> list[Any]:
    """Inputs, targets and which of these count, by step; sequences of several lengths."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for step in range(STEPS):
        x, y = torch.randn(2, BATCH, 3 + step % 2, WIDTH, generator=draw, dtype=torch.float64)
        counts = torch.rand(y.shape[:2], generator=draw) < 0.7
        made.append((x, y, counts))
    return made


class Auxiliary(GlobalBatches):
    """A network with auxiliary losses in every layer.

    Args:
        by_token: return the sum over tokens and their number instead of a mean over samples.
    """

    def __init__(self, by_token: bool = False) -> None:
        super().__init__(batches())
        torch.manual_seed(7)
        self.net = PipelineSequential(layers=[Loaded() for _ in range(4)])
        self.by_token = by_token

    @property
    def layers(self) -> list[Loaded]:
        return [layer for layer in self.modules() if isinstance(layer, Loaded)]

    def main_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, counts = batch
        squares = (self.net(x) - y).square().mean(-1)
        if self.by_token:
            return squares[counts].sum(), counts.sum()
        return squares.mean(), torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, tokens = self.main_loss(batch)
        return {"loss": loss, "num_tokens": tokens} if self.by_token else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


@cache
def plain_loop(by_token: bool = False, accumulate: int = 1) -> dict[str, Tensor]:
    """Weights of one process that adds the auxiliary losses to the loss."""
    module = Auxiliary(by_token).double()
    for layer in module.layers:
        layer.collects = True
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(module.batches):
        loss, tokens = module.main_loss(batch)
        found = [one for layer in module.layers for one in layer.found]
        for loss_b, tokens_b in found:
            loss = loss + ((loss_b * tokens_b).sum() if by_token else loss_b.mean())
        (loss / tokens / accumulate).backward()
        for layer in module.layers:
            layer.found.clear()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(module)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a step."""

    devices: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    zero: int = 1
    recompute: str = "none"

    def options(self) -> dict[str, Any]:
        return {
            "pp": PipelineConfig(degree=self.pp, schedule=self.schedule),
            "num_microbatches": self.microbatches,
            "zero": self.zero,
            "activations": ActivationConfig(
                recompute=self.recompute, blocks=None if self.recompute == "none" else ["Loaded"]
            ),
        }

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())


class ByHand(Auxiliary):
    """The same under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss, _ = self.main_loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def train_job(
    options: Any, devices: int, module: Auxiliary, accumulate: int = 1, **trainer_options: Any
) -> dict[str, Tensor]:
    trainer = make_trainer(
        options,
        devices,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        **trainer_options,
    )
    trainer.fit(module)
    return weights(module)


class Alone(Auxiliary):
    """The same for Lightning without our strategy."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)


def scaled_job(options: Any, devices: int, module: Auxiliary) -> dict[str, Tensor]:
    """Weights of a run in float16, whose products are rounded."""
    module.batches = [(x.float(), y.float(), counts) for x, y, counts in module.batches]
    plugin = Fp16Precision(initial_scale=2.0**10)
    return train_job(options, devices, module.float(), precision=None, plugins=plugin)


WAYS = (
    Way(),
    Way(devices=2, zero=0),
    Way(microbatches=4, recompute="full"),
    Way(devices=2, zero=3, microbatches=2),
    Way(devices=2, pp=2, schedule="gpipe", microbatches=4),
    Way(devices=2, pp=2, microbatches=3),
    Way(devices=2, pp=2, schedule="interleaved", microbatches=4),
    Way(devices=2, pp=2, schedule="zbv", microbatches=4),
    Way(devices=2, pp=2, schedule="dualpipev", microbatches=4),
    Way(devices=4, pp=2, schedule="zb-h1", microbatches=4, zero=2),
)


@pytest.mark.parametrize(
    ("way", "by_token", "accumulate"),
    [
        pytest.param(
            *(way, by_token, 1 + (index + by_token) % 2),
            # By default a way meets one of the two.
            marks=[pytest.mark.thorough] * ((index // 2 + by_token) % 2),
        )
        for index, way in enumerate(WAYS)
        for by_token in (False, True)
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(
    pool: WorkerPool, way: Way, by_token: bool, accumulate: int
) -> None:
    module = Auxiliary(by_token)
    found = pool.run(way.devices, train_job, way.options(), way.devices, module, accumulate)
    assert_same(merged(found), plain_loop(by_token, accumulate))


@pytest.mark.parametrize("devices", [1, 2])
def test_so_they_are_under_manual_optimization(pool: WorkerPool, devices: int) -> None:
    found = pool.run(devices, train_job, {}, devices, ByHand())
    assert_same(merged(found), plain_loop())


def test_plain_lightning_takes_the_mean_over_sequences(pool: WorkerPool) -> None:
    [found] = pool.run(1, train_job, None, 1, Alone())
    assert_same(found, plain_loop())


@pytest.mark.parametrize("way", [Way(), Way(devices=2, pp=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("by_token", [False, True], ids=["mean", "token"])
def test_the_loss_scale_is_theirs_too(pool: WorkerPool, way: Way, by_token: bool) -> None:
    by_rank = pool.run(way.devices, scaled_job, way.options(), way.devices, Auxiliary(by_token))
    found = merged(by_rank)
    for name, weight in plain_loop(by_token).items():
        torch.testing.assert_close(found[name].double(), weight, rtol=0, atol=5e-4)


class Mixed(GlobalBatches):
    """A transformer of two mixtures, whose losses it adds itself unless they are injected."""

    def __init__(self, by_token: bool = False, **router: Any) -> None:
        draw = torch.Generator().manual_seed(3)
        super().__init__([tuple(torch.randint(WORDS, (2, 8, 6), generator=draw)) for _ in range(3)])
        torch.manual_seed(7)
        config = RouterConfig(z_loss=0.1, balance_weight=0.2, **router)
        self.net = PipelineSequential(
            embedding=VocabParallelEmbedding(WORDS, 2 * WIDTH),
            layers=[Attends(config) for _ in range(2)],
            head=ColumnParallelLinear(2 * WIDTH, WORDS),
        )
        self.loss = VocabParallelCrossEntropy(
            ignore_index=0 if by_token else -100, reduction="sum" if by_token else "mean"
        )
        self.by_token, self.adds = by_token, not config.inject

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, targets = batch
        loss: Tensor = self.loss(self.net(words), targets)
        if self.by_token:
            return {"loss": loss, "num_tokens": (targets > 0).sum()}
        if not self.adds:
            return loss
        more = auxiliary_loss(self)
        self.log("auxiliary", more, on_step=False, on_epoch=True, sync_dist=True)
        return loss + more

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Attends(nn.Module):
    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(2 * WIDTH, 2)
        self.mixture = MixtureOfExperts(2 * WIDTH, 6, 4, 2, router=config, init_std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = self.mixture(x)
        return x + y


def mixed_job(options: Any, devices: int, router: dict[str, Any]) -> Any:
    module = Mixed(**router)
    trainer = make_trainer(options, devices, use_distributed_sampler=False)
    trainer.fit(module)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {n: p for n, p in weights(module).items() if "experts" not in n}, logged


def by_hand() -> tuple[dict[str, Tensor], float]:
    """Weights of a plain loop, and the mean of what the steps add."""
    module, added = Mixed(inject=False).double(), []
    optimizer = module.configure_optimizers()
    for words, targets in module.batches:
        loss = module.loss(module.net(words), targets)
        added.append(auxiliary_loss(module))
        optimizer.zero_grad()
        (loss + added[-1]).backward()
        optimizer.step()
    return weights(module), torch.stack(added).mean().item()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Hold what a rank has whole against one process."""
    for name, weight in found.items():
        if weight.shape == expected[name].shape:
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-13)


MIXED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "microbatches": (1, {"num_microbatches": 4}),
    "ep=2": (2, {"ep": 2}),
    "tp=2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "cp=2 ep=4": (4, {"cp": 2, "ep": 4, "num_microbatches": 2}),
    "full": (1, {"activations": ActivationConfig(recompute="full", blocks=["Attends"])}),
    "selective": (
        2,
        {"activations": ActivationConfig(recompute="selective", blocks=["Attends"]), "cp": 2},
    ),
}


def some(*names: str) -> list[Any]:
    """All ways, of which these are tried by default."""
    return [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in names)) for name in MIXED
    ]


@pytest.mark.parametrize("name", some("one process", "ep=2", "tp=2 sp"))
def test_a_step_may_add_the_losses_itself(pool: WorkerPool, name: str) -> None:
    devices, options = MIXED[name]
    expected, mean = by_hand()
    for found, logged in pool.run(devices, mixed_job, options, devices, {"inject": False}):
        compare(found, expected)
        assert logged["auxiliary"] == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("name", some("microbatches", "tp=2 sp", "full", "selective"))
def test_injected_ones_have_the_same_gradient(pool: WorkerPool, name: str) -> None:
    devices, options = MIXED[name]
    expected, _ = by_hand()
    for found, _ in pool.run(devices, mixed_job, options, devices, {}):
        compare(found, expected)


@pytest.mark.parametrize(
    ("options", "router"),
    [
        ({"ep": 2}, {}),
        ({"zero": 0}, {"by_token": True}),
        ({"ep": 2, "tp": 2}, {"by_token": True}),
        ({"cp": 2}, {"inject": False}),
        ({"tp": 2}, {"inject": False}),
        ({"pp": 2, "num_microbatches": 1}, {"by_token": True}),
    ],
    ids=str,
)
def test_a_balance_over_a_batch_is_that_of_all_ranks(
    pool: WorkerPool, options: dict[str, Any], router: dict[str, Any]
) -> None:
    router = {**router, "balance": "batch"}
    [(expected, logged)] = pool.run(1, mixed_job, {}, 1, router)
    for found, values in pool.run(2, mixed_job, options, 2, router):
        compare(found, expected)
        assert values == pytest.approx(logged, rel=1e-10)


@pytest.mark.parametrize("inject", [True, False])
def test_a_checkpoint_of_the_user_keeps_their_gradient(inject: bool) -> None:
    mixture = MixtureOfExperts(WIDTH, 6, 4, 2, router=RouterConfig(inject=inject, z_loss=0.1))
    x, gradients = torch.randn(2, 3, WIDTH), []
    for run in (mixture, partial(checkpoint, mixture, use_reentrant=False)):
        loss = run(x).square().sum()
        if not inject:
            loss = loss + auxiliary_loss(mixture)
        gradients.append(torch.autograd.grad(loss, mixture.router.weight))
    assert torch.equal(*(gradient for (gradient,) in gradients))


@pytest.mark.parametrize("inject", [True, False])
def test_the_output_of_a_mixture_may_be_changed_in_place(inject: bool) -> None:
    mixture = MixtureOfExperts(WIDTH, 6, 4, 2, router=RouterConfig(inject=inject))
    x, gradients = torch.randn(2, 3, WIDTH), []
    for in_place in (False, True):
        y = mixture(x)
        y = y.mul_(2).add_(x) if in_place else y * 2 + x
        if not inject:
            y = y + 0 * auxiliary_loss(mixture)
        gradients.append(torch.autograd.grad(y.square().sum(), mixture.router.weight))
    assert torch.equal(*(gradient for (gradient,) in gradients))


class Forgets(Mixed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.net(batch[0]), batch[1])
        return loss


class AsksInVain(Mixed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + auxiliary_loss(self)


def mistake_job(kind: type[Mixed], options: dict[str, Any], devices: int, inject: bool) -> str:
    trainer = make_trainer(options, devices, use_distributed_sampler=False)
    with pytest.raises(ConfigError) as error:
        trainer.fit(kind(inject=inject))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "devices", "inject", "words"),
    [
        (Forgets, {}, 1, False, "nobody has asked for the auxiliary losses; nearest valid: loss +"),
        (AsksInVain, {}, 1, True, "none with inject=False.* nearest valid: RouterConfig"),
        (AsksInVain, {}, 1, False, "no mixture has run with gradients since the last call"),
        (Mixed, {"pp": 2}, 2, False, "inject=False, pp=2: .* nearest valid: inject=True, or pp=1"),
    ],
)
def test_losses_that_nobody_adds_are_an_error(
    pool: WorkerPool,
    kind: type[Mixed],
    options: dict[str, Any],
    devices: int,
    inject: bool,
    words: str,
) -> None:
    for text in pool.run(devices, mistake_job, kind, options, devices, inject):
        assert re.search(words, text), text
