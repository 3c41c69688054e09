"""Runs of small modules that write down every hook with the facts that it sees.

A `Case` is data: a module, options of the Trainer, callbacks and a script. `run_case` runs it under
plain Lightning (``layout`` None) or under a layout, and returns a `Record`; `difference` compares
two of them. Callbacks see logged values; hooks of the module see facts only, since at the end of an
epoch under a pipeline they run on one rank.
"""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, ModelHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.strategy.small import dp_of

WIDTH = 4
GLOBAL_BATCH = 8
SAMPLES = 24  # three batches

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"zero": 1}),
    "zero3": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "num_microbatches": 2}),
}
"""Processes and options."""
DATA_PARALLEL = ("dp", "zero3")
BOTH = ("dp", "pp")

Event = tuple[str, tuple[Any, ...], dict[str, float]]
"""Name of a hook, what every layout must see in it, and values."""


def samples(count: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        *(torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    )


class Pair(nn.Module):
    """Two layers, which share their hidden features over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Base(pl.LightningModule):
    """A network that any layout can hold, and every step and loader."""

    dp = 1
    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = PipelineSequential(layers=[Pair(), Pair()])
        # Plain Lightning would round what it loads to the format that the weights were made in.
        self.double()

    def loader(self, dataset: Dataset[Any] | None = None, **options: Any) -> Any:
        """A loader whose batches on all ranks make up the same global batch as on one."""
        size = GLOBAL_BATCH // self.dp
        return DataLoader(samples() if dataset is None else dataset, batch_size=size, **options)

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return self.loader(samples(16, seed=1))

    def test_dataloader(self) -> Any:
        return self.loader(samples(16, seed=2))

    def predict_dataloader(self) -> Any:
        return self.loader(samples(16, seed=3))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _public(*kinds: type) -> set[str]:
    return {n for kind in kinds for n, _ in inspect.getmembers(kind, inspect.isfunction)}


CALLBACK_HOOKS = sorted(
    name
    for name in _public(Callback)
    if name.startswith("on_") or name in ("setup", "teardown", "state_dict", "load_state_dict")
)
MODULE_HOOKS = sorted(
    {name for name in _public(ModelHooks, CheckpointHooks) if name.startswith("on_")}
    | {"on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"}
    | {"prepare_data", "setup", "teardown", "optimizer_step", "optimizer_zero_grad"}
    | {"configure_optimizers", "configure_callbacks", "configure_gradient_clipping"}
    | {"lr_scheduler_step", "training_step", "validation_step", "test_step", "predict_step"}
    | {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
)
DATA_HOOKS = sorted(
    {"on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"}
    | {"prepare_data", "setup", "teardown", "state_dict", "load_state_dict", "on_exception"}
    | {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
)
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _shape(value: Any) -> Any:
    """What an argument of a hook is, without its numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _shape(part) for key, part in value.items()}
    return type(value).__name__ if isinstance(value, Tensor | list | tuple) else "..."


def _numbers(value: Any, name: str) -> dict[str, float]:
    if isinstance(value, Tensor):
        return {name: float(value.detach().double().sum())}
    if isinstance(value, Mapping):
        return {
            k: v for key, part in value.items() for k, v in _numbers(part, f"{name}.{key}").items()
        }
    return {}


def _facts(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[Any, ...]:
    return (
        str(trainer.state.stage and trainer.state.stage.value),
        trainer.global_step,
        trainer.current_epoch,
        trainer.should_stop,
        torch.is_grad_enabled(),
        module.training,
    )


def witness(events: list[Event]) -> Callback:
    """A callback that writes down every hook, and every value that can be seen there."""
    hooks = {n: _seen_by_callback(n, events, getattr(Callback, n)) for n in CALLBACK_HOOKS}
    made: Callback = type("Witness", (Callback,), hooks)()
    return made


def _seen_by_callback(name: str, events: list[Event], original: Any) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("state_dict", "load_state_dict"):
            events.append((f"callback.{name}", (), {}))
            return original(self, *args)
        trainer, module, *others = args
        facts, values = [_facts(trainer, module)], {}
        for position, value in enumerate((*others, *kwargs.values())):
            if name.endswith("_checkpoint"):
                facts.append(sorted(value))
            elif isinstance(value, BaseException):
                facts.append(f"{type(value).__name__}: {value}")
            elif isinstance(value, Tensor | Mapping):
                facts.append(_shape(value))
                values |= _numbers(value, f"argument {position}")
            elif isinstance(value, int):
                facts.append(value)
        for kind in ("callback", "logged", "progress_bar"):
            metrics = dict(getattr(trainer, f"{kind}_metrics"))
            metrics.pop("v_num", None)
            values |= {f"{kind} {key}": float(value) for key, value in metrics.items()}
        events.append((f"callback.{name}", tuple(facts), values))
        return original(self, *args, **kwargs)

    return _as_part_of(original, hook)


def _seen_by_module(name: str, events: list[Event], original: Any, who: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.trainer.lightning_module if who == "data" else self
        facts = [_facts(self.trainer, module)] if self.trainer and module else []
        checkpoint = name.endswith("_checkpoint")
        named = [*args, *(kwargs[key] for key in sorted(kwargs))]
        facts += (
            [sorted(named[0])] if checkpoint else [v for v in named if isinstance(v, int | str)]
        )
        events.append((f"{who}.{name}", tuple(facts), {}))
        return original(self, *args, **kwargs)

    return _as_part_of(original, hook)


def _as_part_of(original: Any, hook: Any) -> Any:
    """The hook, with what Lightning asks of functions; and nobody reads its code as the user's."""
    hook.__signature__ = inspect.signature(original)
    hook.__module__ = Callback.__module__
    return hook


def recorded(kind: type, events: list[Event], hooks: Sequence[str], who: str) -> type:
    """A class that writes down its hooks; Lightning looks on classes for what is overridden."""
    methods = {
        name: _seen_by_module(name, events, getattr(kind, name), who)
        for name in hooks
        if getattr(kind, name, None) is not None
    }
    return type(kind.__name__, (kind,), methods)


@dataclass
class Record:
    """All that a run of a case showed on one rank."""

    events: list[Event] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What every layout must find: numbers of steps, names of files, what a script returns."""
    values: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    """What a data-parallel rank has a part of."""
    first: dict[str, Any] = field(default_factory=dict)
    """What rank 0 alone has: loggers."""
    error: str = ""


class Run:
    """What a script of a case has at hand."""

    def __init__(
        self, case: "Case", layout: Mapping[str, Any] | None, devices: int, directory: Path
    ) -> None:
        self.case, self.layout, self.devices, self.directory = case, layout, devices, directory
        self.record = Record()
        self.dp = dp_of(devices, layout or {})

    def module(self, kind: type[Base] | None = None, *args: Any, **kwargs: Any) -> Any:
        """A module that writes down its hooks."""
        kind = recorded(kind or self.case.module, self.record.events, MODULE_HOOKS, "module")
        module = kind(*args, **kwargs)
        module.dp = self.dp
        return module

    def trainer(self, callbacks: Sequence[Callback] | None = None, **options: Any) -> pl.Trainer:
        """A quiet Trainer with the case's options, its callbacks and a witness in front."""
        if callbacks is None:
            callbacks = self.case.callbacks(self.directory)
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "precision": "64-true",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        made = self.case.made_options(self.directory)
        return pl.Trainer(
            strategy="auto" if self.layout is None else MegatronStrategy(**self.layout),
            devices=self.devices,
            default_root_dir=self.directory,
            callbacks=[witness(self.record.events), *callbacks],
            **{**quiet, **self.case.trainer, **made, **options},
        )

    def note(self, **facts: Any) -> None:
        """Keep facts that every layout must find."""
        self.record.facts |= facts

    def finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep the state that the run ended in."""
        self.note(
            global_step=trainer.global_step,
            current_epoch=trainer.current_epoch,
            status=str(trainer.state.status),
            training=module.training,
            num_training_batches=str(trainer.num_training_batches),
            learning_rates=[g["lr"] for o in trainer.optimizers for g in o.param_groups],
        )
        # Rank 0 removes files while the others are here.
        self.record.first["files"] = sorted(p.name for p in self.directory.rglob("*.ckpt"))
        self.record.values |= {k: float(v) for k, v in trainer.callback_metrics.items()}
        whole = module.state_dict() if self.layout is None else lightning_megatron.gather(module)
        self.record.weights = {k: v.detach().clone() for k, v in whole.items()}


def fit(run: Run) -> None:
    """The usual script."""
    trainer, module = run.trainer(), run.module()
    trainer.fit(module)
    run.finish(trainer, module)


@dataclass(frozen=True)
class Case:
    """One way to use Lightning.

    Attributes:
        module: class of the module.
        trainer: options of the Trainer.
        callbacks: makes the callbacks; gets the run's directory.
        made_options: makes options that must be new for each Trainer.
        script: what is called, `fit` by default.
        layouts: names of the `LAYOUTS` under which the case is run, beside one process: where ranks
            could differ from it, and of similar cases one.
        others: of similar cases the layouts of the others (``"one"`` too), under which
            `make test-all` runs them.
        refused: patterns of the error that a layout, or ``"one"`` process, gives instead.
        unlike: parts of events' names that are not compared under a layout.
        rounding: relative difference of values under a layout.
        hooks_only: whether values and weights are left out.
        reason: why something is refused or not compared.
    """

    module: type[Base] = Base
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], list[Callback]] = lambda _: []
    made_options: Callable[[Path], dict[str, Any]] = lambda _: {}
    script: Callable[[Run], None] = fit
    layouts: Sequence[str] = ("pp",)
    others: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    unlike: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounding: float = 1e-10
    hooks_only: bool = False
    reason: str = ""


def run_case(case: Case, layout: str | None, directory: Path) -> Record:
    """Run a case under plain Lightning (None), in one process (``"one"``) or under a layout."""
    devices, options = LAYOUTS.get(layout or "", (1, {}))
    os.environ.pop("PL_GLOBAL_SEED", None)
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(case, None if layout is None else options, devices, directory)
    torch.manual_seed(7)
    try:
        case.script(run)
    except Exception as error:
        run.record.error = f"{type(error).__name__}: {error}"
    return run.record


def _same(ours: Any, plain: Any, rel: float) -> bool:
    if isinstance(plain, float) and isinstance(ours, float):
        return math.isclose(ours, plain, rel_tol=rel, abs_tol=rel) or (
            math.isnan(ours) and math.isnan(plain)
        )
    return bool(ours == plain)


def _first_difference(ours: Sequence[Event], plain: Sequence[Event], rel: float) -> str:
    for index, ((name, facts, values), (p_name, p_facts, p_values)) in enumerate(
        zip(ours, plain, strict=False)
    ):
        before = [e[0] for e in plain[max(0, index - 3) : index]]
        where = f"event {index}, after {before}"
        if (name, facts) != (p_name, p_facts):
            return f"{where}: {name} {facts}; plain: {p_name} {p_facts}"
        if values.keys() != p_values.keys():
            return f"{where}: {name}: {sorted(values)}; plain: {sorted(p_values)}"
        for key, value in p_values.items():
            if not _same(values[key], value, rel):
                return f"{where}: {name}: {key} = {values[key]}; plain: {value}"
    if len(ours) != len(plain):
        longer = max(ours, plain, key=len)
        rest = [e[0] for e in longer[min(len(ours), len(plain)) :]][:5]
        return f"{len(ours)} events; plain: {len(plain)}; the rest begins with {rest}"
    return ""


def difference(ours: Record, plain: Record, rel: float = 0.0) -> str:
    """What is not the same in two records; empty if nothing."""
    if ours.error != plain.error:
        return f"error {ours.error!r}; plain: {plain.error!r}"
    found = _first_difference(ours.events, plain.events, rel)
    if found:
        return found
    for kind in ("facts", "own", "first"):
        mine, theirs = getattr(ours, kind), getattr(plain, kind)
        keys = [k for k in mine | theirs if mine.get(k) != theirs.get(k)]
        if keys:
            return "; ".join(f"{k}: {mine.get(k)}; plain: {theirs.get(k)}" for k in keys)
    for kind in ("values", "weights"):
        mine, theirs = getattr(ours, kind), getattr(plain, kind)
        if mine.keys() != theirs.keys():
            return f"{kind}: {sorted(mine)}; plain: {sorted(theirs)}"
    for key, value in plain.values.items():
        if not _same(ours.values[key], value, rel):
            return f"{key} = {ours.values[key]}; plain: {value}"
    for key, weight in plain.weights.items():
        if not torch.allclose(ours.weights[key], weight, rtol=rel, atol=rel):
            return f"weight {key}: off by {(ours.weights[key] - weight).abs().max():.2e}"
    return ""


def comparable(record: Record, case: Case, layout: str = "one", rank: int = 0) -> Record:
    """The part of a record that a rank of a layout has in common with plain Lightning.

    A step runs once for each microbatch under a pipeline, and data-parallel ranks have a loss each.
    Hooks of the module are looked at on rank 0 only.
    """
    events: list[Event] = []
    for name, facts, values in record.events:
        if rank and not name.startswith("callback."):
            continue
        if any(part in name for part in case.unlike.get(layout, ())):
            continue
        if case.hooks_only:
            values = {}
        elif layout in DATA_PARALLEL:
            values = {k: v for k, v in values.items() if not k.startswith("argument")}
        event = (name, facts, values)
        if layout == "pp" and name.endswith(STEPS) and events and events[-1] == event:
            continue
        events.append(event)
    found = replace(record, events=events, first={} if rank else record.first)
    if case.hooks_only:
        found = replace(found, values={}, weights={})
    return replace(found, own={}) if layout in DATA_PARALLEL else found
