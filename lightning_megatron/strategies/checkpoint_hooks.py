"""Strategy hooks that save and load; mixed into the strategy.

Lightning collects ``state_dict`` and ``optimizer_states`` from the strategy, lets callbacks and the
module add to the dictionary, and hands all of it back to be written. What travels in between are
descriptions of this rank's shards under global names (`checkpoint.state`), not gathered tensors.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.checkpoint.io import load_directory, save_directory
from lightning_megatron.checkpoint.optimizer import OptimizerSnapshot, capture_optimizer
from lightning_megatron.checkpoint.state import chunks_of, model_chunks, parameter_names
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.strategies.checkpoint_search import AUTO, NoCheckpoint, find_checkpoint
from lightning_megatron.strategies.data_position import KEY, DataPosition
from lightning_megatron.topology.degrees import AXES


class CheckpointHooks:
    """Saving and loading checkpoint directories."""

    parallel: ParallelModule
    optimizers: list[Optimizer]
    lightning_module: LightningModule | None
    checkpoint_io: CheckpointIO
    is_global_zero: bool
    _data_position: DataPosition
    _checkpoint_group: dist.ProcessGroup | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into the shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` restores the optimizers."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Descriptions of this rank's part of the module, by global name."""
        self.parallel.data.reshard()
        return model_chunks(self.parallel.module, self.parallel.canonical)

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Description of this rank's part of the optimizer's state."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        chunks = chunks_of(self.lightning_module_state_dict())
        return capture_optimizer(optimizer, self._optimized_names(), chunks)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write the directory ``filepath``; collective over all processes."""
        if storage_options is not None:
            rank_zero_warn("storage_options is ignored: MegatronStrategy writes a local directory")
        model = checkpoint.pop("state_dict")
        optimizers: list[OptimizerSnapshot] = checkpoint.pop("optimizer_states", [])
        topology = self.parallel.topology
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        checkpoint[KEY] = self._data_position.save(trainer, topology)
        save_directory(
            filepath,
            model,
            checkpoint,
            optimizers=optimizers,
            layout={axis: getattr(topology.degrees, axis) for axis in AXES},
            group=self._host_world(),
        )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read weights, and when fitting the optimizers, of any layout; collective.

        Args:
            checkpoint_path: a checkpoint directory, or ``"auto"`` for the newest valid one.
            weights_only: ignored; nothing that could execute code is read.

        Returns:
            The rest of Lightning's checkpoint dictionary; `NoCheckpoint` if it is ``"auto"`` and
            there is none yet.
        """
        del weights_only
        module = self.lightning_module
        assert module is not None
        if os.path.isfile(checkpoint_path) and checkpoint_path != AUTO:
            raise ConfigError(
                f"ckpt_path={os.fspath(checkpoint_path)}: MegatronStrategy loads the checkpoint "
                "directories that it writes, this is a file; nearest valid: load the weights into "
                "the module before giving it to the Trainer, with Module.load_from_checkpoint(...)"
            )
        self.parallel.data.reshard()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        group = self._host_world()
        reader = find_checkpoint(
            checkpoint_path,
            module.trainer,
            with_optimizers=fitting and bool(self.optimizers),
            group=group,
        )
        if reader is None:
            return NoCheckpoint()
        checkpoint = load_directory(
            reader,
            module,
            self.optimizers if fitting else (),
            canonical=self.parallel.canonical,
            names=self._optimized_names(),
            strict=module.strict_loading,
            group=group,
        )
        if fitting:
            self._data_position.load(checkpoint, module.trainer, self.parallel.topology)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has loaded the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has loaded the optimizers."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on rank zero."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(os.fspath(filepath))

    def _optimized_names(self) -> dict[torch.Tensor, str]:
        return parameter_names(self.parallel.module, self.parallel.canonical)

    def _host_world(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes, where the default group is not one."""
        if dist.get_backend() == "gloo":
            return None
        if self._checkpoint_group is None:
            self._checkpoint_group = dist.new_group(backend="gloo")
        return self._checkpoint_group
