"""Biases of routers move by the choices of all tokens of an optimizer step, in every layout."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import (
    Fp16Precision,
    NumberGuard,
    PipelineConfig,
    PipelineSequential,
    RollbackConfig,
)
from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.layers import (
    CausalSelfAttention,
    ColumnParallelLinear,
    MixtureOfExperts,
    RouterConfig,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.jobs import GlobalBatches
from tests.strategy.small import make_trainer

Biases = dict[str, list[float]]
WORDS, WIDTH, EXPERTS, STEP = 16, 8, 4, 0.02
IGNORED = -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(WIDTH, 2)
        config = RouterConfig(score="sigmoid", bias_update=STEP, z_loss=0.1, balance_weight=0.1)
        self.mixture = MixtureOfExperts(WIDTH, 6, EXPERTS, 2, router=config, init_std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = self.mixture(x)
        return x + y


def batches(count: int = 4) -> list[Any]:
    """Words and targets, some of which do not count; sequences of two lengths."""
    draw = torch.Generator().manual_seed(2)
    made = []
    for step in range(count):
        x, y = torch.randint(WORDS, (2, 8, 8 - step % 2 * 2), generator=draw)
        made.append((x.square() // WORDS, y.masked_fill(x % 4 == 0, IGNORED)))  # small ones often
    return made


class Balanced(GlobalBatches):
    """A network of mixtures whose routers have a bias.

    Args:
        data: global batches.
        faults: batches whose loss is not a number.
        transient: whether it is one if the batch runs again.
    """

    def __init__(
        self,
        data: Sequence[Any] | None = None,
        faults: Sequence[int] = (),
        *,
        transient: bool = False,
    ) -> None:
        super().__init__(batches() if data is None else data)
        self.faults, self.transient = list(faults), transient
        torch.manual_seed(7)
        self.net = PipelineSequential(
            embedding=VocabParallelEmbedding(WORDS, WIDTH),
            layers=[Block() for _ in range(2)],
            head=ColumnParallelLinear(WIDTH, WORDS),
        )
        self.loss = VocabParallelCrossEntropy(ignore_index=IGNORED, reduction="sum")

    @property
    def routers(self) -> dict[str, Router]:
        return {name: part for name, part in self.named_modules() if isinstance(part, Router)}

    @property
    def biases(self) -> Biases:
        return {name: router.bias.tolist() for name, router in self.routers.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, targets = batch
        loss = self.loss(self.net(words), targets)
        if batch_idx in self.faults:
            loss = loss * torch.nan
            if self.transient:
                self.faults.remove(batch_idx)
        return {"loss": loss, "num_tokens": (targets != IGNORED).sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@cache
def plain_loop(accumulate: int = 1, by_itself: bool = False) -> tuple[Biases, dict[str, Tensor]]:
    """Biases, moved as their definition reads or ``by_itself``, and weights of one process."""
    module = Balanced().double()
    counts = {name: torch.zeros(EXPERTS, dtype=torch.float64) for name in module.routers}

    def counted(name: str) -> Any:
        def note(_: Any, __: Any, output: Any) -> None:
            for expert in output[0].experts_tk.flatten().tolist():
                counts[name][expert] += 1

        return note

    losses: list[Tensor] = []
    for name, router in module.routers.items():
        router.register_forward_hook(counted(name))
        router.register_forward_hook(lambda _, __, output: losses.append(output[1] @ output[2]))
        # What the plain loop is to show, the layer does not do by itself.
        router.attach_losses = lambda y, *_: y  # type: ignore[method-assign]
        if not by_itself:
            router._follows_steps = id(router)  # type: ignore[assignment]
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(module.batches):
        output = module.training_step(batch, index)
        loss = output["loss"] + sum(losses)
        (loss / output["num_tokens"] / accumulate).backward()
        losses.clear()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            for name, router in module.routers.items():
                assert router.bias is not None
                if not by_itself:
                    router.bias += STEP * (counts[name].mean() - counts[name]).sign()
                counts[name].zero_()
    return module.biases, {name: p.detach().clone() for name, p in module.named_parameters()}


class Notes(pl.Callback):
    """Biases after each batch, and whether its step was skipped."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, Biases]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        assert all(router.step_counts_e is None for router in module.routers.values())
        self.found.append((trainer.strategy.precision.skipped, module.biases))


def fit_job(
    options: Mapping[str, Any] | None, devices: int, module: Balanced | None = None, **extra: Any
) -> Any:
    module = Balanced() if module is None else module
    extra = {"limit_val_batches": 0, **extra}
    trainer = make_trainer(options, devices, use_distributed_sampler=False, **extra)
    trainer.fit(module)
    return module.biases, {name: router.weight for name, router in module.routers.items()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, 4 microbatches": (1, {"num_microbatches": 4}),
    "ep=2": (2, {"ep": 2}),
    "ep=2, 2 microbatches": (2, {"ep": 2, "num_microbatches": 2, "zero": 2}),
    "tp=2": (2, {"tp": 2, "num_microbatches": 2}),
    "ep=4 tp=2 sp": (4, {"ep": 4, "tp": 2, "sequence_parallel": True}),
    "cp=2": (2, {"cp": 2, "ep": 2}),
    "pp=2": (2, {"pp": 2, "num_microbatches": 4}),
    "pp=2 zbv ep=2": (
        4,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "ep": 2, "num_microbatches": 4},
    ),
    "dp=2 recompute": (
        2,
        {"activations": ActivationConfig(recompute="full", blocks=["Block"]), "zero": 0},
    ),
    "ep=2 tp=2 sp": (2, {"ep": 2, "tp": 2, "sequence_parallel": True}),
}


VALIDATED = ("ep=2, 2 microbatches", "pp=2")


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param(name, 1 + index % 2, marks=[pytest.mark.thorough] * (LAYOUTS[name][0] > 2))
        for index, name in enumerate(LAYOUTS)
    ],
)
def test_biases_are_those_of_one_process(pool: WorkerPool, name: str, accumulate: int) -> None:
    """Evaluation, which some of the runs stop for after each batch, leaves them."""
    devices, options = LAYOUTS[name]
    validation = {"val_check_interval": 1, "limit_val_batches": 2} if name in VALIDATED else {}
    biases, weights = plain_loop(accumulate)
    assert len({value for bias in biases.values() for value in bias}) > 2  # they differ
    found = pool.run(
        devices, fit_job, options, devices, accumulate_grad_batches=accumulate, **validation
    )
    everyone: dict[str, Any] = {}
    for ours, routers in found:
        everyone |= ours
        assert ours == {name: biases[name] for name in ours}
        for router, weight in routers.items():
            torch.testing.assert_close(
                weight.detach(), weights[f"{router}.weight"], rtol=1e-10, atol=1e-13
            )
    assert everyone == biases


def test_a_plain_optimizer_moves_them_too() -> None:
    assert plain_loop(2, by_itself=True)[0] == plain_loop(2)[0]


def test_ranks_with_other_numbers_of_samples_count_them(pool: WorkerPool) -> None:
    """What fills up the microbatches of a rank with fewer samples counts nowhere."""
    options = {"ep": 2, "microbatch_size": 2}
    biases, weights = plain_loop()
    routed = 0.0
    for ours, routers, tokens in pool.run(2, uneven_job, options):
        routed += tokens
        assert ours == biases
        for router, weight in routers.items():
            expected = weights[f"{router}.weight"]
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-13)
    assert routed == sum(words.numel() for words, _ in batches())


def uneven_job(options: Mapping[str, Any]) -> Any:
    module = Uneven()
    found = fit_job(options, 2, module)
    [tokens, _] = [float(r.statistics.totals["tokens"]) for r in module.routers.values()]
    return *found, tokens


class Uneven(Balanced):
    def train_dataloader(self) -> Any:
        rank = self.trainer.strategy.topology.batch.rank
        shares = [tree_map(lambda t: t.split((5, 3))[rank], batch) for batch in self.batches]
        return DataLoader(shares, batch_size=None)  # type: ignore[arg-type]


def guarded_job(options: Mapping[str, Any], devices: int, response: str) -> Any:
    """Biases with a bad batch, and those of a run without what it does not train on."""
    data, fault = batches(), 2
    words, targets = data[fault]
    data[fault] = torch.full_like(words, WORDS - 1), targets  # it would move biases elsewhere
    left_out = {"skip": range(2, 3), "rerun": range(0), "rollback": range(1, 3)}[response]
    bad = Balanced(data, [fault], transient=response == "rerun")
    good = Balanced([batch for index, batch in enumerate(data) if index not in left_out])
    going_back = RollbackConfig(steps=1, skip_batches=2)
    guard = NumberGuard(nonfinite=response, rollback=going_back)
    found, _ = fit_job(options, devices, bad, callbacks=[guard])
    assert guard.faults
    return found, fit_job(options, devices, good)[0]


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("one process, 4 microbatches", "rerun"),
        ("one process, 4 microbatches", "rollback"),
        ("ep=2", "skip"),
        ("pp=2", "rerun"),
        pytest.param("ep=2", "rollback", marks=pytest.mark.thorough),
        pytest.param("pp=2", "skip", marks=pytest.mark.thorough),
    ],
)
def test_what_a_guard_leaves_out_or_runs_again_counts_as_often_as_it_trains(
    pool: WorkerPool, name: str, response: str
) -> None:
    devices, options = LAYOUTS[name]
    for found, expected in pool.run(devices, guarded_job, options, devices, response):
        assert found == expected


def overflow_job() -> list[tuple[bool, Biases]]:
    plugin, notes = Fp16Precision(initial_scale=2.0**18), Notes()
    fit_job({}, 1, precision=None, plugins=plugin, callbacks=[notes])
    return notes.found


def test_a_step_that_overflows_leaves_them(pool: WorkerPool) -> None:
    [found] = pool.run(1, overflow_job)
    assert {skipped for skipped, _ in found} == {False, True}
    before: Biases = {}
    for skipped, biases in found:
        assert not before or (biases == before) is skipped
        before = biases


VALIDATES = {"num_sanity_val_steps": 0, "limit_train_batches": 1, "limit_val_batches": 1.0}


class OtherLengths(Balanced):
    """One rank validates a batch less."""

    def val_dataloader(self) -> Any:
        rank = self.trainer.strategy.topology.batch.rank
        return DataLoader(self.batches[rank:], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"ep": 2}, {"zero": 3}], ids=str)
def test_other_numbers_of_batches_are_refused_where_forwards_meet(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    with pytest.raises(WorkerError, match=r"ConfigError: evaluation of 3 to 4 batches.*nearest"):
        pool.run(2, fit_job, options, 2, OtherLengths(), **VALIDATES)


def test_they_are_not_where_each_rank_has_all(pool: WorkerPool) -> None:
    pool.run(2, fit_job, {"zero": 0}, 2, OtherLengths(), **VALIDATES)


class Around(Balanced):
    """Mixtures before and behind the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = Block().mixture, Block().mixture
        self.enter = nn.Embedding(WORDS, WIDTH)
        self.net = PipelineSequential(layers=[nn.Linear(WIDTH, WIDTH), Block()])
        self.leave = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, targets = batch
        x = self.net(torch.tanh(self.before(self.enter(words))))
        loss = self.loss(self.leave(x + torch.tanh(self.behind(torch.tanh(x)))), targets)
        return {"loss": loss, "num_tokens": (targets != IGNORED).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def around_job(options: Mapping[str, Any], devices: int) -> Any:
    return fit_job(options, devices, Around())


@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_so_do_mixtures_around_the_trunk_of_a_pipeline(pool: WorkerPool, ep: int) -> None:
    [(biases, weights)] = pool.run(1, around_job, {}, 1)
    options = {"pp": 2, "num_microbatches": 2, "ep": ep}
    for ours, routers in pool.run(2 * ep, around_job, options, 2 * ep):
        assert len(ours) >= 2
        assert ours == {name: biases[name] for name in ours}
        for router, weight in routers.items():
            torch.testing.assert_close(weight, weights[router], rtol=1e-10, atol=1e-13)


class Shared(Balanced):
    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.net = PipelineSequential(
            embedding=VocabParallelEmbedding(WORDS, WIDTH),
            layers=[block, block],
            head=ColumnParallelLinear(WIDTH, WORDS),
        )


def test_a_bias_of_several_stages_is_refused(pool: WorkerPool) -> None:
    words = r"ConfigError: net.layers.0.mixture.router.weight: pipeline ranks \(0, 1\) share"
    with pytest.raises(WorkerError, match=words):
        pool.run(2, fit_job, {"pp": 2}, 2, Shared())


class Frozen(Balanced):
    def __init__(self) -> None:
        super().__init__()
        self.net.layers[0].mixture.router.requires_grad_(False)


class TwoOptimizers(Balanced):
    """Steps on everything but routers, then on these."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.between: list[bool] = []

    def configure_optimizers(self) -> Any:
        routers = [router.weight for router in self.routers.values()]
        others = [p for p in self.parameters() if all(p is not q for q in routers)]
        return [torch.optim.SGD(group, lr=0.1) for group in (others, routers)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        output = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(output["loss"] / output["num_tokens"])
        before = self.biases
        first.step()
        self.between.append(self.biases == before)
        second.step()
        first.zero_grad()
        second.zero_grad()


def owners_job() -> Any:
    module = TwoOptimizers()
    moved = fit_job({}, 1, module)[0]
    return fit_job({}, 1, Frozen())[0], moved, module.between


def test_they_move_with_the_optimizer_of_the_router(pool: WorkerPool) -> None:
    [(frozen, moved, between)] = pool.run(1, owners_job)
    first, second = frozen.values()
    assert not any(first)
    assert any(second)
    assert all(any(bias) for bias in moved.values())
    assert between == [True] * len(batches())


def interrupted_job(options: Mapping[str, Any], devices: int, path: str) -> None:
    trainer = make_trainer(
        options, devices, max_steps=2, limit_val_batches=0, use_distributed_sampler=False
    )
    trainer.fit(Balanced())
    trainer.save_checkpoint(path)


def resumed_job(path: str) -> Any:
    trainer = make_trainer({}, 1, limit_val_batches=0, use_distributed_sampler=False)
    module = Balanced()
    trainer.fit(module, ckpt_path=path)
    return module.biases


def test_a_resumed_run_goes_on_with_them(pool: WorkerPool, tmp_path: Path) -> None:
    devices, options = LAYOUTS["ep=2"]
    pool.run(devices, interrupted_job, options, devices, str(tmp_path / "two.ckpt"))
    [found] = pool.run(1, resumed_job, str(tmp_path / "two.ckpt"))
    assert found == plain_loop()[0]
