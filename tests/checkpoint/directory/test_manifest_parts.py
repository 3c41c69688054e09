"""Parts of a manifest: where ranks have written, and what may happen to that; older formats."""

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
from lightning_megatron.checkpoint.directory import hashed_files, manifest
from lightning_megatron.checkpoint.directory.manifest import part_file, read_manifest
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict, load_tensor
from lightning_megatron.checkpoint.offline.offline_writer import FileContent, write_in_parts
from lightning_megatron.cli import main
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.damage import flip, forge, part_at, rewrite_part

ROWS = torch.arange(24.0).reshape(8, 3)
FIXTURES = Path(__file__).parent / "fixtures"


def rows(rank, size, value=0.0):
    begin, end = (8 * r // size for r in (rank, rank + 1))
    tensor = ROWS[begin:end].clone() + value
    return Chunk(tensor=tensor, full_shape=(8, 3), offsets=(begin, 0))


def save_job(path):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"rows": rows(rank, size), "same": whole(torch.ones(2))}
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


def test_each_rank_says_where_its_bytes_are(path):
    manifest = read_manifest(path)
    assert manifest.writers == [0, 1, 2]
    shards = {f(rank) for rank in range(3) for f in (part_file, "__{}_0.distcp".format)}
    assert manifest.files.keys() == {".metadata", "state.json"} | shards
    for rank in range(3):
        (chunk,) = part_at(path, rank)["model.rows"]
        assert chunk.file == f"__{rank}_0.distcp"
        assert f"{chunk.begin}, {chunk.length}" in (path / part_file(rank)).read_text()
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


def test_flipped_bits_of_a_part_are_found(path):
    file = path / part_file(1)
    for bit in (1, 500, 8 * file.stat().st_size - 3):
        flip(file, bit)
        refuses(path, "manifest.1.json: the content has SHA-256")
        with pytest.raises(DamagedCheckpointError, match="not the part that was written|not text"):
            read_manifest(path).part(path, 1)
        flip(file, bit)
    assert torch.equal(load_full_state_dict(path)["rows"], ROWS)


def swap(path):
    (path / "manifest.1.json").rename(path / "aside")
    (path / "manifest.2.json").rename(path / "manifest.1.json")
    (path / "aside").rename(path / "manifest.2.json")


def test_parts_that_are_not_what_was_written_are_refused(path):
    swap(path)
    refuses(path, "manifest.1.json.*manifest.2.json")
    swap(path)
    (path / "manifest.1.json").unlink()
    refuses(path, "manifest.1.json is missing")
    shutil.copy(path / "manifest.0.json", path / "manifest.1.json")
    refuses(path, "manifest.1.json")
    (path / "manifest.1.json").write_bytes(b"")
    refuses(path, "manifest.1.json has 0 bytes")
    (path / "manifest.1.json").unlink()
    (path / "manifest.1.json").symlink_to("/etc/passwd")
    refuses(path, "manifest.1.json is a link out")


def test_a_part_that_says_something_else_is_refused(path):
    (chunk,) = part_at(path, 1)["model.rows"]
    others = [replace(chunk, offsets=(3, 0)), replace(chunk, sizes=(2, 3))]
    for part in ({}, *({"model.rows": [other]} for other in others)):
        rewrite_part(path, 1, part)
        with pytest.raises(DamagedCheckpointError, match=r"the chunk at \(2, 0\) is not in part 1"):
            load_full_state_dict(path)
    for content in (b"[]", b'{"tensors": {"a": [3]}}'):
        forge(path, part_file(1), content)
        with pytest.raises(DamagedCheckpointError, match="manifest.1.json is not part of a manif"):
            load_full_state_dict(path)


def test_ranks_read_only_the_parts_that_they_need(pool, path):
    opened = pool.run(2, count_parts_job, path)
    assert opened == [[0, 1], [1, 2]]


def count_parts_job(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reader = CheckpointReader(path)
    chunk = rows(rank, 2, -1.0)
    reader.read({"model.rows": chunk})
    assert torch.equal(chunk.tensor, rows(rank, 2).tensor)
    return sorted(reader.manifest.parts)


def test_parts_are_forgotten_when_they_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_KEPT_PARTS", 2)
    chunks = [{"a": rows(rank, 4)} for rank in range(4)]
    parts = [FileContent(planned=chunk, load=lambda chunk=chunk: chunk) for chunk in chunks]
    write_in_parts(tmp_path / "a.ckpt", parts, {})
    reader = CheckpointReader(tmp_path / "a.ckpt", alone=True)
    value = whole(torch.zeros(8, 3))
    reader.read({"model.a": value})
    assert torch.equal(value.tensor, ROWS)
    assert sorted(reader.manifest.parts) == [2, 3]


@pytest.mark.parametrize("schema", [2, 3])
def test_older_checkpoints_are_read_verified_and_indexed(tmp_path, capsys, schema):
    path = Path(shutil.copytree(FIXTURES / f"schema{schema}.ckpt", tmp_path / "old.ckpt"))
    saved = read_manifest(path)
    assert (saved.schema, saved.writers) == (schema, [0, 1])
    expected = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(load_full_state_dict(path)["rows"], expected)
    assert torch.equal(load_tensor(path, "rows", slice(2, 5)), expected[2:5])
    assert main(["ckpt", "verify", str(path)]) == 0
    assert main(["ckpt", "show", "--json", str(path)]) == 0
    assert main(["ckpt", "index", str(path)]) == 0
    assert ".metadata was there" in capsys.readouterr().out
    assert [len(saved.part(path, number)["model.rows"]) for number in (0, 1)] == [1, 1]
    flip(path / "__1_0.distcp", 999)
    refuses(path, "__1_0.distcp: the content has SHA-256")


def test_all_that_format_3_holds_is_read():
    path = FIXTURES / "schema3.ckpt"
    state = load_full_state_dict(path)
    assert torch.equal(state["alias"], torch.ones(2, dtype=torch.bfloat16))
    assert (state["one"].dtype, state["scalar"].item()) == (torch.bfloat16, 7)
    reader = CheckpointReader(path, alone=True)
    assert (reader.manifest.step, reader.manifest.epoch) == (9, 1)
    assert reader.state["callbacks"] == {"best": torch.tensor(0.5)}


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
    monkeypatch.setattr(hashed_files, "LARGEST_TEXT", limit)
    state = {"x": "x" * (400 if file == "state.json" else 1)}
    chunks = {f"rows{i}": rows(0, 1) for i in range(1 if file == "state.json" else 6)}
    with pytest.raises(CheckpointError, match=rf"{file} would have \d+ bytes, and at most {limit}"):
        save_directory(tmp_path / "a.ckpt", chunks, state)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert load_full_state_dict(tmp_path / "a.ckpt").keys() == {"rows"}
