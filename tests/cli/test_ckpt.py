"""`lightning-megatron ckpt`."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.checkpoint.directory.commit import set_aside
from lightning_megatron.cli import main
from tests.checkpoint.damage import flip, rewrite_manifest, save


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "run" / f"step={step}.ckpt" for step in (1, 2, 3)]
    for step, path in enumerate(paths, 1):
        save(path, step=step)
        rewrite_manifest(path, written=1e9 + step, layout={"tp": 2, "pp": 1})
    return paths


def test_ls_lists_newest_first(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    flip(three[0] / "manifest.json", 99)
    (three[1] / "manifest.json").unlink()
    os.utime(three[1], (5, 5))
    set_aside(three[2])
    save(three[2], step=4)
    directory = three[0].parent.parent
    assert main(["ckpt", "ls", str(directory)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["NAME", "STEP", "EPOCH", "WRITTEN", "SIZE", "OWN", "LAYOUT", "STATUS"]
    shown = {line[0]: (line[1], line[-1]) for line in lines[1:]}
    assert shown == {
        "run/step=3.ckpt": ("4", "verified"),
        "run/step=1.ckpt": ("-", "damaged"),
        "run/step=2.ckpt": ("-", "torn"),
        "run/step=3.ckpt.corrupt": ("3", "damaged"),
    }
    assert list(shown)[-1] == "run/step=3.ckpt.corrupt"
    assert "tp=2" in lines[-1]


def test_a_folder_of_runs_is_shown_and_verified_and_ls_sees_truncation(
    three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(three[0].parent.parent)
    assert main(["ckpt", "show", folder]) == 0
    assert capsys.readouterr().out.count("TENSOR") == 3
    assert main(["ckpt", "show", "--json", folder]) == 0
    assert [entry["step"] for entry in json.loads(capsys.readouterr().out)] == [1, 2, 3]
    flip(three[0] / "__0_0.distcp", 9999)
    os.truncate(three[1] / "__0_0.distcp", 100)
    assert main(["ckpt", "verify", folder]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1][:7] for line in lines if line[0] == "/"] == [
        "damaged",
        "damaged",
        "valid (",
    ]
    assert main(["ckpt", "ls", "--json", folder]) == 0
    status = {e["step"]: e["status"] for e in json.loads(capsys.readouterr().out)}
    whole = "complete, not verified"
    assert status == {1: whole, 2: "damaged", 3: whole}
    (three[2] / "manifest.json").unlink()
    assert main(["ckpt", "show", folder]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("TENSOR") == 2
    assert "no manifest.json" in printed.err


def test_ls_prints_json(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", "--json", str(three[0].parent)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in found] == [3, 2, 1]
    assert found[0]["path"] == str(three[2])
    sizes = [f.stat().st_size for f in three[2].iterdir() if f.name != "manifest.json"]
    assert found[0]["bytes"] == sum(sizes)
    assert found[0]["layout"] == {"tp": 2, "pp": 1}


def test_ls_of_a_checkpoint_of_nothing_and_of_no_directory(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "ls", str(three[0])]) == 0
    assert "complete, not verified" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["ckpt", "ls", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}/empty\n"
    assert main(["ckpt", "ls", str(tmp_path / "nowhere")]) == 2
    assert "must be a directory" in capsys.readouterr().err


def test_show_prints_files_and_tensors(
    three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "show", str(three[2])]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["step", "3"] in rows
    assert ["layout", "tp=2"] in rows  # axes of one rank are left out
    assert ["model.0.weight", "float32", "3x4", "1"] in rows
    assert ["optimizer.0.0.weight.momentum_buffer", "float32", "3x4", "1"] in rows
    assert any(row[:1] == ["__0_0.distcp"] for row in rows)
    assert "23 in model.*" in printed
    assert main(["ckpt", "show", "--json", str(three[2])]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tensors"]["model.0.weight"]["shape"] == [3, 4]
    empty = three[2].parent / "empty"
    empty.mkdir()
    assert main(["ckpt", "show", str(empty)]) == 2


def test_verify_of_a_good_one(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    (three[0] / "note.txt").write_text("mine")
    assert main(["ckpt", "verify", str(three[0])]) == 0
    printed = capsys.readouterr().out
    assert "step=1.ckpt: valid (5 files, " in printed
    assert "not part of it: note.txt" in printed


def test_verify_of_a_bad_one(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    flip(three[0] / "__0_0.distcp", 4000)
    (three[1] / "manifest.json").unlink()
    assert main(["ckpt", "verify", *map(str, three)]) == 1
    printed = capsys.readouterr().out
    assert "step=1.ckpt: damaged\n" in printed
    assert "__0_0.distcp: the content has SHA-256 " in printed
    assert "step=2.ckpt: damaged\n" in printed
    assert "step=3.ckpt: valid" in printed
    assert main(["ckpt", "verify", "--json", *map(str, three)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [verdict["exit"] for verdict in found] == [1, 1, 0]
    assert "was written" in found[0]["fault"]


def test_verify_of_none(
    three: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file.ckpt").write_bytes(b"")
    (tmp_path / "foreign.ckpt").mkdir()
    for name in ("file.ckpt", "foreign.ckpt", "nowhere.ckpt"):
        assert main(["ckpt", "verify", str(tmp_path / name)]) == 2
        assert "cannot be verified" in capsys.readouterr().err
    assert main(["ckpt", "verify", "s3://bucket/a.ckpt"]) == 2

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lightning_megatron.checkpoint.directory.verify.read_entry", refuse)
    assert main(["ckpt", "verify", *map(str, three)]) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["burn"], ["ls"], ["verify"], ["show", "a", "b"]])
def test_usage_is_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["ckpt", *args])
    assert info.value.code == 2


def test_ls_and_show_wait_for_no_torch_and_nothing_unpickles(three: list[Path]) -> None:
    code = (
        "import sys; from lightning_megatron.cli import main; "
        f"main(['ckpt', 'ls', {str(three[0].parent)!r}]); main(['ckpt', 'show', {str(three[0])!r}])"
        "; print([m for m in ('torch', 'pickle', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_verify_unpickles_nothing(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr("torch.load", refuse)
    monkeypatch.setattr(
        "lightning_megatron.checkpoint.directory.dcp_metadata._RestrictedUnpickler", refuse
    )
    assert main(["ckpt", "verify", str(three[0])]) == 0
