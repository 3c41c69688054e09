"""`lightning-megatron data`: show tokens on disk, and verify them.

`show` reads manifests and the sizes of files and answers at once. `verify` reads everything: it
compares each file with its hash and each token with the vocabulary.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.data.tokens.manifest import MANIFEST_FILE, Manifest, Shard
from lightning_megatron.errors import NoSuchTokensError, TokenFileError

_SHOWN = 20
"""Shards that `show` lists."""
_PARTS = (0, 25, 50, 75, 100)
"""Percentiles of the documents' lengths that `show --lengths` prints."""


def data(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `data`.

    Returns:
        The exit code: 0; 1 if `show` or `verify` finds damage; 2 if there are no tokens at a path,
        or for another mistake of the user.
    """
    options = _parser().parse_args(list(args))
    codes: list[_Answer] = [options.run(Path(path), options) for path in options.path]
    if options.json:
        facts = [found for _, found in codes]
        print(json.dumps(facts if len(facts) > 1 else facts[0], indent=1))
    return max(code for code, _ in codes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron data", description="Inspect tokens on disk."
    )
    commands = parser.add_subparsers(required=True, metavar="{show,verify}")
    found = {
        name: commands.add_parser(name, help=summary, description=summary)
        for name, summary in (
            ("show", "print what directories or pairs of token files hold"),
            ("verify", "compare token files with their hashes and their vocabulary; exit code 0 "
             "if all are intact, 1 if one is damaged, 2 if there are none"),
        )
    }  # fmt: skip
    for name, run in (("show", _show), ("verify", _verify)):
        found[name].add_argument("path", metavar="DIR|PREFIX", nargs="+")
        found[name].add_argument("--json", action="store_true", help="print JSON")
        found[name].set_defaults(run=run)
    found["show"].add_argument(
        "--lengths", action="store_true", help="say how long the documents are, too"
    )
    return parser


_Answer = tuple[int, dict[str, Any]]
"""Exit code, and facts for JSON."""


def _show(path: Path, options: argparse.Namespace) -> _Answer:
    try:
        facts, shards, problems = _facts(path, options.lengths)
    except TokenFileError as error:
        return _unreadable(path, error)
    code = 1 if problems else 0
    if not options.json:
        print("\n".join(f"{name:<12}{_printable(value)}" for name, value in _lines(facts)))
        print("\n" + "\n".join(_table(shards)))
        for problem in problems:
            print(f"lightning-megatron: {problem}", file=sys.stderr)
    return code, {**facts, "shards": [asdict(shard) for shard in shards], "problems": problems}


def _facts(path: Path, lengths: bool) -> tuple[dict[str, Any], Sequence[Shard], list[str]]:
    if (path / MANIFEST_FILE).is_file() and not (manifest := Manifest.read(path)).complete:
        facts = _of_manifest(path, manifest)
        return facts, manifest.shards, [f"{path}: incomplete; `preprocess --resume` goes on"]
    corpus = Corpus(path)
    problems = corpus.problems()
    if corpus.manifest is not None:
        facts = _of_manifest(path, corpus.manifest)
    else:
        facts = _sums(path, corpus.shards, corpus.dtype.name)
    if lengths and not problems:
        facts["lengths"] = _lengths(corpus)
    return facts, corpus.shards, problems


def _sums(path: Path, shards: Sequence[Shard], dtype: str) -> dict[str, Any]:
    return {
        "path": str(path),
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "dtype": dtype,
    }


def _of_manifest(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        **_sums(path, manifest.shards, manifest.dtype),
        "complete": manifest.complete,
        "tokenizer": asdict(manifest.tokenizer),
        "options": dict(manifest.options),
    }


def _lengths(corpus: Corpus) -> dict[str, float]:
    import numpy as np

    found = corpus.lengths
    if not len(found):
        return {}
    names = [f"p{part}" for part in _PARTS]
    percentiles = np.percentile(found, _PARTS).tolist()
    return {"mean": float(found.mean()), **dict(zip(names, percentiles, strict=True))}


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if name == "tokenizer":
            eos = "none" if value["eos_id"] is None else value["eos_id"]
            sha = value["sha256"][:16] or "-"
            yield "tokenizer", value["name"]
            yield "", f"{value['vocab_size']:,} tokens, end of document {eos}, SHA-256 {sha}"
        elif name == "lengths":
            yield name, ", ".join(f"{part} {size:,.0f}" for part, size in value.items()) or "-"
        elif name == "options":
            for option, chosen in value.items():
                yield "option", f"{option}={json.dumps(chosen)}"
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        else:
            yield name, f"{value:,}" if isinstance(value, int) else str(value)


def _table(shards: Sequence[Shard]) -> Iterator[str]:
    rows = [
        (s.name, f"{s.documents:,}", f"{s.tokens:,}", _bytes(s), s.source) for s in shards[:_SHOWN]
    ]
    lines = [("SHARD", "DOCUMENTS", "TOKENS", "BYTES", "SOURCE"), *rows]
    widths = [max(len(_printable(line[i])) for line in lines) for i in range(5)]
    for name, *numbers, source in lines:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:4], strict=True)]
        yield "  ".join([_printable(name).ljust(widths[0]), *cells, _printable(source)]).rstrip()
    if len(shards) > _SHOWN:
        yield f"... and {len(shards) - _SHOWN:,} more (--json lists them)"


def _bytes(shard: Shard) -> str:
    return f"{sum(shard.sizes.values()):,}" if shard.sizes else "-"


def _verify(path: Path, options: argparse.Namespace) -> _Answer:
    begin = time.perf_counter()
    try:
        corpus = Corpus(path)
    except TokenFileError as error:
        return _unreadable(path, error)
    faults = []
    for fault in corpus.faults():
        faults.append(fault)
        # At once: the rest of a large corpus may take hours.
        print(f"lightning-megatron: {_printable(fault)}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - begin
    hashed = all(shard.sha256 for shard in corpus.shards)
    if not options.json and not faults:
        known = "" if corpus.vocab_size else ", of an unknown vocabulary"
        print(
            f"{path}: {'valid' if hashed else 'readable, but without hashes to compare with'} "
            f"({len(corpus.shards):,} shards, {len(corpus):,} documents, {corpus.total:,} tokens"
            f"{known}, {seconds:.1f} s)"
        )
    facts = {"path": str(path), "faults": faults, "hashed": hashed, "seconds": round(seconds, 3)}
    return (1 if faults else 0), facts


def _unreadable(path: Path, error: TokenFileError) -> _Answer:
    print(f"lightning-megatron: {error}", file=sys.stderr)
    code = 2 if isinstance(error, NoSuchTokensError) else 1
    return code, {"path": str(path), "faults": [str(error)]}


def _printable(text: str) -> str:
    # A name out of a file must not move the cursor of the terminal.
    return "".join(c if c.isprintable() else "?" for c in text)
