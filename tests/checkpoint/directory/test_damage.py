"""What may happen to a checkpoint on its way back: nothing of it becomes a weight."""

import random
import shutil
from dataclasses import replace

import pytest
import torch

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.collective_io import load_directory, save_directory
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.damage import bits, filled, flip, rewrite_manifest, save, value_of


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step.ckpt"
    save(path)
    return path


def assert_refused(path, message=None):
    module = filled(-1.0)
    with pytest.raises(DamagedCheckpointError, match=message):
        load_directory(path, module)
    assert value_of(module) == -1.0


def flips(path, count, seed=1):
    """Random bits of all files, each file in turn, so that small ones are met as well."""
    chosen = random.Random(seed)
    files = bits(path)
    return [
        (file, chosen.randrange(size))
        for file, size in (files[i % len(files)] for i in range(count))
    ]


def test_100_flipped_bits_over_all_files_are_found(path):
    positions = flips(path, 100)
    assert len({file for file, _ in positions}) == 6
    found = 0
    for file, bit in positions:
        flip(file, bit)
        assert_refused(path, file.name)
        found += 1
        flip(file, bit)
    assert found == 100
    module = filled(-1.0)
    load_directory(path, module)
    assert value_of(module) == 1.0


def test_zeroed_block_and_every_truncation_are_found(path):
    for file, size in bits(path):
        content = file.read_bytes()
        for length in (0, 1, size // 16, size // 8 - 1):
            file.write_bytes(content[:length])
            assert_refused(path, file.name)
        file.write_bytes(content[:64] + bytes(64) + content[128:])
        assert_refused(path, file.name)
        file.write_bytes(content + b"\0")
        assert_refused(path, file.name)
        file.unlink()
        assert_refused(path, file.name)
        file.write_bytes(content)
    load_directory(path, filled(0.0))


def test_files_of_another_checkpoint_are_found(path, tmp_path):
    other = tmp_path / "other.ckpt"
    save(other, value=2.0, step=1)
    for file, _ in bits(path):
        assert file.stat().st_size == (other / file.name).stat().st_size or "json" in file.name
        content = file.read_bytes()
        if (other / file.name).read_bytes() == content:
            assert file.name in (
                ".metadata",
                "manifest.0.json",
            )  # the same places
            continue
        shutil.copy(other / file.name, file)
        # A foreign manifest is intact itself, and all files are foreign to it.
        assert_refused(path, None if file.name == "manifest.json" else file.name)
        file.write_bytes(content)


def test_swapped_files_are_found(path):
    files = [file for file, _ in bits(path) if file.name != "manifest.json"]
    for one, other in zip(files, files[1:], strict=False):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        assert_refused(path, "damaged: ")
        one.write_bytes(first)
        other.write_bytes(second)


def test_foreign_file_changes_nothing(path):
    (path / "__1_0.distcp").write_bytes(b"foreign")
    module = filled(-1.0)
    load_directory(path, module)
    assert value_of(module) == 1.0


def test_hole_in_a_tensor_is_found_before_anything_is_read(path):
    tensors = dict(CheckpointReader(path, alone=True).manifest.tensors)
    entry = tensors["model.0.weight"]
    tensors["model.0.weight"] = replace(entry, runs=())
    tensors["model.0.bias"] = replace(
        tensors["model.0.bias"], runs=2 * tensors["model.0.bias"].runs
    )
    rewrite_manifest(path, tensors=tensors)
    assert_refused(path, "model.0.weight: only 0 of 12 elements are stored")


@pytest.mark.parametrize("function", [load_full_state_dict, lambda p: CheckpointReader(p)])
def test_every_way_in_is_guarded(path, function):
    flip(path / "__0_0.distcp", 9999)
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        function(path)


def test_ranks_share_the_check_and_all_refuse(pool, path):
    flip(path / "__0_0.distcp", 9999)
    seen = pool.run(3, _refusal, path)
    assert seen[0].startswith("loading ")
    assert seen == [seen[0]] * 3


def _refusal(path):
    torch.distributed.init_process_group("gloo")
    module = filled(-1.0)
    try:
        load_directory(path, module)
    except DamagedCheckpointError as error:
        assert value_of(module) == -1.0
        return str(error)


def _save_rows(path):
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = torch.arange(400.0).reshape(4, 100)
    part = rows.chunk(size)[rank].clone()
    chunk = Chunk(tensor=part, offsets=(rank * len(part), 0), full_shape=(4, 100))
    save_directory(path, {"rows": chunk}, {})


def test_shards_of_other_rank_counts_and_of_other_ranks_are_found(pool, tmp_path):
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    for size, path in ((1, one), (2, two)):
        pool.run(size, _save_rows, path)
        assert torch.equal(load_full_state_dict(path)["rows"].flatten(), torch.arange(400.0))
    first, second = two / "__0_0.distcp", two / "__1_0.distcp"
    contents = {file: file.read_bytes() for file in two.iterdir()}
    assert len(contents[first]) == len(contents[second])

    def refused(message):
        with pytest.raises(DamagedCheckpointError, match=message):
            load_full_state_dict(two)
        for file, content in contents.items():
            file.write_bytes(content)

    first.write_bytes(contents[second])  # a rank's twice
    refused("__0_0.distcp: the content has")
    first.write_bytes(contents[second])
    second.write_bytes(contents[first])  # two of the same size, swapped
    refused("__0_0.distcp: .*__1_0.distcp: ")
    shutil.copy(one / "__0_0.distcp", first)  # of another number of ranks
    refused("__0_0.distcp has")
    shutil.copy(one / "manifest.json", two)  # with its manifest: the index is another
    shutil.copy(one / "__0_0.distcp", two)
    refused(".metadata")
    load_full_state_dict(two)
