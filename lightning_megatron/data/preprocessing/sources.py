"""Files to be tokenized: their formats, their content, and where a file may be cut.

A source is one file. Its hash says whether a finished corpus still is that of its sources. A file
whose size and time of change are those of an earlier run is taken to have the hash found then.

Text is measured in bytes once it is unpacked, and may be cut anywhere: whoever reads a range reads
the records that begin in it. Tables (Parquet, and the Arrow files that the `datasets` library
keeps) may be cut between row groups or record batches only.
"""

import glob
import gzip
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.errors import ConfigError, raise_if_any

Kind = Literal["jsonl", "txt", "parquet", "arrow"]

KINDS: Mapping[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "txt",
    ".md": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Format of a file by its ending; the first two formats may also be compressed (``.gz``)."""

HUB = "hf:"
"""Beginning of a name of the Hugging Face Hub, or of a directory that `datasets` can load."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file.

    Attributes:
        path: the file, as it was named.
        kind: its format.
        compressed: whether it has to be unpacked.
        size: bytes of the file.
        changed: its time of change in nanoseconds.
        sha256: hash of the file.
        blocks: bytes of the parts that cannot be cut: row groups, record batches, a whole document.
            None for text that may be cut at any byte.
        text_bytes: bytes of text in it.
    """

    path: str
    kind: Kind
    compressed: bool
    size: int
    changed: int
    sha256: str
    blocks: tuple[int, ...] | None
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How sources are read.

    Attributes:
        text_key: field of a record, or column of a table, that holds its text. None: records are
            taken whole, as those of conversations are.
        separator: text between the documents of a text file; None: each file is one document.
    """

    text_key: str | None = "text"
    separator: str | None = None

    def boundary(self, kind: Kind) -> bytes | None:
        """Bytes between two records of a text file; None if there is but one record."""
        if kind == "jsonl":
            return b"\n"
        return None if self.separator is None else self.separator.encode()


def find_files(
    names: Sequence[str],
    kind: Kind | None = None,
    *,
    config: str | None = None,
    split: str = "train",
) -> list[tuple[str, Kind]]:
    """Return the files that names stand for, in the order of the names.

    Args:
        names: paths, patterns (``corpus/**/*.txt``), directories, and ``hf:NAME`` for a dataset of
            the Hugging Face Hub or one in a directory.
        kind: format of all files; by default that of their endings.
        config: configuration of ``hf:`` datasets.
        split: split of ``hf:`` datasets.

    Returns:
        Paths with their formats; matches of a pattern and files of a directory are sorted.

    Raises:
        ConfigError: no file is found for a name, one is named twice, or the format is unknown.
    """
    problems: list[str] = []
    found: list[tuple[str, Kind]] = []
    for name in names:
        if name.startswith(HUB):
            found += [(path, "arrow") for path in _hub_files(name, config, split)]
            continue
        paths = _matches(name)
        if not paths:
            problems.append(f"{name}: {_missing(name)}")
        for path in paths:
            known = kind or kind_of(path)
            if known is None:
                problems.append(
                    f"{path}: format unknown; a file must end in {', '.join(KINDS)} (text also in "
                    f".gz), or say --format"
                )
            else:
                found.append((path, known))
    raise_if_any(problems)
    if not found:
        raise ConfigError("no files were named")
    counts = Counter(os.path.abspath(path) for path, _ in found)
    twice = [path for path, count in counts.items() if count > 1]
    raise_if_any([f"{path}: named twice; its text would count twice" for path in twice])
    return found


def kind_of(path: str) -> Kind | None:
    """Return the format of a file by its ending, None if that is not known."""
    lower = path.lower()
    kind = KINDS.get(Path(lower.removesuffix(".gz")).suffix)
    return None if lower.endswith(".gz") and kind in ("parquet", "arrow") else kind


def examine(
    files: Sequence[tuple[str, Kind]],
    reading: Reading,
    known: Sequence[Mapping[str, Any]] = (),
    threads: int = 1,
) -> list[Source]:
    """Return the sources with their hashes and sizes of text.

    Args:
        files: paths and formats.
        reading: how they will be read.
        known: sources of an earlier run as mappings, whose hashes hold while size and time of
            change are the same.
        threads: files that are read at a time.

    Raises:
        ConfigError: a file cannot be read, is cut off, or has no column of the text's name.
    """
    earlier = {str(source["path"]): source for source in known}

    def one(file: tuple[str, Kind]) -> Source | str:
        try:
            return _examined(*file, reading, earlier.get(file[0]))
        except ConfigError as error:
            return str(error)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            return f"{file[0]}: is cut off or damaged ({error}); fetch it again"
        except OSError as error:
            return f"{file[0]}: cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor(max(1, threads)) as pool:
        results = list(pool.map(one, files))
    raise_if_any([result for result in results if isinstance(result, str)])
    return [result for result in results if isinstance(result, Source)]


def _matches(name: str) -> list[str]:
    path = Path(name).expanduser()
    if path.is_dir():
        inside = (str(file) for file in path.rglob("*") if file.is_file())
        return sorted(file for file in inside if kind_of(file) is not None)
    if path.exists():
        return [str(path)]
    return sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file())


def _missing(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        return f"no file in this directory ends in {', '.join(KINDS)}"
    if glob.has_magic(name):
        return "no file matches this pattern"
    near = get_close_matches(
        path.name, [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else [], n=1
    )
    return "does not exist" + (f"; nearest: {path.parent / near[0]}" if near else "")


def _examined(path: str, kind: Kind, reading: Reading, earlier: Mapping[str, Any] | None) -> Source:
    stat = Path(path).stat()
    compressed = path.lower().endswith(".gz")
    same = earlier is not None and (earlier["size"], earlier["changed"]) == (
        stat.st_size,
        stat.st_mtime_ns,
    )
    sha256 = str(earlier["sha256"]) if same and earlier is not None else _hash(path)
    blocks: tuple[int, ...] | None = None
    if kind == "parquet":
        blocks = _row_groups(path, reading.text_key)
    elif kind == "arrow":
        blocks = _record_batches(path, reading.text_key)
    elif compressed and same and earlier is not None:
        text_bytes = int(earlier["text_bytes"])
    else:
        text_bytes = _unpacked(path) if compressed else stat.st_size
    if blocks is not None:
        text_bytes = sum(blocks)
    elif reading.boundary(kind) is None:
        blocks = (text_bytes,)
    return Source(
        path=path,
        kind=kind,
        compressed=compressed,
        size=stat.st_size,
        changed=stat.st_mtime_ns,
        sha256=sha256,
        blocks=blocks,
        text_bytes=text_bytes,
    )


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _unpacked(path: str) -> int:
    with gzip.open(path, "rb") as file:
        return sum(map(len, iter(lambda: file.read(_CHUNK), b"")))


def _row_groups(path: str, column: str | None) -> tuple[int, ...]:
    parquet, errors = import_pyarrow("parquet")
    try:
        with parquet.ParquetFile(path) as file:
            _require_column(path, file.schema_arrow.names, column)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            return tuple(_column_bytes(group, column) for group in groups)
    except errors as error:
        raise ConfigError(f"{path}: no Parquet file, or a damaged one ({error})") from error


def _column_bytes(group: Any, column: str | None) -> int:
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(
        c.total_uncompressed_size
        for c in columns
        if column is None or c.path_in_schema.split(".")[0] == column
    )


def _record_batches(path: str, column: str | None) -> tuple[int, ...]:
    pyarrow, errors = import_pyarrow()
    try:
        with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
            _require_column(path, stream.schema.names, column)
            return tuple(
                batch.nbytes if column is None else batch.column(column).nbytes for batch in stream
            )
    except errors as error:
        raise ConfigError(
            f"{path}: no stream of Arrow record batches, or a damaged one ({error})"
        ) from error


def _require_column(path: str, names: Sequence[str], column: str | None) -> None:
    if column is not None and column not in names:
        raise ConfigError(
            f"{path}: no column {column!r}; name the one that holds the text with --text-key: "
            f"{', '.join(names)}"
        )


def import_pyarrow(module: str | None = None) -> tuple[Any, type[Exception]]:
    """Return pyarrow, or one of its modules, and the base class of its errors."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Parquet and Arrow files need pyarrow; install lightning-megatron[data]"
        ) from error
    errors: type[Exception] = pyarrow.ArrowException
    return (getattr(pyarrow, module) if module else pyarrow), errors


def _hub_files(name: str, config: str | None, split: str) -> list[str]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: needs the datasets library; install lightning-megatron[data]"
        ) from error
    try:
        dataset: Any = datasets.load_dataset(name.removeprefix(HUB), config, split=split)
    except Exception as error:  # the library raises errors of many kinds
        raise ConfigError(f"{name}: {error}") from error
    paths = [str(file["filename"]) for file in dataset.cache_files]
    pyarrow, _ = import_pyarrow()
    rows = 0
    for path in paths:
        with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
            rows += sum(batch.num_rows for batch in stream)
    if rows != len(dataset):
        raise ConfigError(
            f"{name}: split {split!r} is {len(dataset)} rows of files with {rows}; name a whole "
            "split"
        )
    return paths
