"""Cases of loops: limits, intervals, ends, skipped batches and kinds of loaders."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tests.lightning.record import BOTH, GLOBAL_BATCH, Base, Case, Run, samples


class StopsEarly(Base):
    """Asks for the end in the second batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.trainer.should_stop = True


class StopsInStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StopsInValidation(Base):
    def on_validation_end(self) -> None:
        self.trainer.should_stop = True


class SkipsRest(Base):
    """Ends the first epoch at its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


class SkipsAll(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class SkipsBatch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class ReturnsDict(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "twice": 2 * loss.detach()}


class ReturnsWrong(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return "a loss"


class Uneven(Base):
    """The last batch is half as large."""

    def train_dataloader(self) -> Any:
        return self.loader(samples(20))

    def val_dataloader(self) -> Any:
        return self.loader(samples(12, seed=1))


class TwoValLoaders(Base):
    def val_dataloader(self) -> Any:
        return [self.loader(samples(16, seed=1)), self.loader(samples(8, seed=2))]

    def test_dataloader(self) -> Any:
        return {"a": self.loader(samples(8, seed=4)), "b": self.loader(samples(16, seed=5))}

    def predict_dataloader(self) -> Any:
        return [self.loader(samples(8, seed=4)), self.loader(samples(8, seed=5))]


class OwnNames(TwoValLoaders):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        name = f"val_{dataloader_idx}"
        self.log(name, self.loss(batch), sync_dist=True, add_dataloader_idx=False)


class SequentialVal(TwoValLoaders):
    mode = "max_size_cycle"

    def val_dataloader(self) -> Any:
        loaders = super().val_dataloader()
        return CombinedLoader({"a": loaders[0], "b": loaders[1]}, self.mode)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batches = [part for part in batch.values() if part is not None]
        inputs = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        self.log("val", self.loss(inputs), sync_dist=True, batch_size=len(inputs[0]))


class MinSizeVal(SequentialVal):
    mode = "min_size"


class Combined(Base):
    """Trains on two loaders at once."""

    mode = "max_size_cycle"

    def train_dataloader(self) -> Any:
        loaders = {"a": self.loader(samples(24)), "b": self.loader(samples(16, seed=8))}
        return CombinedLoader(loaders, self.mode)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        return super().training_step([torch.cat(t) for t in zip(*parts, strict=True)], batch_idx)


class CombinedMin(Combined):
    mode = "min_size"


class CombinedMax(Combined):
    mode = "max_size"


class CombinedSequential(Combined):
    mode = "sequential"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Base.training_step(self, batch, batch_idx)


class PlainDict(Combined):
    def train_dataloader(self) -> Any:
        return {"a": self.loader(samples(24)), "b": self.loader(samples(16, seed=8))}


class PlainList(Base):
    def train_dataloader(self) -> Any:
        return [self.loader(samples(24)), self.loader(samples(24, seed=8))]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([torch.cat(t) for t in zip(*batch, strict=True)], batch_idx)


class Stream(IterableDataset[Any]):
    """Samples of no known number."""

    def __iter__(self) -> Any:
        return iter(samples())


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(samples())


class Streams(Base):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=GLOBAL_BATCH)


class SizedStreams(Base):
    def train_dataloader(self) -> Any:
        return DataLoader(SizedStream(), batch_size=GLOBAL_BATCH)


class Batches:
    """Whole batches, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return zip(*(t.split(GLOBAL_BATCH) for t in samples().tensors), strict=True)


class NoLoader(Base):
    """Batches from an iterable that is no DataLoader."""

    def train_dataloader(self) -> Any:
        return Batches()


class Shuffled(Base):
    def train_dataloader(self) -> Any:
        return self.loader(shuffle=True, generator=torch.Generator().manual_seed(2))


class OddFirst(Sampler[int]):
    """An order of the user's."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(1, 24, 2), *range(0, 24, 2)])

    def __len__(self) -> int:
        return 24


class OwnSampler(Base):
    def train_dataloader(self) -> Any:
        return self.loader(sampler=OddFirst())


class OwnBatches(Base):
    def train_dataloader(self) -> Any:
        batches = BatchSampler(OddFirst(), GLOBAL_BATCH // self.dp, drop_last=False)
        return DataLoader(samples(), batch_sampler=batches)


class PullsItself(Base):
    """Takes its batches from an iterator."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, batch_size=len(batch[0]))
        return loss


class Dicts(Base):
    """Batches of dicts in a class of their own."""

    def train_dataloader(self) -> Any:
        inputs, targets = samples().tensors
        rows = [{"x": x, "y": y, "name": "row"} for x, y in zip(inputs, targets, strict=True)]
        return self.loader(rows)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class Reloads(Base):
    """Other data in each epoch."""

    def train_dataloader(self) -> Any:
        return self.loader(samples(24, seed=self.current_epoch))


class KeepsOutputs(Base):
    """What steps of an evaluation return arrives in the hooks after them."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("test", loss, sync_dist=True)
        return {"loss": loss, "index": batch_idx}


def evaluate(run: Run) -> None:
    """Validate, test and predict, without a fit and after one."""
    trainer, module = run.trainer(), run.module()
    for fitted in (False, True):
        if fitted:
            trainer.fit(module)
        for name in ("validate", "test"):
            results = getattr(trainer, name)(module, verbose=False)
            run.note(**{f"{name} {fitted} {i}": sorted(r) for i, r in enumerate(results)})
            for i, result in enumerate(results):
                run.record.values |= {f"{name} {fitted} {i} {k}": v for k, v in result.items()}
        predictions = trainer.predict(module)
        run.record.own[f"predictions {fitted}"] = _sums(predictions)
    run.finish(trainer, module)


def _sums(predictions: Any) -> Any:
    if isinstance(predictions, list):
        return [_sums(part) for part in predictions]
    return (tuple(predictions.shape), round(float(predictions.sum()), 9))


def predict_without_results(run: Run) -> None:
    trainer, module = run.trainer(), run.module()
    run.note(results=trainer.predict(module, return_predictions=False))
    run.finish(trainer, module)


def with_loaders(run: Run) -> None:
    """Loaders are given to the calls."""
    trainer, module = run.trainer(), run.module()
    train, val = module.loader(samples(16)), module.loader(samples(8))
    trainer.fit(module, train, val)
    run.note(validated=len(trainer.validate(module, val, verbose=False)))
    run.finish(trainer, module)


def fit_twice(run: Run) -> None:
    """The second fit goes on where the first ended."""
    trainer, module = run.trainer(max_epochs=1), run.module()
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    run.finish(trainer, module)


def fit_in_two_trainers(run: Run) -> None:
    module = run.module()
    run.trainer(max_epochs=1).fit(module)
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module)
    run.finish(trainer, module)


ONE_READER = ("tp", "pp")  # each data-parallel rank would read everything
NO_DATA_PARALLEL = "Lightning leaves it to the user which rank reads which part"
ENDS_ALONE = "a stage that fails ends its process; its peers notice that, not the exception"
SKIP = "Lightning's own rule for several processes: a step must not return None"

CASES = {
    "fit": Case(layouts=("dp", "zero3", "tp"), others=("pp",)),
    "three epochs": Case(trainer={"max_epochs": 3}, layouts=()),
    "limit_train_batches=2": Case(trainer={"limit_train_batches": 2}, layouts=()),
    "limit_train_batches=0.5": Case(trainer={"limit_train_batches": 0.5}, layouts=()),
    "limit_train_batches=0": Case(trainer={"limit_train_batches": 0}, layouts=("pp",)),
    "limit_val_batches=1": Case(trainer={"limit_val_batches": 1}, layouts=()),
    "limit_val_batches=0": Case(trainer={"limit_val_batches": 0}, layouts=()),
    "val_check_interval=2": Case(trainer={"val_check_interval": 2}, layouts=(), others=("pp",)),
    "val_check_interval=0.34": Case(trainer={"val_check_interval": 0.34}, layouts=()),
    "val_check_interval over epochs": Case(
        trainer={"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 4},
        layouts=(),
    ),
    "check_val_every_n_epoch=2": Case(
        trainer={"check_val_every_n_epoch": 2, "max_epochs": 4}, layouts=()
    ),
    "max_steps=4": Case(trainer={"max_steps": 4}, layouts=(), others=("dp",)),
    "max_steps without epochs": Case(trainer={"max_steps": 4, "max_epochs": -1}, layouts=()),
    "max_steps=0": Case(trainer={"max_steps": 0}, layouts=()),
    "max_epochs=0": Case(trainer={"max_epochs": 0}, layouts=()),
    "max_time=0": Case(trainer={"max_time": timedelta(seconds=0)}, layouts=("dp",)),
    "should_stop": Case(module=StopsEarly, layouts=(), others=("pp",)),
    "should_stop in the step": Case(module=StopsInStep, unlike={"pp": ("training_step",)}),
    "should_stop in validation": Case(
        module=StopsInValidation, trainer={"val_check_interval": 1}, layouts=("pp",)
    ),
    "should_stop, min_epochs=2": Case(
        module=StopsEarly, trainer={"min_epochs": 2, "max_epochs": 4}, layouts=("dp",)
    ),
    "should_stop, min_steps=5": Case(
        module=StopsEarly, trainer={"min_steps": 5, "max_epochs": 4}, layouts=()
    ),
    "accumulate_grad_batches=2": Case(
        trainer={"accumulate_grad_batches": 2}, layouts=("dp",), others=("one",)
    ),
    "accumulate, val_check_interval": Case(
        trainer={"accumulate_grad_batches": 2, "val_check_interval": 1}, layouts=(), others=("pp",)
    ),
    "accumulate, max_steps": Case(
        trainer={"accumulate_grad_batches": 2, "max_steps": 3, "max_epochs": 5}, layouts=()
    ),
    "gradient_clip_val": Case(trainer={"gradient_clip_val": 0.05}, layouts=(), others=BOTH),
    "gradient_clip_algorithm=value": Case(
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, layouts=()
    ),
    "rest of an epoch is skipped": Case(module=SkipsRest, layouts=("pp",)),
    "every epoch is skipped": Case(module=SkipsAll, layouts=()),
    "training_step returns None": Case(
        module=SkipsBatch,
        layouts=("tp",),
        refused={"tp": "by returning None in distributed"},
        reason=f"{SKIP}; {ENDS_ALONE}",
    ),
    "training_step returns a dict": Case(
        module=ReturnsDict, layouts=("tp",), reason="what is beside the loss has one stage"
    ),
    "training_step returns a string": Case(module=ReturnsWrong, layouts=("tp",), reason=ENDS_ALONE),
    "uneven batches": Case(module=Uneven, layouts=("pp",), others=("zero3",)),
    "fast_dev_run": Case(trainer={"fast_dev_run": True}, layouts=()),
    "fast_dev_run=2": Case(trainer={"fast_dev_run": 2, "enable_checkpointing": True}, layouts=()),
    "barebones": Case(
        made_options=lambda _: {"barebones": True, "logger": None, "num_sanity_val_steps": None},
        layouts=(),
    ),
    "overfit_batches=2": Case(trainer={"overfit_batches": 2}, layouts=("dp",)),
    "sanity check": Case(trainer={"num_sanity_val_steps": 1}, layouts=()),
    "whole sanity check": Case(
        trainer={"num_sanity_val_steps": -1}, module=TwoValLoaders, layouts=(), others=("pp",)
    ),
    "reload_dataloaders": Case(
        module=Reloads,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        layouts=("pp",),
    ),
    "reload_dataloaders, every second": Case(
        module=Reloads,
        trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
        layouts=(),
    ),
    "two validation loaders": Case(module=TwoValLoaders, layouts=(), others=("dp",)),
    "two loaders with limits": Case(
        module=TwoValLoaders, trainer={"limit_val_batches": 1}, layouts=()
    ),
    "names without index": Case(module=OwnNames, layouts=()),
    "combined validation": Case(module=SequentialVal, layouts=(), others=("pp",)),
    "combined validation, min_size": Case(module=MinSizeVal, layouts=()),
    "max_size_cycle": Case(module=Combined, layouts=("dp",)),
    "min_size": Case(module=CombinedMin, layouts=()),
    "max_size": Case(module=CombinedMax, layouts=()),
    "sequential": Case(module=CombinedSequential, layouts=("pp",)),
    "dict of loaders": Case(module=PlainDict, layouts=()),
    "list of loaders": Case(module=PlainList, layouts=()),
    "iterable dataset": Case(module=Streams, layouts=("pp",), reason=NO_DATA_PARALLEL),
    "iterable dataset, interval": Case(
        module=Streams,
        trainer={"val_check_interval": 2},
        layouts=(),
        others=("tp",),
        reason=NO_DATA_PARALLEL,
    ),
    "iterable dataset, limit": Case(
        module=Streams,
        trainer={"limit_train_batches": 2},
        layouts=(),
        reason=NO_DATA_PARALLEL,
    ),
    "iterable dataset with a length": Case(
        module=SizedStreams, layouts=(), reason=NO_DATA_PARALLEL
    ),
    "iterable without a loader": Case(module=NoLoader, layouts=("tp",), reason=NO_DATA_PARALLEL),
    "shuffled": Case(
        module=Shuffled, hooks_only=True, reason="orders by seed and epoch alone", layouts=("dp",)
    ),
    "own sampler": Case(module=OwnSampler, layouts=(), others=("dp",)),
    "own batch sampler": Case(module=OwnBatches, layouts=("dp",)),
    "dataloader_iter": Case(
        module=PullsItself,
        refused={"pp": "cannot be cut into microbatches; nearest valid: .* num_microbatches=1"},
        reason="the batch is fetched inside of the step",
    ),
    "batches of dicts": Case(module=Dicts, layouts=("pp",)),
    "evaluation": Case(
        script=evaluate, module=KeepsOutputs, layouts=("zero3",), others=("one", "pp")
    ),
    "evaluation of several loaders": Case(
        script=evaluate, module=TwoValLoaders, layouts=("dp",), others=("one",)
    ),
    "evaluation with limits": Case(
        script=evaluate,
        trainer={"limit_test_batches": 1, "limit_predict_batches": 1, "limit_val_batches": 0.5},
        layouts=(),
    ),
    "evaluation without inference_mode": Case(
        script=evaluate, trainer={"inference_mode": False}, layouts=("pp",)
    ),
    "predictions are dropped": Case(script=predict_without_results, layouts=()),
    "loaders are given": Case(script=with_loaders, layouts=(), others=("pp",)),
    "fit twice": Case(script=fit_twice, layouts=(), others=("pp",)),
    "fit in two Trainers": Case(script=fit_in_two_trainers, layouts=(), others=("pp",)),
}
