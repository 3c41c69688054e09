"""What is deleted when a new checkpoint stands, and what never is."""

import os
import re

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory import commit
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.discovery import Places, candidates
from lightning_megatron.checkpoint.directory.retention import Rotation, rotate
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import DamagedCheckpointError
from lightning_megatron.strategy.checkpoint_paths import names_of
from tests.checkpoint.damage import flip, rewrite_manifest, save

ALONE = Peers(alone=True)


@pytest.fixture
def rotation(tmp_path):
    return Rotation(
        directory=tmp_path, names=names_of(ModelCheckpoint(filename="{step}")), spared=frozenset()
    )


def write(path, date):
    save(path)
    rewrite_manifest(path, written=1e9 + date)
    return path


def rotated(rotation, path, keep=2, **changes):
    rotation = Rotation(**{**vars(rotation), **changes})
    rotate(path, save(path), [rotation], keep, ALONE)
    return sorted(os.listdir(path.parent))


def test_the_newest_stay(tmp_path, rotation):
    for date, step in enumerate((4, 1, 3, 2)):
        write(tmp_path / f"step={step}.ckpt", date)
    assert rotated(rotation, tmp_path / "step=0.ckpt", 3) == [
        "step=0.ckpt",
        "step=2.ckpt",
        "step=3.ckpt",
    ]


def test_what_is_held_or_has_another_name_stays_and_does_not_count(tmp_path, rotation):
    for date in range(4):
        write(tmp_path / f"step={date}.ckpt", date)
    for name in ("last.ckpt", "before-surgery.ckpt", "step=1-mine.ckpt", "step=7.ckpt.corrupt"):
        write(tmp_path / name, 9)
    write(tmp_path / "torn.ckpt", 9)
    (tmp_path / "torn.ckpt" / "manifest.json").unlink()
    (tmp_path / "best.ckpt").symlink_to("step=1.ckpt")
    others = set(os.listdir(tmp_path)) - {f"step={date}.ckpt" for date in range(4)}
    left = rotated(rotation, tmp_path / "step=9.ckpt", spared=frozenset({tmp_path / "best.ckpt"}))
    assert set(left) - others == {"step=1.ckpt", "step=3.ckpt", "step=9.ckpt"}
    assert others <= set(left)


def test_one_that_is_not_whole_does_not_count(tmp_path, rotation):
    for date in range(3):
        write(tmp_path / f"step={date}.ckpt", date)
    (tmp_path / "step=2.ckpt" / "__0_0.distcp").write_bytes(b"")
    assert rotated(rotation, tmp_path / "step=9.ckpt") == [
        "step=1.ckpt",
        "step=2.ckpt",
        "step=9.ckpt",
    ]


def test_a_checkpoint_with_another_name_deletes_nothing(tmp_path, rotation):
    for date in range(4):
        write(tmp_path / f"step={date}.ckpt", date)
    assert len(rotated(rotation, tmp_path / "mine.ckpt")) == 5


def test_nothing_is_deleted_for_a_new_one_that_is_damaged(tmp_path, rotation):
    for date in range(3):
        write(tmp_path / f"step={date}.ckpt", date)
    manifest = save(tmp_path / "step=9.ckpt")
    flip(tmp_path / "step=9.ckpt" / "__0_0.distcp", 4321)
    with pytest.raises(DamagedCheckpointError, match="content has SHA-256"):
        rotate(tmp_path / "step=9.ckpt", manifest, [rotation], 2, ALONE)
    assert len(os.listdir(tmp_path)) == 4


def test_a_crash_while_deleting_leaves_nothing_that_looks_damaged(tmp_path, monkeypatch):
    write(tmp_path / "step=1.ckpt", 1)

    def crash(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit.shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / "step=1.ckpt")
    assert candidates(Places(trees=(tmp_path,))) == []
    write(tmp_path / "step=1.ckpt", 1)
    assert os.listdir(tmp_path) == ["step=1.ckpt"]


@pytest.mark.parametrize(
    ("options", "made", "others"),
    [
        ({}, ["epoch=0-step=5.ckpt", "epoch=0-step=5-v1.ckpt"], ["last.ckpt", "step=5.ckpt"]),
        ({"filename": "{step:05d}"}, ["step=00005.ckpt"], ["5.ckpt", "step=x.ckpt"]),
        (
            {"filename": "m-{val/loss:.2f}"},
            ["m-val/loss=-0.10.ckpt", "m-val/loss=nan.ckpt"],
            ["m-val/loss=0.10.ckpt.corrupt", "m-other/loss=1.ckpt"],
        ),
        (
            {"filename": "s{step}", "auto_insert_metric_name": False},
            ["s12.ckpt"],
            ["s.ckpt", "smooth.ckpt"],
        ),
    ],
)
def test_names_that_a_callback_makes(options, made, others):
    names = names_of(ModelCheckpoint(**options))
    assert [name for name in (*made, *others) if re.fullmatch(names, name)] == made


def test_the_callback_makes_such_names():
    for options in ({}, {"filename": "{epoch:02d}-{val_loss:.3f}"}, {"filename": "x={a}"}):
        callback = ModelCheckpoint(**options)
        name = callback.format_checkpoint_name({"epoch": 3, "step": 7, "val_loss": -1e-9, "a": 2})
        assert re.fullmatch(names_of(callback), name), name


def test_at_least_two_are_kept():
    (problem,) = CheckpointConfig(keep=1).problems()
    assert "keep=1: must be an integer of at least 2" in problem
    assert CheckpointConfig(keep=2).problems() == []
