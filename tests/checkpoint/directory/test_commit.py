import errno
import fcntl
import os
import shutil

import pytest

from lightning_megatron.checkpoint.directory.commit import Staging, locate, remove, write_durably


def stage(target, token="t", content=b"new"):
    staging = Staging(target, token)
    staging.create()
    write_durably(staging.directory / "manifest.json", content)
    return staging


def content(path):
    return (path / "manifest.json").read_bytes()


def test_publish_makes_the_directory_and_leaves_nothing_else(tmp_path):
    stage(tmp_path / "deep" / "a.ckpt").publish()
    assert content(tmp_path / "deep" / "a.ckpt") == b"new"
    assert os.listdir(tmp_path / "deep") == ["a.ckpt"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_publish_replaces_whatever_stands_there(tmp_path, kind):
    target, other = tmp_path / "a.ckpt", tmp_path / "other.ckpt"
    stage(other, content=b"other").publish()
    if kind == "directory":
        stage(target, content=b"old").publish()
    elif kind == "file":
        target.write_bytes(b"old")
    else:
        target.symlink_to(other, target_is_directory=True)
    stage(target).publish()
    assert content(target) == b"new"
    assert content(other) == b"other"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "other.ckpt"]


def test_failed_publish_puts_the_old_one_back(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    stage(target, content=b"old").publish()
    staging = stage(target)
    rename = os.rename

    def fail(source, destination):
        if source == staging.directory:
            raise OSError("no")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"):
        staging.publish()
    staging.discard()
    assert content(target) == b"old"
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("complete", [True, False])
def test_crash_between_the_two_renames_loses_nothing(tmp_path, complete):
    target = tmp_path / "a.ckpt"
    stage(target, content=b"old").publish()
    staging = stage(target)
    if not complete:
        (staging.directory / "manifest.json").unlink()
    os.rename(target, tmp_path / ".a.ckpt.old-t")
    survivor = locate(target)
    assert content(survivor) == (b"new" if complete else b"old")
    stage(target, "next", b"newest").publish()
    assert content(target) == b"newest"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def dead(target, complete=False, mark="tmp"):
    """What a killed process leaves behind."""
    path = target.with_name(f".{target.name}.{mark}-{Staging.new_token()}")
    path.mkdir()
    if complete:
        (path / "manifest.json").write_bytes(b"survivor")
    return path


def test_next_attempt_removes_what_the_dead_left_and_spares_the_living(tmp_path):
    alive = Staging(tmp_path / "b.ckpt", Staging.new_token())
    alive.create()
    (tmp_path / ".mine.tmp-1").mkdir()
    for mark in ("tmp", "old"):
        dead(tmp_path / "a.ckpt", mark=mark)
        dead(tmp_path / "c.ckpt", mark=mark)
    stage(tmp_path / "a.ckpt").publish()
    assert sorted(os.listdir(tmp_path)) == [alive.directory.name, ".mine.tmp-1", "a.ckpt"]
    alive.discard()
    assert sorted(os.listdir(tmp_path)) == [".mine.tmp-1", "a.ckpt"]


@pytest.mark.parametrize("mark", ["tmp", "old"])
def test_next_attempt_gives_complete_ones_their_names_back(tmp_path, mark):
    dead(tmp_path / "b.ckpt", complete=True, mark=mark)
    stage(tmp_path / "a.ckpt").publish()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]
    dead(tmp_path / "b.ckpt", complete=True)
    stage(tmp_path / "a.ckpt").publish()
    assert content(tmp_path / "b.ckpt") == b"survivor"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_without_locks_only_what_is_a_day_old_is_removed(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    old, new = dead(tmp_path / "b.ckpt"), dead(tmp_path / "c.ckpt")
    os.utime(old, (1e9, 1e9))
    stage(tmp_path / "a.ckpt").publish()
    assert sorted(os.listdir(tmp_path)) == [new.name, "a.ckpt"]


def test_deleting_leaves_no_half_under_the_name(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    stage(target).publish()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(target)
    assert not target.exists()
    assert locate(target) == target
    monkeypatch.undo()
    stage(tmp_path / "b.ckpt").publish()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_locate_without_anything_is_the_target(tmp_path):
    assert locate(tmp_path / "no" / "a.ckpt") == tmp_path / "no" / "a.ckpt"


def test_remove_of_a_link_spares_its_target(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["real"]


def test_a_manifest_is_never_there_in_part(tmp_path, monkeypatch):
    """A process that is killed while it writes one must not leave a complete checkpoint behind."""
    staging = Staging(tmp_path / "a.ckpt", "1")
    staging.create()

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        staging.write("manifest.json", b"{}")
    assert list(staging.directory.iterdir())
    assert locate(tmp_path / "a.ckpt") == tmp_path / "a.ckpt"


def test_files_and_directories_are_on_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.rename

    def name(path):
        return os.path.relpath(path, tmp_path)

    def record_fsync(descriptor):
        calls.append(("sync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(source, target):
        calls.append(("rename", name(source), name(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    staging = stage(tmp_path / "a.ckpt")
    assert ("sync", ".a.ckpt.tmp-t/manifest.json.part") in calls
    calls.clear()
    staging.publish()
    assert calls == [
        ("sync", ".a.ckpt.tmp-t"),
        ("rename", ".a.ckpt.tmp-t", "a.ckpt"),
        ("sync", "."),
    ]


def test_files_that_are_written_together_are_all_there_or_one_says_why(tmp_path):
    staging = Staging(tmp_path / "a.ckpt", "t")
    staging.create()
    staging.write_all({f"file{i}": bytes([i]) for i in range(5)})
    assert [(staging.directory / f"file{i}").read_bytes() for i in range(5)] == [
        bytes([i]) for i in range(5)
    ]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        staging.write_all({"one": b"1", "nowhere/two": b"2", "three": b"3"})
