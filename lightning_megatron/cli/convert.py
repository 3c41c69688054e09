"""`lightning-megatron convert`: checkpoints to and from other forms, in one process.

`convert CKPT FILE` writes one file from a checkpoint directory of any layout and needs the memory
of the whole model. `--to hf` writes a Hugging Face model directory, `--from-hf` makes a checkpoint
of one, and `--from-lightning` makes one of a checkpoint of another Lightning strategy. `--upcycle`
makes a mixture of experts of a dense model. These need the memory of a few tensors. No process
group is needed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.nested_fields import from_fields

_DTYPES = ("float64", "float32", "float16", "bfloat16")


def convert(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `convert`.

    Returns:
        The exit code: 0, or 2 for a mistake of the user or a damaged checkpoint.
    """
    options = _parser().parse_args(list(args))
    if options.upcycle is not None:
        options.to = "upcycle"
    actions = {
        None: _to_file,
        "hf": _to_hugging_face,
        "from-hf": _from_hugging_face,
        "from-lightning": _from_lightning,
        "upcycle": _upcycle,
    }
    try:
        _refuse_idle_options(options)
        written = actions[options.to](options)
    except (ConfigError, CheckpointError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    print(f"wrote {written}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron convert",
        description="Convert the weights of a checkpoint directory to other formats, or from them.",
    )
    parser.add_argument(
        "source",
        help="checkpoint directory, of any layout; with --from-hf a Hugging Face model directory, "
        "with --from-lightning a file or sharded directory of another Lightning strategy",
    )
    parser.add_argument(
        "target",
        type=Path,
        help="OUT.safetensors for a plain state_dict, OUT.ckpt for a file that "
        "LightningModule.load_from_checkpoint reads; with --to hf the model directory to make, "
        "with --from-hf, --from-lightning and --upcycle the checkpoint directory",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--to",
        choices=("hf", "from-hf", "from-lightning"),
        help="hf: write a Hugging Face model directory",
    )
    way.add_argument(
        "--from-hf",
        dest="to",
        action="store_const",
        const="from-hf",
        help="make a checkpoint from a Hugging Face model directory, to start training from",
    )
    way.add_argument(
        "--from-lightning",
        dest="to",
        action="store_const",
        const="from-lightning",
        help="make a checkpoint from weights that another Lightning strategy saved",
    )
    way.add_argument(
        "--upcycle",
        metavar="EXPERTS",
        help="make a mixture of experts of a dense model: fields of MixtureConfig, such as "
        "experts=8,top_k=2 or experts=64,top_k=8,first_dense=1,router.balance=batch",
    )
    parser.add_argument(
        "--noise",
        type=float,
        metavar="SHARE",
        help="with --upcycle: standard deviation of noise on the experts' weights, as a share of "
        "that of each matrix (default: 0, all experts alike)",
    )
    parser.add_argument(
        "--seed", type=int, help="with --upcycle: seed of routers and noise (default: 0)"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="with --from-lightning: allow the source to run any code; only for files of authors "
        "that you trust",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the weights; not for a single file"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing target of the same kind; not for a single file",
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        help="with --to hf: copy family, special tokens, tokenizer and generation options from "
        "this Hugging Face model directory",
    )
    parser.add_argument(
        "--model-type", help="with --to hf: the family to write (llama, mistral), if several fit"
    )
    parser.add_argument(
        "--max-shard-size",
        type=float,
        metavar="GB",
        help="with --to hf: largest size of a file (default: 5)",
    )
    parser.add_argument(
        "--pad-vocab-to-multiple",
        type=int,
        metavar="N",
        help="with --from-hf: pad the vocabulary to a multiple of N, so that tp can split it",
    )
    return parser


def _refuse_idle_options(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    of_both = ("dtype", "overwrite")
    of_export = ("like", "model_type", "max_shard_size")
    of_import, of_lightning = ("pad_vocab_to_multiple",), ("trust_pickle",)
    of_upcycling = ("noise", "seed")
    fitting = {
        None: (),
        "hf": (*of_both, *of_export),
        "from-hf": (*of_both, *of_import),
        "from-lightning": (*of_both, *of_lightning),
        "upcycle": (*of_both, *of_upcycling),
    }
    idle = [
        f"--{name.replace('_', '-')}"
        for name in (*of_both, *of_export, *of_import, *of_lightning, *of_upcycling)
        if getattr(options, name) and name not in fitting[options.to]
    ]
    if idle:
        way = {None: "a single file", "hf": "--to hf"}.get(options.to, f"--{options.to}")
        raise ConfigError(f"{', '.join(idle)}: not used for {way}; nearest valid: leave it out")


def _to_file(options: argparse.Namespace) -> Path:
    # Late here and below: --help need not wait for torch.
    from lightning_megatron.checkpoint.offline.export import (
        convert_to_lightning,
        export_safetensors,
    )

    file: Path = options.target
    writers = {".safetensors": export_safetensors, ".ckpt": convert_to_lightning}
    if file.suffix not in writers:
        raise ConfigError(
            f"target={file}: must end in .safetensors or .ckpt; nearest valid: "
            f"{file.with_suffix('.safetensors')}, {file.with_suffix('.ckpt')}, or --to hf for a "
            "directory"
        )
    writers[file.suffix](options.source, file)
    return file


def _to_hugging_face(options: argparse.Namespace) -> Path:
    import torch

    from lightning_megatron.checkpoint.offline.huggingface.export_model import export_hugging_face

    export_hugging_face(
        options.source,
        options.target,
        model_type=options.model_type,
        like=options.like,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_shard_bytes=int((options.max_shard_size or 5) * 10**9),
        overwrite=options.overwrite,
    )
    return Path(options.target)


def _from_hugging_face(options: argparse.Namespace) -> Path:
    import torch

    from lightning_megatron.checkpoint.offline.huggingface.import_model import import_hugging_face

    import_hugging_face(
        options.source,
        options.target,
        pad_vocab_to_multiple=options.pad_vocab_to_multiple or 1,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        overwrite=options.overwrite,
    )
    return Path(options.target)


def _from_lightning(options: argparse.Namespace) -> Path:
    import torch

    from lightning_megatron.checkpoint.offline.lightning_import import import_lightning

    import_lightning(
        options.source,
        options.target,
        trust_pickle=options.trust_pickle,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        overwrite=options.overwrite,
    )
    return Path(options.target)


def _mixture_of(text: str) -> MixtureConfig:
    """Read fields of `MixtureConfig`: ``experts=8,top_k=2,router.balance=batch``."""
    fields: dict[str, Any] = {}
    for option in text.split(","):
        name, equals, value = option.strip().partition("=")
        if not equals:
            raise ConfigError(
                f"--upcycle {text}: must be NAME=VALUE,...; nearest valid: "
                "--upcycle experts=8,top_k=2"
            )
        *owners, last = ("num_experts" if name == "experts" else name).split(".")
        holder = fields
        for owner in owners:
            holder = holder.setdefault(owner, {})
            if not isinstance(holder, dict):
                raise ConfigError(
                    f"--upcycle {text}: {owner} is given as a value and as options; nearest valid: "
                    f"{owner}.{last}={value} alone"
                )
        holder[last] = yaml.safe_load(value)
    return from_fields(MixtureConfig, fields, "--upcycle ")


def _upcycle(options: argparse.Namespace) -> Path:
    import torch

    from lightning_megatron.checkpoint.offline.upcycle import upcycle

    upcycle(
        options.source,
        options.target,
        _mixture_of(options.upcycle),
        noise=options.noise or 0.0,
        seed=options.seed or 0,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        overwrite=options.overwrite,
    )
    return Path(options.target)
