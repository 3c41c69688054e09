"""Disks that refuse, for real: what the system itself then says, on some ranks or all."""

import contextlib
import ctypes
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.save.saver import Saver
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError
from lightning_megatron.strategy.megatron import MegatronStrategy
from tests.strategy.small import Small, loader, make_trainer, weights

STEPS = 4
FAILS_AT = 2
"""The step whose checkpoint cannot be written."""

_NEWNS, _BIND, _REC, _PRIVATE, _REMOUNT, _READ_ONLY, _DETACH = (
    *(0x20000, 4096, 16384, 1 << 18, 32, 1, 2),
)


def _system(name: str, *args: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def own_mounts() -> None:
    """Have this thread, and those it starts, see mounts of their own."""
    _system("unshare", _NEWNS)
    _system("mount", b"none", b"/", None, _REC | _PRIVATE, None)


def can_mount() -> bool:
    """Whether the system lets us; asked in a child, which ends with what it changed."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            own_mounts()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """EROFS: the directory is mounted over itself, for reading alone."""
    path = os.fsencode(directory)
    _system("mount", path, path, None, _BIND, None)
    try:
        _system("mount", path, path, None, _BIND | _REMOUNT | _READ_ONLY, None)
        yield
    finally:
        _system("umount2", path, _DETACH)


@contextlib.contextmanager
def too_large(directory: Path) -> Iterator[None]:
    """EFBIG, as a quota would: no file may grow beyond some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def forbidden(directory: Path) -> Iterator[None]:
    """EACCES: the process is nobody's for a while."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def deleted(directory: Path) -> Iterator[None]:
    """ENOENT: somebody deletes the run's directory just when shards are written."""
    write = FileSystemWriter.write_data

    def after_deletion(*args: Any) -> Any:
        # At once: another rank may write a file while a tree is being emptied, and so keep it.
        with contextlib.suppress(FileNotFoundError):
            aside = directory.rename(directory.with_name(f"{directory.name}-of-{os.getpid()}"))
            shutil.rmtree(aside)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", after_deletion)
        yield


FAULTS = {
    "read-only": (read_only, "[Errno 30] Read-only file system"),
    "too large": (too_large, "[Errno 27] File too large"),
    "forbidden": (forbidden, "[Errno 13] Permission denied"),
    "deleted": (
        deleted,
        "[Errno 2] No such file or directory; it was deleted during the save, or not all machines "
        "share it",
    ),
}


SAVES = [(m, ranks) for ranks in ((0,), (1,), (0, 1)) for m in ("sync", "async")]
"""How a save is made (training waits, or goes on meanwhile), and the ranks on which it fails."""


class Fault(pl.Callback):
    """Has one save meet a fault; ModelCheckpoint comes after it in every step."""

    def __init__(self, kind: str | None, directory: Path, last: int = FAILS_AT) -> None:
        self.kind, self.directory, self.last = kind, directory, last
        self.active = contextlib.ExitStack()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step not in (FAILS_AT, self.last + 1):
            return
        assert isinstance(trainer.strategy, MegatronStrategy)
        assert trainer.strategy.checkpoints.saver is not None
        trainer.strategy.checkpoints.saver.drain()
        self.active.close()
        if trainer.global_step == FAILS_AT and self.kind is not None:
            self.active.enter_context(FAULTS[self.kind][0](self.directory))

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.active.close()


class Large(Small):
    """With enough frozen numbers for a shard of each rank to exceed a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.arange(20_000.0), requires_grad=False)


def fit(
    directory: Path, config: CheckpointConfig, callbacks: list[pl.Callback], **options: Any
) -> dict[str, Tensor]:
    """Train, with a checkpoint for each step, and return the weights."""
    module, dp = Large(), int(os.environ["WORLD_SIZE"])
    save = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=1, save_top_k=-1, **options
    )
    trainer = make_trainer(
        {"zero": 2, "checkpoint": config},
        dp,
        max_steps=STEPS,
        callbacks=[*callbacks, save],
        enable_checkpointing=True,
    )
    trainer.fit(module, loader(dp=dp))
    assert trainer.global_step == STEPS
    return weights(module)


@contextlib.contextmanager
def messages(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the package logs."""
    records: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_megatron")
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def goes_on_job(base: Path, kind: str, saves: list[Any]) -> dict[str, list[str]]:
    """One save fails in each of these ways."""
    if kind == "read-only":
        own_mounts()
    rank, warned = int(os.environ["RANK"]), {}
    expected = fit(base / "none", CheckpointConfig(), [])
    for mode, ranks in saves:
        directory = base / "-".join((mode, *map(str, ranks)))
        faults: list[pl.Callback] = [Fault(kind if rank in ranks else None, directory)]
        with messages() as seen:
            found = fit(directory, CheckpointConfig(mode=mode), faults)
        warned[directory.name] = seen
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    return warned


def ends_job(base: Path, kind: str) -> list[str]:
    """Failed saves end the run: the first, or the second in a row."""
    rank, errors = int(os.environ["RANK"]), []
    for mode in ("sync", "async"):
        for options in ({"on_error": "raise"}, {"max_failed_saves": 2}):
            directory = base / f"{mode}{len(errors)}"
            fault = Fault(kind if rank == 1 else None, directory, last=STEPS)
            with pytest.raises(CheckpointError) as info:
                fit(directory, CheckpointConfig(mode=mode, **options), [fault])  # type: ignore[arg-type]
            fault.active.close()
            errors.append(str(info.value))
    return errors


def full_disk_job(directory: Path) -> list[str]:
    """ENOSPC: a small disk is full before a save, and fills up during others."""
    own_mounts()
    path, filler = os.fsencode(directory), directory / "filler"
    _system("mount", b"tmpfs", path, b"tmpfs", 0, b"size=1m")
    write, module = FileSystemWriter.write_data, nn.Linear(50_000, 1)
    alone = Peers(alone=True)

    def save(saver: Saver, step: int) -> None:
        nn.init.constant_(module.weight, step)
        saver.check()
        saver.save(directory / f"{step}.ckpt", model_chunks(module), {})
        saver.remove(directory / f"{step - 1}.ckpt")
        saver.drain()

    def while_others_write(*args: Any) -> Any:
        filler.write_bytes(bytes(700_000))
        return write(*args)

    try:
        with messages() as seen, pytest.MonkeyPatch.context() as patch:
            for mode in ("sync", "async") * 2:
                saver = Saver(
                    CheckpointConfig(mode=mode), alone, alone if mode == "async" else None
                )  # type: ignore[arg-type]
                save(saver, 1)
                filler.write_bytes(bytes(600_000))
                save(saver, 2)
                filler.unlink()
                patch.setattr(FileSystemWriter, "write_data", while_others_write)
                save(saver, 3)
                patch.undo()
                filler.unlink()
                assert os.listdir(directory) == ["1.ckpt"], (os.listdir(directory), seen)
                save(saver, 4)
                assert os.listdir(directory) == ["4.ckpt"]
                assert (load_full_state_dict(directory / "4.ckpt")["weight"] == 4).all()
                saver.close()
                shutil.rmtree(directory / "4.ckpt")
        return seen
    finally:
        _system("umount2", path, _DETACH)
