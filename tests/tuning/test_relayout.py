"""A trunk that moves amid a run: to other stages, more than once, and to another ZeRO stage."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy, PipelineConfig, PipelineSequential
from lightning_megatron.checkpoint.chunks import own_chunks, parameter_names
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.apply import Transforms
from lightning_megatron.testing import WorkerPool
from lightning_megatron.tuning import partition as tuner_module
from lightning_megatron.tuning import relayout as relayouts
from lightning_megatron.tuning.partition import MeasuredPartition
from lightning_megatron.tuning.relayout import obstacle, relayout
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.jobs import GlobalBatches, quiet_trainer
from tests.parity.test_repartition import MOVES_BEFORE, forced
from tests.strategy.small import tuner_of

WIDTH = 6
MEASURED = PipelineConfig(degree=2, partition="measured")


class Item(nn.Module):
    """A layer that counts, in a buffer that every data-parallel rank has for itself."""

    linear: nn.Module
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += float(x.sum())
        y: Tensor = self.linear(x).tanh()
        return y


class Module(GlobalBatches):
    def __init__(self, item: Callable[[], nn.Module] = Item, steps: int = 4) -> None:
        draw = torch.Generator().manual_seed(0)
        super().__init__(
            [(torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw))] * steps
        )
        torch.manual_seed(1)
        self.trunk = PipelineSequential(layers=[item() for _ in range(6)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.trunk(batch[0]).float(), batch[1].float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@own_weights
def everything(strategy: MegatronStrategy) -> dict[str, Tensor]:
    """Weights and optimizer state of all ranks, as a checkpoint would hold them."""
    parallel = strategy.parallel
    parallel.data.come_to_rest()
    names = parameter_names(parallel.module, parallel.canonical)
    chunks = own_chunks(parallel.module, parallel.canonical, parallel.data.rows)
    found = {f"model.{n}": c for n, c in chunks.items()}
    for optimizer in strategy.optimizers:
        snapshot = capture_optimizer(optimizer, names, chunks)
        found |= {f"optimizer.{n}": c for n, c in snapshot.tensors.items()}
    mine = {
        n: (c.full_shape, [(r.offsets, r.tensor.clone()) for r in c.rectangles()])
        for n, c in found.items()
    }
    whole: dict[str, Tensor] = {}
    for part in Peers(strategy.host_group).all_gather(mine):
        for name, (shape, rectangles) in part.items():
            for offsets, tensor in rectangles:
                full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
                index = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
                full[index] = tensor
    assert not any(bool(full.isnan().any()) for full in whole.values())
    return whole


@own_weights
def counters(strategy: MegatronStrategy, module: Any) -> dict[int, list[float]]:
    """Counters of the items on the ranks with these data, by item."""
    mine = {i: m.seen.tolist() for i, m in enumerate(module.trunk.layers) if hasattr(m, "seen")}
    found: dict[int, list[float]] = {}
    for part in Peers.over(strategy.topology.pp).all_gather(mine):
        found |= part
    return dict(sorted(found.items()))


class Moves(L.Callback):
    """Moves the trunk before some batches; what was there before is there afterwards."""

    def __init__(self, moves: dict[int, Callable[[Transforms], Transforms]]) -> None:
        self.moves = moves
        self.losses: list[float] = []
        self.items: list[int] = []
        self.learning: list[bool] = []

    @own_weights
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        if batch_idx in self.moves:
            before, counted = everything(strategy), counters(strategy, module)
            old = [weakref.ref(p) for p in strategy.parallel.trunk.parameters()]
            counts = [sum(1 for ref in old if ref() is not None)]

            def fill(*args: Any) -> None:
                counts.append(sum(1 for ref in old if ref() is not None))
                filled(*args)

            filled = relayouts._fill
            with mock.patch.object(relayouts, "_fill", fill):
                relayout(strategy, self.moves[batch_idx](strategy.parallel.transforms))
            assert counts == [len(old), 0], "old weights go as they are sent"
            after = everything(strategy)
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                assert tensor.dtype == after[name].dtype
                assert torch.equal(tensor, after[name]), name
            assert {float(t) for n, t in after.items() if n.endswith("step")} == {float(batch_idx)}
            assert counters(strategy, module) == counted
        self.items.append(len(list(strategy.parallel.trunk.parameters())))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"])))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.learning.append(all(p.grad is not None for p in module.trunk.parameters()))


def stages(*counts: int) -> Callable[[Transforms], Transforms]:
    def change(transforms: Transforms) -> Transforms:
        pipeline = replace(transforms.pipeline, partition=list(counts))
        return replace(transforms, pipeline=pipeline)

    return change


def zero(stage: Literal[0, 1, 2, 3]) -> Callable[[Transforms], Transforms]:
    sharding = ShardingConfig(stage=stage, min_numel=1)
    return lambda transforms: replace(stages(1, 5)(transforms), sharding=sharding)


MOVES: dict[str, Sequence[Callable[[Transforms], Transforms]]] = {
    "stages, and back": (stages(1, 5), stages(3, 3)),
    "ZeRO 3, then 0": (zero(3), zero(0)),
}


Trained = tuple[list[float], list[int], list[bool]]


def moving(options: dict[str, Any], moves: str | None, precision: Any) -> Trained:
    L.seed_everything(1, verbose=False)
    given = {} if moves is None else dict(zip((1, 3), MOVES[moves], strict=True))
    callback = Moves(given)
    strategy = MegatronStrategy(pp=MEASURED, num_microbatches=2, **options)
    quiet_trainer(strategy, callbacks=[callback], precision=precision).fit(Module())
    return callback.losses, callback.items, callback.learning


LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "alone": (2, {}, "stages, and back"),
    "zero 1": (4, {"zero": 1}, "stages, and back"),
    "zero 2": (4, {"zero": 2}, "stages, and back"),
    "zero 3": (4, {"zero": 3}, "stages, and back"),
    "from ZeRO 1": (4, {"zero": 1}, "ZeRO 3, then 0"),
}


DEFAULT = {("alone", "bf16-mixed"), ("zero 2", "bf16-mixed"), ("from ZeRO 1", "32-true")}
CASES = [(layout, precision) for layout in LAYOUTS for precision in ("bf16-mixed", "32-true")]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [pytest.param(*c, marks=[pytest.mark.thorough] * (c not in DEFAULT)) for c in CASES],
)
def test_every_bit_moves_as_often_as_asked(pool: WorkerPool, layout: str, precision: str) -> None:
    world, options, moves = LAYOUTS[layout]
    still = pool.run(world, moving, options, None, precision)
    moved = pool.run(world, moving, options, moves, precision)
    for (losses, items, learning), before in zip(moved, still, strict=True):
        same_sums = moves == "stages, and back"
        assert losses == (before[0] if same_sums else pytest.approx(before[0], rel=1e-6))
        assert items != before[1]
        assert learning == before[2]


# What keeps a trunk where it is -------------------------------------------------------------------


class Secret:
    """An object without a plain form."""


class Keeping(Item):
    def get_extra_state(self) -> Any:
        return Secret()

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it travelled")


class KeepingFirst(Item):
    """Keeps an object in the first item, which is on the first stage."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.keeps = KeepingFirst.made % 6 == 0
        KeepingFirst.made += 1

    def get_extra_state(self) -> Any:
        return Secret() if self.keeps else None

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it travelled")


class Numbered(torch.optim.SGD):
    """Keeps state under a number."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter][0] = torch.zeros_like(parameter)
        return loss


class Uneven(torch.optim.SGD):
    """Keeps state whose shape is neither the parameter's nor a number's."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sketch"] = torch.zeros(3)
        return loss


class Stepped(Module):
    def __init__(self, optimizer: type[torch.optim.SGD], **options: Any) -> None:
        super().__init__(steps=MOVES_BEFORE + 1, **options)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


class Looks(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.found = obstacle(trainer.strategy)


def hindered(optimizer: type[torch.optim.SGD], item: type[Item]) -> tuple[bool, str | None]:
    """Train to where the trunk would move; whether it has, and why it may not."""
    L.seed_everything(1, verbose=False)
    looks = Looks()
    strategy = MegatronStrategy(pp=MEASURED, num_microbatches=2, zero=1)
    module = Stepped(optimizer, item=item)
    with forced([1, 5]):
        quiet_trainer(strategy, callbacks=[looks], precision="32-true").fit(module)
    tuner = tuner_of(strategy, MeasuredPartition)
    assert tuner is not None
    assert tuner.report is not None
    return tuner.report.after != tuner.report.before, looks.found


@pytest.mark.parametrize(
    ("optimizer", "item", "reason"),
    [
        (torch.optim.SGD, Item, None),
        (torch.optim.SGD, Keeping, "Secret has no plain form"),
        (Numbered, Item, "Numbered state 0 has no name"),
        (Uneven, Item, "Uneven state 'sketch' of 'trunk.layers."),
    ],
)
def test_a_trunk_that_cannot_move_stays_and_says_why(
    pool: WorkerPool, optimizer: type[torch.optim.SGD], item: type[Item], reason: str | None
) -> None:
    for moved, found in pool.run(4, hindered, optimizer, item):
        assert moved == (reason is None)
        assert (found is None) if reason is None else (reason in str(found))


class Tries(L.Callback):
    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            strategy, before = trainer.strategy, everything(trainer.strategy)
            with pytest.raises(ConfigError) as found:
                relayout(strategy, stages(1, 5)(strategy.parallel.transforms))
            self.errors.append(str(found.value))
            after = everything(strategy)
            assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def refused() -> list[str]:
    L.seed_everything(1, verbose=False)
    tries = Tries()
    strategy = MegatronStrategy(pp=MEASURED, num_microbatches=2)
    trainer = quiet_trainer(strategy, callbacks=[tries], precision="32-true")
    trainer.fit(Module(KeepingFirst))
    assert trainer.global_step == 4
    return tries.errors


def test_what_one_rank_cannot_hand_on_all_ranks_refuse_and_go_on(pool: WorkerPool) -> None:
    first, second = pool.run(2, refused)
    assert first == second
    assert "trunk.layers.0: a tests.tuning.test_relayout.Secret has no plain form" in first[0]


class Exchanges(L.Callback):
    """Exchanges a layer of the first stage before the trunk would move."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        item = module.trunk.layers[0]
        if batch_idx == MOVES_BEFORE - 1 and isinstance(item, Item):
            item.linear = nn.Sequential(item.linear)


def exchanged() -> tuple[bool, list[str]]:
    L.seed_everything(1, verbose=False)
    strategy, said = MegatronStrategy(pp=MEASURED, num_microbatches=2), list[str]()
    with forced([1, 5]), mock.patch.object(tuner_module, "rank_zero_info", said.append):
        trainer = quiet_trainer(strategy, callbacks=[Exchanges()], precision="32-true")
        trainer.fit(Stepped(torch.optim.SGD))
    tuner = tuner_of(strategy, MeasuredPartition)
    assert tuner is not None
    assert tuner.report is not None
    return tuner.report.after != tuner.report.before, said


def test_a_trunk_with_another_layer_stays_and_every_rank_knows_why(pool: WorkerPool) -> None:
    for moved, said in pool.run(2, exchanged):
        assert not moved
        assert "layers.0.linear (Sequential) was added or exchanged" in said[0]
