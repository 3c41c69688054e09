import logging
import os
import shutil

import pytest
import torch.distributed as dist

from lightning_megatron.checkpoint.directory import commit
from lightning_megatron.checkpoint.directory.commit import Staging, set_aside
from lightning_megatron.checkpoint.directory.discovery import Places, candidates
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.load.newest import open_newest, open_or_go_back
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.damage import flip, rewrite_manifest, save


@pytest.fixture
def places(tmp_path):
    return Places(trees=(tmp_path,))


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1 to 3, the newest last."""
    paths = [tmp_path / f"step={step}.ckpt" for step in (1, 2, 3)]
    for step, path in enumerate(paths, 1):
        save(path, step=step)
        rewrite_manifest(path, written=1e9 + step)
    return paths


def step_of(reader):
    return reader.state["global_step"]


def test_without_any_there_is_none(places, tmp_path):
    assert open_newest(places) is None
    (tmp_path / "other.ckpt").mkdir()
    (tmp_path / "lightning.ckpt").write_bytes(b"a file of Lightning's")
    (tmp_path / "sharded.ckpt").mkdir()
    for name in ("meta.pt", "__0_0.distcp", ".metadata"):
        (tmp_path / "sharded.ckpt" / name).write_bytes(b"")
    assert open_newest(places) is None
    assert len(os.listdir(tmp_path)) == 3  # none of these is ours to rename
    assert open_newest(Places(trees=(tmp_path / "nowhere",), folders=(tmp_path / "no",))) is None


def test_newest_is_the_one_written_last_whatever_its_name_or_date(three, places):
    rewrite_manifest(three[0], written=2e9)
    for path, date in zip(three, (1, 3, 2), strict=True):
        os.utime(path / "manifest.json", (date, date))
    assert candidates(places) == [three[0], three[2], three[1]]
    assert step_of(open_newest(places)) == 1


def test_checkpoint_without_a_date_has_that_of_its_file(three, places):
    rewrite_manifest(three[0], written=None)
    assert candidates(places)[0] == three[0]
    os.utime(three[0] / "manifest.json", (5, 5))
    assert candidates(places)[-1] == three[0]


def test_directories_below_a_tree_are_searched_but_not_below_a_folder(three, tmp_path):
    deep = tmp_path / "val" / "loss=1.ckpt"
    save(deep)
    (tmp_path / "circle").symlink_to(tmp_path)
    assert candidates(Places(trees=(tmp_path,))) == [deep, *reversed(three)]
    assert candidates(Places(folders=(tmp_path,))) == [*reversed(three)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: flip(p / "__0_0.distcp", 12345), "__0_0.distcp: the content has SHA-256"),
        (lambda p: flip(p / "manifest.json", 12345), "manifest.json: the content has SHA-256"),
        (lambda p: (p / "manifest.json").unlink(), "one that was not finished"),
        (lambda p: (p / "state.json").unlink(), "state.json is missing"),
        (lambda p: os.truncate(p / ".metadata", 7), ".metadata has 7 bytes"),
    ],
)
def test_damaged_one_is_renamed_and_the_one_before_is_used(three, places, damage, reason, caplog):
    damage(three[2])
    os.utime(three[2])
    reader = open_newest(places)
    assert reader.directory == three[1]
    names = ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt.corrupt"]
    assert sorted(os.listdir(three[0].parent)) == names
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "step=3.ckpt.corrupt: " in line
    assert reason in line
    assert "\n" not in line
    caplog.clear()
    assert step_of(open_newest(places)) == 2  # and from now on without a word
    assert "corrupt" not in caplog.text


def test_all_damaged_stops_with_the_list_also_when_asked_again(three, places):
    for path in three:
        flip(path / "state.json", 99)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="every checkpoint is damaged") as info:
            open_newest(places)
        for path in three:
            assert f"{path}.corrupt: " in str(info.value)
    assert all(".corrupt" in name for name in os.listdir(three[0].parent))


def test_what_cannot_be_read_is_neither_renamed_nor_passed_over(three, places, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("lightning_megatron.checkpoint.directory.verify.read_entry", fail)
    with pytest.raises(CheckpointError, match=r"Input/output error: '.*step=3.ckpt"):
        open_newest(places)
    assert all(path.exists() for path in three)


def test_directory_where_nothing_can_be_renamed_is_no_reason_to_stop(three, places, monkeypatch):
    def refuse(*args):
        raise OSError(30, "Read-only file system")

    flip(three[2] / "state.json", 99)
    monkeypatch.setattr(commit.os, "rename", refuse)
    assert step_of(open_newest(places)) == 2


def test_link_stands_for_what_it_points_to(three, places):
    last = three[0].with_name("last.ckpt")
    last.symlink_to(three[2].name)
    assert candidates(places) == [*reversed(three)]
    flip(three[2] / "state.json", 99)
    assert step_of(open_newest(places)) == 2
    assert last.is_symlink()


def test_survivor_of_a_crash_is_found(three, places):
    os.rename(three[2], three[2].with_name(f".{three[2].name}.tmp-abc"))
    Staging(three[2].with_name("step=4.ckpt"), "dead").create()
    reader = open_newest(places)
    assert step_of(reader) == 3
    flip(reader.directory / "state.json", 99)
    assert step_of(open_newest(places)) == 2
    assert three[2].with_name("step=3.ckpt.corrupt").is_dir()


def test_checkpoint_of_weights_alone_cannot_go_on(three, places, caplog):
    save(three[2], step=3, optimizer=False)
    assert step_of(open_newest(places)) == 3
    assert step_of(open_newest(places, with_optimizers=True)) == 2
    assert "without optimizer state" in caplog.text


def test_names_of_damaged_ones_do_not_collide(tmp_path):
    for expected in ("a.ckpt.corrupt", "a.ckpt.corrupt2", "a.ckpt.corrupt3"):
        (tmp_path / "a.ckpt").mkdir()
        assert set_aside(tmp_path / "a.ckpt") == tmp_path / expected


@pytest.mark.parametrize("linked", [False, True])
def test_last_goes_back_and_is_a_good_name_again(three, places, linked):
    last = three[0].with_name("last.ckpt")
    if linked:
        last.symlink_to(three[2].name)
    else:
        shutil.copytree(three[2], last)
    flip(last / "state.json", 99)
    reader = open_or_go_back(last, places)
    assert step_of(reader) == (2 if linked else 3)
    assert last.resolve() == reader.directory
    assert CheckpointReader(last).state == reader.state
    save(last, step=4)  # as ModelCheckpoint does next
    assert not last.is_symlink()
    assert read_manifest(last).step == 4
    assert read_manifest(reader.directory).step == step_of(reader)


def test_last_without_another_is_an_error(tmp_path, places):
    save(tmp_path / "last.ckpt")
    flip(tmp_path / "last.ckpt" / "state.json", 99)
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        open_or_go_back(tmp_path / "last.ckpt", places)


def job(directory):
    """Only the first rank's view of the disk counts; all agree."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    places = Places(trees=(directory,)) if rank == 0 else Places(trees=(directory / "nowhere",))
    reader = open_newest(places)
    opened = [reader.directory.name, step_of(reader)]
    flip_by(rank, reader.directory / "__0_0.distcp")
    dist.barrier()
    opened += [open_newest(places).directory.name]
    flip_by(rank, directory / "step=1.ckpt" / "__0_0.distcp")
    dist.barrier()
    try:
        open_newest(places)
    except CheckpointError as error:
        opened.append(str(error))
    return opened


def flip_by(rank, file):
    if rank == 0:
        flip(file, 4321)


def test_ranks_agree(pool, three, tmp_path):
    flip(three[2] / ".metadata", 99)
    seen = pool.run(3, job, tmp_path)
    assert seen[0][:3] == ["step=2.ckpt", 2, "step=1.ckpt"]
    assert seen[0][3].count("the content has SHA-256") == 1
    assert seen[0][3].count("found damaged by an earlier search") == 2
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert sorted(os.listdir(tmp_path)) == [f"step={n}.ckpt.corrupt" for n in (1, 2, 3)]


def test_an_error_of_damage_is_one_for_all_callers(three):
    flip(three[0] / "state.json", 99)
    with pytest.raises(DamagedCheckpointError, match=r"step=1\.ckpt: damaged: state\.json"):
        CheckpointReader(three[0])
