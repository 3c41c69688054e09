"""The saver by itself, with a writer that waits until it is told to go on."""

import logging
import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import load_directory
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError

WRITE = FileSystemWriter.write_data


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
)


class Gate:
    """Stands in for the writer of shards: waits for `open`, and fails if it is told to."""

    def __init__(self, patch):
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.fails = False
        patch.setattr(FileSystemWriter, "write_data", lambda *args: self.write(*args))

    def write(self, writer, *args):
        self.reached.set()
        assert self.opened.wait(60)
        if self.fails:
            raise OSError(28, "No space left on device")
        return WRITE(writer, *args)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@contextmanager
def saver(report=None, **options):
    alone = Peers(alone=True)
    mode = options.setdefault("mode", "async")
    made = Saver(CheckpointConfig(**options), alone, alone if mode == "async" else None, report)
    try:
        yield made
    finally:
        made.close()


def when_told_to_stop(background, action):
    """Act as soon as the save that is in flight is asked to give way, however long that takes."""
    stop = background._unsettled[-1].stop

    def wait():
        assert stop.wait(60)
        action()

    threading.Thread(target=wait, daemon=True).start()


def linear(value):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(value)
    return module


class Mixed(nn.Module):
    """Tensors of many formats and shapes."""

    def __init__(self, size=33):
        super().__init__()
        for i, dtype in enumerate(DTYPES):
            self.register_buffer(f"buffer{i}", torch.randn(size, 5).to(dtype))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("strided", torch.randn(8, 6)[::2].T)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.large = nn.Parameter(torch.randn(300, size))


def assert_same(path, expected):
    module = Mixed(expected.large.shape[1])
    load_directory(path, module)
    for name, value in module.state_dict().items():
        assert value.dtype == expected.state_dict()[name].dtype
        assert torch.equal(plain(value), plain(expected.state_dict()[name])), name


def plain(tensor):
    """A form that can be compared."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()


def loaded(path):
    module = nn.Linear(3, 2)
    state = load_directory(path, module)
    return module.weight[0, 0].item(), state


def test_what_came_of_a_save_is_reported(tmp_path, gate):
    outcomes, path = [], tmp_path / "a.ckpt"
    with saver(outcomes.append) as background:
        background.save(path, model_chunks(linear(1.0)), {"global_step": 7})
        time.sleep(0.2)
        assert outcomes == []
        gate.opened.set()
        background.drain()
        gate.fails = True
        background.check()
        background.save(tmp_path / "b.ckpt", model_chunks(linear(2.0)), {})
        background.drain()
    good, bad = outcomes
    size = sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")
    assert (good.path, good.step, good.bytes, good.error) == (str(path), 7, size, None)
    assert good.ok
    assert good.seconds > good.stall + 0.19
    assert (bad.step, bad.bytes, bad.ok) == (None, 0, False)
    assert "No space left" in bad.error
    gate.fails = False
    with saver(outcomes.append, mode="sync") as at_once:
        at_once.save(tmp_path / "c.ckpt", model_chunks(linear(1.0)), {})
    assert outcomes[-1].seconds == outcomes[-1].stall > 0


def test_the_tensors_may_grow_and_shrink(tmp_path):
    with saver() as background:
        modules = [Mixed(size) for size in (5, 5000, 50)]
        for i, module in enumerate(modules):
            background.save(tmp_path / f"{i}.ckpt", model_chunks(module), {})
        background.drain()
    for i, module in enumerate(modules):
        assert_same(tmp_path / f"{i}.ckpt", module)


def test_incremental_checkpoints_are_whole(tmp_path):
    module = Mixed()
    copies = []
    with saver(incremental=True) as background:
        for i in range(4):
            background.check()
            with torch.no_grad():
                module.scalar.fill_(i)
            copies.append(Mixed())
            copies[-1].load_state_dict(module.state_dict())
            background.save(tmp_path / f"{i}.ckpt", model_chunks(module), {})
        background.drain()
    for i, expected in enumerate(copies):
        assert_same(tmp_path / f"{i}.ckpt", expected)


def test_what_changes_after_the_call_is_not_saved(tmp_path, gate):
    module, state = linear(1.0), {"global_step": 1, "loops": {"seen": [1]}}
    with saver() as background:
        background.save(tmp_path / "a.ckpt", model_chunks(module), state)
        with torch.no_grad():
            module.weight.fill_(2.0)
        state["loops"]["seen"].append(2)
        assert gate.reached.wait(60)
        assert not is_checkpoint(tmp_path / "a.ckpt")
        gate.opened.set()
        background.drain()
    assert loaded(tmp_path / "a.ckpt") == (1.0, {"global_step": 1, "loops": {"seen": [1]}})
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_save_waits_for_the_one_in_flight(tmp_path, gate):
    module = linear(1.0)
    with saver() as background:
        background.save(tmp_path / "1.ckpt", model_chunks(module), {})
        with torch.no_grad():
            module.weight.fill_(2.0)
        threading.Timer(0.2, gate.opened.set).start()
        background.save(tmp_path / "2.ckpt", model_chunks(module), {})
        assert is_checkpoint(tmp_path / "1.ckpt")
        background.drain()
    assert [loaded(tmp_path / f"{i}.ckpt")[0] for i in (1, 2)] == [1.0, 2.0]


def test_the_same_tensors_are_saved_twice_without_waiting(tmp_path, gate):
    module = linear(1.0)
    with saver() as background:
        background.check()
        background.save(tmp_path / "best.ckpt", model_chunks(module), {"global_step": 1})
        background.save(tmp_path / "last.ckpt", model_chunks(module), {"global_step": 2})
        gate.opened.set()
        background.drain()
    assert loaded(tmp_path / "best.ckpt") == (1.0, {"global_step": 1})
    assert loaded(tmp_path / "last.ckpt") == (1.0, {"global_step": 2})


def test_the_same_path_again_replaces_it(tmp_path, gate):
    module = linear(1.0)
    with saver() as background:
        background.save(tmp_path / "a.ckpt", model_chunks(module), {"epoch": 1})
        background.save(tmp_path / "a.ckpt", model_chunks(module), {"epoch": 2})
        gate.opened.set()
        background.drain()
    assert loaded(tmp_path / "a.ckpt") == (1.0, {"epoch": 2})
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_every_other_save_is_superseded_at_most(tmp_path, gate):
    with saver(when_busy="supersede") as background:
        for i in range(3):
            if i == 1:
                when_told_to_stop(background, gate.opened.set)
            background.save(tmp_path / f"{i}.ckpt", model_chunks(linear(float(i))), {})
        background.drain()
    # The second took the place of the first; the third had to wait for the second.
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]


def test_the_old_one_stays_until_the_new_one_stands(tmp_path, gate):
    gate.opened.set()
    with saver() as background:
        background.save(tmp_path / "old.ckpt", model_chunks(linear(1.0)), {})
        background.drain()
        gate.opened.clear()
        background.save(tmp_path / "new.ckpt", model_chunks(linear(2.0)), {})
        background.remove(tmp_path / "old.ckpt")
        assert is_checkpoint(tmp_path / "old.ckpt")
        gate.opened.set()
        background.drain()
        assert os.listdir(tmp_path) == ["new.ckpt"]
        background.remove(tmp_path / "new.ckpt")
        assert os.listdir(tmp_path) == []


def test_removing_what_is_still_being_written(tmp_path, gate):
    with saver() as background:
        background.save(tmp_path / "a.ckpt", model_chunks(linear(1.0)), {})
        background.remove(tmp_path / "a.ckpt")
        gate.opened.set()
        background.drain()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_failures_are_reported_once_and_keep_the_old_one(tmp_path, gate, caplog, mode):
    gate.opened.set()
    with saver(mode=mode) as background, caplog.at_level(logging.WARNING):
        background.save(tmp_path / "old.ckpt", model_chunks(linear(1.0)), {})
        background.drain()
        gate.fails = True
        background.save(tmp_path / "new.ckpt", model_chunks(linear(2.0)), {})
        background.remove(tmp_path / "old.ckpt")
        background.drain()
        for _ in range(3):
            background.check()
        assert os.listdir(tmp_path) == ["old.ckpt"]
        assert len(caplog.records) == 1
        message = caplog.records[0].getMessage()
        assert "new.ckpt" in message
        assert "[Errno 28] No space left on device" in message
        assert "training goes on (1 save failed in a row; this run has 1 checkpoint)" in message
        gate.fails = False
        background.save(tmp_path / "next.ckpt", model_chunks(linear(3.0)), {})
        background.drain()
    assert os.listdir(tmp_path) == ["next.ckpt"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_training_ends_after_too_many_failures_in_a_row(tmp_path, gate, mode):
    gate.opened.set()
    with saver(max_failed_saves=2, mode=mode) as background:
        for fails in (True, False, True):
            gate.fails = fails
            background.save(tmp_path / "a.ckpt", model_chunks(linear(1.0)), {})
            background.drain()

        def fail_again():
            background.save(tmp_path / "a.ckpt", model_chunks(linear(2.0)), {})
            background.drain()

        with pytest.raises(CheckpointError, match=r"Errno 28.* bytes needed here, .* free"):
            fail_again()
    assert loaded(tmp_path / "a.ckpt")[0] == 1.0


def test_a_real_error_of_the_system_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with saver(on_error="raise") as background:
        background.save(tmp_path / "file" / "a.ckpt", model_chunks(linear(1.0)), {})
        with pytest.raises(CheckpointError, match=r"\[Errno (17|20)\] (Not a dir|File ex)"):
            background.drain()


def test_state_without_plain_form_is_an_error_of_the_call(tmp_path):
    with saver() as background, pytest.raises(ConfigError, match="bad"):
        background.save(tmp_path / "a.ckpt", model_chunks(linear(1.0)), {"bad": lambda: 0})
    assert os.listdir(tmp_path) == []


def test_copying_may_fail(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory")

    with saver(on_error="raise") as background:
        monkeypatch.setattr(background._copy, "take", fail)
        background.save(tmp_path / "a.ckpt", model_chunks(linear(1.0)), {})
        with pytest.raises(CheckpointError, match="copying to the host: RuntimeError: out of mem"):
            background.drain()


def test_an_abandoned_save_does_not_hold_the_process(tmp_path, gate, caplog):
    with saver() as background:
        background.save(tmp_path / "a.ckpt", model_chunks(linear(1.0)), {})
        background.close(timeout_s=0.05)
        assert "the save has not ended in time" in caplog.text
        gate.opened.set()
        deadline = time.monotonic() + 60
        while not is_checkpoint(tmp_path / "a.ckpt") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert loaded(tmp_path / "a.ckpt")[0] == 1.0


def test_options_are_checked():
    wrong = {
        "mode": "later",
        "on_error": "ignore",
        "max_failed_saves": 0,
        "when_busy": "skip",
        "drain_timeout_s": -1.0,
    }
    assert len(CheckpointConfig(**wrong).problems()) == len(wrong)


def connect():
    dist.init_process_group("gloo")
    return Peers(), Peers(dist.new_group(backend="gloo"))


def failing_job(path, on_error):
    """Rank 1 fails; ranks take steps in lock-step but for the one that is let go ahead."""
    peers, group = connect()
    background = Saver(CheckpointConfig(mode="async", on_error=on_error), peers, group)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        gate.opened.set()
        gate.fails = dist.get_rank() == 1
        background.save(path / "a.ckpt", model_chunks(linear(1.0)), {})
        steps, error = 0, ""
        try:
            for _ in range(40 if on_error == "continue" else 4000):  # it ends long before
                background.check()
                steps += 1
                time.sleep(0.01 * dist.get_rank())
                dist.all_reduce(torch.ones(1))
        except CheckpointError as raised:
            error = str(raised)
        background.close()
    return steps, error


@pytest.mark.parametrize("on_error", ["continue", "raise"])
def test_all_ranks_end_training_in_the_same_step(pool, tmp_path, on_error):
    (steps, error), (other_steps, other_error) = pool.run(2, failing_job, tmp_path, on_error)
    assert (steps, error) == (other_steps, other_error)
    assert os.listdir(tmp_path) == []
    if on_error == "continue":
        assert (steps, error) == (40, "")
    else:
        assert steps < 4000
        assert "rank 1: " in error
        assert "[Errno 28]" in error


def collectives_job(path):
    """The saver's messages and training's do not meet."""
    peers, group = connect()
    background = Saver(CheckpointConfig(mode="async"), peers, group)
    rank, total = dist.get_rank(), torch.zeros(())
    for step in range(20):
        background.check()
        value = torch.tensor(float(step + rank))
        dist.all_reduce(value)
        total += value
        background.save(path / f"{step}.ckpt", model_chunks(linear(float(step))), {})
    background.drain()
    background.close()
    return total.item()


def test_training_communicates_while_saving(pool, tmp_path):
    assert pool.run(2, collectives_job, tmp_path) == [400.0, 400.0]
    assert [loaded(tmp_path / f"{i}.ckpt")[0] for i in range(20)] == list(range(20))


def destroy_job(path, delay):
    """Lose the process groups while a save is in flight."""
    peers, group = connect()
    background = Saver(CheckpointConfig(mode="async"), peers, group)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        background.save(path, model_chunks(linear(1.0)), {})
        threading.Timer(delay * dist.get_rank(), gate.opened.set).start()
        if delay:
            time.sleep(delay / 2)
        dist.destroy_process_group()
        gate.opened.set()
        background.close(timeout_s=40)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1])
def test_a_lost_process_group_leaves_a_whole_checkpoint_or_none(pool, tmp_path, delay):
    pool.run(2, destroy_job, tmp_path / "a.ckpt", delay)
    if is_checkpoint(tmp_path / "a.ckpt"):
        assert loaded(tmp_path / "a.ckpt")[0] == 1.0
        assert read_manifest(tmp_path / "a.ckpt").files


def test_a_write_that_torch_does_not_count_is_saved_after_the_next_step(tmp_path):
    module = linear(1.0)
    with saver() as background:
        for step, value in enumerate((1.0, 2.0)):
            background.check()
            module.weight.data.fill_(value)
            background.save(tmp_path / f"{step}.ckpt", model_chunks(module), {"global_step": step})
        background.drain()
    values = [load_full_state_dict(tmp_path / f"{i}.ckpt")["weight"][0, 0].item() for i in (0, 1)]
    assert values == [1.0, 2.0]
