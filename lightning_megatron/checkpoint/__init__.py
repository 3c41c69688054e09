"""Checkpoints that do not depend on the layout they were written under.

Options of training:

- `CheckpointConfig`: options of saving and loading (``MegatronStrategy(checkpoint=...)``).
- `LocalCheckpointConfig`: options of checkpoints on the machines' own disks.

During training or after it:

- `gather`: the whole weights of a module.

Checkpoint directories in one process, without training:

- `load_from_checkpoint`: a LightningModule; `load_full_state_dict`: its weights; `load_tensor`: one
  of them, or a part of it, such as one expert.
- `load_transformer`: a `Transformer`; `stored_config`: its sizes.
- `convert_to_lightning`, `export_safetensors`, `export_hugging_face`: files for other libraries.
- `import_lightning`, `import_hugging_face`: checkpoint directories from other libraries' files.
- `is_checkpoint`, `read_manifest`, `Manifest`: the contents of a directory, unverified.
- `CheckpointReader`: an open, verified checkpoint.

The folders are ``directory`` (files on disk and their commit), ``save``, ``load``,
``trainer_state`` (all state but tensors), ``local`` and ``offline``. Names are imported when they
are first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.checkpoint.config import CheckpointConfig as CheckpointConfig
    from lightning_megatron.checkpoint.config import LocalCheckpointConfig as LocalCheckpointConfig
    from lightning_megatron.checkpoint.directory.manifest import Manifest as Manifest
    from lightning_megatron.checkpoint.directory.manifest import is_checkpoint as is_checkpoint
    from lightning_megatron.checkpoint.directory.manifest import read_manifest as read_manifest
    from lightning_megatron.checkpoint.gather_state import gather as gather
    from lightning_megatron.checkpoint.load.reader import CheckpointReader as CheckpointReader
    from lightning_megatron.checkpoint.offline.export import (
        convert_to_lightning as convert_to_lightning,
    )
    from lightning_megatron.checkpoint.offline.export import (
        export_safetensors as export_safetensors,
    )
    from lightning_megatron.checkpoint.offline.export import (
        load_from_checkpoint as load_from_checkpoint,
    )
    from lightning_megatron.checkpoint.offline.export import (
        load_full_state_dict as load_full_state_dict,
    )
    from lightning_megatron.checkpoint.offline.export import load_tensor as load_tensor
    from lightning_megatron.checkpoint.offline.huggingface.export_model import (
        export_hugging_face as export_hugging_face,
    )
    from lightning_megatron.checkpoint.offline.huggingface.import_model import (
        import_hugging_face as import_hugging_face,
    )
    from lightning_megatron.checkpoint.offline.huggingface.transformer import (
        load_transformer as load_transformer,
    )
    from lightning_megatron.checkpoint.offline.huggingface.transformer import (
        stored_config as stored_config,
    )
    from lightning_megatron.checkpoint.offline.lightning_import import (
        import_lightning as import_lightning,
    )

_HOMES = {
    "CheckpointConfig": "config",
    "CheckpointReader": "load.reader",
    "LocalCheckpointConfig": "config",
    "Manifest": "directory.manifest",
    "convert_to_lightning": "offline.export",
    "export_hugging_face": "offline.huggingface.export_model",
    "export_safetensors": "offline.export",
    "gather": "gather_state",
    "import_hugging_face": "offline.huggingface.import_model",
    "import_lightning": "offline.lightning_import",
    "is_checkpoint": "directory.manifest",
    "load_from_checkpoint": "offline.export",
    "load_full_state_dict": "offline.export",
    "load_tensor": "offline.export",
    "load_transformer": "offline.huggingface.transformer",
    "read_manifest": "directory.manifest",
    "stored_config": "offline.huggingface.transformer",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointReader",
    "LocalCheckpointConfig",
    "Manifest",
    "convert_to_lightning",
    "export_hugging_face",
    "export_safetensors",
    "gather",
    "import_hugging_face",
    "import_lightning",
    "is_checkpoint",
    "load_from_checkpoint",
    "load_full_state_dict",
    "load_tensor",
    "load_transformer",
    "read_manifest",
    "stored_config",
]

__getattr__ = lazy_names(__name__, _HOMES)
