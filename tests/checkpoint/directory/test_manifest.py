import json

import pytest

from lightning_megatron.checkpoint.directory.chunk_runs import Repeat, Run
from lightning_megatron.checkpoint.directory.hashed_files import entry_of, is_file_name
from lightning_megatron.checkpoint.directory.manifest import (
    Manifest,
    TensorEntry,
    is_checkpoint,
    library_versions,
    local_path,
    read_manifest,
)
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError
from tests.checkpoint.older import sealed

FILES = {"state.json": entry_of(b"{}"), ".metadata": entry_of(b"abc")}
SHARDS = {n: entry_of(bytes(99)) for i in (0, 1) for n in (f"manifest.{i}.json", f"__{i}_0.distcp")}
RUN = Run(
    part=0,
    offsets=(0, 1),
    sizes=(1, 3),
    repeats=(Repeat(count=2, part_step=1, steps=(1, 0)),),
)
MANIFEST = Manifest(
    step=3,
    epoch=1,
    written=1.5e9,
    layout={"tp": 2},
    versions={"torch": "2"},
    files=FILES | SHARDS,
    tensors={"model.a": TensorEntry(dtype="float32", shape=(2, 4), runs=(RUN,))},
    aliases={"b": "a"},
)


def changed(**changes):
    data = json.loads(MANIFEST.to_json())
    del data["sha256"]
    return sealed({**data, **changes})


def test_manifest_comes_back():
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_tensors_and_files_have_a_line_each():
    lines = MANIFEST.to_json().splitlines()
    assert sum('"__0_0.distcp": ' in line for line in lines) == 1
    assert '"shape": [2, 4]' in next(line for line in lines if "model.a" in line)
    json.loads(MANIFEST.to_json())


def test_fields_of_later_versions_are_ignored():
    assert Manifest.from_json(changed(later=1)) == MANIFEST


def test_newer_schema_is_refused_but_not_called_damaged():
    with pytest.raises(CheckpointError, match="format 99.*upgrade lightning-megatron") as info:
        Manifest.from_json(changed(schema=99))
    assert not isinstance(info.value, DamagedCheckpointError)


def test_every_flipped_bit_is_found():
    content = MANIFEST.to_json().encode()
    undetected = []
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        try:
            Manifest.from_json(flipped.decode())
        except (DamagedCheckpointError, UnicodeDecodeError):
            continue
        undetected.append(position)
    assert undetected == []


def test_every_truncation_is_found():
    text = MANIFEST.to_json()
    for length in range(len(text)):
        with pytest.raises(DamagedCheckpointError):
            Manifest.from_json(text[:length])


def test_hash_of_the_manifest_is_named_expected_and_found():
    text = MANIFEST.to_json().replace('"step": 3', '"step": 4')
    with pytest.raises(DamagedCheckpointError, match="content has SHA-256 .{64}, but .{64} was"):
        Manifest.from_json(text)


def test_the_first_schema_is_refused_but_not_called_damaged():
    text = json.dumps({"schema": 1, "files": {".metadata": {"size": 3, "sha256": None}}})
    with pytest.raises(CheckpointError, match="format 1, .* formats 2 to 4 are read;") as info:
        Manifest.from_json(text)
    assert not isinstance(info.value, DamagedCheckpointError)


def test_manifest_without_its_hash_is_refused():
    body = MANIFEST.to_json().rpartition(",\n")[0]
    with pytest.raises(DamagedCheckpointError, match="does not end with its own hash"):
        Manifest.from_json(body + "\n}\n")


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
    with pytest.raises(DamagedCheckpointError, match="not a manifest"):
        Manifest.from_json(changed(files={name: {"size": 1, "sha256": "0" * 64}}))


@pytest.mark.parametrize(
    "changes",
    [{"files": 3}, {"files": {"a": 1}}, {"tensors": {"a": {}}}, {"tensors": {"a": {"chunks": 3}}}],
    ids=str,
)
def test_what_has_other_fields_is_refused(changes):
    with pytest.raises(DamagedCheckpointError, match="not a manifest"):
        Manifest.from_json(changed(**changes))


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


def test_manifest_of_absurd_size_is_not_read(directory):
    with (directory / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it costs nothing to make
    with pytest.raises(DamagedCheckpointError, match="are not read"):
        read_manifest(directory)


def test_manifest_that_is_a_device_is_not_read(directory):
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match="is not a file"):
        read_manifest(directory)
