"""`lightning-megatron ckpt`: list checkpoints, show one, verify one.

`ls` and `show` read manifests only and answer at once. `verify` makes all checks of loading: it
compares every file with its hash. `index` writes the export for torch.distributed.checkpoint, which
large checkpoints do not have. No command unpickles anything.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory.commit import CORRUPT, locate
from lightning_megatron.checkpoint.directory.discovery import (
    Places,
    candidates,
    is_candidate,
    renamed,
)
from lightning_megatron.checkpoint.directory.manifest import (
    METADATA_FILE,
    Manifest,
    is_checkpoint,
    local_path,
    read_manifest,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath, sizes, storage_path
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lightning_megatron.topology.degrees import divided_axes


def ckpt(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `ckpt`.

    Returns:
        The exit code: 0; 1 if `verify` finds damage; 2 if a path is no checkpoint, or unreadable.
    """
    options = _parser().parse_args(list(args))
    try:
        code: int = options.run(options)
    except (ConfigError, CheckpointError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron ckpt", description="Inspect checkpoints without loading them."
    )
    commands = parser.add_subparsers(required=True, metavar="{ls,show,verify,index}")
    for name, run, summary, argument, several in (
        ("ls", _ls, "list the checkpoints below a directory, newest first", "DIR|URL", False),
        ("show", _show, "print the contents of checkpoints", "PATH|URL", False),
        ("verify", _verify, "compare checkpoints with their hashes; exit code 0 if all are "
         "intact, 1 if one is damaged, 2 if one cannot be read", "PATH|URL", True),
        ("index", _index, "write .metadata, the index for torch.distributed.checkpoint, into a "
         "checkpoint that has none because of its many chunks", "PATH", False),
    ):  # fmt: skip
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("path", type=str, metavar=argument, nargs="+" if several else None)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
    return parser


def _ls(options: argparse.Namespace) -> int:
    top = _place(options.path)
    if not top.is_dir():
        raise ConfigError(
            f"DIR={top}: must be a directory that exists; nearest valid: one with checkpoints"
        )
    places = Places(trees=(top.resolve(),))
    found = [top] if is_checkpoint(top) else [*candidates(places), *renamed(places)]
    entries = [_overview(path) for path in found]
    if options.json:
        _print_json(entries)
    elif not entries:
        print(f"no checkpoints in {top}")
    else:
        rows = [
            [
                _relative(e["path"], top),
                *(_text(e[key]) for key in ("step", "epoch")),
                _date(e["written"]),
                _size(e["bytes"]),
                _size(e["own_bytes"]),
                _layout(e["layout"]),
                e["status"],
            ]
            for e in entries
        ]
        print(_table(["NAME", "STEP", "EPOCH", "WRITTEN", "SIZE", "OWN", "LAYOUT", "STATUS"], rows))
    return 0


def _overview(path: AnyPath) -> dict[str, Any]:
    place = locate(path)
    unknown = dict.fromkeys(("step", "epoch", "written", "bytes", "own_bytes", "layout"))
    entry: dict[str, Any] = {"path": str(path), **unknown, "status": "complete, not verified"}
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return {
            **entry,
            "status": "damaged" if is_checkpoint(place) else "torn",
            "fault": str(error),
        }
    entry |= {key: getattr(manifest, key) for key in ("step", "epoch", "written", "layout")}
    entry |= {"bytes": manifest.size, "own_bytes": manifest.own_size}
    found = sizes(place) if place.is_dir() else {place.name: manifest.size}
    if CORRUPT in path.suffix or any(found.get(n) != f.size for n, f in manifest.files.items()):
        entry["status"] = "damaged"
    return entry


def _checkpoints(path: AnyPath) -> list[AnyPath]:
    """Return a checkpoint, or all in a folder of runs; the path itself if there are none."""
    if not path.is_dir() or is_candidate(path.absolute()):
        return [path]
    places = Places(trees=(path.resolve(),))
    return sorted([*candidates(places), *renamed(places)], key=str) or [path]


def _show(options: argparse.Namespace) -> int:
    path, code = _place(options.path), 0
    found = _checkpoints(path)
    facts: list[dict[str, Any]] = []
    for number, each in enumerate(found):
        try:
            directory = locate(each.absolute())
            manifest = read_manifest(directory)
        except CheckpointError as error:
            if found == [path]:
                raise
            print(f"lightning-megatron: {error}", file=sys.stderr)
            code = 2
            continue
        if options.json:
            total = {"bytes": manifest.size, "own_bytes": manifest.own_size}
            known = asdict(replace(manifest, parts={}))
            del known["parts"]
            facts.append({"path": str(directory), **total, **known})
            continue
        print("\n" * (number > 0), end="")
        _print_manifest(directory, manifest)
    if options.json:
        _print_json(facts[0] if found == [path] else facts)
    return code


def _print_manifest(directory: AnyPath, manifest: Manifest) -> None:
    facts = {
        "path": directory,
        "step": _text(manifest.step),
        "epoch": _text(manifest.epoch),
        "written": _date(manifest.written),
        "layout": _layout(manifest.layout),
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        "size": _size(manifest.size),
        "own": f"{_size(manifest.own_size)}; the rest is linked from an earlier checkpoint",
        "optimizers": manifest.optimizers,
        "parameters": f"{_elements(manifest):,} in model.*",
    }
    if not manifest.linked:
        del facts["own"]
    print("\n".join(f"{key:<12}{value}" for key, value in facts.items()))
    files = [
        [n, _size(e.size), "linked" if n in manifest.linked else "own", (e.sha256 or "-")[:16]]
        for n, e in manifest.files.items()
    ]
    print("\n" + _table(["FILE", "SIZE", "BYTES", "SHA-256"], files))
    tensors = [
        [name, e.dtype, "x".join(map(str, e.shape)) or "scalar", str(e.count)]
        for name, e in manifest.tensors.items()
    ]
    if tensors:
        print("\n" + _table(["TENSOR", "DTYPE", "SHAPE", "CHUNKS"], tensors))
    if manifest.aliases:
        aliases = [[alias, name] for alias, name in manifest.aliases.items()]
        print("\n" + _table(["ALIAS", "OF"], aliases))


def _verify(options: argparse.Namespace) -> int:
    found = [_verdict(path) for text in options.path for path in _checkpoints(_place(text))]
    if options.json:
        _print_json(found)
    else:
        for verdict in found:
            print(_sentence(verdict), file=sys.stderr if verdict["exit"] == 2 else sys.stdout)
    code: int = max(verdict["exit"] for verdict in found)
    return code


def _index(options: argparse.Namespace) -> int:
    # Late: the other commands need not wait for torch.
    from lightning_megatron.checkpoint.directory.commit import write_durably
    from lightning_megatron.checkpoint.directory.dcp_metadata import pickled_metadata
    from lightning_megatron.checkpoint.load.reader import CheckpointReader

    reader = CheckpointReader(local_path(options.path), alone=True)
    directory, manifest = reader.directory, reader.manifest
    made = manifest.file(METADATA_FILE) not in manifest.files
    if made:
        parts = (manifest.part(directory, number) for number in manifest.writers)
        content = pickled_metadata(manifest.tensors, parts)
        assert isinstance(directory, Path)
        (directory / METADATA_FILE).unlink(missing_ok=True)
        write_durably(directory / METADATA_FILE, content)
    if options.json:
        _print_json({"path": str(directory), "made": made})
    else:
        print(f"{directory}: {METADATA_FILE} {'is made' if made else 'was there'}")
    return 0


def _verdict(path: AnyPath) -> dict[str, Any]:
    # Late: the other commands need not wait for torch.
    from lightning_megatron.checkpoint.directory.verify import foreign_files, is_shared
    from lightning_megatron.checkpoint.load.file_reader import open_checkpoint

    verdict: dict[str, Any] = {"path": str(path), "exit": 0, "fault": None}
    begin = time.perf_counter()
    try:
        if path.exists() and not is_candidate(path.absolute()):
            raise CheckpointError(f"{path}: not a checkpoint of lightning-megatron")
        reader = open_checkpoint(path, alone=True)
    except DamagedCheckpointError as error:
        return {**verdict, "exit": 1, "fault": str(error)}
    except (CheckpointError, ConfigError) as error:
        return {**verdict, "exit": 2, "fault": str(error)}
    manifest, is_dir = reader.manifest, reader.directory.is_dir()
    return {
        **verdict,
        "step": manifest.step,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "shared": [n for n in manifest.files if is_dir and is_shared(reader.directory / n)],
        "tensors": len(manifest.tensors),
        "foreign": foreign_files(reader.directory, manifest) if is_dir else [],
        "seconds": round(time.perf_counter() - begin, 3),
    }


def _sentence(verdict: Mapping[str, Any]) -> str:
    path = verdict["path"]
    if verdict["exit"]:
        kind = "damaged" if verdict["exit"] == 1 else "cannot be verified"
        return f"{path}: {kind}\n  {_printable(verdict['fault'])}"
    foreign = f"; not part of it: {', '.join(verdict['foreign'])}" if verdict["foreign"] else ""
    if verdict["shared"]:
        foreign += f"; shared with other checkpoints: {', '.join(verdict['shared'])}"
    return (
        f"{path}: valid ({verdict['files']} files, {_size(verdict['bytes'])}, "
        f"{verdict['tensors']} tensors, {verdict['seconds']:.1f} s){foreign}"
    )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # A name out of a file must not move the cursor of the terminal.
    lines = [header, *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _elements(manifest: Manifest) -> int:
    tensors = manifest.tensors.items()
    return sum(math.prod(e.shape) for name, e in tensors if name.startswith("model."))


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _date(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size, unit = float(count), 0
    while size >= 1000 and unit < 5:
        size, unit = size / 1000, unit + 1
    return f"{size:.{0 if unit == 0 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[unit]}"


def _layout(layout: Mapping[str, int] | None) -> str:
    """The axes that divide anything."""
    if layout is None:
        return "-"
    return divided_axes(layout) or "one process"


def _place(text: str) -> AnyPath:
    """Return an argument as a path; a path of this machine stays as it was written."""
    return storage_path(text) if "://" in text else Path(text)


def _relative(path: str, base: AnyPath) -> str:
    there, root = _place(path), base.resolve()
    return str(there.relative_to(root)) if there.is_relative_to(root) else path
