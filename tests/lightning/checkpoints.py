"""Cases of checkpoints, data modules and the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from tests.lightning.callbacks import Counts, Logged
from tests.lightning.logs import Parameters
from tests.lightning.optimizers import EachStep, Lists, Plateau
from tests.lightning.record import (
    DATA_HOOKS,
    GLOBAL_BATCH,
    LAYOUTS,
    Base,
    Case,
    Run,
    recorded,
    samples,
    witness,
)


class Momentum(EachStep):
    """An optimizer with a state, and a scheduler."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["optimizer"].param_groups[0]["momentum"] = 0.9
        return found


class Extra(Logged):
    """Puts something of its own into its checkpoints."""

    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"epoch": self.current_epoch, "list": [1, "two"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]


class SavesInHook(Base):
    """Saves by itself in the middle of an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            root = Path(self.trainer.default_root_dir)
            self.trainer.save_checkpoint(root / "middle.ckpt")


def resume(run: Run, *, options: dict[str, Any], path: str = "", weights: bool = False) -> None:
    """Save, and go on in another Trainer."""
    trainer = run.trainer(**options)
    trainer.fit(run.module())
    saved = run.directory / (path or "saved.ckpt")
    if not path:
        trainer.save_checkpoint(saved, weights_only=weights)
    after = run.module()
    trainer = run.trainer()
    trainer.fit(after, ckpt_path=saved)
    note(run, trainer, after)


def note(run: Run, trainer: pl.Trainer, module: Any) -> None:
    """What came back."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Counts):
            run.note(**{callback.state_key: callback.batches})
        if isinstance(callback, EarlyStopping):
            run.note(waited=callback.wait_count)
    loops = trainer.fit_loop
    run.note(
        batches=loops.epoch_loop.total_batch_idx,
        epochs=loops.epoch_progress.total.completed,
        steps=loops.epoch_loop.automatic_optimization.optim_progress.optimizer_steps,
        found=getattr(module, "found", None),
        hparams=dict(module.hparams),
    )
    run.finish(trainer, module)


def after_epoch(run: Run) -> None:
    resume(run, options={"max_epochs": 1})


def in_accumulation(run: Run) -> None:
    resume(run, options={"limit_train_batches": 1, "max_epochs": 1})


def from_hook(run: Run) -> None:
    resume(run, options={"max_epochs": 1}, path="middle.ckpt")


def from_weights(run: Run) -> None:
    resume(run, options={"max_epochs": 1}, weights=True)


def nothing_left(run: Run) -> None:
    """The checkpoint is at the end already."""
    resume(run, options={})


def best_and_last(run: Run) -> None:
    """Evaluate what ModelCheckpoint kept, and go on from the last."""
    trainer, module = run.trainer(), run.module()
    trainer.fit(module)
    for path in ("best", "last"):
        results = trainer.test(ckpt_path=path, verbose=False)
        run.record.values[path] = results[0]["test"]
        results = trainer.validate(module, ckpt_path=path, verbose=False)
        run.record.values[f"{path} val"] = results[0]["val"]
        run.record.own[path] = round(float(trainer.predict(ckpt_path=path)[0].sum()), 9)
    trainer = run.trainer(max_epochs=4)
    trainer.fit(module, ckpt_path="last")
    note(run, trainer, module)


def missing(run: Run) -> None:
    run.trainer().fit(run.module(), ckpt_path="best")


def before_fit(run: Run) -> None:
    run.trainer().save_checkpoint(run.directory / "a.ckpt")


class Data(pl.LightningDataModule):
    """Its loaders, and a state of its own."""

    def __init__(self, dp: int = 1, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.dp, self.scale, self.loads = dp, scale, 0

    def _loader(self, seed: int, count: int = 16) -> Any:
        return DataLoader(samples(count, seed), batch_size=GLOBAL_BATCH // self.dp)

    def train_dataloader(self) -> Any:
        self.loads += 1
        return self._loader(0, 24)

    def val_dataloader(self) -> Any:
        return [self._loader(1), self._loader(2)]

    def test_dataloader(self) -> Any:
        return self._loader(3)

    def predict_dataloader(self) -> Any:
        return self._loader(4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * self.scale for part in batch]

    def state_dict(self) -> dict[str, Any]:
        return {"loads": self.loads}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads = state_dict["loads"]


class Moves(Data):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [part.to(device) for part in batch]

    def prepare_data(self) -> None:
        (Path(self.trainer.default_root_dir) / "prepared").touch()  # type: ignore[union-attr]


class OwnHooks(Base):
    """Changes batches on their way."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part + 1 for part in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * 2 for part in batch]


def with_data(run: Run, kind: type[Data] = Data) -> None:
    """Every call with a data module, and a run that goes on."""
    kind = recorded(kind, run.record.events, DATA_HOOKS, "data")
    trainer, module, data = run.trainer(max_epochs=1), run.module(), kind(run.dp, 0.5)
    trainer.fit(module, datamodule=data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    trainer.save_checkpoint(run.directory / "data.ckpt")
    module, data = run.module(), kind(run.dp, 0.5)
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, datamodule=data, ckpt_path=run.directory / "data.ckpt")
    run.note(loads=data.loads)
    run.finish(trainer, module)


def with_other_data(run: Run) -> None:
    with_data(run, Moves)


class Told(Parameters):
    """A module of the command line."""

    def __init__(self, width: int = 3, name: str = "x") -> None:
        super().__init__(width, name)
        self.lr = 0.01 * width


def command_line(run: Run) -> None:
    """Fit, and go on from a checkpoint with its hyper-parameters."""
    kind = recorded(Told, run.record.events, ("on_fit_start", "on_train_epoch_start"), "module")

    class Command(LightningCLI):
        def before_fit(self) -> None:
            run.record.events.append(("cli.before_fit", (), {}))

        def after_fit(self) -> None:
            run.record.events.append(("cli.after_fit", (), {}))

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.link_arguments("model.width", "data.scale", compute_fn=lambda w: w / 2)

    def call(*args: str) -> None:
        if run.layout is not None:
            strategy = "--trainer.strategy"
            options = (f"{strategy}.{name}={value}" for name, value in run.layout.items())
            kind_of_strategy = "lightning_megatron.MegatronStrategy" if run.layout else "megatron"
            args = (*args, f"{strategy}={kind_of_strategy}", *options)
        defaults = {
            **{"accelerator": "cpu", "precision": "64-true", "devices": run.devices},
            **{"default_root_dir": str(run.directory), "logger": False},
            **{"enable_progress_bar": False, "enable_model_summary": False},
            **{"enable_checkpointing": False, "callbacks": [witness(run.record.events)]},
        }
        cli = Command(
            kind,
            Data,
            args=list(args),
            trainer_defaults=defaults,
            seed_everything_default=3,
            save_config_kwargs={"overwrite": True},
        )
        run.note(hparams=cli.model.hparams["width"], scale=cli.datamodule.scale)
        run.finish(cli.trainer, cli.model)

    epochs = "--trainer.max_epochs=1"
    call("fit", epochs, "--model.width=4", f"--data.dp={run.dp}")
    call("validate", "--model.width=5", f"--data.dp={run.dp}", "--verbose=false")


LOADED = ("on_load_checkpoint", "load_state_dict")
AFTER_SETUP = (
    "training goes on with the next sample, not with the first of the epoch; and a checkpoint is "
    "read when its shards have their place, as under FSDP"
)

RESUMED = {
    "after an epoch": Case(Momentum, script=after_epoch, layouts=("dp",), others=("pp",)),
    "in mid-accumulation": Case(
        Momentum, script=in_accumulation, trainer={"accumulate_grad_batches": 2}, layouts=("pp",)
    ),
    "saved in a hook": Case(
        SavesInHook, script=from_hook, hooks_only=True, layouts=("dp",), others=("one",)
    ),
    "at its end": Case(Momentum, script=nothing_left, layouts=()),
    "callbacks' states and extra entries": Case(
        Extra,
        script=after_epoch,
        callbacks=lambda _: [Counts("a"), Counts("b"), EarlyStopping("val", patience=4)],
    ),
    "schedulers": Case(Lists, script=after_epoch, layouts=()),
    "plateau": Case(Plateau, script=after_epoch, layouts=(), others=("pp",)),
    "hyper-parameters": Case(Parameters, script=after_epoch, layouts=()),
    "best and last": Case(
        Logged,
        script=best_and_last,
        trainer={"max_epochs": 3, "enable_checkpointing": True},
        callbacks=lambda place: [ModelCheckpoint(place, monitor="val", save_last=True)],
        layouts=("dp",),
        others=("one",),
    ),
    "data module": Case(script=with_data, layouts=(), others=("dp",)),
    "data module with hooks": Case(script=with_other_data, layouts=("pp",)),
}
OTHERS = {
    "weights only": Case(
        Momentum,
        script=from_weights,
        layouts=(),
        refused={"one": "ConfigError: the checkpoint holds only weights, no optimizer state"},
        reason="every ill-fitting checkpoint is a ConfigError",
    ),
    "no best": Case(script=missing, layouts=()),
    "before a run": Case(script=before_fit, layouts=()),
    "batches change": Case(OwnHooks),
    "command line": Case(script=command_line, layouts=(), others=("pp",)),
}
CASES = OTHERS | {
    name: replace(case, unlike=dict.fromkeys(("one", *LAYOUTS), LOADED), reason=AFTER_SETUP)
    for name, case in RESUMED.items()
}
