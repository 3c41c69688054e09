"""Checkpoints in stores: what is published, replaced and found without renames."""

import json
import os
import pickle
import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import known_implementations
from torch import nn

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import load_directory, save_directory
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.discovery import Places, candidates, renamed
from lightning_megatron.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    is_checkpoint,
    read_manifest,
)
from lightning_megatron.checkpoint.directory.storage import RemotePath, storage_path
from lightning_megatron.checkpoint.load.newest import open_newest, open_or_go_back
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import export_safetensors, load_full_state_dict
from lightning_megatron.cli import main
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError
from tests.checkpoint.damage import filled, save, value_of


class Shared(DirFileSystem):
    """A store that several processes see: a folder, but without links, renames and empty folders.

    Attributes:
        operations: that changed something.
    """

    protocol = "shared"
    operations: list[tuple[str, str]] = []
    fails_after: int | None = None

    def __init__(self, **options):
        super().__init__(path=os.environ["SHARED_STORE"], fs=fsspec.filesystem("file"), **options)

    def _do(self, name, path):
        if Shared.fails_after is not None and len(Shared.operations) >= Shared.fails_after:
            raise TimeoutError("the store does not answer")
        Shared.operations.append((name, path.rpartition("/")[2]))

    def open(self, path, mode="rb", **options):
        if "w" in mode:
            self._do("put", path)
            os.makedirs(os.path.dirname(self._join(path)), exist_ok=True)
        return super().open(path, mode, **options)

    def pipe_file(self, path, value, **options):
        with self.open(path, "wb") as file:
            file.write(value)

    def rm_file(self, path):
        self._do("delete", path)
        super().rm_file(path)


fsspec.register_implementation("shared", Shared, clobber=True)


@pytest.fixture
def shared(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARED_STORE", str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    Shared.clear_instance_cache()
    Shared.operations.clear()
    return RemotePath("shared://run")


@pytest.fixture(params=["memory", "shared"])
def store(request, shared):
    return RemotePath(f"memory://{uuid.uuid4().hex}") if request.param == "memory" else shared


def names(place):
    return sorted(entry.name for entry in place.iterdir())


def value_in(place):
    module = filled(0.0)
    load_directory(place, module)
    return value_of(module)


def test_a_checkpoint_is_the_same_files_as_on_a_disk(store, tmp_path):
    save(store / "a.ckpt", 2.0, step=7)
    save(tmp_path / "a.ckpt", 2.0, step=7)
    assert names(store / "a.ckpt") == sorted(os.listdir(tmp_path / "a.ckpt"))
    there, here = (read_manifest(path) for path in (store / "a.ckpt", tmp_path / "a.ckpt"))
    assert {**there.files, ".metadata": None} == {**here.files, ".metadata": None}
    assert there.tensors == here.tensors
    assert value_in(store / "a.ckpt") == 2.0
    assert value_in(str(store / "a.ckpt")) == 2.0


def test_the_manifest_is_put_last(shared):
    save(shared / "a.ckpt")
    assert Shared.operations[-1] == ("put", MANIFEST_FILE)
    assert [name for _, name in Shared.operations].count(MANIFEST_FILE) == 1


def test_replacing_changes_nothing_that_the_old_one_needs(shared, tmp_path):
    save(shared / "a.ckpt", 1.0)
    old = set(names(shared / "a.ckpt"))
    Shared.operations.clear()
    save(shared / "a.ckpt", 2.0)
    commit = Shared.operations.index(("put", MANIFEST_FILE))
    assert not old & {name for _, name in Shared.operations[:commit]}
    assert value_in(shared / "a.ckpt") == 2.0
    assert not (old - {MANIFEST_FILE}) & set(names(shared / "a.ckpt"))
    shutil.copytree(tmp_path / "store" / shared.name / "a.ckpt", tmp_path / "copy.ckpt")
    assert value_in(tmp_path / "copy.ckpt") == 2.0
    save(shared / "a.ckpt", 3.0)
    assert value_in(shared / "a.ckpt") == 3.0
    assert len(names(shared / "a.ckpt")) == len(old)


def test_a_failure_at_any_point_leaves_the_old_one_or_the_new_one(shared, monkeypatch):
    save(shared / "a.ckpt", 1.0)
    outcomes = []
    for count in range(20):
        save(shared / "a.ckpt", 1.0)
        Shared.operations.clear()
        monkeypatch.setattr(Shared, "fails_after", count)
        try:
            save(shared / "a.ckpt", 2.0)
        except CheckpointError as error:
            assert "the store does not answer" in str(error)  # noqa: PT017
        finished = len(Shared.operations) < count
        monkeypatch.setattr(Shared, "fails_after", None)
        outcomes.append(value_in(shared / "a.ckpt"))
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1.0, 2.0}


def test_a_first_save_that_fails_leaves_nothing(shared, monkeypatch):
    monkeypatch.setattr(Shared, "fails_after", 2)
    with pytest.raises(CheckpointError, match="does not answer"):
        save(shared / "a.ckpt")
    monkeypatch.setattr(Shared, "fails_after", None)
    assert candidates(Places(trees=(shared,))) in ([], [shared / "a.ckpt"])
    assert not is_checkpoint(shared / "a.ckpt")
    save(shared / "a.ckpt", 3.0)
    assert value_in(shared / "a.ckpt") == 3.0


def test_what_is_no_checkpoint_is_not_replaced(store):
    (store / "data").write_bytes(b"precious")
    for place in (store, store / "data"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            save(place)
    assert names(store) == ["data"]
    for name in ("meta.pt", ".metadata", "__0_0.distcp"):
        (store / "foreign" / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no checkpoint \(meta.pt\)"):
        save(store / "foreign")
    assert names(store / "foreign") == [".metadata", "__0_0.distcp", "meta.pt"]


def test_newest_valid_one_is_found_and_a_damaged_one_renamed(store, caplog):
    for step in (1, 2, 3):
        save(store / "deep" / f"{step}.ckpt", step=step)
    file = store / "deep" / "3.ckpt" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[700] ^= 4
    file.write_bytes(bytes(content))
    (store / "deep" / "2.ckpt" / MANIFEST_FILE).unlink()
    places = Places(trees=(store,))
    assert len(candidates(places)) == 3
    reader = open_newest(places)
    assert reader.directory == store / "deep" / "1.ckpt"
    assert reader.state["global_step"] == 1
    # What is torn has no date of its own, and few stores date a prefix: it may come last.
    assert store / "deep" / "3.ckpt.corrupt" in renamed(places)
    assert "the content has SHA-256" in caplog.text
    assert not (store / "deep" / "3.ckpt").exists()
    assert (store / "deep" / "3.ckpt.corrupt" / MANIFEST_FILE).is_file()


def test_last_goes_back_to_another(store):
    save(store / "1.ckpt", step=1)
    save(store / "last.ckpt", step=2)
    (store / "last.ckpt" / "state.json").unlink()
    reader = open_or_go_back(store / "last.ckpt", Places(trees=(store,)))
    assert reader.state["global_step"] == 1
    assert names(store) == ["1.ckpt", "last.ckpt.corrupt"]


def test_missing_ones_are_named(store):
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        CheckpointReader(store / "no.ckpt", alone=True)


def test_remove(store):
    save(store / "a.ckpt")
    save(store / "b.ckpt")
    remove(store / "a.ckpt")
    remove(store / "a.ckpt")
    assert names(store) == ["b.ckpt"]


def test_export(store, tmp_path):
    save(store / "a.ckpt", 3.0)
    assert load_full_state_dict(store / "a.ckpt")["0.weight"][0, 0] == 3.0
    export_safetensors(str(store / "a.ckpt"), tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size
    with pytest.raises(ConfigError, match="a path of this machine"):
        export_safetensors(str(store / "a.ckpt"), str(store / "a.safetensors"))


def test_command_line(store, capsys):
    save(store / "a.ckpt", step=5)
    save(store / "sub" / "b.ckpt", step=6)
    (store / "sub" / "b.ckpt" / "state.json").unlink()
    assert main(["ckpt", "ls", str(store)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["sub/b.ckpt", "6"],
        ["a.ckpt", "5"],
    ]
    assert main(["ckpt", "show", str(store / "a.ckpt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert main(["ckpt", "verify", str(store / "a.ckpt")]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(store / "sub" / "b.ckpt")]) == 1
    assert main(["ckpt", "verify", str(store / "none")]) == 2


def test_file_urls_are_paths(tmp_path):
    for scheme in ("file", "local"):
        assert storage_path(f"{scheme}://{tmp_path}/a.ckpt") == tmp_path / "a.ckpt"
    assert storage_path("relative") == Path.cwd() / "relative"


def test_unknown_and_missing_schemes_name_the_remedy(monkeypatch):
    with pytest.raises(ConfigError, match="no scheme 'memorie'; nearest valid: memory://"):
        storage_path("memorie://x/a.ckpt")
    monkeypatch.setitem(
        known_implementations,
        "bucket",
        {"class": "not_installed.Store", "err": "Install not_installed"},
    )
    with pytest.raises(ConfigError, match=r"scheme 'bucket' needs .* pip install not_installed"):
        save_directory("bucket://x/a.ckpt", model_chunks(nn.Linear(1, 1)), {})


def test_paths_of_stores():
    place = RemotePath("memory://x//y/z.ckpt/")
    assert (str(place), place.name, place.suffix) == ("memory://x/y/z.ckpt", "z.ckpt", ".ckpt")
    assert place.parent == RemotePath("memory:///x/y")
    assert place.relative_to(RemotePath("memory://x")).as_posix() == "y/z.ckpt"
    assert not place.is_relative_to(RemotePath("memory://x/z"))
    assert place.with_name("a") == place.parent / "a"
    assert pickle.loads(pickle.dumps(place)) == place
    root = RemotePath("memory://x")
    assert root.parent == root


def ranks_job():
    """Each rank writes its part; the first alone sees what was there before."""
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), RemotePath("shared://run/a.ckpt")
    for value in (1.0, 2.0):
        module = nn.Linear(64, 64)
        with torch.no_grad():
            module.weight.fill_(value)
        save_directory(place, model_chunks(module), {"global_step": int(value)})
    dist.barrier()
    loaded = nn.Linear(64, 64)
    state = load_directory(place, loaded)
    shards = [name for name in names(place) if name.endswith(".distcp")]
    if rank == 0:
        (place / shards[1]).write_bytes(b"foreign")
    dist.barrier()
    try:
        CheckpointReader(place)
    except DamagedCheckpointError as error:
        return float(loaded.weight.mean()), state["global_step"], len(shards), str(error)
    return None


def test_ranks_write_and_read_together(pool, tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    seen = pool.run(2, with_store, str(tmp_path / "store"))
    assert seen[0][:3] == (2.0, 2, 2)
    assert "bytes, not the" in seen[0][3]
    assert seen[1] == seen[0]


def with_store(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARED_STORE", folder)
        Shared.clear_instance_cache()
        return ranks_job()
