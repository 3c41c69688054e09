"""A run that saves without end, to be killed: one or two processes, forked from a warm worker."""

import contextlib
import gc
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.checkpoint.chunks import Chunk, model_chunks
from lightning_megatron.checkpoint.collective_io import load_directory
from lightning_megatron.checkpoint.directory.commit import hidden_target, locate
from lightning_megatron.checkpoint.directory.discovery import Places, candidates
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.load.newest import open_newest
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.save.saver import CheckpointConfig, Saver
from lightning_megatron.comm.peers import Peers

ROWS = 512
"""Of a weight: enough for writing it to take a while."""


def weights(step: int, rank: int, size: int) -> dict[str, Chunk]:
    """This rank's part of a model all of whose numbers are the step."""
    module = nn.Linear(ROWS, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(step)
    chunks: dict[str, Any] = model_chunks(module)
    rows = 4 // size
    part = module.weight.detach()[rank * rows : (rank + 1) * rows].clone()
    chunks["weight"] = Chunk(tensor=part, offsets=(rank * rows, 0), full_shape=(4, ROWS))
    return chunks


def newest_step(directory: Path) -> int:
    """Open the newest checkpoint as a run that starts does, and return its step or 0; collective.

    Everything that bears the name of a checkpoint must be one, and hold what its step says.
    """
    places = Places(trees=(directory,))
    visible = [path for path in directory.iterdir() if hidden_target(path) is None]
    assert all(path.suffix == ".ckpt" and is_checkpoint(path) for path in visible), visible
    reader = open_newest(places)
    assert not [path for path in directory.iterdir() if ".corrupt" in path.name]
    if reader is None:
        assert not visible
        return 0
    step: int = reader.state["global_step"]
    module = nn.Linear(ROWS, 4)
    load_directory(reader, module)
    for parameter in module.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, step))
    for path in candidates(places)[1:]:
        stored, saved = load_full_state_dict(path), read_manifest(locate(path)).step
        assert all(bool((value == saved).all()) for value in stored.values())
    return step


def train(
    directory: Path, mode: Any, rank: int, size: int, announce: Callable[[int], None]
) -> None:
    """Save step after step, beside it the last one, and delete the one before; never returns."""
    peers = Peers(alone=size == 1)
    background = None
    if mode == "async":
        background = Peers(dist.new_group(backend="gloo")) if size > 1 else peers
    step = newest_step(directory)
    saver = Saver(CheckpointConfig(mode=mode, on_error="raise"), peers, background)
    announce(step)
    while True:
        step += 1
        saver.check()
        chunks = weights(step, rank, size)
        saver.save(directory / f"step={step}.ckpt", chunks, {"global_step": step})
        saver.save(directory / "last.ckpt", chunks, {"global_step": step})
        if rank == 0 and step > 1:
            saver.remove(directory / f"step={step - 1}.ckpt")
        if mode == "sync" or step % 3 == 0:
            saver.drain()
            announce(step)


class Victim:
    """One process of the run; its first rank tells which steps are safe."""

    def __init__(self, directory: Path, mode: str, rank: int, size: int, store: Path) -> None:
        self._pipe, write = os.pipe()
        self._heard = b""
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            threading.Thread(target=die_with, args=(parent,), daemon=True).start()
            try:
                if size > 1:
                    rendezvous = dist.FileStore(str(store), size)
                    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size)
                train(directory, mode, rank, size, lambda step: tell(write, step))
            except BaseException as error:
                os.write(2, f"rank {rank}: {error!r}\n".encode())
                code = 3
            finally:
                os._exit(code)
        os.close(write)

    def hear(self) -> None:
        """Wait until it says something: first that it begins, then which steps are safe."""
        assert select.select([self._pipe], [], [], 60)[0], "it hangs"
        said = os.read(self._pipe, 100)
        assert said, "it died by itself"
        self._heard += said

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def bury(self, patience_s: float = 60.0) -> int:
        """Wait for its end; return the last step that it called safe."""
        deadline = time.monotonic() + patience_s
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "it survived its peer"
            time.sleep(0.002)
        self.was_killed = os.WIFSIGNALED(ended[1])
        with open(self._pipe, "rb") as pipe:
            heard = self._heard + pipe.read()
        return int(heard.split(b"\n")[-2])


def die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(4)


def tell(pipe: int, step: int) -> None:
    os.write(pipe, f"{step}\n".encode())


def kill_job(directory: Path, mode: str, size: int, kills: int, seed: int) -> dict[str, int]:
    """Start the run again and again, and kill it at random; returns what was met."""
    gc.collect()
    gc.freeze()
    chosen = random.Random(seed)
    seen = {"kills": 0, "torn": 0, "hidden": 0, "steps": 0, "ahead": 0}
    safe, span = 0, 0.0
    for attempt in range(kills):
        store = directory.with_name(f"store{attempt}")
        victims = [Victim(directory, mode, rank, size, store) for rank in range(size)]
        for victim in victims:
            victim.hear()
        began = time.monotonic()
        if attempt == 0:
            for _ in range(1 if mode == "async" else 3):
                victims[0].hear()
            span = time.monotonic() - began
        else:
            time.sleep(chosen.random() * span)
        doomed = [chosen.choice(victims)] if attempt % 2 else victims
        for victim in doomed:
            victim.kill()
        safe = max(safe, *(victim.bury() for victim in victims))
        # A peer of the dead ends by itself; without one, an end of its own would be a defect.
        assert all(victim.was_killed for victim in doomed) or size > 1
        hidden = [path for path in directory.iterdir() if hidden_target(path)]
        seen["torn"] += any(not is_checkpoint(path) for path in hidden)
        seen["hidden"] += bool(hidden)
        found = newest_step(directory)
        assert found >= safe, f"step {found} is the newest, but {safe} was published"
        seen["ahead"] += found > safe
        safe, seen["steps"], seen["kills"] = found, found, attempt + 1
    survivor = Saver(CheckpointConfig(), Peers(alone=True))
    survivor.save(directory / "other.ckpt", weights(safe + 1, 0, 1), {"global_step": safe + 1})
    left = [path.name for path in directory.iterdir() if hidden_target(path)]
    assert not left, f"not cleaned up: {left}"
    assert newest_step(directory) == safe + 1
    return seen
