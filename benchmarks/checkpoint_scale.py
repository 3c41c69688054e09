"""What a save and a load of a thousand ranks cost each of them, without their tensors.

The ranks of a layout of tp=8 and ZeRO over the rest are taken one by one, each in a process of its
own that does what this rank would do: plan, write its part of the manifest, write the rest of it,
read as a rank of another layout, verify. Matrices are cut along their first or their second
dimension by tensor parallelism, some into pieces of unequal size; vectors are the same on all tp
ranks. What is not in the figures: the network, and the tensors themselves.

    python -m benchmarks.checkpoint_scale --tensors 1200 4100
"""

import argparse
import hashlib
import math
import multiprocessing
import pickle
import re
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parser, report
from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle
from lightning_megatron.checkpoint.directory.coverage import overlapping, tensor_faults
from lightning_megatron.checkpoint.directory.hashed_files import (
    FileEntry,
    encoded,
    entry_of,
    read_entry,
)
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    ChunkEntry,
    Manifest,
    Part,
    TensorEntry,
    part_file,
    part_text,
    read_manifest,
)
from lightning_megatron.checkpoint.save.write_assignment import (
    OFFERS_EACH,
    Offer,
    _offer,
    _packed,
    _unpacked,
    assign,
)

TP = 8
_SHAPES = ((8192, 8192), (11008, 4096))
_ARCHIVE_BYTES = 1500
"""What `torch.save` adds to the numbers of a tensor."""


def name_of(number: int) -> str:
    """The name of a tensor, as long as names are."""
    return f"model.trunk.layers.{number // 12}.block.{number % 12}.projection.weight"


def held(number: int, rank: int, ranks: int) -> tuple[tuple[int, ...], Rectangle | None]:
    """Shape of a tensor, and the rectangle that a rank has of it."""
    dp, (tp_rank, dp_rank) = ranks // TP, (rank % TP, rank // TP)
    rows, columns = _SHAPES[number % 2]
    kind = number % 5
    if kind == 4:
        begin, length = _rows(rows, dp, dp_rank)
        return (rows,), ((begin,), (length,)) if length else None
    if kind < 2:
        begin, length = _rows(rows // TP, dp, dp_rank)
        offsets, sizes = (tp_rank * (rows // TP) + begin, 0), (length, columns)
    else:
        begin, length = _rows(rows, dp, dp_rank)
        offsets, sizes = (begin, tp_rank * (columns // TP)), (length, columns // TP)
    return (rows, columns), (offsets, sizes) if length else None


def _rows(length: int, size: int, rank: int) -> tuple[int, int]:
    """What FSDP2 gives a rank of so many rows."""
    each = -(-length // size)
    begin = min(rank * each, length)
    return begin, min(each, length - begin)


def offer_of(numbers: Sequence[int], rank: int, ranks: int) -> Offer:
    """What a rank offers of some tensors."""
    offer: Offer = {}
    for number in numbers:
        shape, rectangle = held(number, rank, ranks)
        if rectangle is not None:
            offer[name_of(number)] = ("bfloat16", shape, False, [rectangle])
    return offer


def planners_of(tensors: int, ranks: int) -> list[list[int]]:
    """The tensors of each planner."""
    offers = sum(len(offer_of(range(tensors), rank, ranks)) for rank in (0, ranks - 1)) / 2 * ranks
    count = min(ranks, math.ceil(offers / OFFERS_EACH))
    dealt: list[list[int]] = [[] for _ in range(count)]
    for number in range(tensors):
        dealt[zlib.crc32(name_of(number).encode()) % count].append(number)
    return dealt


def build(directory: Path, tensors: int, ranks: int) -> int:
    """Make what all ranks together make; return the number of chunks."""
    tables: list[dict[str, TensorEntry]] = []
    written: list[dict[str, list[Rectangle]]] = [defaultdict(list) for _ in range(ranks)]
    planners = planners_of(tensors, ranks)
    for planner, numbers in enumerate(planners):
        offers = [offer_of(numbers, rank, ranks) for rank in range(ranks)]
        verdict = assign(offers, planner, len(planners))
        tables.append(dict(verdict.tensors))
        for rank, mine in enumerate(verdict.positions):
            for name, positions in mine.items():
                written[rank][name] += [offers[rank][name][3][p] for p in positions]
    entries: dict[str, FileEntry] = {}
    for rank, mine_ in enumerate(written):
        content = part_text(part_of_rank(rank, mine_)).encode()
        name, shard = part_file(rank), f"__{rank}_0.distcp"
        (directory / name).write_bytes(content)
        digest = hashlib.sha256(shard.encode()).hexdigest()
        entries |= {shard: FileEntry(size=1 << 40, sha256=digest), name: entry_of(content)}
    (directory / "tables").write_bytes(pickle.dumps([pickle.dumps(t) for t in tables]))
    (directory / "files").write_bytes(pickle.dumps(entries))
    (directory / "rank").write_bytes(pickle.dumps(dict(written[ranks // 2])))
    return sum(entry.count for table in tables for entry in table.values())


def part_of_rank(rank: int, written: dict[str, list[Rectangle]]) -> Part:
    """The part of a rank that has written these rectangles."""
    file, end = f"__{rank}_0.distcp", 0
    held_: dict[str, tuple[ChunkEntry, ...]] = {}
    for name, rectangles in written.items():
        chunks = []
        for offsets, sizes in rectangles:
            length = 2 * math.prod(sizes) + _ARCHIVE_BYTES
            chunks.append(
                ChunkEntry(offsets=offsets, sizes=sizes, file=file, begin=end, length=length)
            )
            end += length
        held_[name] = tuple(chunks)
    return held_


# What one rank does: each returns the step, ready to be measured, and what it came to.


def plan(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """Rank 0 as planner: from the texts that it is sent to what it sends."""
    planners = planners_of(tensors, ranks)
    yield None
    texts = [_packed(offer_of(planners[0], rank, ranks)) for rank in range(ranks)]
    yield None
    verdict = assign([_offer(_unpacked(text)) for text in texts], 0, len(planners))
    replies = [_packed(mine) for mine in verdict.positions]
    kilobytes = (sum(map(len, texts)) / 1e3, sum(map(len, replies)) / 1e3)
    yield "{} planners; {:.0f} kB come, {:.0f} kB go".format(len(planners), *kilobytes)


def root(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """Rank 0: from what planners and writers report to a manifest that is written and hashed."""
    yield None
    tables = pickle.loads((directory / "tables").read_bytes())
    entries = pickle.loads((directory / "files").read_bytes())
    yield None
    found: dict[str, TensorEntry] = {}
    for table in tables:
        found |= pickle.loads(table)
    manifest = Manifest(written=1.0, files=entries, tensors=found)
    content = encoded(MANIFEST_FILE, manifest.to_json())
    (directory / MANIFEST_FILE).write_bytes(content)
    yield f"{len(content) / 1e6:.2f} MB"


def part(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """Any rank: its part, written and hashed."""
    written = pickle.loads((directory / "rank").read_bytes())
    yield None
    yield None
    content = encoded("part", part_text(part_of_rank(ranks // 2, written)))
    (directory / "a part").write_bytes(content)
    entry_of(content)
    yield f"{len(content) / 1e6:.2f} MB"


def read(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """A rank of half as many: manifest, then the places of all of its rectangles."""
    yield None
    yield None
    manifest = read_manifest(directory)
    needed: set[int] = set()
    for number in range(tensors):
        _, rectangle = held(number, ranks // 4 + 1, ranks // 2)
        if rectangle is not None:
            needed |= {p for p, _ in overlapping(manifest.tensors[name_of(number)], rectangle)}
    places = sum(len(manifest.part(directory, number)) for number in sorted(needed))
    yield f"{len(needed)} parts opened, {places} tensors in them"


def verify(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """The same rank's share of checking the tensors."""
    manifest = read_manifest(directory)
    yield None
    yield None
    assert tensor_faults(manifest.tensors, ranks // 4 + 1, ranks // 2) == []
    yield ""


def verify_alone(directory: Path, tensors: int, ranks: int) -> Iterator[Any]:
    """One process, as `lightning-megatron ckpt verify`: manifest, tensors, hashes of the parts."""
    yield None
    yield None
    manifest = read_manifest(directory)
    assert tensor_faults(manifest.tensors) == []
    for number in range(ranks):
        assert read_entry(directory / part_file(number)) == manifest.files[part_file(number)]
    yield f"{ranks} parts"


ROLES: dict[str, Callable[[Path, int, int], Iterator[Any]]] = {
    "rank 0: plan": plan,
    "rank 0: write the manifest": root,
    "any rank: write its part": part,
    "rank of another layout: find its chunks": read,
    "rank of another layout: its share of verifying": verify,
    "one process: verify everything": verify_alone,
}


def measure(step: Iterator[Any]) -> tuple[float, float, str]:
    """CPU seconds, peak MB above the start and result of a role.

    The memory counts from the first pause, which is when the rank has what it has anyway; the time
    from the second, when it has been sent what it works on.
    """
    next(step)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _kilobytes("VmRSS")
    next(step)
    begin = time.process_time()
    result = next(step)
    return time.process_time() - begin, (_kilobytes("VmHWM") - before) / 1e3, str(result)


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


def run(role: str, directory: Path, tensors: int, ranks: int, connection: Any) -> None:
    """In a process of its own, one role."""
    torch.set_num_threads(1)
    if role == "build":
        connection.send(build(directory, tensors, ranks))
    else:
        connection.send(measure(ROLES[role](directory, tensors, ranks)))


def in_process(role: str, directory: Path, tensors: int, ranks: int) -> Any:
    """What `run` sends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(role, directory, tensors, ranks, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def rows_of(tensors: int, ranks: int) -> list[dict[str, Any]]:
    """One row for each role."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        count = in_process("build", Path(folder), tensors, ranks)
        for role in ROLES:
            seconds, megabytes, result = in_process(role, Path(folder), tensors, ranks)
            rows.append(
                {
                    "chunks": f"{count:,} ({tensors} x {ranks} ranks)",
                    "step": role,
                    "CPU seconds": round(seconds, 2),
                    "peak MB": round(megabytes),
                    "what": result,
                }
            )
            print(rows[-1], flush=True)
    return rows


def options() -> argparse.Namespace:
    """The options of the command line."""
    made = parser(__doc__, steps=0)
    made.add_argument("--tensors", type=int, nargs="+", default=[1200], help="numbers of tensors")
    made.add_argument("--ranks", type=int, nargs="+", default=[1024], help="numbers of ranks")
    return made.parse_args()


def main() -> None:
    """Run and report."""
    given = options()
    rows = [row for ranks in given.ranks for n in given.tensors for row in rows_of(n, ranks)]
    report("checkpoint_scale", "Saving and loading as one of many ranks", rows, given.output)


if __name__ == "__main__":
    main()
