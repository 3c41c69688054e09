"""Checkpoints as earlier versions wrote them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory.hashed_files import entry_of
from lightning_megatron.checkpoint.directory.manifest import MANIFEST_FILE, part_file


def sealed(data: dict[str, Any]) -> str:
    """The text of a manifest with this content, and the right hash of itself."""
    body = json.dumps(data, indent=1)[: -len("\n}")]
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def make_format_3(directory: Path) -> None:
    """Write the manifest anew, as format 3: its parts list files, and end with their hashes."""
    root = json.loads((directory / MANIFEST_FILE).read_text())
    del root["sha256"]
    parts: dict[str, Any] = {}
    for number in range(len(root["files"])):
        name = part_file(number)
        if name not in root["files"]:
            continue
        tensors = json.loads((directory / name).read_text())["tensors"]
        names = {chunk[2] for chunks in tensors.values() for chunk in chunks}
        files = {file: root["files"][file] for file in sorted(names)}
        text = sealed({"schema": 3, "part": number, "files": files, "tensors": tensors})
        (directory / name).write_text(text)
        root["files"][name] = vars(entry_of(text.encode()))
        count = sum(map(len, tensors.values()))
        parts[name] = {"part": number, "files": sorted(names), "chunks": count}
    root |= {"schema": 3, "parts": parts}
    (directory / MANIFEST_FILE).write_text(sealed(root))
