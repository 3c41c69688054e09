"""Paths of checkpoints: directories of this machine, or prefixes in an object store.

Readers of checkpoints need little of a path: its entries, their sizes, their bytes. `RemotePath`
offers that for every scheme of fsspec (``s3://``, ``gs://``, ``memory://``), with the method names
of `pathlib.Path`. Only the commit (commit.py, remote_commit.py) has to know which of the two
it was given. ``file://`` and ``local://`` are ordinary paths of this machine.

fsspec caches listings; here every listing is asked anew, as other processes write. Credentials and
endpoints are set as fsspec documents it (configuration files and environment variables).
"""

import difflib
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from typing_extensions import override

from lightning_megatron.errors import ConfigError

_SEPARATOR = "://"
_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True)
class RemoteStat:
    """Size and date of an object."""

    st_size: int
    st_mtime: float
    """Date in seconds since 1970; 0 where the store has none."""


class RemotePath(os.PathLike[str]):
    """A place in a store, with the methods of `pathlib.Path` that checkpoints need.

    Args:
        url: the URL with its scheme.

    Raises:
        ConfigError: fsspec knows no such scheme, or the package for it is not installed.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition(_SEPARATOR)
        _check_scheme(url, scheme)
        self._scheme = scheme
        parts = [part for part in rest.split("/") if part]
        self.parts = tuple(parts)
        # Some schemes begin with an authority that may be empty, as hdfs:///path does.
        root = "/" if rest.startswith("/") and scheme != "memory" else ""
        self._url = f"{scheme}{_SEPARATOR}{root}{'/'.join(parts)}"

    @property
    def fs(self) -> Any:
        """The fsspec file system, with an empty cache."""
        from fsspec.core import url_to_fs

        fs, _ = url_to_fs(self._url)
        fs.invalidate_cache()
        return fs

    @property
    def path(self) -> str:
        """The path within the file system, without the scheme."""
        from fsspec.core import url_to_fs

        path: str = url_to_fs(self._url)[1]
        return path

    @property
    def name(self) -> str:
        """The last component."""
        return self.parts[-1] if self.parts else ""

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        """The parent; a root is its own."""
        return RemotePath(self._url[: -len(self.name) - 1]) if len(self.parts) > 1 else self

    def with_name(self, name: str) -> "RemotePath":
        """Return the sibling of this name."""
        return self.parent / name

    def is_relative_to(self, other: "Path | RemotePath") -> bool:
        """Return whether the path is ``other`` or below it."""
        return (
            isinstance(other, RemotePath)
            and other._scheme == self._scheme
            and self.parts[: len(other.parts)] == other.parts
        )

    def relative_to(self, other: "Path | RemotePath") -> PurePosixPath:
        """Return the path relative to ``other``."""
        if not isinstance(other, RemotePath) or not self.is_relative_to(other):
            raise ValueError(f"{self} is not below {other}")
        return PurePosixPath(*self.parts[len(other.parts) :])

    def absolute(self) -> "RemotePath":
        """Return the path itself, which is absolute."""
        return self

    def resolve(self) -> "RemotePath":
        """Return the path itself, as stores have no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False, as stores have no links."""
        return False

    def exists(self) -> bool:
        """Return whether an object or prefix exists."""
        return bool(self.fs.exists(self.path))

    def is_dir(self) -> bool:
        """Return whether the path is a prefix of objects."""
        return bool(self.fs.isdir(self.path))

    def is_file(self) -> bool:
        """Return whether the path is an object."""
        return bool(self.fs.isfile(self.path))

    def stat(self) -> RemoteStat:
        """Return size and date."""
        fs = self.fs
        size = int(fs.info(self.path).get("size") or 0)
        try:
            modified = fs.modified(self.path).timestamp()
        except Exception:  # of directories few stores know it, and each fails in its own way
            modified = 0.0
        return RemoteStat(size, modified)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the objects directly below, by name, from one listing."""
        return {e.name: size for e, kind, size in self._entries() if kind == "file"}

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the entries directly below."""
        return (entry for entry, _, _ in self._entries())

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the entries directly below whose names match."""
        return (e for e in self.iterdir() if fnmatch.fnmatchcase(e.name, pattern))

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the entries below, at any depth, whose names match."""
        for entry, kind, _ in self._entries():
            if fnmatch.fnmatchcase(entry.name, pattern):
                yield entry
            if kind == "directory":
                yield from entry.rglob(pattern)

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Open an object as a binary file; what is written appears when the file is closed."""
        return self.fs.open(self.path, mode)

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        content: bytes = self.fs.cat_file(self.path)
        return content

    def write_bytes(self, data: bytes) -> None:
        """Put an object; readers see the old or the new one, never a mixture."""
        self.fs.pipe_file(self.path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete an object."""
        try:
            self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _entries(self) -> list[tuple["RemotePath", str, int]]:
        try:
            found = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        here, entries = self.path.rstrip("/"), []
        for info in found:
            # A store may keep an empty object for the directory itself.
            if (path := info["name"].rstrip("/")) != here:
                child = self / path.rpartition("/")[2]
                entries.append((child, str(info["type"]), int(info.get("size") or 0)))
        return sorted(entries, key=lambda entry: entry[0].name)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self._url}/{name}")

    def __fspath__(self) -> str:
        """Return the URL."""
        return self._url

    @override
    def __str__(self) -> str:
        return self._url

    @override
    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._key == self._key

    @override
    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, tuple[str, ...]]:
        return self._scheme, self.parts


AnyPath: TypeAlias = Path | RemotePath
"""Path of a checkpoint, local or in a store."""


def storage_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return ``path`` as an absolute path of this machine, or as a path in a store.

    Raises:
        ConfigError: fsspec knows no such scheme, or the package for it is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    scheme, separator, rest = text.partition(_SEPARATOR)
    if separator and scheme not in _LOCAL_SCHEMES:
        return RemotePath(text)
    return Path(os.path.abspath(rest if separator else text))


def sizes(directory: AnyPath) -> dict[str, int]:
    """Return the sizes of the files in a directory, by name."""
    if isinstance(directory, RemotePath):
        return directory.sizes()
    with os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _check_scheme(url: str, scheme: str) -> None:
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        get_filesystem_class(scheme.rpartition("::")[2])
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        raise ConfigError(
            f"checkpoint path {url!r}: the scheme {scheme!r} needs a package that is not "
            f"installed ({error}); nearest valid: pip install {package}"
        ) from error
    except ValueError as error:
        near = difflib.get_close_matches(scheme, known_implementations, 1)
        valid = f"{near[0]}{_SEPARATOR}..." if near else "a path without a scheme"
        raise ConfigError(
            f"checkpoint path {url!r}: fsspec knows no scheme {scheme!r}; nearest valid: {valid}"
        ) from error
