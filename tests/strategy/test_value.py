"""A strategy as a value: copied, pickled, and given to one Trainer after the other."""

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, MegatronStrategy, PipelineConfig, ShardingConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, assert_same, loader, make_trainer, samples, weights


class Narrow(MegatronStrategy):
    """A constructor of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(zero=width % 4)  # type: ignore[arg-type]
        self.width = width


def pickled(strategy: Any) -> Any:
    return pickle.loads(pickle.dumps(strategy))


GIVEN: list[Any] = [
    lambda: MegatronStrategy(2, PipelineConfig(degree=2), zero=ShardingConfig(stage=1, wrap=["A"])),
    lambda: Narrow(3),
]


@pytest.mark.parametrize("make", GIVEN)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_has_the_options_and_no_trainer(make: Any, copied: Any) -> None:
    strategy = make()
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    assert trainer.strategy.accelerator is not None
    made = copied(strategy)
    assert type(made) is type(strategy)
    assert made.options == strategy.options
    assert repr(made) == repr(strategy)
    assert made.accelerator is None


def test_a_strategy_is_written_as_it_is_made() -> None:
    assert repr(MegatronStrategy(2, zero=3)) == "MegatronStrategy(2, zero=3)"
    assert repr(Narrow(width=1)) == "Narrow(width=1)"


class Predicts(Small):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def fit_and_predict(devices: int) -> list[Any]:
    """Predictions by the same strategy, and by plain Lightning."""
    strategy, module = MegatronStrategy(zero=2), Predicts()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    first = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_steps=2,
        enable_checkpointing=False,
        **quiet,  # type: ignore[arg-type]
    )
    first.fit(module, loader())
    data = DataLoader(samples(), 4)
    second = pl.Trainer(
        strategy=strategy,
        accelerator=CPUAccelerator(),
        devices=devices,
        precision="bf16-mixed",
        **quiet,  # type: ignore[arg-type]
    )
    # Its own precision, which the first one's must not hide.
    assert second.precision == "bf16-mixed"
    third = pl.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=devices,
        precision="64-true",
        **quiet,  # type: ignore[arg-type]
    )
    found = third.predict(module, data)
    with pytest.raises(ConfigError, match="given to another Trainer later"):
        first.fit(module, loader())
    assert third.strategy is strategy
    plain = [module.net(batch[0]) for batch in data]
    return [torch.cat(found), torch.cat(plain).detach()]  # type: ignore[arg-type]


def test_fit_then_predict_with_other_flags() -> None:
    found, plain = fit_and_predict(1)
    torch.testing.assert_close(found, plain)


def test_a_strategy_at_work_is_not_given_away() -> None:
    class Nested(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            pl.Trainer(strategy=trainer.strategy, accelerator="cpu", devices=1, logger=False)

    with pytest.raises(ConfigError, match="at work in a Trainer.*copy.deepcopy"):
        make_trainer({}, callbacks=[Nested()]).fit(Small(), loader())


@pytest.mark.parametrize(
    ("layout", "seen"),
    [
        ({}, True),
        ({"zero": 3, "ep": 2}, True),
        ({"tp": 2}, False),
        ({"pp": PipelineConfig(degree=2)}, False),
        ({"cp": 2}, False),
    ],
)
def test_a_ddp_strategy_is_what_divides_by_all_processes(layout: Any, seen: bool) -> None:
    strategy = MegatronStrategy(**layout)
    assert isinstance(strategy, DDPStrategy) is seen
    assert isinstance(strategy, MegatronStrategy)
    assert isinstance(strategy, ParallelStrategy)
    assert type(strategy) is MegatronStrategy
    assert strategy.__class__.__name__ == "MegatronStrategy"
    assert not issubclass(MegatronStrategy, DDPStrategy)
    assert isinstance(Narrow(1), DDPStrategy)
    assert strategy._ddp_kwargs["find_unused_parameters"]
    with pytest.raises(TypeError):
        strategy._ddp_kwargs["broadcast_buffers"] = True  # type: ignore[index]


def test_a_module_that_is_one_graph_is_refused() -> None:
    """Lightning asks for a DDPStrategy before it takes one."""
    module: Any = Small()
    module._compiler_ctx = {}  # as `torch.compile(module)` leaves it, which takes seconds
    with pytest.raises(ConfigError, match=r"torch.compile\(module\).*CompileConfig"):
        make_trainer({}).fit(module, loader())


def ended_by_the_user(devices: int) -> Any:
    """What chemprop's command line does after training, and another run behind it."""
    module = Small()
    for _ in range(2):
        trainer = make_trainer({"zero": 1}, devices)
        trainer.fit(module, loader(dp=devices))
        assert isinstance(trainer.strategy, DDPStrategy)
        torch.distributed.destroy_process_group()
    return weights(module)


def test_who_takes_it_for_ddp_may_destroy_the_process_groups(pool: WorkerPool) -> None:
    [plain] = pool.run(1, trained_twice)
    for found in pool.run(2, ended_by_the_user, 2):
        assert_same(found, plain)


def trained_twice() -> Any:
    module = Small()
    for _ in range(2):
        make_trainer(None).fit(module, loader())
    return weights(module)
