"""Modules that compute at the end of an epoch, and between batches, from what steps have filled.

`notes` collects what they have found out. Callbacks monitor what they log, and decide by it.
"""

from collections import Counter, defaultdict, deque
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_megatron import PipelineSequential

WIDTH, CLASSES, SAMPLES, BATCH = 4, 3, 24, 8


class Average:
    """A meter as users write them."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count


class ByHand(L.LightningModule):
    """Metrics, lists, counters, dicts, a meter and a buffer, all read at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(
            layers=[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)],
            head=nn.Linear(WIDTH, CLASSES),
        )
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.several = MetricCollection(
            [MulticlassAccuracy(CLASSES, average="micro"), MulticlassF1Score(CLASSES)]
        )
        self.logits_mean = MeanMetric()
        self.register_buffer("confusion", torch.zeros(CLASSES, CLASSES, dtype=torch.float64))
        self.outputs: list[Tensor] = []
        self.by_class: dict[int, list[float]] = {}
        self.counts: Counter[int] = Counter()
        self.meter = Average()
        self.seen_in_training = 0
        self.train_losses: list[Tensor] = []
        self.temperature = 1.0
        self.unshareable = {"net": self.trunk, "hook": lambda: 0}
        self.notes: list[Any] = []

    def data(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=BATCH)

    def train_dataloader(self) -> Any:
        return self.data(0)

    def val_dataloader(self) -> Any:
        return self.data(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.trunk(x) / self.temperature, y)
        self.seen_in_training += len(y)
        self.train_losses.append(loss.detach() * len(y))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.stack(self.train_losses).sum() / self.seen_in_training)
        self.train_losses.clear()
        self.seen_in_training = 0
        self.temperature *= 0.9

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.trunk(x)
        loss = F.cross_entropy(logits, y)
        guess = logits.argmax(-1)
        self.accuracy.update(guess, y)
        self.several.update(guess, y)
        self.logits_mean.update(logits)
        self.confusion.index_put_((y, guess), torch.ones(()).double(), accumulate=True)
        self.outputs.append(loss * len(y))
        losses = F.cross_entropy(logits, y, reduction="none")
        for label, value in zip(y.tolist(), losses.tolist(), strict=True):
            self.by_class.setdefault(label, []).append(value)
        self.counts.update(guess.tolist())
        self.meter.add(float(loss), len(y))

    def on_validation_epoch_end(self) -> None:
        self.log("acc", self.accuracy.compute())
        self.log_dict(self.several.compute())
        self.log("logits", round(float(self.logits_mean.compute()), 7))  # it adds in float32
        self.log("diagonal", self.confusion.diagonal().sum() / self.confusion.sum())
        self.log("stacked", torch.stack(self.outputs).sum() / SAMPLES)
        self.log("first_class", sum(self.by_class[0]) / len(self.by_class[0]))
        self.log("most_guessed", float(self.counts.most_common(1)[0][1]))
        self.log("val", self.meter.total / self.meter.count)
        for metric in (self.accuracy, self.several, self.logits_mean):
            metric.reset()
        self.confusion.zero_()
        self.outputs.clear()
        self.by_class.clear()
        self.counts.clear()
        self.meter = Average()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

    def configure_callbacks(self) -> Any:
        return [
            ModelCheckpoint(filename="{epoch}-{val:.6f}-{acc:.4f}", monitor="val", save_top_k=1),
            EarlyStopping("val", min_delta=0.02, patience=0),
        ]

    def on_fit_end(self) -> None:
        assert 1 < self.trainer.current_epoch < 6, "early stopping has to decide something"
        best = self.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        self.notes += [self.trainer.current_epoch, self.temperature, Path(best).name]


class LastValues(L.Callback):
    """Notes what is logged after each batch."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        logged = trainer.callback_metrics
        module.rows.append(tuple(float(logged[k]) for k in module.LOGGED if k in logged))


class BetweenBatches(ByHand):
    """Hooks after each batch log what the step filled; some of that cannot be pickled.

    One of the values names and chooses checkpoints.
    """

    LOGGED = ("summed", "label_0", "running", "train_acc")

    def __init__(self) -> None:
        super().__init__()

        class Local(Average):
            pass

        self.rows: list[tuple[float, ...]] = []
        self.losses: list[float] = []
        self.by_label: dict[int, list[int]] = defaultdict(lambda: [0])
        self.local = Local()
        self.phases = {"train": MulticlassAccuracy(CLASSES)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.trunk(x) / self.temperature
        loss = F.cross_entropy(logits, y)
        self.losses.append(float(loss.detach()) * len(y))
        for label in logits.argmax(-1).tolist():
            self.by_label[label][0] += 1
        self.local.add(float(loss.detach()), len(y))
        self.phases["train"].update(logits.argmax(-1), y)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("summed", self.losses_so_far(), batch_size=1)
        self.log("label_0", float(self.by_label[0][0]), batch_size=1)
        self.log("running", self.local.total / self.local.count, batch_size=1)
        self.log("train_acc", self.phases["train"].compute(), batch_size=1)

    def losses_so_far(self) -> float:
        return sum(self.losses)

    def on_train_epoch_end(self) -> None:
        self.losses.clear()
        self.by_label.clear()
        self.phases["train"].reset()

    def configure_callbacks(self) -> Any:
        name = "{step}-{running:.6f}"
        best = ModelCheckpoint(None, name, "running", every_n_train_steps=2, save_top_k=2)
        return [LastValues(), best]

    def on_fit_end(self) -> None:
        assert len(set(self.rows)) == len(self.rows) == 6
        best: Any = self.trainer.checkpoint_callback
        self.notes += [value for row in self.rows for value in row]
        self.notes += sorted(Path(path).name for path in best.best_k_models)


class AfterBatches(L.LightningModule):
    """A hook after each batch notes what it reads; the subclasses say what steps fill."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        self.trunk = PipelineSequential(layers=layers)
        self.train_losses: list[float] = []
        self.meter = Average()
        self.reduce = {"mean": lambda values: sum(values) / len(values), "last": lambda v: v[-1]}
        self.notes: list[Any] = []

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x), batch_size=BATCH)

    def loss(self, batch: Any) -> Tensor:
        return self.trunk(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        assert len(set(self.notes)) == 3


class NamedByStage(AfterBatches):
    """The step makes up the name of the list that it fills."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def shared_step(self, batch: Any, stage: str) -> Tensor:
        loss = self.loss(batch)
        getattr(self, f"{stage}_losses").append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        # A list holds the losses of microbatches, as many in each batch.
        self.notes.append(sum(self.train_losses) / len(self.train_losses))


class WithMeter(AfterBatches):
    """The step fills an object of a plain class."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.meter.add(float(loss.detach()), BATCH)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(self.meter.total / self.meter.count)


class WithFunctions(AfterBatches):
    """The step and the hook use functions in a dict that nobody changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_losses.append(self.reduce["last"]([float(loss.detach())]))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(self.reduce["mean"](self.train_losses))


class NotedByRank(AfterBatches):
    """A hook before each batch notes the rank; the step only reads that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(self.notes) == batch_idx + 1
        return self.loss(batch)

    def on_train_batch_start(self, *args: Any) -> None:
        self.notes.append(self.global_rank)

    def on_train_end(self) -> None:
        pass


class Reporter:
    """Looks into a module for it."""

    def report(self, module: Any) -> float:
        return sum(module.train_losses) / len(module.train_losses)


class ReadByOther(AfterBatches):
    """The hook has an object read what the step fills, and mentions no name of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reporter = Reporter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(self.reporter.report(self))


class ReadByName(ReadByOther):
    """The hook makes a function that reads an attribute by its name."""

    def on_train_batch_end(self, *args: Any) -> None:
        losses = attrgetter("train_losses")(self)
        self.notes.append(sum(losses) / len(losses))


class CallsTrunk(ByHand):
    """Calls its trunk where the stages of a pipeline do not."""

    def on_train_epoch_end(self) -> None:
        self.trunk(torch.zeros(1, WIDTH, dtype=torch.float64))


class Unshareable(ByHand):
    """Hooks read a container that holds, further in, what no process can give to another."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Any]] = {"val": []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = float(self.trunk(batch[0]).sum())
        self.calls["val"].append(lambda: value)

    def on_validation_epoch_end(self) -> None:
        self.log("val", sum(call() for call in self.calls["val"]))


class FillsTable(AfterBatches):
    """The step writes into an array that is too large to be looked at in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros((1 << 18,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.table[batch_idx] += float(loss.detach()) * len(batch[0])
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(self.table.sum())


class SharesTable(FillsTable):
    """The same, named."""

    shared_between_stages = ("table",)


class Draws(AfterBatches):
    """The step draws behind the trunk; nothing outside of the generator tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float(self.generator.random())

    def on_train_epoch_end(self) -> None:
        self.notes.append(self.generator.bit_generator.state["state"]["state"] % 1000)

    def on_train_end(self) -> None:
        pass


class Nested(AfterBatches):
    """The step fills what stands in other things, small arrays, sets and queues."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"sums": {"loss": torch.zeros((), dtype=torch.float64)}, "seen": [[0], [1.0]]}
        self.counts = np.zeros(3)
        self.newest: deque[float] = deque(maxlen=2)
        self.found: set[int] = set()
        self.averages = [Average()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = float(loss.detach()) * len(batch[0])
        self.state["sums"]["loss"] += value
        self.state["seen"][1][0] += value
        self.counts[batch_idx] += value
        self.newest.append(value)
        self.found.add(batch_idx)
        self.averages[0].add(value, 1)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        sums: Any = self.state["sums"], self.state["seen"]
        numbers = (float(sums[0]["loss"]), float(sums[1][1][0]), float(self.counts.sum()))
        self.notes.append(sum(numbers) + len(self.found) + self.averages[0].total)
        assert len(self.newest) > 0


class NormsBehind(AfterBatches):
    """A batch norm behind the trunk, whose statistics kernels write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.norm(self.trunk(batch[0]))
        return out.square().mean() + out.sin().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(float(self.norm.running_mean.sum() + self.norm.running_var.sum()))


FILLING: dict[str, type[AfterBatches]] = {
    kind.__name__: kind
    for kind in (
        *(NamedByStage, WithMeter, WithFunctions, ReadByOther, ReadByName),
        *(SharesTable, Nested),
    )
}
"""Ways of steps to fill what a hook reads."""
