"""Whether the checkpoints of a run are files or directories.

The user says it, or it follows from the layout and the size of the module, so that it is the same
for every checkpoint of a run. It is said once.
"""

import logging
import os
from pathlib import Path

from lightning_megatron.checkpoint.chunks import clean_name, own_chunks
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.storage import storage_path
from lightning_megatron.comm.peers import Peers
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.unparallelize import is_whole

logger = logging.getLogger(__name__)

_LARGEST_FILE = 4 * 10**9
"""Bytes of weights and optimizer state up to which ``"auto"`` writes files: some seconds of a
disk."""
_STATE_FACTOR = 3
"""Size of a parameter with the two states of Adam, relative to that of the parameter."""


class CheckpointFormat:
    """Form of the checkpoints of a run.

    Args:
        config: the options.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._chosen: tuple[ParallelModule, bool] | None = None

    def is_file(self, parallel: ParallelModule, path: str | os.PathLike[str] | None = None) -> bool:
        """Whether a checkpoint is to be a file.

        Args:
            parallel: the module on its layout.
            path: where it is to be, if that is known; the rank's own value.
        """
        if self._config.format != "auto":
            return self._config.format == "file"
        if self._chosen is None or self._chosen[0] is not parallel:
            reason = self._reason_for_directory(parallel)
            self._chosen = parallel, reason is None
            if Peers().is_first:
                logger.info(
                    "Checkpoints are %s",
                    "files, as Lightning's own (CheckpointConfig(format='directory') for "
                    "directories, which all ranks write)"
                    if reason is None
                    else f"directories, as {reason} (CheckpointConfig(format='file') for files)",
                )
        in_store = path is not None and not isinstance(storage_path(path), Path)
        return self._chosen[1] and not in_store

    def _reason_for_directory(self, parallel: ParallelModule) -> str | None:
        topology = parallel.topology
        divided = [
            f"{axis}={size}"
            for axis in ("tp", "pp", "cp", "ep")
            if (size := getattr(topology, axis).size) > 1
        ]
        if divided:
            return f"{', '.join(divided)} divides the module or its work"
        if parallel.transforms.sharding.stage > 2 and not is_whole(parallel):
            return "zero=3 divides the weights"
        if options := self._config.needs_directory:
            return f"{', '.join(options)} asks for it"
        if (size := _size_of(parallel)) > _LARGEST_FILE:
            return f"weights and optimizer state take about {size / 1e9:.0f} GB"
        return None


def _size_of(parallel: ParallelModule) -> int:
    """Return the bytes of a checkpoint with the state of Adam."""
    size = 0
    learns = {clean_name(name) for name, p in parallel.module.named_parameters() if p.requires_grad}
    for name, chunk in own_chunks(parallel.module, parallel.canonical, parallel.data.rows).items():
        count = chunk.tensor.element_size()
        for length in chunk.full_shape:
            count *= length
        size += count * (_STATE_FACTOR if name in learns else 1)
    return size
