"""`lightning-megatron generate`: have the model of a checkpoint continue a text, in one process.

The model of the quickstart reads and writes bytes. One that came from Hugging Face has a tokenizer
in its model directory, which `--tokenizer` names; it needs the extra `hf`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_megatron.errors import CheckpointError, ConfigError

_BYTES = 256


def generate(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `generate`.

    Returns:
        The exit code: 0, or 2 for a mistake of the user or a damaged checkpoint.
    """
    options = _parser().parse_args(list(args))
    try:
        print(_continued(options))
    except (ConfigError, CheckpointError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron generate",
        description="Continue a text with the model of a checkpoint directory of any layout.",
    )
    parser.add_argument("checkpoint", help="checkpoint directory")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="Hugging Face model directory whose tokenizer the model uses; none for one of bytes",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest with probability P"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--device", default="cpu", help="like cuda:0; default cpu")
    return parser


def _continued(options: argparse.Namespace) -> str:
    # Late: --help need not wait for torch.
    import torch

    from lightning_megatron.checkpoint.offline.huggingface.transformer import load_transformer
    from lightning_megatron.models.generation import generate as continue_tokens

    model = load_transformer(options.checkpoint, device=options.device)
    encode, decode, stop_token = _codec(options.tokenizer, model.config.num_tokens)
    prompt = encode(options.prompt)
    if not prompt:
        raise ConfigError("--prompt: there must be at least one token to continue")
    tokens = continue_tokens(
        model,
        torch.tensor([prompt], device=options.device),
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token=stop_token,
        generator=torch.Generator(options.device).manual_seed(options.seed),
    )
    return decode(tokens[0].tolist())


def _codec(
    tokenizer: str | None, num_tokens: int
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], int | None]:
    """Text to tokens, tokens to text, and the token that ends a text."""
    if tokenizer is None:
        if num_tokens != _BYTES:
            raise ConfigError(
                f"the model has {num_tokens} tokens, which are not bytes; nearest valid: "
                "--tokenizer with the Hugging Face directory that it came from"
            )
        return (
            lambda text: list(text.encode()),
            lambda tokens: bytes(tokens).decode(errors="replace"),
            None,
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "--tokenizer needs the transformers library; nearest valid: "
            "pip install 'lightning-megatron[hf]'"
        ) from error
    try:
        known: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer={tokenizer}: {error}") from error
    return (
        known.encode,
        lambda tokens: str(known.decode(tokens, skip_special_tokens=True)),
        known.eos_token_id,
    )
