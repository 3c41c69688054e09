import json
import os

import pytest

from lightning_megatron.checkpoint.manifest import (
    FileEntry,
    Manifest,
    check_files,
    is_checkpoint,
    is_file_name,
    library_versions,
    local_path,
    read_manifest,
)
from lightning_megatron.errors import CheckpointError, ConfigError

FILES = {"state.json": FileEntry(size=2), ".metadata": FileEntry(size=3, sha256="ab")}
MANIFEST = Manifest(step=3, epoch=1, layout={"tp": 2}, versions={"torch": "2"}, files=FILES)


def test_manifest_comes_back():
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_fields_of_later_versions_are_ignored():
    data = {**json.loads(MANIFEST.to_json()), "later": 1}
    assert Manifest.from_json(json.dumps(data)) == MANIFEST


def test_newer_schema_is_refused():
    data = {**json.loads(MANIFEST.to_json()), "schema": 99}
    with pytest.raises(CheckpointError, match="schema 99"):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"schema": 1, "files": 3}',
        '{"schema": "1", "files": {}}',
        "[" * 9999,
    ],
)
def test_other_json_is_refused(text):
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "..", ".", "a/b", "a\\b", "", "a\nb", "x" * 300]
)
def test_name_that_leaves_the_directory_is_refused(name):
    assert not is_file_name(name)
    data = {**json.loads(MANIFEST.to_json()), "files": {name: {"size": 1}}}
    with pytest.raises(CheckpointError, match="not a manifest"):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("size", [-1, "1", 1.5, True, None])
def test_lie_about_a_size_is_refused(size):
    data = {**json.loads(MANIFEST.to_json()), "files": {"a": {"size": size}}}
    with pytest.raises(CheckpointError, match="not a manifest"):
        Manifest.from_json(json.dumps(data))


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "c.ckpt"
    path.mkdir()
    (path / "state.json").write_bytes(b"{}")
    (path / ".metadata").write_bytes(b"abc")
    (path / "manifest.json").write_text(MANIFEST.to_json())
    return path


def test_complete_directory_is_accepted(directory):
    assert is_checkpoint(directory)
    assert read_manifest(directory) == MANIFEST
    check_files(directory, MANIFEST)


def test_missing_and_torn_files_are_named_together(directory):
    (directory / "state.json").unlink()
    (directory / ".metadata").write_bytes(b"a")
    message = r"state.json is missing; .metadata has 1 bytes, not the 3"
    with pytest.raises(CheckpointError, match=message):
        check_files(directory, MANIFEST)


def test_link_out_of_the_directory_is_refused(directory, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"{}")
    (directory / "state.json").unlink()
    os.symlink(tmp_path / "elsewhere", directory / "state.json")
    with pytest.raises(CheckpointError, match=r"state.json is a link out"):
        check_files(directory, MANIFEST)


def test_required_files_must_be_listed(directory):
    with pytest.raises(CheckpointError, match=r".metadata is not in the manifest"):
        check_files(directory, Manifest(files={"state.json": FileEntry(size=2)}))


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.ckpt", "no such checkpoint"), ("file.ckpt", "a file"), ("empty.ckpt", "not finished")],
)
def test_what_is_no_checkpoint_says_why(tmp_path, name, message):
    (tmp_path / "file.ckpt").write_bytes(b"")
    (tmp_path / "empty.ckpt").mkdir()
    assert not is_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path / name)


def test_remote_path_is_refused():
    assert not is_checkpoint("memory://a")
    with pytest.raises(ConfigError, match="memory://a"):
        local_path("memory://a")


def test_versions_name_the_engine():
    assert library_versions()["torch"] != "unknown"
