"""`lightning-megatron preprocess`: text files to tokens on disk, in parallel."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_megatron.data.preprocessing.run import Outcome, PreprocessOptions
from lightning_megatron.data.preprocessing.run import preprocess as run
from lightning_megatron.data.preprocessing.sources import Reading
from lightning_megatron.data.preprocessing.work import Report
from lightning_megatron.errors import MegatronError

_INTERRUPTED = 130
"""Exit code of a command that was ended from the keyboard, as a shell reports it."""


def preprocess(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `preprocess`.

    Returns:
        The exit code: 0; 2 for a mistake of the user or text that cannot be read; 130 if it was
        interrupted.
    """
    options = _parser().parse_args(list(args))
    try:
        outcome = run(
            options.sources,
            options.output,
            _options(options),
            workers=options.workers,
            resume=options.resume,
            overwrite=options.overwrite,
            progress=None if options.no_progress else _bar,
        )
    except MegatronError as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; go on with --resume", file=sys.stderr)
        return _INTERRUPTED
    print(_summary(options.output, outcome))
    return 0


def _options(options: argparse.Namespace) -> PreprocessOptions:
    separator = options.separator
    return PreprocessOptions(
        tokenizer=options.tokenizer,
        reading=Reading(
            text_key=options.text_key,
            separator=separator.encode().decode("unicode_escape") if separator else separator,
        ),
        kind=options.format,
        hub_config=options.hf_config,
        hub_split=options.hf_split,
        eos=options.eos,
        append_eos=not options.no_eos,
        special_tokens=options.special_tokens,
        shard_bytes=None if options.shard_mb is None else int(options.shard_mb * 2**20),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron preprocess",
        description="Turn text into tokens on disk: shards in Megatron-LM's format with a manifest."
        " The result is the same for any number of workers; a second run does nothing.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files (.jsonl, .txt, either with .gz; .parquet; .arrow), directories, quoted patterns"
        " ('corpus/**/*.txt'), or hf:NAME for a dataset of the Hugging Face Hub or a directory",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="model directory, tokenizer.json, or name of a model on the Hub",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="directory to make"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes; default: the cores of this machine (%(default)s)",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on with a run that was interrupted"
    )
    existing.add_argument(
        "--overwrite", action="store_true", help="remove what an earlier run made of other text"
    )
    _add_text_options(parser)
    parser.add_argument(
        "--shard-mb",
        type=float,
        metavar="MB",
        help="MiB of text of a shard; default: a 256th of all, at least 4 and at most 1024",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text-key",
        default="text",
        metavar="NAME",
        help="field or column that holds the text; default: %(default)s",
    )
    text.add_argument(
        "--separator",
        metavar="TEXT",
        help=r"what separates documents of text files ('\n', '\n\n', '<|endoftext|>'); default: "
        "each file is one document",
    )
    text.add_argument(
        "--format",
        choices=("jsonl", "txt", "parquet", "arrow"),
        help="format of all files; default: by their endings",
    )
    text.add_argument("--hf-config", metavar="NAME", help="configuration of hf: datasets")
    text.add_argument(
        "--hf-split", default="train", metavar="NAME", help="split of these; default: %(default)s"
    )
    end = text.add_mutually_exclusive_group()
    end.add_argument(
        "--eos",
        metavar="TOKEN",
        help="token that ends each document; default: the one that the tokenizer's directory names",
    )
    end.add_argument("--no-eos", action="store_true", help="end documents with no token")
    text.add_argument(
        "--special-tokens",
        action="store_true",
        help="add the tokens that the tokenizer's post-processor puts around a text",
    )


@contextmanager
def _bar(total: int, done: int) -> Iterator[Report]:
    """Progress bar over the bytes of text, where somebody sees it."""
    from tqdm import tqdm

    tokens_made = 0
    with tqdm(
        total=total, initial=done, unit="B", unit_scale=True, desc="tokenizing", disable=None
    ) as bar:

        def report(size: int, tokens: int) -> None:
            nonlocal tokens_made
            tokens_made += tokens
            elapsed = bar.format_dict["elapsed"] if not bar.disable else 0
            if elapsed:
                bar.set_postfix_str(f"{tokens_made / elapsed:,.0f} tokens/s", refresh=False)
            bar.update(size)

        yield report


def _summary(output: Path, outcome: Outcome) -> str:
    manifest = outcome.manifest
    lines = [
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of "
        f"{manifest.tokenizer.vocab_size:,}, {len(manifest.shards):,} shards ({manifest.dtype})"
    ]
    if not outcome.made:
        lines.append("nothing to do: it was made from the same sources and options")
    elif outcome.made < len(manifest.shards):
        lines.append(f"{len(manifest.shards) - outcome.made} shards were there already")
    if outcome.empty:
        lines.append(f"left out {outcome.empty:,} records without text")
    return "\n".join(lines)
