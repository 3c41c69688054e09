"""The inventory of a local checkpoint: the list of its files over all nodes.

No node has all files, so every node keeps the list of all: name, size, hash and writer of each.
Directories whose lists are equal to the byte belong to one checkpoint, and only their files are
put together; a step that was saved twice is not mistaken for another. The content of the files is
described by the manifest among them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE
from lightning_megatron.checkpoint.directory.rank_manifest import FileEntry
from lightning_megatron.checkpoint.directory.sealed_text import is_file_name, read_text
from lightning_megatron.checkpoint.directory.storage import sizes
from lightning_megatron.errors import DamagedCheckpointError

INVENTORY_FILE = "local.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The files of a local checkpoint, over all nodes."""

    step: int
    """Optimizer steps taken."""
    taken: float
    """Time at which the state was captured, in seconds since 1970."""
    files: Mapping[str, FileEntry]
    """Size and hash of every file."""
    nodes: Mapping[str, int]
    """Number of the node that wrote each file, at that time; without files that all nodes have."""

    @property
    def everywhere(self) -> list[str]:
        """Names of the small files that every node has."""
        return [name for name in self.files if name not in self.nodes]

    def to_json(self) -> str:
        """Return the content of ``local.json``."""
        body = json.dumps(
            {
                "step": self.step,
                "taken": self.taken,
                "files": {
                    name: [entry.size, entry.sha256, self.nodes.get(name)]
                    for name, entry in self.files.items()
                },
            }
        )
        return f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n"

    @property
    def digest(self) -> str:
        """Hash of the list, which identifies the checkpoint."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "Inventory":
        """Parse the content of ``local.json``.

        Raises:
            DamagedCheckpointError: the text is not what was written.
        """
        body, _, seal = text.rstrip("\n").rpartition("\n")
        if hashlib.sha256(body.encode()).hexdigest() != seal:
            raise DamagedCheckpointError(f"{INVENTORY_FILE} is not what was written")
        try:
            data = json.loads(body)
            files = {name: _entry(name, fields) for name, fields in data["files"].items()}
            nodes = {n: int(f[2]) for n, f in data["files"].items() if f[2] is not None}
            if MANIFEST_FILE not in files or MANIFEST_FILE in nodes:
                raise ValueError("it lists no manifest")
            return cls(step=int(data["step"]), taken=float(data["taken"]), files=files, nodes=nodes)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{INVENTORY_FILE} is no inventory: {error!r}") from None

    def held(self, directory: Path) -> set[str]:
        """Return the names of files that a directory has with the right size.

        Raises:
            OSError: the directory cannot be read.
        """
        present = sizes(directory)
        return {name for name, entry in self.files.items() if present.get(name) == entry.size}

    def size(self, names: Iterable[str]) -> int:
        """Return the total bytes of some files."""
        return sum(self.files[name].size for name in names)


def read_inventory(directory: Path) -> Inventory:
    """Read the inventory of a local checkpoint.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpointError: the file is not what was written.
    """
    return Inventory.from_json(read_text(directory / INVENTORY_FILE))


def _entry(name: str, fields: Any) -> FileEntry:
    size, sha256, _ = fields
    if not is_file_name(name) or type(size) is not int or not 0 <= size < 1 << 63:
        raise ValueError(f"{name!r}: {fields!r}")
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError(f"{name!r}: {fields!r}")
    return FileEntry(size=size, sha256=sha256)
