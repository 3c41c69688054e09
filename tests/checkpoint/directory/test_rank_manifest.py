"""Parts of a manifest: what ranks have written, and what may happen to that."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.collective_io import load_directory, save_directory
from lightning_megatron.checkpoint.directory import dcp_metadata as dcp_index
from lightning_megatron.checkpoint.directory import sealed_text
from lightning_megatron.checkpoint.directory.chunk_runs import Run
from lightning_megatron.checkpoint.directory.index import ShardIndex
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.directory.rank_manifest import (
    ChunkEntry,
    RankManifest,
    part_file,
)
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.trainer_state import state_files
from lightning_megatron.cli import main
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.damage import flip, part_at, rewrite_manifest, rewrite_part

ROWS = torch.arange(24.0).reshape(8, 3)
FIXTURES = Path(__file__).parent / "fixtures"


def rows(rank, size, value=0.0):
    begin, end = (8 * r // size for r in (rank, rank + 1))
    tensor = ROWS[begin:end].clone() + value
    return Chunk(tensor=tensor, full_shape=(8, 3), offsets=(begin, 0))


def save_job(path, value=0.0):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"rows": rows(rank, size, value), "same": whole(torch.ones(2))}
    save_directory(path, state if rank < 3 else {}, {"global_step": 5})
    return size


@pytest.fixture(scope="module")
def of_three(pool, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "a.ckpt"
    pool.run(3, save_job, path)
    return path


@pytest.fixture
def path(of_three, tmp_path):
    return Path(shutil.copytree(of_three, tmp_path / "a.ckpt"))


def test_each_rank_says_what_it_wrote(path):
    manifest = read_manifest(path)
    by_rank = manifest.files_by_rank
    assert {rank: sorted(files) for rank, files in by_rank.items()} == {
        rank: [f"__{rank}_0.distcp", f"manifest.{rank}.json"] for rank in range(3)
    }
    others = manifest.files.keys() - {name for files in by_rank.values() for name in files}
    assert others == {".metadata", "state.json"}
    for rank in range(3):
        part = part_at(path, rank)
        assert part.files == {f"__{rank}_0.distcp": by_rank[rank][f"__{rank}_0.distcp"]}
        assert RankManifest.from_json(part.to_json(), "a part") == part
    assert manifest.tensors["model.rows"].count == 3
    assert "distcp" not in json.dumps(json.loads((path / "manifest.json").read_text())["tensors"])


def test_what_follows_a_rule_takes_no_room_in_the_root(path):
    tensors = json.loads((path / "manifest.json").read_text())["tensors"]
    assert tensors["model.rows"]["chunks"] == [
        [0, [0, 0], [2, 3]],
        [1, [2, 0], [3, 3], [[2, 1, [3, 0]]]],
    ]


def refuses(path, message):
    for enter in (
        load_full_state_dict,
        lambda p: load_directory(p, torch.nn.Module()),
    ):
        with pytest.raises(DamagedCheckpointError, match=message):
            enter(path)
    assert main(["ckpt", "verify", str(path)]) == 1


def test_every_flipped_bit_of_a_part_is_found(path):
    file = path / part_file(1)
    text = file.read_text()
    for bit in range(8 * len(text)):
        flip(file, bit)
        with pytest.raises((DamagedCheckpointError, UnicodeDecodeError)):
            RankManifest.from_json(file.read_text(), "a part")
        flip(file, bit)
    for bit in (1, 500, 8 * len(text) - 3):
        flip(file, bit)
        refuses(path, "manifest.1.json: the content has SHA-256")
        flip(file, bit)
    assert torch.equal(load_full_state_dict(path)["rows"], ROWS)


def swap(path):
    (path / "manifest.1.json").rename(path / "aside")
    (path / "manifest.2.json").rename(path / "manifest.1.json")
    (path / "aside").rename(path / "manifest.2.json")


def of_another_save(pool, path):
    pool.run(3, save_job, path.parent / "b.ckpt", 1.0)
    shutil.copy(path.parent / "b.ckpt" / "manifest.1.json", path)


def grow(file, size):
    with file.open("r+b") as stream:
        stream.truncate(size)  # sparse: it costs nothing to make


def test_parts_that_are_not_what_was_written_are_refused(pool, path):
    swap(path)
    refuses(path, "manifest.1.json: .*manifest.2.json: ")
    swap(path)
    of_another_save(pool, path)
    refuses(path, "manifest.1.json: the content has SHA-256")
    (path / "manifest.1.json").unlink()
    refuses(path, "manifest.1.json is missing")
    shutil.copy(path / "manifest.0.json", path / "manifest.1.json")
    refuses(path, "manifest.1.json")
    (path / "manifest.1.json").write_bytes(b"")
    refuses(path, "manifest.1.json has 0 bytes")
    (path / "manifest.1.json").unlink()
    (path / "manifest.1.json").symlink_to("/etc/passwd")
    refuses(path, "manifest.1.json is a link out")


def test_part_of_any_size_takes_no_memory(path):
    grow(path / "manifest.1.json", 1 << 40)
    refuses(path, "manifest.1.json has 1099511627776 bytes, not the")
    # The root says so too; and who loads has not hashed it.
    entry = read_manifest(path).files["manifest.1.json"]
    huge = {**read_manifest(path).files, "manifest.1.json": replace(entry, size=1 << 40)}
    rewrite_manifest(path, files=huge)
    index = ShardIndex(path, read_manifest(path))
    with pytest.raises(DamagedCheckpointError, match="more than .* are not read"):
        index.part(1)
    grow(path / "manifest.1.json", 1 << 28)
    with pytest.raises(DamagedCheckpointError, match="has NUL bytes"):
        index.part(1)


PLACE = ChunkEntry(offsets=(2, 0), sizes=(3, 3), file="__1_0.distcp", begin=0, length=99)
LIES = {
    "another number": ({"number": 2}, "contradict"),
    "no file": ({"files": {}, "tensors": {}}, "contradict"),
    "a file of another rank": (
        {"tensors": {"model.rows": (replace(PLACE, file="__2_0.distcp"),)}},
        "not part of a manifest",
    ),
    "a file above": (
        {"tensors": {"model.rows": (replace(PLACE, file="../x"),)}},
        "not part of a manifest",
    ),
    "fewer chunks": ({"tensors": {}}, "contradict"),
    "another tensor": ({"tensors": {"model.x": (PLACE,)}}, "root manifest has no chunk"),
    "another place": (
        {"tensors": {"model.rows": (replace(PLACE, offsets=(3, 0)),)}},
        "root manifest has no chunk",
    ),
    "another size": (
        {"tensors": {"model.rows": (replace(PLACE, sizes=(9, 1)),)}},
        "root manifest has no chunk",
    ),
    "too short": ({"tensors": {"model.rows": (replace(PLACE, length=3),)}}, "exceeds file"),
    "beyond the file": ({"tensors": {"model.rows": (replace(PLACE, begin=1 << 50),)}}, "exceeds"),
    "no count": (
        {"tensors": {"model.rows": (replace(PLACE, begin=-1),)}},
        "has no file, begin or length",
    ),
}


@pytest.mark.parametrize("kind", LIES)
def test_forged_parts_are_refused(path, kind):
    changes, message = LIES[kind]
    rewrite_part(path, 1, **changes)
    refuses(path, message)


def test_root_that_claims_other_chunks_is_refused(path):
    tensors = dict(read_manifest(path).tensors)
    first, rest = tensors["model.rows"].runs
    lie = (
        replace(first, part=1),
        replace(rest, repeats=()),
        Run(part=0, offsets=(5, 0), sizes=(3, 3)),
    )
    tensors["model.rows"] = replace(tensors["model.rows"], runs=lie)
    rewrite_manifest(path, tensors=tensors)
    refuses(path, "rows: the chunk at .* is in no file|root manifest has no chunk")
    tensors["model.rows"] = replace(tensors["model.rows"], runs=(replace(first, part=7), rest))
    rewrite_manifest(path, tensors=tensors)
    refuses(path, "model.rows: a chunk is in no file")


def test_ranks_read_only_the_parts_that_they_need(pool, path):
    opened = pool.run(2, count_parts_job, path)
    assert opened == [[0, 1], [1, 2]]


def count_parts_job(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reader = CheckpointReader(path)
    reader.index._kept.clear()
    chunk = rows(rank, 2, -1.0)
    reader.read({"model.rows": chunk})
    assert torch.equal(chunk.tensor, rows(rank, 2).tensor)
    return sorted(reader.index._kept)


def test_older_checkpoints_are_read_verified_and_indexed(tmp_path, capsys):
    path = Path(shutil.copytree(FIXTURES / "schema2.ckpt", tmp_path / "old.ckpt"))
    assert read_manifest(path).schema == 2
    expected = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(load_full_state_dict(path)["rows"], expected)
    assert main(["ckpt", "verify", str(path)]) == 0
    assert main(["ckpt", "show", "--json", str(path)]) == 0
    assert main(["ckpt", "index", str(path)]) == 0
    assert ".metadata was there" in capsys.readouterr().out
    saved = read_manifest(path)
    assert [part.count for part in saved.embedded.values()] == [1, 1]
    flip(path / "__1_0.distcp", 999)
    refuses(path, "__1_0.distcp: the content has SHA-256")


def read_by_dcp(path):
    state = {"model.rows": torch.zeros(8, 3), "model.same": torch.zeros(2)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def test_dcp_reads_what_we_write(path):
    state = read_by_dcp(path)
    assert torch.equal(state["model.rows"], ROWS)
    assert torch.equal(state["model.same"], torch.ones(2))


def test_large_checkpoints_get_the_index_of_dcp_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_megatron.checkpoint.save.save_plan.MOST_CHUNKS", 1)
    path = tmp_path / "a.ckpt"
    save_directory(path, {"rows": rows(0, 1), "same": whole(torch.ones(2))}, {})
    assert not (path / ".metadata").exists()
    assert torch.equal(load_full_state_dict(path)["rows"], ROWS)
    assert main(["ckpt", "index", str(path)]) == 0
    assert ".metadata is made" in capsys.readouterr().out
    assert torch.equal(read_by_dcp(path)["model.rows"], ROWS)
    assert main(["ckpt", "verify", str(path)]) == 0
    assert "not part of it" not in capsys.readouterr().out
    assert dcp_index.MOST_CHUNKS >= 10_000


@pytest.mark.parametrize(
    ("limit", "file"), [(300, "state.json"), (300, "manifest.0.json"), (900, "manifest.json")]
)
def test_nothing_is_written_that_is_too_large_to_be_read(tmp_path, monkeypatch, limit, file):
    save_directory(tmp_path / "a.ckpt", {"rows": rows(0, 1)}, {"x": "old"})
    monkeypatch.setattr(sealed_text, "LARGEST_TEXT", limit)
    monkeypatch.setattr(state_files, "LARGEST_TEXT", limit)
    state = {"x": "x" * (400 if file == "state.json" else 1)}
    chunks = {f"rows{i}": rows(0, 1) for i in range(1 if limit == 300 else 5)}
    with pytest.raises(CheckpointError, match=rf"{file} would have \d+ bytes, and at most {limit}"):
        save_directory(tmp_path / "a.ckpt", chunks, state)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert load_full_state_dict(tmp_path / "a.ckpt").keys() == {"rows"}
