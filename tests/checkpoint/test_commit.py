import os

import pytest

from lightning_megatron.checkpoint.commit import Staging, locate, remove, write_durably


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


def test_next_attempt_removes_torn_leftovers_of_the_same_name_only(tmp_path):
    Staging(tmp_path / "a.ckpt", "dead").create()
    Staging(tmp_path / "a.ckpt-v1.ckpt", "alive").create()
    stage(tmp_path / "a.ckpt").publish()
    assert sorted(os.listdir(tmp_path)) == [".a.ckpt-v1.ckpt.tmp-alive", "a.ckpt"]


def test_locate_without_anything_is_the_target(tmp_path):
    assert locate(tmp_path / "no" / "a.ckpt") == tmp_path / "no" / "a.ckpt"


def test_remove_of_a_link_spares_its_target(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["real"]
