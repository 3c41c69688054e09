"""`lightning-megatron preprocess`: text files to tokens on disk, in parallel."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_megatron.data.preprocessing.chat import ChatFormat
from lightning_megatron.data.preprocessing.run import Outcome, PreprocessOptions
from lightning_megatron.data.preprocessing.run import preprocess as run
from lightning_megatron.data.preprocessing.sources import Reading
from lightning_megatron.data.preprocessing.work import Report
from lightning_megatron.errors import ConfigError, MegatronError, raise_if_any

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
            text_key=options.text_key or "text",
            separator=_unescaped(separator) if separator else separator,
        ),
        kind=options.format,
        hub_config=options.hf_config,
        hub_split=options.hf_split,
        eos=options.eos,
        append_eos=not options.no_eos,
        special_tokens=options.special_tokens,
        chat=_chat(options),
        shard_bytes=None if options.shard_mb is None else int(options.shard_mb * 2**20),
    )


def _unescaped(text: str) -> str:
    """Text with its escapes replaced; other characters stay what they are."""
    try:
        # Python reads escapes in Latin-1 only: what lies beyond becomes an escape first.
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--separator={text}: {error.reason}; nearest valid: two backslashes for one"
        ) from error


def _chat(options: argparse.Namespace) -> ChatFormat | None:
    given = {
        "--chat-template": options.chat_template,
        "--chat-markers": options.chat_markers,
        "--chat-end": options.chat_end,
        "--chat-option": options.chat_option,
        "--chat-date": options.chat_date,
        "--answers": options.answers,
    }
    if not options.chat:
        raise_if_any([f"{name} needs --chat" for name, value in given.items() if value])
        return None
    if options.text_key is not None:
        raise ConfigError("--text-key with --chat: conversations are read from whole records")
    return ChatFormat(
        template=None if options.chat_template is None else _read(options.chat_template),
        markers=None if options.chat_markers is None else _mapping(options.chat_markers),
        end=options.chat_end,
        answers=options.answers or "all",
        template_options=dict(map(_variable, options.chat_option)),
        date=options.chat_date,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template={path}: cannot be read ({error})") from error


def _mapping(text: str) -> dict[str, str]:
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict) and all(isinstance(v, str) for v in content.values()):
            return content
    raise ConfigError(
        f"--chat-markers={text}: must be a JSON object of texts; nearest valid: "
        """'{"user": "<|user|>", "assistant": "<|assistant|>"}'"""
    )


def _variable(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--chat-option={text}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


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
        default=_cores(),
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
    _add_chat_options(parser)
    parser.add_argument(
        "--shard-mb",
        type=float,
        metavar="MB",
        help="MiB of text of a shard; default: a 256th of all, at least 4 and at most 1024",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text-key",
        metavar="NAME",
        help="field or column that holds the text; default: text",
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


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    chat = parser.add_argument_group("conversations, of which only answers have a loss")
    chat.add_argument(
        "--chat",
        action="store_true",
        help="records are conversations (messages, conversations, prompt and completion, "
        "instruction and output)",
    )
    chat.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template; default: that of the tokenizer's directory",
    )
    chat.add_argument(
        "--chat-markers",
        metavar="JSON",
        help="text before a message, by role, in place of a template",
    )
    chat.add_argument(
        "--chat-end",
        metavar="TEXT",
        help="text behind a message, with markers; default: the tokenizer's end-of-text token",
    )
    chat.add_argument(
        "--chat-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable for the template (enable_thinking=false)",
    )
    chat.add_argument("--chat-date", metavar="TEXT", help="date, for a template that asks for it")
    chat.add_argument(
        "--answers", choices=("all", "last"), help="which answers have a loss; default: all"
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
