"""What two checkpoints share, and what must not follow from it."""

import errno
import logging
import os
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.checkpoint.chunks import Chunk, model_chunks, parameter_names
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.load.reader import CheckpointReader
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer
from lightning_megatron.checkpoint.save import incremental
from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.cli import main
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError
from tests.checkpoint.damage import flip, place_of

WIDTH = 64


class Tuned(nn.Module):
    """A frozen trunk and a small adapter, with what saves them."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=0.1)

    def step(self):
        self.adapter.weight.grad = torch.ones_like(self.adapter.weight)
        self.optimizer.step()

    def save(self, saver, path):
        chunks = model_chunks(self)
        snapshot = capture_optimizer(self.optimizer, parameter_names(self), chunks)
        saver.save(path, chunks, {}, optimizers=[snapshot], wait=True)
        saver.check()
        return read_manifest(path)

    def assert_in(self, path):
        stored = load_full_state_dict(path)
        for name, value in self.state_dict().items():
            assert torch.equal(stored[name], value), name


@contextmanager
def saver(**options):
    alone = Peers(alone=True)
    config = CheckpointConfig(incremental=True, on_error="raise", **options)
    made = Saver(config, alone, alone if config.mode == "async" else None)
    try:
        yield made
    finally:
        made.close()


MODES = [{}, {"mode": "async"}]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()) or "sync")
def test_what_is_frozen_is_written_once(tmp_path, mode):
    module = Tuned()
    with saver(**mode) as background:
        manifests = []
        for i in range(3):
            module.step()
            manifests.append(module.save(background, tmp_path / f"{i}.ckpt"))
            module.assert_in(tmp_path / f"{i}.ckpt")
    first, second, third = manifests
    assert first.own_size == first.size
    (name,) = second.linked
    assert second.linked == third.linked
    assert second.files[name].size > 4 * WIDTH**2
    assert second.own_size < first.size - 4 * WIDTH**2
    assert (tmp_path / "2.ckpt" / name).stat().st_nlink == 3
    for i in (0, 1):  # deleting takes nothing from the others
        shutil.rmtree(tmp_path / f"{i}.ckpt")
    module.assert_in(tmp_path / "2.ckpt")


def test_what_was_believed_frozen_and_is_not_is_written(tmp_path):
    module = Tuned()
    with saver() as background:
        module.save(background, tmp_path / "0.ckpt")
        with torch.no_grad():
            module.trunk.weight.data[0, 0] += 1  # in the sample
        assert not module.save(background, tmp_path / "1.ckpt").linked
        module.assert_in(tmp_path / "1.ckpt")
        with torch.no_grad():
            module.trunk.weight.data[5, 7] += 1  # not in it
        for i in (2, 3):
            manifest = module.save(background, tmp_path / f"{i}.ckpt")
            place = place_of(tmp_path / f"{i}.ckpt", "model.trunk.weight")
            assert place.file not in manifest.linked  # it is not believed again
            assert manifest.linked  # what stands still is
            module.assert_in(tmp_path / f"{i}.ckpt")


def test_what_comes_to_rest_is_linked_from_the_second_save_on(tmp_path):
    module = Tuned()
    module.step()
    with saver() as background:
        module.save(background, tmp_path / "0.ckpt")
        sizes = [module.save(background, tmp_path / f"{i}.ckpt").own_size for i in (1, 2, 3)]
    assert len(set(sizes)) <= 2
    manifest = read_manifest(tmp_path / "3.ckpt")
    assert all(name in manifest.linked for name in manifest.files if name.endswith(".distcp"))
    module.assert_in(tmp_path / "3.ckpt")


def test_bits_are_compared_not_numbers(tmp_path):
    module = Tuned()
    with torch.no_grad():
        module.trunk.weight.fill_(0.0)
        module.trunk.weight[3, 3] = float("nan")
    with saver() as background:
        module.save(background, tmp_path / "0.ckpt")
        assert module.save(background, tmp_path / "1.ckpt").linked
        with torch.no_grad():
            module.trunk.weight[5, 7] = -0.0
        module.save(background, tmp_path / "2.ckpt")
    stored = load_full_state_dict(tmp_path / "2.ckpt")["trunk.weight"]
    assert torch.signbit(stored[5, 7])


def test_a_damaged_file_is_not_passed_on(tmp_path, caplog):
    module = Tuned()
    with saver() as background:
        module.save(background, tmp_path / "0.ckpt")
        (name,) = module.save(background, tmp_path / "1.ckpt").linked
        flip(tmp_path / "1.ckpt" / name, 8 * 2000 + 3)
        assert not set(module.save(background, tmp_path / "2.ckpt").linked) & {name}
        assert f"{tmp_path / '1.ckpt' / name} is damaged" in caplog.text
        module.assert_in(tmp_path / "2.ckpt")
        assert module.save(background, tmp_path / "3.ckpt").linked
    for i in (0, 1):
        with pytest.raises(CheckpointError, match="other checkpoints share the file"):
            CheckpointReader(tmp_path / f"{i}.ckpt", alone=True)


def test_files_are_found_in_an_older_checkpoint_or_written(tmp_path):
    module = Tuned()
    with saver() as background:
        for i in range(3):
            module.save(background, tmp_path / f"{i}.ckpt")
        shutil.rmtree(tmp_path / "2.ckpt")
        assert module.save(background, tmp_path / "3.ckpt").linked
        for i in (0, 1, 3):
            shutil.rmtree(tmp_path / f"{i}.ckpt")
        assert not module.save(background, tmp_path / "4.ckpt").linked
        module.assert_in(tmp_path / "4.ckpt")


def test_saving_over_itself(tmp_path):
    module = Tuned()
    with saver() as background:
        for _ in range(3):
            module.step()
            manifest = module.save(background, tmp_path / "last.ckpt")
            module.assert_in(tmp_path / "last.ckpt")
    assert manifest.linked
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_the_first_save_after_a_resume_shares_with_what_was_loaded(tmp_path):
    module = Tuned()
    module.step()
    with saver() as background:
        module.save(background, tmp_path / "0.ckpt")
    reader = CheckpointReader(tmp_path / "0.ckpt", alone=True)
    with saver() as background:
        background.note_loaded(reader.directory, reader.manifest)
        module.step()
        assert len(module.save(background, tmp_path / "1.ckpt").linked) == 1
    module.assert_in(tmp_path / "1.ckpt")


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_without_links_everything_is_written_and_said_once(tmp_path, monkeypatch, caplog, error):
    def refuse(*args):
        raise OSError(error, "no")

    monkeypatch.setattr(os, "link", refuse)
    module = Tuned()
    with saver() as background:
        for i in range(3):
            assert not module.save(background, tmp_path / f"{i}.ckpt").linked
            module.assert_in(tmp_path / f"{i}.ckpt")
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(messages) == 1
    assert f"{os.strerror(error)}; every checkpoint is written in full" in messages[0]


def test_a_store_has_no_links(caplog):
    module = Tuned()
    with saver() as background:
        for i in range(2):
            chunks = model_chunks(module)
            background.save(f"memory://incremental/{i}.ckpt", chunks, {}, wait=True)
        assert caplog.text.count("a store has no hard links") == 1
        module.assert_in("memory://incremental/1.ckpt")


def test_files_do_not_multiply(tmp_path, monkeypatch):
    monkeypatch.setattr(incremental, "_MOST_LINKS", 2)
    module = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
    with saver() as background:
        for i in range(8):
            for layer in list(module)[i:]:  # come to rest one after the other
                layer.weight.data += 1
            background.save(tmp_path / f"{i}.ckpt", model_chunks(module), {})
            files = read_manifest(tmp_path / f"{i}.ckpt").files
            assert len([name for name in files if name.endswith(".distcp")]) <= 4


def test_command_line(tmp_path, capsys):
    module = Tuned()
    with saver() as background:
        for i in range(2):
            module.step()
            module.save(background, tmp_path / f"{i}.ckpt")
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "OWN" in table[0]
    assert main(["ckpt", "show", str(tmp_path / "1.ckpt")]) == 0
    shown = capsys.readouterr().out
    assert "linked from an earlier checkpoint" in shown
    assert shown.count("linked ") == 2
    assert main(["ckpt", "verify", str(tmp_path / "1.ckpt")]) == 0
    assert "shared with other checkpoints: __0_" in capsys.readouterr().out


def ranks_job(directory):
    """Each rank has half of a frozen weight, and all of a trained one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    frozen = torch.full((2, WIDTH), float(rank))
    trained = torch.zeros(3)
    background = Saver(CheckpointConfig(incremental=True, on_error="raise"), Peers())
    for i in range(3):
        trained += 1
        chunks = {
            "frozen": Chunk(tensor=frozen, offsets=(2 * rank, 0), full_shape=(4, WIDTH)),
            "trained": Chunk(tensor=trained, offsets=(0,), full_shape=(3,)),
        }
        background.save(directory / f"{i}.ckpt", chunks, {})
    background.close()


def test_ranks_link_their_own_files(pool, tmp_path):
    pool.run(2, ranks_job, tmp_path)
    manifest = read_manifest(tmp_path / "2.ckpt")
    assert len(manifest.linked) == 2
    stored = load_full_state_dict(tmp_path / "2.ckpt")
    assert stored["frozen"].mean(1).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert stored["trained"].tolist() == [3.0] * 3
