"""Lightning's loaders are where `_lightning.loaders` looks for them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron._lightning.loaders import (
    Stateful,
    discard_batches,
    evaluation_source,
    forget_loader_states,
    makes_training_loader,
    read_anew,
    repeats_short_loaders,
    replace_predicted_batches,
    training_fetcher,
    training_loader,
    training_source,
)
from tests._lightning.running import Module, On, make_trainer


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 8), batch_size=4, **options)


def test_training_loader_training_fetcher_and_makes_training_loader() -> None:
    found: list[Any] = []
    given = loader()

    def note(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        combined, fetcher = training_loader(trainer), training_fetcher(trainer)
        assert combined is not None
        assert fetcher is not None
        found.append((combined.flattened, fetcher.combined_loader is combined))
        assert not makes_training_loader(trainer)

    trainer = make_trainer(On(on_train_start=note))
    assert training_loader(trainer) is None
    assert training_fetcher(trainer) is None
    assert makes_training_loader(trainer)
    trainer.fit(Module(), given)
    assert found == [([given], True)]


class Reading(Module):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(f"{batch_idx}: {batch[0].sum():.4f}")
        return super().training_step(batch, batch_idx)


def read(on_train_start: Any) -> list[str]:
    """Batches that are read after something was done."""
    torch.manual_seed(0)
    module = Reading()
    data = RandomDataset(32, 8)
    trainer = make_trainer(On(on_train_start=on_train_start), limit_train_batches=5)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return [call for call in module.calls if ":" in call]


def test_read_anew() -> None:
    def move(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        combined = training_loader(trainer)
        assert combined is not None
        vars(combined.flattened[0])["batch_sampler"] = [[6, 7], [0, 1]]
        read_anew(trainer)

    whole = read(lambda *_: None)
    values = [call.partition(": ")[2] for call in whole]
    assert len(whole) == 4
    assert read(move) == [f"0: {values[3]}", f"1: {values[0]}"]


def test_discard_batches() -> None:
    whole = read(lambda *_: None)
    values = [call.partition(": ")[2] for call in whole]
    left = read(lambda trainer, _: discard_batches(trainer, 2))
    assert left == [f"0: {values[2]}", f"1: {values[3]}"]


def test_makes_training_loader_again() -> None:
    asked: list[bool] = []
    trainer = make_trainer(reload_dataloaders_every_n_epochs=1, max_epochs=2)
    original = trainer.strategy.process_dataloader

    def note(dataloader: Any) -> Any:
        if trainer.training:
            asked.append(makes_training_loader(trainer))
        return original(dataloader)

    trainer.strategy.process_dataloader = note  # type: ignore[method-assign]
    trainer.fit(Module())
    assert asked[0]
    assert sum(asked) == 2


@pytest.mark.parametrize(("mode", "repeats"), [("max_size_cycle", True), ("min_size", False)])
def test_repeats_short_loaders(mode: Any, repeats: bool) -> None:
    assert repeats_short_loaders(CombinedLoader([loader()], mode)) is repeats


def test_training_source() -> None:
    given, found = loader(), []
    note = On(setup=lambda trainer, _: found.append(training_source(trainer)))
    make_trainer(note).fit(Module(), given)
    assert found == [given]


def test_evaluation_source() -> None:
    given, found = loader(), []
    note = On(on_validation_end=lambda trainer, _: found.append(evaluation_source(trainer)))
    make_trainer(note, limit_val_batches=1).validate(Module(), given, verbose=False)
    assert found == [given]


def test_forget_loader_states() -> None:
    trainer = make_trainer()
    trainer.fit_loop.on_load_checkpoint({"combined_loader": [{"position": 3}]})
    assert trainer.fit_loop._combined_loader_states_to_load
    forget_loader_states(trainer)
    assert not trainer.fit_loop._combined_loader_states_to_load


class Threes(list[list[int]]):
    """Batch sampler that Lightning has never seen."""


class Pairs(SingleDeviceStrategy):
    """Reads the first two samples of each batch."""

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        replace_predicted_batches(dataloader, lambda batches: [batch[:2] for batch in batches])
        return dataloader


@pytest.mark.filterwarnings("ignore:.*custom batch sampler")
def test_replace_predicted_batches() -> None:
    batches = Threes([[0, 3, 5], [1, 2, 4]])
    given = DataLoader(RandomDataset(32, 8), batch_sampler=batches)
    trainer = make_trainer(strategy=Pairs("cpu"), accelerator="auto")
    assert [len(output) for output in trainer.predict(Module(), given) or []] == [2, 2]
    replace_predicted_batches(given, list)  # no loader of predictions
    assert given.batch_sampler is batches


def test_stateful() -> None:
    class Has:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    assert isinstance(Has(), Stateful)
    assert not isinstance(loader(), Stateful)
