"""What users write around a step: outputs for hooks, metrics, samplers, hooks of parameters.

Each habit is a module of its own; `notes` collects what it has found out on the way.
"""

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric

from lightning_megatron import PipelineSequential, adopt
from tests.parity.strangers import CLASSES, Stranger

# Outputs of steps beside the loss -----------------------------------------------------------------


def found_in(x: Tensor, y: Tensor, out: Tensor) -> dict[str, Any]:
    """What users return of a batch beside its loss."""
    right = out.argmax(-1) == y
    return {
        "right": right.sum(),
        "count": right.sum().item(),
        "size": len(x),
        "accuracy": right.double().mean(),
        "sum": out.sum(),
        "least": out.min(),
        "most": float(out.max()),
        "of_class": torch.bincount(y, minlength=CLASSES),
        "mean_of_class": out.mean(0),
        "of_each": F.cross_entropy(out, y, reduction="none"),
        "array": out.detach().numpy().sum(0),
        "list": [len(y), float(out.sum())],
        "names": [f"{label}" for label in y.tolist()],
        "name": f"{len(x)} samples",
        "nothing": None,
        "pair": (out.detach(), y),
    }


def numbers_in(found: Any) -> list[float]:
    """All numbers of outputs, in one order."""
    if isinstance(found, dict):
        return [x for key in sorted(found) if key != "loss" for x in numbers_in(found[key])]
    if isinstance(found, list | tuple):
        return [x for item in found for x in numbers_in(item)]
    if isinstance(found, str):
        return [float(found.split()[0])]
    if found is None:
        return [-1.0]
    return [float(x) for x in np.asarray(found).reshape(-1)]


class NotesOutputs(Stranger):
    """Hooks see what steps have returned beside their loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        return {"loss": F.cross_entropy(out, y), **found_in(x, y, out.detach())}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return found_in(x, y, self.net(x))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes += numbers_in(outputs)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes += numbers_in(outputs)


class NotesLoss(Stranger):
    """A validation step that returns a number alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum")

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(outputs)


class CountsAndReturns(Stranger):
    """Steps fill metrics, lists, objects and a buffer, and return a number to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()
        self.meter = Meter()
        self.seen: list[Tensor] = []
        self.register_buffer("total", torch.zeros(()).double())
        self.alias = self.seen
        self.samples = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.log("sum", out.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.metric.update(y)
        self.meter.metric.update(y)
        self.seen.append(out.detach().sum(0))
        self.total += y.sum()
        self.samples += len(x)
        return {"loss": F.cross_entropy(out, y), "right": (out.argmax(-1) == y).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(outputs["right"])
        self.notes += [float(self.total), self.samples]
        self.note(torch.stack(self.alias).sum())

    def on_train_epoch_end(self) -> None:
        self.note(self.metric.compute())
        self.note(self.meter.metric.compute())


class CountsTokens(Stranger):
    """A hook sees over how many tokens the loss is a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, ignore_index=0, reduction="sum")
        return {"loss": loss, "num_tokens": (y != 0).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(self.all_gather(outputs["num_tokens"]).sum())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class ReturnsUnlike(Stranger):
    """A step that returns a number to a hook, and cannot run without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        [slope] = torch.autograd.grad(loss, out, retain_graph=True)
        return {"loss": loss, "slope": slope.norm()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(outputs["slope"])


class WithLoss(nn.Module):
    """A last item that returns a number beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), x.square().mean()


class NumberOfTrunk(Stranger):
    """Rows of outputs for a hook, and a number of the trunk's in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(blocks=[nn.Linear(6, 6), nn.Tanh()], head=WithLoss())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out, size = self.net(x)
        return {"loss": F.cross_entropy(out, y) + 0.1 * size, **self.more(out, size)}

    def more(self, out: Tensor, size: Tensor) -> Any:
        return {"out": out}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(sum(value.detach().sum() for value in outputs.values()))


class NumberOfTrunkForHook(NumberOfTrunk):
    """The number goes to a hook."""

    def more(self, out: Tensor, size: Tensor) -> Any:
        return {"size": 2 * size}


class GathersOutputs(Stranger):
    """Numbers of the batches of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        return {"loss": F.cross_entropy(out, y), "size": len(x), "least": out.min(), "out": out}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(self.all_gather(outputs["least"].detach()).min())
        self.note(self.all_gather(outputs["out"].detach()).sum())
        self.note(self.all_gather(torch.tensor(outputs["size"])).sum())


class PredictsCounts(Stranger):
    """Predictions that are no tensors with a row for each sample."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        return torch.stack([out.sum(), out.min(), torch.tensor(len(out)).double()])

    def predict_dataloader(self) -> Any:
        return self.train_dataloader()


# Metrics ------------------------------------------------------------------------------------------


class Meter:
    """An object of the user's with a metric inside."""

    def __init__(self) -> None:
        self.metric = SumMetric()


class Metrics(L.Callback):
    """Metrics of a callback: made in a hook, in a collection, in an object, nested."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.made = SumMetric()
        self.both = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})
        self.meter = Meter()
        self.nested = {"train": {"all": [CatMetric()]}}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.late = {"late": SumMetric()}

    def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, *__: Any) -> None:
        y = batch[1].double()
        for metric in (self.made, self.both, self.meter.metric, self.late["late"]):
            metric.update(y)
        self.nested["train"]["all"][0].update(y)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.note(self.made.compute())
        for value in self.both.compute().values():
            module.note(value)
        module.note(self.meter.metric.compute())
        module.note(self.late["late"].compute())
        values = self.nested["train"]["all"][0].compute()
        module.note(len(values))
        module.note(values.sum())


class MetricsElsewhere(Stranger):
    """Metrics in a callback, an object, and made in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def on_train_start(self) -> None:
        self.late = [MeanMetric()]
        self.collection = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        local = SumMetric()
        local.update(batch[1])
        self.note(local.compute())
        self.meter.metric.update(batch[1])
        self.late[0].update(batch[1].double())
        self.collection.update(batch[1].double())

    def on_train_epoch_end(self) -> None:
        self.note(self.meter.metric.compute())
        self.note(self.late[0].compute())
        self.notes += [float(x) for x in self.collection.compute().values()]

    def configure_callbacks(self) -> Any:
        return [Metrics()]


class MetricsInSteps(Stranger):
    """Steps update metrics in an object and in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.nested = {"train": {"sum": SumMetric()}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.meter.metric.update(out.detach().abs().sum() + y.sum())
        self.nested["train"]["sum"].update(out.detach().abs().sum())
        return F.cross_entropy(out, y)

    def on_train_epoch_end(self) -> None:
        self.note(round(float(self.meter.metric.compute()), 4))
        self.note(round(float(self.nested["train"]["sum"].compute()), 4))


# Samplers -----------------------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        g = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=g).double(), index % CLASSES, index


class Sampled(Stranger):
    """Reads a part of a dataset, as its sampler says; the base of those below."""

    def sampler(self) -> Any:
        return SequentialSampler(range(8))

    def train_dataloader(self) -> Any:
        size = getattr(self.trainer.strategy, "data_parallel_size", 1)
        return DataLoader(Numbered(), batch_size=4 // size, sampler=self.sampler())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch[:2])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes += sorted(self.all_gather(batch[2]).flatten().tolist())


class First(Sampled):
    pass


class Permuted(Sampled):
    """Each of eight once: which of them come first is not what one process draws."""

    def sampler(self) -> Any:
        return RandomSampler(range(8))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes += self.all_gather(batch[2]).flatten().tolist()
        self.notes.sort()


class PermutedByOwn(Permuted):
    def sampler(self) -> Any:
        return RandomSampler(range(6), generator=torch.Generator().manual_seed(3))


class PermutedByLoader(Permuted):
    """The loader makes the sampler, with a generator of the user's."""

    def train_dataloader(self) -> Any:
        size = getattr(self.trainer.strategy, "data_parallel_size", 1)
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Numbered(), batch_size=4 // size, shuffle=True, generator=generator)


class Subset(Permuted):
    def sampler(self) -> Any:
        return SubsetRandomSampler(range(4, 12), generator=torch.Generator().manual_seed(3))


class Weighted(Sampled):
    def sampler(self) -> Any:
        g = torch.Generator().manual_seed(3)
        return WeightedRandomSampler([1.0] * 4 + [0.0] * 12, 8, generator=g)


class Own(Sampler[int]):
    def __iter__(self) -> Any:
        return iter((3, 1, 4, 15, 9, 2, 6, 5))

    def __len__(self) -> int:
        return 8


class OwnSampler(Sampled):
    def sampler(self) -> Any:
        return Own()


class Reversed(Sampled):
    """A sampler's class of the user's, with torch's as its base."""

    def sampler(self) -> Any:
        class Back(SequentialSampler):
            def __iter__(self) -> Any:
                return iter(reversed(range(len(self.data_source))))

        return Back(range(8))


class Adaptive(Sampled):
    """A sampler that goes by what was trained on up to then."""

    def sampler(self) -> Any:
        module = self

        class FromThere(Own):
            def __iter__(self) -> Any:
                return ((index + 3 * len(module.notes)) % 16 for index in range(8))

        return FromThere()


# Gradients ----------------------------------------------------------------------------------------


class ClipsEach(Stranger):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            self.note(clip_grad_norm_([p], 0.05))


class ClipsItems(Stranger):
    """Clips each item of a network by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for item in self.net.children():
            clip_grad_norm_(item.parameters(), 0.05)


class HooksAccumulated(Stranger):
    """Notes and scales gradients as they arrive."""

    def on_fit_start(self) -> None:
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self.scale)

    def scale(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(1 / (1 + p.grad.norm()))


class GradientPenalty(Stranger):
    """A penalty on the derivative of the output by the input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = self.net(x)
        [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * slope.square().mean()


class Adversarial(Stranger):
    """The derivative by the input in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            [slope] = torch.autograd.grad(self.loss(x, y), x)
        self.log("slope", slope.abs().mean(), on_epoch=True, sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class NotesAccumulated(Stranger):
    """Each gradient once a batch, in two batches before a step."""

    def on_fit_start(self) -> None:
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self.see)

    def see(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-0.02, 0.02)


class Maml(Stranger):
    """One inner step for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        total: Any = 0.0
        weights = dict(self.net.named_parameters())
        for one, label in zip(x, y, strict=True):
            out = torch.func.functional_call(self.net, weights, (one[None],))
            grads = torch.autograd.grad(
                F.cross_entropy(out, label[None]), list(weights.values()), create_graph=True
            )
            fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            out = torch.func.functional_call(self.net, fast, (one[None],))
            total = total + F.cross_entropy(out, label[None])
        return total / len(x)


class PenaltyByCriterion(Stranger):
    """A criterion that is given the network."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Criterion()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.criterion(self.net, self.net(x), y)


class Criterion(nn.Module):
    def forward(self, net: nn.Module, out: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in net.parameters())
        return F.cross_entropy(out, y) + 0.01 * penalty


class CompilesBeside(Stranger):
    """A compiled network beside the plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net, backend="eager")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fast(x), y)


class Wraps(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return 0.5 * self.inner(x)


class InTwo(Stranger):
    """A network that is in another module as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Wraps(self.net)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x) + self.scaled(x), y)


# Logs, random numbers, networks ----------------------------------------------------------------


class LogsEach(Stranger):
    """Logs a number of each parameter after a batch, and what hooks of layers have seen."""

    def on_fit_start(self) -> None:
        self.sizes: dict[str, float] = {}
        for name, layer in self.net.named_modules():
            if isinstance(layer, nn.Tanh | nn.LayerNorm):
                layer.register_forward_hook(self.saw(name))

    def saw(self, name: str) -> Any:
        def hook(layer: Any, args: Any, output: Any) -> None:
            self.sizes[name] = float(output.detach().abs().mean())

        return hook

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            self.log(f"norm/{name}", p.detach().norm())
        for name, size in self.sizes.items():
            self.log(f"size/{name}", size)


class NoisyGradients(Stranger):
    """Draws in hooks, as in Langevin dynamics."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.manual_seed(self.global_step)
        for p in self.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p), alpha=0.01)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        torch.manual_seed(self.global_step + 100)
        for p in self.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)


class OfDicts(nn.Module):
    """A network whose blocks are no modules that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}) for _ in range(2)
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block["down"](block["up"](x).tanh())  # type: ignore[index]
        return self.head(x)


class AdoptsDicts(Stranger):
    """A network of one's own, adopted."""

    def make_net(self) -> Any:
        return adopt(OfDicts())


def _among(first: str, last: str) -> dict[str, type[Stranger]]:
    """Modules of this file from one to another, by name."""
    names = [
        name
        for name, kind in globals().items()
        if isinstance(kind, type) and issubclass(kind, Stranger) and kind.__module__ == __name__
    ]
    chosen = names[names.index(first) : names.index(last) + 1]
    return {name: globals()[name] for name in chosen if name != "Sampled"}


OUTPUTS = _among("NotesOutputs", "PredictsCounts")
METRICS = _among("MetricsElsewhere", "MetricsInSteps")
SAMPLERS = _among("First", "Adaptive")
GRADIENTS = _among("ClipsEach", "AdoptsDicts")
