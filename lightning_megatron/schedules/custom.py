"""custom: a schedule read from a file.

The format is the compute-only one of ``torch.distributed.pipelining`` (`_dump_csv`): a line for
each rank, in it the actions in order, each as stage, kind and microbatch::

    0F0,0F1,0I0,0F2,0W0,0I1,0W1,0I2,0W2
    1F0,1B0,1F1,1B1,,1F2,1B2

Kinds are those of `Kind`. Empty entries (time in which a rank stands idle) and the entries of
torch's longer format that move data (``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``, ``UNSHARD``,
``RESHARD``, ``REDUCE_GRAD``) are passed over, as the runner finds out itself what to move when.
``(0F3;1B1)OVERLAP_F_B`` is read as its parts one after the other. A JSON file holds a list of such
lists.

Which rank holds which stage, and how many microbatches there are, follows from the actions.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.schedules.actions import Action, Kind, Schedule

_ENTRY = re.compile(r"(\d+)([FBIW])(\d+)")
_MOVES_DATA = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a ``.csv`` or ``.json`` file.

    Raises:
        ConfigError: when the file cannot be read, an entry is no action, or the actions are not
            every forward and every backward of every stage once.
    """
    path = Path(path)
    try:
        rows = _read(path)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"table={str(path)!r}: the table of a schedule is a .csv or .json file ({error}); "
            f"nearest valid: a file with one line of entries such as 0F0,0B0 for each rank"
        ) from error
    return parse_schedule(rows, str(path))


def parse_schedule(rows: Sequence[Sequence[str]], source: str = "rows") -> Schedule:
    """Make a schedule of entries such as ``0F0``, a list for each rank.

    Args:
        rows: the entries.
        source: where they come from, for messages.

    >>> print(*parse_schedule([["0F0", "0F1", "0B0", "0B1"]]).row(0))
    F0.0 F0.1 B0.0 B0.1

    Raises:
        ConfigError: as in `load_schedule`.
    """
    problems: list[str] = []
    actions = tuple(tuple(_actions(row, rank, source, problems)) for rank, row in enumerate(rows))
    raise_if_any(problems)
    everything = [action for row in actions for action in row]
    holders = {(action.stage, rank) for rank, row in enumerate(actions) for action in row}
    num_stages = 1 + max((stage for stage, _ in holders), default=-1)
    num_microbatches = 1 + max((action.microbatch for action in everything), default=-1)
    placement = dict(holders)
    raise_if_any(_faults(everything, holders, num_stages, num_microbatches, len(actions), source))
    stage_ranks = tuple(placement[stage] for stage in range(num_stages))
    return Schedule("custom", num_microbatches, stage_ranks, actions)


def dump_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write ``schedule`` in the format that `load_schedule` reads (and torch's `_load_csv`)."""
    rows = [[f"{a.stage}{a.kind.value}{a.microbatch}" for a in row] for row in schedule.actions]
    if Path(path).suffix == ".json":
        text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    else:
        text = "".join(",".join(row) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def _read(path: Path) -> list[list[str]]:
    if path.suffix == ".json":
        rows = json.loads(path.read_text("utf-8"))
        return [[str(entry or "") for entry in row] for row in rows]
    if path.suffix != ".csv":
        raise ValueError(f"its ending is {path.suffix!r}")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _actions(row: Sequence[str], rank: int, source: str, problems: list[str]) -> Iterator[Action]:
    for entry in (part for whole in row for part in _parts(whole.strip())):
        if found := _ENTRY.fullmatch(entry):
            stage, kind, microbatch = found.groups()
            yield Action(Kind(kind), int(stage), int(microbatch))
        elif entry and not _MOVES_DATA.fullmatch(entry):
            problems.append(
                f"table={source!r}, rank {rank}: {entry!r} is no action; nearest valid: stage, one "
                f"of F, B, I, W, and microbatch, as in {rank}F0"
            )


def _parts(entry: str) -> list[str]:
    overlap = _OVERLAP.fullmatch(entry)
    return [part.strip() for part in overlap[1].split(";")] if overlap else [entry]


def _faults(
    everything: list[Action],
    holders: set[tuple[int, int]],
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
    source: str,
) -> list[str]:
    """Reasons why the actions are no schedule."""
    faults = []
    stages = Counter(stage for stage, _ in holders)
    ranks = Counter(rank for _, rank in holders)
    if not everything:
        faults.append("the table holds no action; nearest valid: a line such as 0F0,0B0")
    for stage in sorted(stage for stage, count in stages.items() if count > 1):
        faults.append(f"stage {stage} stands on several ranks; nearest valid: one of them")
    uneven = {ranks[rank] for rank in range(num_ranks)}
    if everything and len(uneven) > 1:
        faults.append(
            f"ranks hold {', '.join(str(ranks[r]) for r in range(num_ranks))} stages; nearest "
            f"valid: the same number on each"
        )
    counts = Counter(everything)
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            did = "".join(kind.value * counts[Action(kind, stage, microbatch)] for kind in Kind)
            if did not in ("FB", "FIW"):
                faults.append(
                    f"microbatch {microbatch} on stage {stage} has {did or 'nothing'}; nearest "
                    f"valid: one F and either one B or one I and one W"
                )
    return [f"table={source!r}: {fault}" for fault in faults]
