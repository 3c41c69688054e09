import os
import re

import pytest

from lightning_megatron.checkpoint.directory import verify
from lightning_megatron.checkpoint.directory.hashed_files import entry_of
from lightning_megatron.checkpoint.directory.manifest import Manifest
from lightning_megatron.checkpoint.directory.verify import (
    check_contents,
    check_files,
    foreign_files,
)
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

CONTENTS = {"state.json": b"{}", ".metadata": b"abc", "__0_0.distcp": bytes(3 << 20)}
MANIFEST = Manifest(files={name: entry_of(content) for name, content in CONTENTS.items()})


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "c.ckpt"
    path.mkdir()
    for name, content in CONTENTS.items():
        (path / name).write_bytes(content)
    return path


def check(directory, manifest=MANIFEST):
    check_files(directory, manifest)
    check_contents("verifying c", directory, manifest, Peers(alone=True))


def test_complete_directory_is_accepted(directory):
    check(directory)


def test_missing_and_torn_files_are_named_together(directory):
    (directory / "state.json").unlink()
    (directory / ".metadata").write_bytes(b"a")
    message = r"state.json is missing, .metadata has 1 bytes, not the 3"
    with pytest.raises(DamagedCheckpointError, match=message):
        check(directory)


def test_files_with_other_content_are_named_with_both_hashes(directory):
    (directory / ".metadata").write_bytes(b"abd")
    with (directory / "__0_0.distcp").open("r+b") as file:
        file.seek(2 << 20)
        file.write(b"\1")
    with pytest.raises(DamagedCheckpointError) as info:
        check(directory)
    text = str(info.value)
    assert text.startswith("verifying c: damaged: ")
    for name in (".metadata", "__0_0.distcp"):
        found = re.search(rf"{name}: the content has SHA-256 (\w+), but (\w+) was written", text)
        assert found[2] == MANIFEST.files[name].sha256
        assert found[1] == entry_of((directory / name).read_bytes()).sha256
    assert "state.json" not in text


def test_the_state_must_be_listed(directory):
    files = {name: entry for name, entry in MANIFEST.files.items() if name != "state.json"}
    with pytest.raises(DamagedCheckpointError, match="state.json is not in the manifest"):
        check(directory, Manifest(files=files))


def test_link_out_of_the_directory_is_refused(directory, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"{}")
    (directory / "state.json").unlink()
    os.symlink(tmp_path / "elsewhere", directory / "state.json")
    with pytest.raises(DamagedCheckpointError, match=r"state.json is a link out"):
        check(directory)


def test_pipe_in_place_of_a_file_is_refused_and_not_waited_for(directory):
    (directory / "state.json").unlink()
    os.mkfifo(directory / "state.json")
    with pytest.raises(DamagedCheckpointError, match=r"state.json is missing"):
        check(directory)


def test_file_that_cannot_be_read_is_no_damage(directory, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verify, "read_entry", fail)
    with pytest.raises(CheckpointError, match=r"Permission denied: .*c\.ckpt") as info:
        check(directory)
    assert not isinstance(info.value, DamagedCheckpointError)


def test_foreign_files_are_listed(directory):
    (directory / "manifest.json").write_bytes(b"")
    (directory / "note.txt").write_bytes(b"")
    assert foreign_files(directory, MANIFEST) == ["note.txt"]


class _Rank(Peers):
    def __init__(self, rank, size):
        self.group, self.rank, self.size = None, rank, size


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_the_bytes(size):
    files = {f"f{i}": entry_of(bytes(100 * (i % 5))) for i in range(20)}
    manifest = Manifest(files=files)
    shares = [verify._share(manifest, _Rank(rank, size)) for rank in range(size)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= 400
