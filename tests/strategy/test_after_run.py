"""What a module is after a run: the user's again, or an error that says what to do."""

import copy
import io
import os
import pickle
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

import lightning_megatron
from lightning_megatron import ActivationConfig, ConfigError, MegatronStrategy, PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.strategy import module_layout
from lightning_megatron.testing import WorkerPool
from lightning_megatron.whole.weights import WeightParts
from tests.parity.jobs import quiet_trainer
from tests.parity.plain_modules import FromMemory

PROBE = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(2, 6)


class Layered(FromMemory):
    """Parallel layers, batch norm, a tied weight; good for any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.held_in = torch.float64
        torch.manual_seed(2)
        first, last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        middle = nn.Sequential(ColumnParallelLinear(6, 8), nn.Tanh(), RowParallelLinear(8, 6))
        self.net = PipelineSequential(
            first, layers=[middle, nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))], last=last
        )

    def batch(self, step: int) -> Any:
        x, _ = super().batch(step)
        return x, x.flip(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.to(self.held_in) for part in batch)
        out: Tensor = self.net(x)
        return (out - y).square().mean()

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)


def fitted(layout: dict[str, Any], **options: Any) -> tuple[Layered, L.Trainer]:
    module = Layered()
    if "mixed" in options.get("precision", ""):
        module.held_in = torch.float32
    module.to(module.held_in)
    memory = ActivationConfig(recompute="full", blocks=["Sequential"])
    trainer = quiet_trainer(MegatronStrategy(**layout, activations=memory), max_epochs=2, **options)
    trainer.fit(module)
    return module, trainer


def hooks_of(module: nn.Module) -> list[str]:
    """Names of what any module or parameter in it calls, or of foreign attributes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [f"{n}.{k}" for n, m in module.named_modules() for k in kinds if getattr(m, k)]
    found += [n for n, m in module.named_modules() if "forward" in vars(m)]
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter, name
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            found.append(name)
    return found


def owned_job(layout: dict[str, Any], precision: str, expected: dict[str, Tensor]) -> None:
    module, trainer = fitted(layout, precision=precision, sync_batchnorm=True)
    assert hooks_of(module) == []
    assert {p.dtype for p in module.parameters()} == {module.held_in}
    probe = PROBE.to(module.held_in)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    if precision == "64-true":
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-10)
    out = module.eval().net(probe)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    twins = [
        torch.load(buffer, weights_only=False),
        pickle.loads(pickle.dumps(module)),
        copy.deepcopy(module),
    ]
    for twin in twins:
        assert torch.equal(twin.net(probe), out)
    # Trained by hand, as by somebody who has never heard of a strategy.
    recomputed(module.train().net, probe, use_reentrant=False).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.load_state_dict(state)
    [before] = trainer.validate(module, verbose=False)
    assert hooks_of(module) == []
    trainer = quiet_trainer(MegatronStrategy(zero=2), precision=precision)
    assert trainer.validate(module, verbose=False) == [pytest.approx(before)]


def state_job(layout: dict[str, Any]) -> dict[str, Tensor]:
    return lightning_megatron.gather(fitted(layout, sync_batchnorm=True)[0])


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Tensor]:
    state: dict[str, Tensor] = pool.run(1, state_job, {})[0]
    return state


@pytest.mark.parametrize(
    ("devices", "layout", "precision"),
    [
        (1, {}, "64-true"),
        (1, {}, "bf16-mixed"),
        (2, {"zero": 0}, "64-true"),
        pytest.param(2, {"zero": 1}, "64-true", marks=pytest.mark.thorough),
        (2, {"zero": 2, "num_microbatches": 2}, "64-true"),
        (2, {"zero": 1}, "bf16-mixed"),
        (2, {"zero": 3}, "64-true"),
        (2, {"tp": 2}, "64-true"),
        (2, {"pp": 2, "num_microbatches": 1}, "64-true"),
        pytest.param(2, {"zero": 3}, "bf16-mixed", marks=pytest.mark.thorough),
        pytest.param(
            4, {"pp": 2, "zero": 3, "num_microbatches": 1}, "64-true", marks=pytest.mark.thorough
        ),
        pytest.param(
            4, {"pp": 2, "tp": 2, "num_microbatches": 1}, "64-true", marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_a_module_that_is_whole_is_the_users_again(
    pool: WorkerPool, alone: Any, devices: int, layout: dict[str, Any], precision: str
) -> None:
    # Batch norms see one microbatch at a time.
    expected = {} if layout.get("num_microbatches", 1) > 1 else alone
    pool.run(devices, owned_job, layout, precision, expected)


def parts_job(layout: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Weights on every rank, on the last one, and what calls say."""
    module, trainer = fitted({**layout, "gather_at_end": False}, sync_batchnorm=True)
    held = next(m for m in module.net.items() if any(True for _ in m.parameters()))
    uses = (
        *(partial(each, PROBE) for each in (module, module.net, held)),
        *(each.state_dict for each in (module, module.net, held)),
        *(partial(torch.save, each, io.BytesIO()) for each in (module, module.net)),
        *(partial(copy.deepcopy, each) for each in (module, module.net)),
    )
    said = []
    for use in uses:
        with pytest.raises(ConfigError) as caught:
            use()
        said.append(str(caught.value))
    first = trainer.validate(module, verbose=False)
    assert trainer.validate(module, verbose=False) == first
    last = torch.distributed.get_world_size() - 1
    return lightning_megatron.gather(module), lightning_megatron.gather(module, rank=last), said


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"zero": 3}),
        (2, {"pp": 2}),
        pytest.param(4, {"pp": 2, "tp": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"pp": 2, "zero": 1}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_module_in_parts_says_how_to_put_it_together(
    pool: WorkerPool, alone: Any, devices: int, layout: dict[str, Any]
) -> None:
    if "pp" in layout:
        layout = {**layout, "num_microbatches": 1}
    by_rank = pool.run(devices, parts_job, layout)
    for rank, (found, last, said) in enumerate(by_rank):
        assert found.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)
        assert (last != {}) == (rank == devices - 1)
        assert all("gather_at_end=True" in text for text in said)
    plain = Layered().double()
    plain.load_state_dict(by_rank[0][0])


def averaged_job(path: Path, layout: dict[str, Any]) -> tuple[float, float, list[Tensor]]:
    """Validation of a checkpoint of averages, before and after, and weights of the run gone on."""

    def run(epochs: int, start: Path | None = None) -> tuple[Layered, L.Trainer]:
        module = Layered().double()
        saver = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
        trainer = quiet_trainer(
            MegatronStrategy(**layout),
            max_epochs=epochs,
            callbacks=[saver, EMAWeightAveraging(decay=0.9)],
            enable_checkpointing=True,
            sync_batchnorm=True,
        )
        trainer.fit(module, ckpt_path=start)
        return module, trainer

    module, trainer = run(2)
    checkpoint = path / "epoch=0.ckpt"
    at_once = [p.detach().clone() for p in module.parameters()]
    resumed, _ = run(2, checkpoint)
    for one, other in zip(at_once, resumed.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)
    found = quiet_trainer(MegatronStrategy(**layout)).validate(
        Layered().double(), ckpt_path=path / "epoch=1.ckpt", verbose=False
    )
    return found[0]["val"], float(trainer.callback_metrics["val"]), at_once


@pytest.mark.parametrize(
    "zero", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (0, 1)), 2]
)
def test_checkpoints_of_averages_are_gone_on_from(
    pool: WorkerPool, tmp_path: Path, zero: int
) -> None:
    for validated, in_fit, _ in pool.run(2, averaged_job, tmp_path, {"zero": zero}):
        assert validated == pytest.approx(in_fit, rel=1e-10)


def saved_job(path: Path, layout: dict[str, Any]) -> None:
    module, trainer = fitted(layout, sync_batchnorm=True)
    trainer.save_checkpoint(path)
    expected = lightning_megatron.gather(module)
    other = Layered().double()
    again = quiet_trainer(MegatronStrategy(zero=2), max_epochs=2)
    again.fit(other, ckpt_path=path)  # trained to its end already
    for key, value in lightning_megatron.gather(other).items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"zero": 1}, marks=pytest.mark.thorough),
        {"zero": 3},
        pytest.param({"pp": 2, "num_microbatches": 1}, marks=pytest.mark.thorough),
        pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_checkpoint_is_saved_after_the_run(
    pool: WorkerPool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    pool.run(2, saved_job, tmp_path / "after.ckpt", layout)


class Failing(MegatronStrategy):
    """Fails on some ranks behind the last collective of training."""

    def __init__(self, error: type[BaseException], ranks: list[int]) -> None:
        super().__init__(zero=3)
        self.error, self.ranks = error, ranks

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.global_rank in self.ranks:
            raise self.error


def failed_job(error: type[BaseException], ranks: list[int]) -> None:
    module = Layered().double()
    trainer = quiet_trainer(Failing(error, ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_layout, "PATIENCE_S", 0.2)
        try:
            trainer.fit(module)
        except (RuntimeError, SystemExit, KeyboardInterrupt):
            assert trainer.global_rank in ranks
    with pytest.raises(ConfigError, match="gather_at_end"):
        module.state_dict()


@pytest.mark.parametrize(("error", "ranks"), [(RuntimeError, [1]), (KeyboardInterrupt, [0, 1])])
def test_after_a_failure_the_module_stays_in_parts(
    pool: WorkerPool, error: type[BaseException], ranks: list[int]
) -> None:
    pool.run(2, failed_job, error, ranks)


def twice_job(layout: dict[str, Any]) -> dict[str, Tensor]:
    """Two fits, one of a moment, and a test in between."""
    module = Layered().double()
    for options in ({"fast_dev_run": True}, {"max_epochs": 2}):
        trainer = quiet_trainer(MegatronStrategy(**layout), sync_batchnorm=True, **options)
        trainer.fit(module)
        [before] = trainer.validate(module, verbose=False)
        assert trainer.validate(module, verbose=False) == [before]
    return module.state_dict()


@pytest.mark.parametrize("layout", [{"zero": 3}, {"pp": 2, "num_microbatches": 1}], ids=str)
def test_a_module_is_trained_twice(pool: WorkerPool, layout: dict[str, Any]) -> None:
    alone = pool.run(1, twice_job, {})[0]
    for found in pool.run(2, twice_job, layout):
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)


def large_job() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_layout, "MOST_BYTES", 1000)
        module, _ = fitted({"tp": 2}, sync_batchnorm=True)
        with pytest.raises(ConfigError, match="gather_at_end=True"):
            module.state_dict()
        assert type(fitted({"tp": 2, "gather_at_end": True})[0].state_dict()) is OrderedDict


def test_what_is_too_large_stays_in_parts_unless_it_is_asked_for(pool: WorkerPool) -> None:
    pool.run(2, large_job)


def uneven_room_job(layout: dict[str, Any]) -> list[str]:
    """One rank alone has no room; returns warnings of ranks that did not come."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(module_layout, "PATIENCE_S", 2.0)
        if os.environ["RANK"] == "1":
            patch.setattr(module_layout, "MOST_BYTES", 1000)
        module, _ = fitted(layout, sync_batchnorm=True)
        with pytest.raises(ConfigError, match="gather_at_end=True"):
            module.state_dict()
    return [text for w in caught if "not all ranks came" in (text := str(w.message))]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "num_microbatches": 1}], ids=str)
def test_ranks_agree_on_whether_there_is_room(pool: WorkerPool, layout: dict[str, Any]) -> None:
    assert pool.run(2, uneven_room_job, layout) == [[], []]


class Recurrent(Layered):
    """With a layer that FSDP2 gives its weights back by ``setattr``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 6).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((self.layer(x)[0], y), batch_idx)


def beside_another_job() -> int:
    other = WeightParts([], nn.Linear(1, 1))  # of a run that was given up, in the same process
    try:
        trainer = quiet_trainer(MegatronStrategy(zero=3))
        trainer.fit(Recurrent())
    finally:
        other.end()
    return trainer.global_step


def test_what_another_run_has_left_says_nothing_of_this_one(pool: WorkerPool) -> None:
    first, second = pool.run(2, beside_another_job)
    assert first == second > 0


def test_gather_at_end_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match=r"gather_at_end='yes': must be .*nearest valid: 'auto'"):
        MegatronStrategy(gather_at_end="yes")  # type: ignore[arg-type]


def test_nothing_of_the_strategys_is_there_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"no Trainer has put the module.*after fit"):
        _ = MegatronStrategy().parallel
