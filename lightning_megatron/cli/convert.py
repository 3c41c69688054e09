"""`lightning-megatron convert`: one file from a checkpoint directory of any layout.

It runs in one process, needs no process group, and gathers the whole model in memory.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import CheckpointError, ConfigError


def convert(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `convert`.

    Returns:
        The exit code: 0, or 2 for a mistake of the user or a damaged checkpoint.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-megatron convert",
        description="Write the weights of a checkpoint directory to one file.",
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory, of any layout")
    parser.add_argument(
        "file",
        type=Path,
        help="OUT.safetensors for a plain state_dict, OUT.ckpt for a file that "
        "LightningModule.load_from_checkpoint reads",
    )
    options = parser.parse_args(list(args))
    # Late: --help need not wait for torch.
    from lightning_megatron.checkpoint.export import convert_to_lightning, export_safetensors

    writers = {".safetensors": export_safetensors, ".ckpt": convert_to_lightning}
    try:
        if options.file.suffix not in writers:
            raise ConfigError(
                f"file={options.file}: the ending says what is written; nearest valid: "
                f"{options.file.with_suffix('.safetensors')} or {options.file.with_suffix('.ckpt')}"
            )
        writers[options.file.suffix](options.checkpoint, options.file)
    except (ConfigError, CheckpointError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.file}")
    return 0
