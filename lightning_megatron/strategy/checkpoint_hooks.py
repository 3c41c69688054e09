"""Strategy hooks that save and load; mixed into the strategy.

Lightning collects ``state_dict`` and ``optimizer_states`` from the strategy, lets callbacks and the
module change the dictionary, and hands all of it back to be written. What travels in between are
descriptions of this rank's shards under global names (`checkpoint.chunks`), not gathered tensors;
where somebody may look at them, tensors that are brought together when they are looked at
(`checkpoint.whole_state`). When a checkpoint is loaded, ``on_load_checkpoint`` of the module sees
tensors that are read when they are looked at, and what it leaves is what is loaded.

While training runs, a `Saver` writes them, perhaps in the background. Lightning may then delete,
load or overwrite a checkpoint that is not there yet, which the saver puts in order; it is drained
at the end of training, before anything is loaded, after an exception and in teardown.
"""

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.checkpoint.chunks import (
    Chunk,
    chunks_of,
    model_chunks,
    own_chunks,
    parameter_names,
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
from lightning_megatron.checkpoint.load.module_state import edits_loaded
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.local.restore import LocalReader
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot, capture_optimizer
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.checkpoint.save.saver import SaveOutcome, Saver
from lightning_megatron.checkpoint.whole_state import WholeState, edits_state
from lightning_megatron.comm.tree import FAN
from lightning_megatron.comm.tree_group import new_tree_group
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.launch.attempt import Attempt
from lightning_megatron.monitoring.events import EventLog
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.strategy.checkpoint_rotation import rotations
from lightning_megatron.strategy.checkpoint_search import AUTO, NoCheckpoint, find_checkpoint
from lightning_megatron.strategy.data.position import DataPosition
from lightning_megatron.strategy.local_checkpoints import LocalCheckpoints
from lightning_megatron.strategy.preflight.averaging import leave_schedulers_to_averages
from lightning_megatron.strategy.processes.connection import ConnectionConfig
from lightning_megatron.strategy.rng_state import RandomState
from lightning_megatron.strategy.save_on_exception import all_ranks_end
from lightning_megatron.strategy.step_engine import StepEngine
from lightning_megatron.topology.degrees import AXES
from lightning_megatron.topology.mesh import Topology

logger = logging.getLogger(__name__)

KEY = "lightning_megatron"
"""Of our entry in Lightning's checkpoint dictionary."""

_LEAVE_S = 5.0
"""Seconds that a run which ends with an error waits for a local checkpoint in flight."""


@dataclass(frozen=True)
class StoredOptimizer:
    """Stands for the state of an optimizer in the dictionary that ``on_load_checkpoint`` sees."""

    index: int


@dataclass(frozen=True)
class _Opened:
    """A checkpoint between `CheckpointHooks.load_checkpoint` and `load_model_state_dict`."""

    reader: CheckpointReader
    stored: Mapping[str, Any]
    with_optimizers: bool
    excluded: tuple[str, ...]
    """Patterns of names that are not loaded."""


@dataclass(frozen=True)
class _Content:
    """What a checkpoint is made of; arguments of `Saver.save` and `save_directory`."""

    model: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizers: Sequence[OptimizerSnapshot]
    layout: Mapping[str, int]


class CheckpointHooks:
    """Saving and loading checkpoint directories."""

    parallel: ParallelModule
    optimizers: list[Optimizer]
    lightning_module: LightningModule | None
    checkpoint_io: CheckpointIO
    _checkpoint_io: CheckpointIO | None
    _checkpoint: CheckpointConfig
    _connection: ConnectionConfig
    is_global_zero: bool
    events: EventLog
    attempt: Attempt
    _data_position: DataPosition
    _random_state: RandomState
    _engine: StepEngine | None
    _checkpoint_group: dist.ProcessGroup | None = None
    _background_group: dist.ProcessGroup | None = None
    _saver: Saver | None = None
    votes: PerBatchVotes
    _local_group: dist.ProcessGroup | None = None
    _local: LocalCheckpoints | None = None
    """Has local checkpoints made; None where there are none."""
    _described: tuple[ParallelModule, dict[str, Chunk]] | None = None
    """The parameters, from when the module is described until the checkpoint is saved."""
    _links_checkpoints = False
    _view: WholeState | None = None
    """The state_dict that hooks see, while a checkpoint is saved or loaded."""
    _opened: "_Opened | None" = None
    """The checkpoint that is being loaded."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into the shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_model_state_dict` restores the optimizers."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the module, by global name.

        Descriptions of it; or, where hooks may look, what a single process would have
        (`WholeState`), which takes all ranks.
        """
        self._refuse_to_save_alone("the checkpoint")
        self.end_view()
        self.parallel.data.come_to_rest()
        module = self.parallel.module
        if self._is_looked_at():
            self._described = self.parallel, self._own_chunks()
            self._view = WholeState(self.parallel, self._host_world(), "on_save_checkpoint")
            self._view.attach()
            return self._view.state()
        state = model_chunks(module, self.parallel.canonical, self.parallel.data.rows)
        self._described = self.parallel, chunks_of(state)
        return state

    def _own_chunks(self) -> dict[str, Chunk]:
        return own_chunks(self.parallel.module, self.parallel.canonical, self.parallel.data.rows)

    def _is_looked_at(self) -> bool:
        """Whether anybody sees the state_dict before it is written, on any rank."""
        module = self.lightning_module
        assert module is not None
        callbacks: list[Callback] = self._trainer().callbacks  # type: ignore[attr-defined]
        looks = is_overridden("on_save_checkpoint", module) or any(
            type(callback).on_save_checkpoint is not Callback.on_save_checkpoint
            for callback in callbacks
        )
        if looks or self.parallel.topology.pp.size == 1:
            return looks or edits_state(module)
        return any(Peers(self._host_world()).collect(edits_state(module)))  # of this stage alone

    def end_view(self) -> None:
        """Let ``state_dict`` be what it is outside of the hooks that save and load."""
        view, self._view = self._view, None
        if view is not None:
            view.detach()

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Description of this rank's part of the optimizer's state."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._described is None or self._described[0] is not self.parallel:
            self.lightning_module_state_dict()
        assert self._described is not None
        chunks = self._described[1]
        return capture_optimizer(optimizer, self._optimized_names(), chunks)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write the directory ``filepath``; collective over all processes."""
        if storage_options is not None:
            rank_zero_warn(
                "storage_options is ignored: credentials belong into fsspec's configuration"
            )
        self._refuse_to_save_alone(filepath)
        trainer = self._trainer()
        content = self._content(checkpoint)
        if self._saver is None:
            save_directory(filepath, **vars(content), group=self._host_world())
            return
        ends = trainer.received_sigterm or trainer.state.status != TrainerStatus.RUNNING
        at_once = self._links_checkpoints or ends
        rotated = rotations(trainer)
        self._saver.save(filepath, **vars(content), rotations=rotated, wait=at_once)

    def save_local(self) -> None:
        """Begin to make a local checkpoint of the present; collective over all processes."""
        assert self._local is not None
        checkpoint = self._trainer()._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._local.run.save(**vars(self._content(checkpoint)))

    def _content(self, checkpoint: dict[str, Any]) -> "_Content":
        """Complete what Lightning has collected; collective."""
        self._described = None
        checkpoint, model = self._take_state(checkpoint)
        optimizers: list[OptimizerSnapshot] = checkpoint.pop("optimizer_states", [])
        topology, trainer = self.parallel.topology, self._trainer()
        data = self._data_position.save(checkpoint, trainer, topology, self._host_world())
        at = data.get("epoch", -1), data.get("batch", -1)
        by_token = None if self._engine is None else self._engine.by_token
        random = self._random_state.save(at, model, by_token, self._host_world())
        checkpoint[KEY] = {"data": data, "random": random, "run": self.attempt.run_id}
        layout = {axis: getattr(topology.degrees, axis) for axis in AXES}
        return _Content(model, checkpoint, optimizers, layout)

    def _take_state(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the checkpoint without the state of the module, and this as hooks have left it."""
        view = self._view
        if view is None:
            return checkpoint, checkpoint.pop("state_dict")
        if self.is_global_zero:  # whose checkpoint counts
            checkpoint = view.resolve(checkpoint)
        model = view.finish(checkpoint.pop("state_dict"))
        self.end_view()
        if kept := checkpoint.get("optimizer_states"):
            checkpoint["optimizer_states"] = [snapshot.renamed(view.renamed) for snapshot in kept]
        return checkpoint, model

    def _refuse_to_save_alone(self, path: str | os.PathLike[str]) -> None:
        """After an error of this rank alone, end with it instead of waiting for the others."""
        cause = sys.exc_info()[1]  # which Lightning is handling
        if cause is None or self._trainer().state.status != TrainerStatus.INTERRUPTED:
            return
        if all_ranks_end():
            return
        logger.warning("%s is not saved: not all ranks have failed", path)
        self.stop_saver(CheckpointConfig.drain_timeout_s)  # teardown is not reached
        raise cause

    def start_saver(self, config: CheckpointConfig, timeout_s: float) -> None:
        """Have checkpoints saved as ``config`` says, until `stop_saver`; collective."""
        self.stop_saver()
        self._warn_of_loggers()
        background = None
        if config.mode == "async":
            if self._background_group is None:
                self._background_group = self._new_host_group(timeout_s)
            background = Peers(self._background_group)
        callbacks = self._trainer().checkpoint_callbacks
        self._links_checkpoints = any(getattr(c, "save_last", None) == "link" for c in callbacks)
        if background is not None and self._links_checkpoints:
            rank_zero_warn(
                "ModelCheckpoint(save_last='link') links to a checkpoint as soon as its save "
                "returns, so saves wait for the disk; save_last=True does not need that"
            )
        self._saver = Saver(config, Peers(self._host_world()), background, self._report)
        self._start_local(config, timeout_s)

    def _start_local(self, config: CheckpointConfig, timeout_s: float) -> None:
        options, trainer = config.local_options, self._trainer()
        if options is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._local_group is None:
            self._local_group = self._new_host_group(timeout_s)
        self._local = LocalCheckpoints(
            options,
            trainer,
            Peers(self._host_world()),
            Peers(self._local_group),
            vote=self.votes.register("local checkpoint", by_rank=False),
            save=self.save_local,
            report=self._report_local,
        )

    def _warn_of_loggers(self) -> None:
        for given in self._trainer().loggers:
            uploads = (getattr(given, f"_log_model{end}", False) for end in ("", "_checkpoints"))
            if any(uploads):
                rank_zero_warn(
                    f"{type(given).__name__}(log_model=...) uploads nothing: it takes files, and "
                    "checkpoints of MegatronStrategy are directories. Log a file that "
                    "`lightning-megatron convert` makes of one, or log_model=False"
                )

    def checkpoint_problems(self) -> list[str]:
        """Faults of what the Trainer was given to save with."""
        given = self._checkpoint_io
        if given is None or type(given) is TorchCheckpointIO:
            return []
        name = type(given).__name__
        instead = (
            "checkpoint=CheckpointConfig(mode='async')"
            if isinstance(given, AsyncCheckpointIO)
            else "on_save_checkpoint and on_load_checkpoint of the module or of a callback"
        )
        return [
            f"plugins=[{name}]: MegatronStrategy writes checkpoints itself, from all ranks "
            f"together, and would never call it; nearest valid: {instead}"
        ]

    def stop_saver(self, timeout_s: float | None = None) -> None:
        """Wait for what is in flight; from now on saving takes place at once. Not collective."""
        self.end_view()
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(timeout_s=timeout_s)
        local, self._local = self._local, None
        if local is not None:
            # After an error it is not worth waiting for what the next one would have replaced.
            local.run.close(timeout_s=None if timeout_s is None else min(timeout_s, _LEAVE_S))
            local.detach(self._trainer())

    def check_saves(self) -> None:
        """Report saves that have ended; raises where training is to end for it."""
        self.end_view()  # of a state_dict that was not saved
        if self._saver is not None:
            self._saver.check()
        if self._local is not None:
            self._local.run.check()

    def before_update(self) -> None:
        """Let no update overtake the copies from a device."""
        if self._saver is not None:
            self._saver.before_update()
        if self._local is not None:
            self._local.run.before_update()

    def on_train_end(self) -> None:
        """Finish the last save; callbacks have had their turn."""
        if self._saver is not None:
            self._saver.drain()
        if self._local is not None:
            self._local.run.drain()
            if not self._trainer().received_sigterm:  # the next attempt may want them
                self._local.run.clean()
        self.parallel.data.come_to_rest()  # under manual optimization what ran last is gathered

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint of any layout; `load_model_state_dict` loads it. Collective.

        Args:
            checkpoint_path: a checkpoint directory, or ``"auto"`` for the newest valid one.
            weights_only: ignored; nothing that could execute code is read.

        Returns:
            Lightning's checkpoint dictionary, with weights that are read when somebody looks at
            them; `NoCheckpoint` if it is ``"auto"`` and
            there is none yet, or if training starts from weights that another library made.
        """
        del weights_only
        module = self.lightning_module
        assert module is not None
        if os.path.isfile(checkpoint_path) and checkpoint_path != AUTO:
            raise ConfigError(
                f"ckpt_path={os.fspath(checkpoint_path)}: MegatronStrategy loads the checkpoint "
                "directories that it writes, this is a file; nearest valid: make a directory of it "
                "with `lightning-megatron convert --from-lightning FILE DIRECTORY`"
            )
        if self._saver is not None:
            self._saver.drain()
        if self._local is not None:
            self._local.run.drain()
        self.parallel.data.come_to_rest()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        group = self._host_world()
        reader = find_checkpoint(
            checkpoint_path,
            module.trainer,
            with_optimizers=fitting and bool(self.optimizers),
            group=group,
            stock=None if self._local is None else self._local.run.stock,
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
        excluded = self._exclude(checkpoint)
        self._opened = _Opened(reader, stored, fitting and not starts, excluded)
        if is_overridden("on_load_checkpoint", module):
            self._view = WholeState(self.parallel, group, "on_load_checkpoint")
            if self._view.is_cut:
                self._view.attach()
        if starts:  # Lightning restores nothing then, and calls no hook
            _call_lightning_module_hook(module.trainer, "on_load_checkpoint", checkpoint)
            self.load_model_state_dict(checkpoint, strict=module.strict_loading)
            rank_zero_info(f"Training starts at step 0 from the weights in {reader.directory}")
            return NoCheckpoint()
        if fitting:
            self._go_on(module.trainer, reader, checkpoint)
        return checkpoint

    def _tell_of(self, reader: CheckpointReader) -> None:
        local, path, size = isinstance(reader, LocalReader), reader.directory, reader.manifest.size
        seconds = reader.verify_s
        self.events.write("verified", path=str(path), seconds=seconds, bytes=size, local=local)
        if local:
            rank_zero_info(
                f"Going on from the local checkpoint of step {reader.manifest.step} ({path}), "
                f"newer than what shared directories have; verified in {seconds:.2f} s"
            )

    def _looks_at_loaded(self) -> bool:
        """Whether values are looked at on the way into the module, on any rank; collective."""
        module = self.lightning_module
        assert module is not None
        callbacks: list[Callback] = self._trainer().callbacks  # type: ignore[attr-defined]
        looks = (
            is_overridden("on_load_checkpoint", module)
            or any(type(c).on_load_checkpoint is not Callback.on_load_checkpoint for c in callbacks)
            or edits_loaded(module)
        )
        return any(Peers(self._host_world()).collect(looks))

    def _go_on(
        self, trainer: Trainer, reader: CheckpointReader, checkpoint: dict[str, Any]
    ) -> None:
        """Train from where a checkpoint was saved."""
        leave_schedulers_to_averages(trainer, checkpoint.get("callbacks", {}))
        if self._saver is not None and not isinstance(reader, LocalReader):
            self._saver.note_loaded(reader.directory, reader.manifest)
        saved = checkpoint.get(KEY, {})
        self._belong_to_run(saved.get("run"))
        topology, step = self.parallel.topology, checkpoint.get("global_step", 0)
        self._data_position.load(saved.get("data", {}), checkpoint, trainer, topology)
        if "random" in saved:
            by_token = self._random_state.load(saved["random"], step)
            if self._engine is not None:
                self._engine.by_token = by_token

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what ``on_load_checkpoint`` has left of the weights, and the optimizers."""
        opened, self._opened = self._opened, None
        assert opened is not None
        assert self.lightning_module is not None
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
            self.lightning_module,
            self.optimizers if resumes else (),
            state=state,
            layout=Layout(
                canonical=self.parallel.canonical,
                names=self._optimized_names(),
                rows=self.parallel.data.rows,
                bring_together=self._weights_were_loaded,
            ),
            strict=strict,
            exclude=opened.excluded,
            group=self._host_world(),
        )

    def _exclude(self, checkpoint: dict[str, Any]) -> tuple[str, ...]:
        """Take what the user does not want out of a checkpoint; return patterns of weights."""
        state = checkpoint["state_dict"]
        patterns = self._checkpoint.exclude
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
        precision = getattr(self, "precision_plugin", None)
        if isinstance(precision, ShardedPrecision):
            precision.forget_weights()
        self.parallel.data.gather_all()

    def _belong_to_run(self, run_id: str | None) -> None:
        """Go by the id of the run that is resumed, whatever the launcher calls it now."""
        if run_id is not None:
            self.attempt = replace(self.attempt, run_id=run_id)
            self.events.identify(run=run_id)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_model_state_dict` has loaded the optimizers."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on rank zero; after the saves that are in flight."""
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.remove(filepath)
        else:
            remove(storage_path(filepath))

    def _report(self, outcome: SaveOutcome) -> None:
        self.events.write("save", **asdict(outcome))

    def _report_local(self, outcome: SaveOutcome) -> None:
        self.events.write("local_save", **asdict(outcome))

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _optimized_names(self) -> dict[torch.Tensor, str]:
        return parameter_names(self.parallel.module, self.parallel.canonical)

    def leave_groups_to(self, topology: Topology) -> None:
        """Have the groups that were made to save destroyed with others."""
        for group in (self._background_group, self._checkpoint_group, self._local_group):
            if group is not None:
                topology.keep(group)
        self._background_group = self._checkpoint_group = self._local_group = None

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, for objects and tensors on the host; None for the default group."""
        return self._host_world()

    def _host_world(self) -> dist.ProcessGroup | None:
        """All processes by a tree; the default group where that is small, and gloo's."""
        if dist.get_backend() == "gloo" and dist.get_world_size() <= FAN:
            return None
        if self._checkpoint_group is None:
            self._checkpoint_group = self._new_host_group(self._connection.timeout_s)
        return self._checkpoint_group

    def _new_host_group(self, timeout_s: float) -> dist.ProcessGroup | None:
        """Another tree of all processes, for a thread of its own; None for a single process."""
        size = dist.get_world_size()
        if size == 1:
            return None
        machines = [peer.machine for peer in self.attempt.peers] or [""] * size
        return new_tree_group(machines, timedelta(seconds=timeout_s))
