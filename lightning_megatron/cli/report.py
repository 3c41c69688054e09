"""`lightning-megatron report`: a run as one HTML page, from the events that it left behind."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.checkpoint.directory.commit import CORRUPT, locate
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError
from lightning_megatron.monitoring.report.page import page, summarize
from lightning_megatron.monitoring.report.run_history import RunHistory, read_run_history


def report(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `report`.

    Returns:
        The exit code: 0; 2 if there is no run, or the page cannot be written.
    """
    options = _parser().parse_args(list(args))
    out = options.output or options.run_dir / "report.html"
    try:
        history = read_run_history(options.run_dir, options.run)
        history.states = _states(history, options.verify)
        out.write_text(page(history), "utf-8")
    except (ConfigError, OSError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    print(summarize(history))
    print(f"  report      {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron report",
        description="Make an HTML page of what a run has left behind, however it ended.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="where its events/ are")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN_DIR/report.html"
    )
    parser.add_argument("--run", metavar="ID", help="which run; default: the newest")
    parser.add_argument(
        "--verify", action="store_true", help="compare the checkpoints with their hashes"
    )
    return parser


def _states(history: RunHistory, verify: bool) -> dict[str, str]:
    paths = {str(save["path"]) for save in history.saves if save.get("ok")}
    return {path: _state(path, history.run_dir, verify) for path in sorted(paths)}


def _state(path: str, run_dir: str, verify: bool) -> str:
    """State of a checkpoint: a key of `monitoring.report.tables.STATES`."""
    try:
        place = _place(path, run_dir)
        if place is None:
            return "gone"
        if not is_checkpoint(place):
            return "torn"
        manifest = read_manifest(place)
        for name, entry in manifest.files.items():
            if place.is_dir() and (place / name).stat().st_size != entry.size:
                return "damaged"
        return _verified(place) if verify else "complete"
    except DamagedCheckpointError:
        return "damaged"
    except CheckpointError:
        return "torn"
    except (OSError, ConfigError):
        return "unknown"


def _place(path: str, run_dir: str) -> AnyPath | None:
    """Path of a checkpoint, also if the directory of the run has moved."""
    given = storage_path(path) if "://" in path else Path(path)
    places: list[AnyPath] = [given]
    if isinstance(given, Path):
        places += [Path(run_dir) / given, Path(run_dir) / given.name]
    for place in places:
        found = locate(place)
        if found.exists():
            return found
        if any(place.parent.glob(f"{place.name}{CORRUPT}*")):
            raise DamagedCheckpointError(f"{place}: was found damaged and renamed")
    return None


def _verified(place: AnyPath) -> str:
    # Late: without --verify nobody waits for torch.
    from lightning_megatron.checkpoint.load.file_reader import open_checkpoint

    open_checkpoint(place, alone=True)  # raises where anything is wrong
    return "verified"
