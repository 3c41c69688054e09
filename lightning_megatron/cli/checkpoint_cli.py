"""LightningCLI that finds a module's hyper-parameters in a checkpoint directory.

``fit --ckpt_path FILE`` of Lightning's builds the module with the hyper-parameters of the
checkpoint. Where ``ckpt_path`` is a directory, as those of MegatronStrategy are, it does not look,
and the module is built with the options of the command line alone.
"""

from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_megatron._lightning.cli import BaseCLI
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.offline.export import plain_hyper_parameters
from lightning_megatron.checkpoint.trainer_state.state_files import read_state_files


class CheckpointCLI(BaseCLI):
    """LightningCLI whose ``--ckpt_path`` may be a checkpoint directory; all else is LightningCLI's.

    Example::

        from lightning_megatron import CheckpointCLI

        CheckpointCLI(MyModule, MyData)

    Raises:
        CheckpointError: the directory is damaged.
    """

    @override
    def read_checkpoint_path(self) -> None:
        """Take hyper-parameters from a checkpoint directory, too."""
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not Path(path).is_dir() or not is_checkpoint(path):
            super().read_checkpoint_path()
            return
        state = read_state_files(Path(path), read_manifest(path))[0]["state"]
        values: dict[str, Any] = plain_hyper_parameters(state.get("hyper_parameters", {}))
        values.pop("_instantiator", None)
        if not values:
            return
        if "_class_path" in values:
            values = {"class_path": values.pop("_class_path"), "dict_kwargs": values}
        self.config = self.parser.parse_object({subcommand: {"model": values}}, self.config)
