"""A whole run of `lightning-megatron preprocess`: from files of text to a directory of shards.

The directory's manifest says from the first moment which sources, tokenizer and options it is for;
it counts as complete only when all shards are there. Until then ``unfinished/`` has a file for each
shard that is done. A shard is written in a directory of this run's own, moved to its place, and
then noted, so that a run that is killed at any moment leaves nothing that a later one could take
for a finished shard.

What exists is compared by content: a second run on the same sources and options does nothing, and
one on others is refused, with what differs.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_megatron.data.preprocessing.chat import ChatEncoder, ChatFormat
from lightning_megatron.data.preprocessing.parts import Part, default_shard_bytes, divide
from lightning_megatron.data.preprocessing.sources import (
    Kind,
    Reading,
    Source,
    examine,
    find_files,
)
from lightning_megatron.data.preprocessing.tokenizer import (
    find_tokenizer,
    folder,
    identify,
    load_tokenizer,
    special_tokens,
)
from lightning_megatron.data.preprocessing.work import Job, Made, Report
from lightning_megatron.data.preprocessing.workers import make_shards
from lightning_megatron.data.tokens.indexed import token_dtype
from lightning_megatron.data.tokens.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    TokenizerIdentity,
    replace_durably,
)
from lightning_megatron.errors import ConfigError, raise_if_any

_UNFINISHED = "unfinished"
_SHARD_FILES = ("shard-*.idx", "shard-*.bin")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What the tokens depend on, apart from the sources."""

    tokenizer: str
    """Model directory, `tokenizer.json`, or name on the Hub."""
    reading: Reading = field(default_factory=Reading)
    """Which field of a record is its text, and what separates documents."""
    kind: Kind | None = None
    """Format of all files; None: that of their endings."""
    hub_config: str | None = None
    """Configuration of ``hf:`` datasets."""
    hub_split: str = "train"
    """Split of ``hf:`` datasets."""
    eos: str | None = None
    """Token that ends a document; None: the one that the tokenizer's directory names."""
    append_eos: bool = True
    """Whether each document ends with that token; a conversation ends as its template says."""
    special_tokens: bool = False
    """Whether the tokenizer adds the tokens that its post-processor names."""
    chat: ChatFormat | None = None
    """How conversations become text, of which only answers have a loss; None: records are texts."""
    shard_bytes: int | None = None
    """Bytes of text of a shard; None: a 256th of all, but 4 MiB at least and 1 GiB at most."""


@dataclass(frozen=True)
class Outcome:
    """What a run has done.

    Attributes:
        manifest: of the finished directory.
        made: shards that this run made; the others were there.
        empty: records without text that this run left out.
    """

    manifest: Manifest
    made: int
    empty: int


Progress = Callable[[int, int], AbstractContextManager[Report]]
"""Makes a progress bar from the bytes of all text and of what is done."""


def preprocess(
    sources: Sequence[str],
    output: str | Path,
    options: PreprocessOptions,
    *,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Tokenize files into a directory of shards with a manifest.

    The result is the same bytes for any number of workers, also when the run was interrupted.

    Args:
        sources: paths, patterns, directories, and ``hf:NAME`` for datasets.
        output: directory that is made.
        options: tokenizer, and how text becomes tokens.
        workers: number of processes.
        resume: go on with a run that did not end, and make again what is missing.
        overwrite: remove what an earlier run made, whatever it was.
        progress: makes a progress bar.

    Raises:
        ConfigError: a source cannot be read, the tokenizer does not fit, or the directory is that
            of other sources or options.
    """
    _refuse(options, workers, resume, overwrite)
    way = _way(options)
    files = find_files(sources, options.kind, config=options.hub_config, split=options.hub_split)
    directory = Path(output)
    files = [(path, kind) for path, kind in files if not _is_of_a_run(path, directory)]
    if options.chat is not None:
        raise_if_any([_no_records(path) for path, kind in files if kind == "txt"])
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        earlier = None if overwrite else _manifest(directory)
        before = earlier.options if earlier is not None else {}
        found = examine(files, way.reading, before.get("sources", ()), workers)
        if overwrite:
            _remove(directory)
        shard_bytes = options.shard_bytes or before.get("shard_bytes") or default_shard_bytes(found)
        manifest = Manifest(
            tokenizer=way.identity,
            dtype=token_dtype(way.identity.vocab_size).name,
            shards=(),
            complete=False,
            options={**way.options, "shard_bytes": shard_bytes, "sources": [*map(_entry, found)]},
        )
        run = _Run(directory, manifest, divide(found, shard_bytes), resume)
        if earlier is not None:
            run.take_over(earlier)
            if earlier.complete and not run.waiting:
                run.clear()
                return Outcome(earlier, 0, 0)
        job = Job(
            sources=tuple(found),
            reading=way.reading,
            tokenizer=way.tokenizer,
            eos_id=way.identity.eos_id if way.options["append_eos"] else None,
            special_tokens=options.special_tokens,
            chat=options.chat,
            dtype=manifest.dtype,
            directory=run.begin(),
        )
        waiting = run.waiting
        total = sum(source.text_bytes for source in found)
        left = sum(part.text_bytes for part in waiting)
        with progress(total, total - left) if progress else nullcontext(_silent) as report:
            make_shards(job, waiting, workers, report, run.keep)
        return Outcome(run.finish(), len(waiting), run.empty)


@dataclass(frozen=True)
class _Way:
    """How text becomes tokens.

    Attributes:
        tokenizer: its directory or file.
        identity: what the manifest says of it.
        reading: which part of a record is read.
        options: what the manifest says of all else.
    """

    tokenizer: Path
    identity: TokenizerIdentity
    reading: Reading
    options: Mapping[str, Any]


def _way(options: PreprocessOptions) -> _Way:
    tokenizer = find_tokenizer(options.tokenizer)
    identity = identify(tokenizer, options.tokenizer, options.eos)
    append_eos = options.append_eos and options.chat is None
    if append_eos and identity.eos_id is None:
        raise ConfigError(_no_eos(tokenizer, options.tokenizer))
    reading, chat = options.reading, None
    if options.chat is not None:
        reading = replace(reading, text_key=None)
        chat = ChatEncoder(folder(tokenizer), options.chat, load_tokenizer(tokenizer)).identity()
    said = {
        **asdict(reading),
        "append_eos": append_eos,
        "special_tokens": options.special_tokens,
        "chat": chat,
        "tokenizers": version("tokenizers"),
    }
    return _Way(tokenizer, identity, reading, said)


class _Run:
    """The output directory.

    Args:
        directory: where it is.
        manifest: what is to be made, without shards.
        parts: all parts.
        resume: whether an unfinished directory may be gone on with.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, parts: Sequence[Part], resume: bool
    ) -> None:
        self._directory = directory
        self._unfinished = directory / _UNFINISHED
        self._manifest = manifest
        self._parts = parts
        self._resume = resume
        self._done: dict[str, Shard | None] = {}
        self._place = self._unfinished
        self.empty = 0

    @property
    def waiting(self) -> list[Part]:
        """Parts that are not done."""
        return [part for part in self._parts if part.name not in self._done]

    def take_over(self, earlier: Manifest) -> None:
        """Take what an earlier run has made, if it was for the same.

        Raises:
            ConfigError: it was for something else, or it did not end and `resume` was not asked.
        """
        differences = _differences(earlier, self._manifest)
        if differences:
            raise ConfigError(
                f"{self._directory} was made from something else: {'; '.join(differences)}. Name "
                "another --output, or say --overwrite to make it again"
            )
        if earlier.complete:
            self._done = {part.name: None for part in self._parts}
            self._done |= {shard.name: shard for shard in earlier.shards}
        else:
            self._done = {
                part.name: _read_shard(note)
                for part in self._parts
                if (note := self._note(part.name)).exists()
            }
        broken = [
            f"{file} {problem}"
            for shard in list(self._done.values())
            if shard is not None
            for file, problem in self._problems(shard)
        ]
        if self._resume:
            return
        if not earlier.complete:
            raise ConfigError(
                f"{self._directory} is unfinished: {len(self._done)} of {len(self._parts)} shards "
                "are there. Go on with --resume, or say --overwrite to begin again"
            )
        if broken:
            raise ConfigError(
                f"{self._directory}: {', '.join(broken[:5])}; --resume makes it again"
            )

    def begin(self) -> Path:
        """Note what is done already; return the directory of this run's own."""
        self._manifest.write(self._directory)
        self._unfinished.mkdir(exist_ok=True)
        for place in self._unfinished.glob("run-*"):
            shutil.rmtree(place, ignore_errors=True)
        for name, shard in self._done.items():
            self._write_note(name, shard)
        # A worker of a killed run may still write into the directory of that one.
        self._place = Path(tempfile.mkdtemp(prefix="run-", dir=self._unfinished))
        return self._place

    def keep(self, part: Part, made: Made) -> None:
        """Move a shard to its place, then note that it is done."""
        shard = made.shard
        for file in () if shard is None else sorted(shard.sizes, key=lambda n: n.endswith("idx")):
            (self._place / file).replace(self._directory / file)
        self._write_note(part.name, shard)
        self._done[part.name] = shard
        self.empty += made.empty

    def finish(self) -> Manifest:
        """Write the whole manifest.

        Raises:
            ConfigError: there is not a single document.
        """
        shards = tuple(s for part in self._parts if (s := self._done[part.name]) is not None)
        if not shards:
            _remove(self._directory)
            raise ConfigError("there is no text in the sources")
        fields = {**vars(self._manifest), "shards": shards, "complete": True}
        manifest = Manifest(**fields)
        manifest.write(self._directory)
        self.clear()
        return manifest

    def clear(self) -> None:
        """Remove what only an unfinished run needs."""
        if self._unfinished.exists():
            shutil.rmtree(self._unfinished)

    def _problems(self, shard: Shard) -> Iterator[tuple[str, str]]:
        """Files of a shard that are not as they were written; the shard then waits again."""
        for file, size in shard.sizes.items():
            path = self._directory / file
            found = path.stat().st_size if path.exists() else None
            if found != size:
                self._done.pop(shard.name, None)
                yield file, "is missing" if found is None else f"has {found} bytes, not {size}"

    def _note(self, name: str) -> Path:
        return self._unfinished / f"{name}.json"

    def _write_note(self, name: str, shard: Shard | None) -> None:
        content = None if shard is None else asdict(shard)
        replace_durably(self._note(name), json.dumps(content).encode())


def _refuse(options: PreprocessOptions, workers: int, resume: bool, overwrite: bool) -> None:
    problems = []
    if workers < 1:
        problems.append(f"--workers={workers}: must be at least 1; nearest valid: --workers=1")
    if options.shard_bytes is not None and options.shard_bytes < 1:
        problems.append("--shard-mb: must be above 0")
    if options.reading.separator == "":
        problems.append("--separator='': must be some text; without it each file is one document")
    if options.chat is not None and options.special_tokens:
        problems.append(
            "--special-tokens with --chat: the template of conversations writes these tokens; "
            "leave out --special-tokens"
        )
    if resume and overwrite:
        problems.append("--resume keeps what is there and --overwrite removes it: say one of them")
    raise_if_any(problems)


def _is_of_a_run(path: str, output: Path) -> bool:
    """Whether a file is no text but what a run wrote into its directory, inside of a source."""
    file, directory = Path(path).absolute(), output.absolute()
    return file == directory / MANIFEST_FILE or directory / _UNFINISHED in file.parents


def _no_eos(path: Path, name: str) -> str:
    tokens = special_tokens(path)
    known = f"of {', '.join(tokens[:12])}" if tokens else "of its vocabulary"
    return (
        f"--tokenizer={name}: does not say which token ends a document; name one {known} with "
        "--eos, or say --no-eos"
    )


def _no_records(path: str) -> str:
    return f"{path}: is plain text; conversations are read from JSON lines, Parquet and Arrow files"


def _entry(source: Source) -> dict[str, Any]:
    """Source in the manifest."""
    left_out = ("blocks", "compressed")
    return {key: value for key, value in asdict(source).items() if key not in left_out}


def _differences(earlier: Manifest, now: Manifest) -> list[str]:
    """What two runs that should make the same have not in common."""
    return [
        *_tokenizer_differences(earlier.tokenizer, now.tokenizer),
        *_option_differences(earlier, now),
        *_source_differences(earlier.options.get("sources", ()), now.options["sources"]),
    ]


def _tokenizer_differences(earlier: TokenizerIdentity, now: TokenizerIdentity) -> Iterator[str]:
    if earlier.sha256 != now.sha256:
        yield f"the tokenizer {earlier.name} is not {now.name}, by the hash of its file"
    elif earlier.eos_id != now.eos_id:
        yield f"the token that ends documents was {earlier.eos_id}, and is {now.eos_id}"


def _option_differences(earlier: Manifest, now: Manifest) -> Iterator[str]:
    for key in sorted({*earlier.options, *now.options} - {"sources"}):
        if key == "tokenizers" and earlier.complete:
            continue  # a finished corpus outlives the library that made it
        before, after = earlier.options.get(key), now.options.get(key)
        if before != after:
            yield f"{key} was {before!r}, and is {after!r}"


def _source_differences(
    earlier: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if [_content(source) for source in earlier] == [_content(source) for source in now]:
        return
    before = {source["path"]: _content(source) for source in earlier}
    after = {source["path"]: _content(source) for source in now}
    changes = [
        *(f"{path} has changed" for path in after if before.get(path, after[path]) != after[path]),
        *(f"{path} is new" for path in after if path not in before),
        *(f"{path} is gone" for path in before if path not in after),
    ]
    yield ", ".join(changes[:5]) if changes else "the order of the sources is another"


def _content(source: Mapping[str, Any]) -> tuple[Any, ...]:
    return source["sha256"], source["kind"], source["text_bytes"]


def _manifest(directory: Path) -> Manifest | None:
    if (directory / MANIFEST_FILE).exists():
        return Manifest.read(directory)
    for pattern in _SHARD_FILES:
        for file in directory.glob(pattern):
            raise ConfigError(
                f"{directory} holds {file.name} but no {MANIFEST_FILE}; name another --output, or "
                "say --overwrite"
            )
    return None


def _remove(directory: Path) -> None:
    """Remove what earlier runs made; the manifest first, as nothing is complete without it."""
    with suppress(FileNotFoundError):
        (directory / MANIFEST_FILE).unlink()
    for pattern in _SHARD_FILES:
        for file in directory.glob(pattern):
            file.unlink()
    shutil.rmtree(directory / _UNFINISHED, ignore_errors=True)


def _read_shard(note: Path) -> Shard | None:
    content = json.loads(note.read_text("utf-8"))
    return None if content is None else Shard(**content)


def _silent(size: int, tokens: int) -> None:
    """Report of a run without a progress bar."""


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other runs out of a directory while this one works there."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{directory}: another run of `preprocess` writes here; wait for it"
            ) from None
        yield
    finally:
        os.close(descriptor)
