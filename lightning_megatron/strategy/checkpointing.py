"""The part of the strategy that saves and loads.

Lightning collects ``state_dict`` and ``optimizer_states`` from the strategy, lets callbacks and the
module change the dictionary, and hands all of it back to be written. What travels in between are
descriptions of this rank's shards under global names (`checkpoint.chunks`), not gathered tensors;
where somebody may look at them, tensors that are brought together when they are looked at
(`checkpoint.whole_state`). When a checkpoint is loaded, ``on_load_checkpoint`` of the module sees
tensors that are read when they are looked at, and what it leaves is what is loaded.

While training runs, a `Saver` writes them, perhaps in the background. Lightning may then delete,
load or overwrite a checkpoint that is not there yet, which the saver puts in order; it is drained
at the end of training, before anything is loaded, after an exception and in teardown.

The file is long because saving and loading stand beside each other: what one collects, the other
has to find.
"""

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from glob import escape
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron._lightning.connectors import callbacks_without_log, collect_checkpoint
from lightning_megatron._lightning.hooks import call_module_hook
from lightning_megatron._lightning.results import uploads_checkpoints
from lightning_megatron.checkpoint.chunks import (
    Chunk,
    chunks_of,
    clean_name,
    model_chunks,
    own_chunks,
    parameter_names,
    whole_chunks,
)
from lightning_megatron.checkpoint.collective_io import (
    Layout,
    load_directory,
    save_directory,
    stored_state,
)
from lightning_megatron.checkpoint.config import PARTS, CheckpointConfig, exclusion_problems
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.storage import storage_path
from lightning_megatron.checkpoint.frozen_weights import check_sums, frozen_names, sums_of
from lightning_megatron.checkpoint.load.file_reader import Opening, OptimizerNames
from lightning_megatron.checkpoint.load.module_state import edits_loaded
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.local.restore import LocalReader
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot, capture_optimizer
from lightning_megatron.checkpoint.save.file_save import FileSave
from lightning_megatron.checkpoint.save.saver import SaveOutcome, Saver
from lightning_megatron.checkpoint.trainer_state.codec import pickling_problems
from lightning_megatron.checkpoint.whole_state import WholeState, edits_state
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.launch.store_barrier import StoreBarrier
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.run_log.sections import CHECKPOINT
from lightning_megatron.strategy.checkpoint_format import CheckpointFormat
from lightning_megatron.strategy.checkpoint_paths import (
    NoCheckpoint,
    find_checkpoint,
    rotations,
)
from lightning_megatron.strategy.data.loaders import DataLoading
from lightning_megatron.strategy.hyper_parameters import with_modules_at_rest
from lightning_megatron.strategy.local_checkpoints import LocalCheckpoints
from lightning_megatron.strategy.preflight.averaging import leave_schedulers_to_averages
from lightning_megatron.strategy.processes.processes import Processes
from lightning_megatron.strategy.run import Run
from lightning_megatron.topology.degrees import AXES
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import parts_of_weights

logger = logging.getLogger(__name__)

KEY = "lightning_megatron"
"""Key of our entry in Lightning's checkpoint dictionary."""

_LEAVE_S = 5.0
"""Seconds that a run which ends with an error waits for a local checkpoint in flight."""

PATIENCE_S = 20.0
"""Seconds that a rank that fails waits for the others to fail as well."""


@dataclass(frozen=True)
class StoredOptimizer:
    """Stands for the state of an optimizer in the dictionary that ``on_load_checkpoint`` sees."""

    index: int


@dataclass(frozen=True)
class _Opened:
    """A checkpoint between `Checkpointing.load` and `load_weights`."""

    reader: CheckpointReader
    stored: Mapping[str, Any]
    with_optimizers: bool
    excluded: tuple[str, ...]
    """Patterns of names that are not loaded."""


@dataclass(frozen=True)
class _Content:
    """Content of a checkpoint; arguments of `Saver.save` and `save_directory`."""

    model: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizers: Sequence[OptimizerSnapshot]
    layout: Mapping[str, int]


@parts_of_weights
class Checkpointing:
    """Saves checkpoint directories, and loads them.

    Args:
        run: what is saved.
        config: whether saving stops training, and what follows a save that fails.
        processes: connects the ranks that save.
        data: knows the position in the training data.

    Attributes:
        saver: writes while training runs; None outside of it, where saving takes place at once.
        local: has local checkpoints made; None where there are none.
    """

    def __init__(
        self, run: Run, config: CheckpointConfig, processes: Processes, data: DataLoading
    ) -> None:
        self._run = run
        self._config = config
        self._format = CheckpointFormat(config)
        self._processes = processes
        self._data = data
        self.saver: Saver | None = None
        self.local: LocalCheckpoints | None = None
        self._background_group: dist.ProcessGroup | None = None
        self._local_group: dist.ProcessGroup | None = None
        self._described: tuple[ParallelModule, dict[str, Chunk]] | None = None
        """The parameters, from when the module is described until the checkpoint is saved."""
        self._left: tuple[dict[str, Chunk], dict[torch.Tensor, str]] | None = None
        """Parts of parameters that optimizers of a run that has ended know, and their names."""
        self._links_checkpoints = False
        self._view: WholeState | None = None
        """The state_dict that hooks see, while a checkpoint is saved or loaded."""
        self._opened: _Opened | None = None
        """The checkpoint that is being loaded."""
        self._section_before: str | None = None
        """Section of the rank when Lightning began to collect a checkpoint."""

    # Saving --------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """This rank's part of the module, by global name.

        Descriptions of it; or, where hooks may look, what a single process would have
        (`WholeState`), which takes all ranks.
        """
        # What Lightning collects after it, from callbacks and the module, is part of the save. If
        # none follows, the next batch ends the section.
        clock = self._run.clock
        if clock.current != CHECKPOINT:
            self._section_before = clock.current
        clock.enter(CHECKPOINT)
        self._refuse_to_save_alone("the checkpoint")
        self.end_view()
        self._run.parallel.data.come_to_rest()
        module = self._run.parallel.module
        if self._is_looked_at():
            self._described = self._run.parallel, self._own_chunks()
            self._view = WholeState(self._run.parallel, self._run.host_group, "on_save_checkpoint")
            self._view.attach()
            return self._view.state()
        state = model_chunks(module, self._run.parallel.canonical, self._run.parallel.data.rows)
        self._described = self._run.parallel, chunks_of(state)
        return state

    def _own_chunks(self) -> dict[str, Chunk]:
        return own_chunks(
            self._run.parallel.module, self._run.parallel.canonical, self._run.parallel.data.rows
        )

    def _is_looked_at(self) -> bool:
        """Whether anybody sees the state_dict before it is written, on any rank."""
        module = self._run.module
        callbacks: list[Callback] = self._run.trainer.callbacks  # type: ignore[attr-defined]
        looks = is_overridden("on_save_checkpoint", module) or any(
            type(callback).on_save_checkpoint is not Callback.on_save_checkpoint
            for callback in callbacks
        )
        if looks or self._run.parallel.topology.pp.size == 1:
            return looks or edits_state(module)
        return any(
            Peers(self._run.host_group).all_gather(edits_state(module))
        )  # of this stage alone

    def end_view(self) -> None:
        """Let ``state_dict`` be what it is outside of the hooks that save and load."""
        view, self._view = self._view, None
        if view is not None:
            view.detach()

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Description of this rank's part of the optimizer's state."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        parallel, beside = self._run.parallel, whole_chunks(self._run.parallel.gradients.beside)
        if self._left is not None and any(
            p in self._left[1] for group in optimizer.param_groups for p in group["params"]
        ):
            return capture_optimizer(optimizer, self._left[1], {**beside, **self._left[0]})
        if self._described is None or self._described[0] is not parallel:
            self.module_state()
        assert self._described is not None
        return capture_optimizer(
            optimizer, self._optimized_names(), {**beside, **self._described[1]}
        )

    def leave_parts(self) -> None:
        """Remember what optimizers know, before whole tensors take its place in the module."""
        self._left = self._own_chunks(), self._optimized_names()

    def forget_parts(self) -> None:
        """Forget what an earlier run has left."""
        self._left = self._described = None

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write the checkpoint ``filepath``; collective over all processes."""
        before, self._section_before = self._section_before, None
        with self._run.clock.section(CHECKPOINT), callbacks_without_log(self._run.trainer):
            self._save(checkpoint, filepath, storage_options)
        if before is not None:
            self._run.clock.enter(before)

    def _save(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None,
    ) -> None:
        if storage_options is not None:
            rank_zero_warn(
                "storage_options is ignored: credentials belong into fsspec's configuration"
            )
        self._refuse_to_save_alone(filepath)
        trainer = self._run.trainer
        content = self._content(checkpoint)
        if self._format.is_file(self._run.parallel, filepath):
            self._save_file(filepath, content)
            return
        if self.saver is None:
            save_directory(filepath, **vars(content), group=self._run.host_group)
            return
        ends = trainer.received_sigterm or trainer.state.status != TrainerStatus.RUNNING
        at_once = self._links_checkpoints or ends
        rotated = rotations(trainer)
        self.saver.save(filepath, **vars(content), rotations=rotated, wait=at_once)

    def _save_file(self, filepath: str | os.PathLike[str], content: "_Content") -> None:
        module = self._run.parallel.module
        save = FileSave(
            filepath,
            **vars(content),
            modules=[
                clean_name(f"{name}.").rstrip(".")
                for name, _ in module.named_modules(remove_duplicate=False)
            ],
            device=self._run.parallel.topology.device,
        )
        if self.saver is None:
            save.write(Peers(self._run.host_group))
        else:
            self.saver.save_file(save)

    def save_local(self) -> None:
        """Begin to make a local checkpoint of the present; collective over all processes."""
        assert self.local is not None
        with self._run.clock.section(CHECKPOINT):
            checkpoint = collect_checkpoint(self._run.trainer)
            with callbacks_without_log(self._run.trainer):
                self.local.run.save(**vars(self._content(checkpoint)))

    def _content(self, checkpoint: dict[str, Any]) -> "_Content":
        """Complete what Lightning has collected; collective."""
        self._described = None
        checkpoint = with_modules_at_rest(checkpoint, self._run.parallel)
        checkpoint, model = self._take_state(checkpoint)
        optimizers: list[OptimizerSnapshot] = checkpoint.pop("optimizer_states", [])
        topology, trainer = self._run.parallel.topology, self._run.trainer
        data = self._data.position.save(checkpoint, trainer, topology, self._run.host_group)
        at = data.get("epoch", -1), data.get("batch", -1)
        by_token = self._run.steps.loss_per_token
        random = self._run.random_state.save(at, model, by_token, self._run.host_group)
        checkpoint[KEY] = {"data": data, "random": random, "run": self._processes.attempt.run_id}
        if self._config.weights == "trainable":
            checkpoint[KEY]["frozen"] = self._leave_out_frozen(model)
        layout = {axis: getattr(topology.degrees, axis) for axis in AXES}
        if topology.ep.size > 1:
            layout["ep"] = topology.ep.size
        return _Content(model, checkpoint, optimizers, layout)

    def _leave_out_frozen(self, model: dict[str, Any]) -> dict[str, int]:
        """Take weights that do not learn out of the state; return their sums. Collective."""
        parallel, peers = self._run.parallel, Peers(self._run.host_group)
        frozen = frozen_names(parallel.module, parallel.canonical)
        sums = sums_of(chunks_of(model), frozen, peers)
        for name in frozen & model.keys():
            del model[name]
        return sums

    def _take_state(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the checkpoint without the state of the module, and this as hooks have left it."""
        view = self._view
        if view is None:
            return checkpoint, checkpoint.pop("state_dict")
        if self._run.is_global_zero:  # whose checkpoint counts
            checkpoint = view.resolve(checkpoint)
        model = view.finish(checkpoint.pop("state_dict"))
        self.end_view()
        if kept := checkpoint.get("optimizer_states"):
            checkpoint["optimizer_states"] = [snapshot.renamed(view.renamed) for snapshot in kept]
        return checkpoint, model

    def _refuse_to_save_alone(self, path: str | os.PathLike[str]) -> None:
        """End with the error of this rank, if it alone has failed; it would wait for the others."""
        cause = sys.exc_info()[1]  # which Lightning is handling
        if cause is None or self._run.trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        if self._all_ranks_end():
            return
        logger.warning("%s is not saved: not all ranks have failed", path)
        self.abandon()  # teardown is not reached
        raise cause

    def _all_ranks_end(self) -> bool:
        """Whether all ranks call this for the same time; waits for them, but not for ever.

        ModelCheckpoint(save_on_exception=True) saves when training ends with an error, and saving
        is collective. An interrupt, or an error that comes of the data, reaches all ranks; but
        where one rank fails alone its peers wait for it in a collective of training, with which
        those of the save would pair up: all of them would hang until the timeout, and nobody would
        read the error. So the ranks meet at the store first.
        """
        everyone = Peers()
        barrier = StoreBarrier("ending", range(everyone.size), everyone.rank)
        try:
            return barrier.wait(PATIENCE_S, again=False)
        except RuntimeError:  # whoever held the store is gone
            return False

    # The saver -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Have checkpoints saved as the options say, until `close`; collective."""
        config = self._config
        self.close()
        self._warn_of_loggers()
        background = None
        if config.mode == "async":
            if self._background_group is None:
                self._background_group = self._processes.new_host_group()
            background = Peers(self._background_group)
        callbacks = self._run.trainer.checkpoint_callbacks
        self._links_checkpoints = any(getattr(c, "save_last", None) == "link" for c in callbacks)
        if background is not None and self._links_checkpoints:
            rank_zero_warn(
                "ModelCheckpoint(save_last='link') links to a checkpoint as soon as its save "
                "returns, so saves wait for the disk; save_last=True does not need that"
            )
        self.saver = Saver(config, Peers(self._run.host_group), background, self._report)
        self._open_local()

    def _open_local(self) -> None:
        config = self._config
        options, trainer = config.local_options, self._run.trainer
        if options is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._local_group is None:
            self._local_group = self._processes.new_host_group()
        self.local = LocalCheckpoints(
            options,
            trainer,
            Peers(self._run.host_group),
            Peers(self._local_group),
            vote=self._run.votes.register("local checkpoint"),
            save=self.save_local,
            report=self._report_local,
        )

    def _warn_of_loggers(self) -> None:
        for given in self._run.trainer.loggers:
            if uploads_checkpoints(given) and not self._format.is_file(self._run.parallel):
                rank_zero_warn(
                    f"{type(given).__name__}(log_model=...) uploads nothing: it takes files, and "
                    "checkpoints of this run are directories; nearest valid: "
                    "CheckpointConfig(format='file'), or log_model=False"
                )

    def problems(self, given: CheckpointIO) -> list[str]:
        """Faults of the options, and of what the Trainer was ``given`` to save with."""
        faults = [*self._config.problems(), *self._problems_of(given)]
        trainer = self._run.trainer
        # Lightning itself leaves out what cannot be pickled, with a warning, of the module's alone.
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.checkpoint_callbacks and data is not None and data.hparams:
            key = LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY
            faults += pickling_problems({key: dict(data.hparams)})
        return faults

    def _problems_of(self, given: CheckpointIO) -> list[str]:
        if type(given) is TorchCheckpointIO:
            return []
        name = type(given).__name__
        if _only_reads(given):
            options = self._config.needs_directory
            if self._config.format == "directory":
                options = ["format='directory'", *options]
            fault = (
                f"plugins=[{name}], checkpoint.{', '.join(options)}: the plugin reads files, and "
                "checkpoints are directories; nearest valid: CheckpointConfig(format='file')"
            )
            return [fault] if options else []
        instead = (
            "checkpoint=CheckpointConfig(mode='async')"
            if isinstance(given, AsyncCheckpointIO)
            else "on_save_checkpoint and on_load_checkpoint of the module or of a callback"
        )
        return [
            f"plugins=[{name}]: MegatronStrategy writes checkpoints itself, from all ranks "
            f"together, and would never call it; nearest valid: {instead}"
        ]

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is in flight; from now on saving takes place at once. Not collective."""
        self.end_view()
        if self.saver is None:
            return
        with self._run.clock.section(CHECKPOINT):
            self._close(self.saver, timeout_s)

    def abandon(self) -> None:
        """Wait for what is in flight, but not for ever: the run has failed."""
        self.close(self._config.drain_timeout_s)

    def _close(self, saver: Saver, timeout_s: float | None) -> None:
        self.saver = None
        saver.close(timeout_s=timeout_s)
        local, self.local = self.local, None
        if local is not None:
            # After an error it is not worth waiting for what the next one would have replaced.
            local.run.close(timeout_s=None if timeout_s is None else min(timeout_s, _LEAVE_S))
            local.detach(self._run.trainer)

    def raise_failed_saves(self) -> None:
        """Report saves that have ended; raises where training is to end for it."""
        self.end_view()  # of a state_dict that was not saved
        if self.saver is not None:
            self.saver.check()
        if self.local is not None:
            self.local.run.check()

    def before_update(self) -> None:
        """Let no update overtake the copies from a device."""
        if self.saver is not None:
            self.saver.before_update()
        if self.local is not None:
            self.local.run.before_update()

    def finish(self) -> None:
        """Finish the last save, as training ends; callbacks have had their turn."""
        if self.saver is not None:
            self.saver.drain()
        if self.local is not None:
            self.local.run.drain()
            if not self._run.trainer.received_sigterm:  # the next attempt may want them
                self.local.run.clean()

    # Loading -------------------------------------------------------------------------------------

    def load(
        self,
        checkpoint_path: str | os.PathLike[str],
        given: CheckpointIO,
        *,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """Open a checkpoint of any layout; `load_weights` loads it. Collective.

        Args:
            checkpoint_path: a checkpoint directory, a file that this strategy or Lightning wrote,
                or ``"auto"`` for the newest valid one.
            given: what the Trainer was given, which may have a way of its own to read files.
            weights_only: whether objects of classes that are not registered are left out.

        Returns:
            Lightning's checkpoint dictionary, with weights that are read when somebody looks at
            them; `NoCheckpoint` if it is ``"auto"`` and
            there is none yet, or if training starts from weights that another library made.
        """
        module = self._run.module
        if self.saver is not None:
            self.saver.drain()
        if self.local is not None:
            self.local.run.drain()
        self._run.parallel.data.come_to_rest()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        group = self._run.host_group
        reader = find_checkpoint(
            checkpoint_path,
            module.trainer,
            with_optimizers=fitting and bool(self._run.optimizers),
            opening=Opening(
                group=group,
                weights_only=weights_only and self._config.weights_only,
                optimizer_names=self._names_of_optimizers() if fitting else None,
                load_file=None if type(given) is TorchCheckpointIO else given.load_checkpoint,
            ),
            stock=None if self.local is None else self.local.run.stock,
        )
        if reader is None:
            return NoCheckpoint()
        if fitting:
            self._tell_of(reader)
        if self._looks_at_loaded():
            reader.fetch_files(None)
        starts = fitting and reader.is_pretrained
        stored = stored_state(reader)
        kept = [StoredOptimizer(i) for i in range(len(reader.optimizers))]
        checkpoint = {
            "pytorch-lightning_version": version("lightning"),
            **reader.state,
            "state_dict": OrderedDict(stored),
            "optimizer_states": kept,
        }
        frozen = reader.state.get(KEY, {}).get("frozen", {})
        if frozen:
            self._check_frozen(frozen, reader.what, strict=module.strict_loading)
        excluded = (*self._exclude(checkpoint), *map(escape, frozen))
        self._opened = _Opened(reader, stored, fitting and not starts, excluded)
        if is_overridden("on_load_checkpoint", module):
            self._view = WholeState(self._run.parallel, group, "on_load_checkpoint")
            if self._view.is_cut:
                self._view.attach()
        if starts:  # Lightning restores nothing then, and calls no hook
            call_module_hook(module.trainer, "on_load_checkpoint", checkpoint)
            self.load_weights(checkpoint, strict=module.strict_loading)
            rank_zero_info(f"Training starts at step 0 from the weights in {reader.directory}")
            return NoCheckpoint()
        if fitting:
            self._go_on(module.trainer, reader, checkpoint)
        return checkpoint

    def _check_frozen(self, stored: Mapping[str, int], what: str, *, strict: bool) -> None:
        """Check that the module has the weights that a checkpoint has left out; collective."""
        found = sums_of(self._own_chunks(), stored.keys(), Peers(self._run.host_group))
        try:
            check_sums(stored, found, what)
        except ConfigError as error:
            if strict:
                raise
            rank_zero_warn(str(error))

    def _tell_of(self, reader: CheckpointReader) -> None:
        local, path, size = isinstance(reader, LocalReader), reader.directory, reader.manifest.size
        seconds = reader.verify_s
        self._run.events.write("verified", path=str(path), seconds=seconds, bytes=size, local=local)
        if local:
            rank_zero_info(
                f"Going on from the local checkpoint of step {reader.manifest.step} ({path}), "
                f"newer than what shared directories have; verified in {seconds:.2f} s"
            )

    def _looks_at_loaded(self) -> bool:
        """Whether values are looked at on the way into the module, on any rank; collective."""
        module = self._run.module
        callbacks: list[Callback] = self._run.trainer.callbacks  # type: ignore[attr-defined]
        looks = (
            is_overridden("on_load_checkpoint", module)
            or any(type(c).on_load_checkpoint is not Callback.on_load_checkpoint for c in callbacks)
            or edits_loaded(module)
        )
        return any(Peers(self._run.host_group).all_gather(looks))

    def _go_on(
        self, trainer: Trainer, reader: CheckpointReader, checkpoint: dict[str, Any]
    ) -> None:
        """Train from where a checkpoint was saved."""
        leave_schedulers_to_averages(trainer, checkpoint.get("callbacks", {}))
        if self.saver is not None and not isinstance(reader, LocalReader):
            self.saver.note_loaded(reader.directory, reader.manifest)
        saved = checkpoint.get(KEY, {})
        if (run_id := saved.get("run")) is not None:
            self._processes.rename_run(run_id)
        topology, step = self._run.parallel.topology, checkpoint.get("global_step", 0)
        self._data.position.load(saved.get("data", {}), checkpoint, trainer, topology)
        if "random" in saved:
            self._run.steps.loss_per_token = self._run.random_state.load(saved["random"], step)

    def load_weights(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what ``on_load_checkpoint`` has left of the weights, and the optimizers."""
        opened, self._opened = self._opened, None
        assert opened is not None
        state, reader = checkpoint.get("state_dict", {}), opened.reader
        if self._view is not None:
            state = self._view.share(state, opened.stored)
            self.end_view()
            assert isinstance(checkpoint, dict)
            checkpoint["state_dict"] = state  # callbacks look at it next
        kept = checkpoint.get("optimizer_states", ())
        if kept and list(kept) != [StoredOptimizer(i) for i in range(len(reader.optimizers))]:
            raise ConfigError(
                "on_load_checkpoint changes checkpoint['optimizer_states'], which is spread over "
                "ranks; nearest valid: checkpoint['optimizer_states'] = [], and the optimizers "
                "begin anew"
            )
        if opened.with_optimizers and reader.optimizers and not kept:
            rank_zero_info("The optimizers begin anew: on_load_checkpoint left out their state")
        resumes = opened.with_optimizers and (kept or not reader.optimizers)
        load_directory(
            reader,
            self._run.module,
            self._run.optimizers if resumes else (),
            state=state,
            layout=Layout(
                canonical=self._run.parallel.canonical,
                names=self._optimized_names(),
                beside=self._run.parallel.gradients.beside,
                rows=self._run.parallel.data.rows,
                bring_together=self._weights_were_loaded,
            ),
            strict=strict,
            exclude=opened.excluded,
            group=self._run.host_group,
        )

    def _exclude(self, checkpoint: dict[str, Any]) -> tuple[str, ...]:
        """Take what the user does not want out of a checkpoint; return patterns of weights."""
        state = checkpoint["state_dict"]
        patterns = self._config.exclude
        raise_if_any(exclusion_problems(patterns, state))
        weights = tuple(p for p in patterns if p not in PARTS)
        for name in [n for n in state if any(fnmatchcase(n, p) for p in weights)]:
            del state[name]
        empty: dict[str, Any] = {"optimizer": [], "lr_schedulers": [], "callbacks": {}}
        for part in patterns:
            if part == "loops":
                for key in ("loops", KEY, "epoch", "global_step"):
                    checkpoint.pop(key, None)
            elif part in empty:
                checkpoint["optimizer_states" if part == "optimizer" else part] = empty[part]
        return weights

    def _weights_were_loaded(self) -> None:
        """Bring what was read into this rank's part of the parameters to the others."""
        self._run.precision.forget_weights()
        self._run.parallel.data.gather_all()

    def remove(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on rank zero; after the saves that are in flight."""
        if not self._run.is_global_zero:
            return
        if self.saver is not None:
            self.saver.remove(filepath)
        else:
            remove(storage_path(filepath))

    def _report(self, outcome: SaveOutcome) -> None:
        self._run.events.write("save", **asdict(outcome))

    def _report_local(self, outcome: SaveOutcome) -> None:
        self._run.events.write("local_save", **asdict(outcome))

    def _optimized_names(self) -> dict[torch.Tensor, str]:
        parallel = self._run.parallel
        return {**parallel.gradients.beside, **parameter_names(parallel.module, parallel.canonical)}

    def _names_of_optimizers(self) -> OptimizerNames | None:
        """Names of the parameters of each optimizer, in its order; None where ranks divide them."""
        if self._run.parallel.topology.pp.size > 1:
            return None
        names = self._optimized_names()
        return [
            [names.get(p, "") for group in optimizer.param_groups for p in group["params"]]
            for optimizer in self._run.optimizers
        ]

    def leave_groups_to(self, topology: Topology) -> None:
        """Have the groups that were made to save destroyed with others."""
        for group in (self._background_group, self._local_group):
            if group is not None:
                topology.keep(group)
        self._background_group = self._local_group = None


def _only_reads(given: CheckpointIO) -> bool:
    """Whether what Lightning's own writes and deletes is what this one does."""
    own = TorchCheckpointIO
    return (
        isinstance(given, own)
        and type(given).save_checkpoint is own.save_checkpoint
        and type(given).remove_checkpoint is own.remove_checkpoint
    )
