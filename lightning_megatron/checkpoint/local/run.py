"""`LocalRun`: checkpoints on the machines themselves, each with a copy on another machine.

A shared checkpoint needs the file system that all machines see, so it is made rarely, and the steps
since then are lost with a machine. A local checkpoint is in memory (``/dev/shm``) or on a disk of
the machine: each rank writes its shard there, as into any checkpoint, and sends the file to a rank
of the next machine, which keeps it beside its own.

::

    node 0: files of node 0, copies of node 2        node 1: files of node 1, copies of node 0
    node 2: files of node 2, copies of node 1

So every file is on ``1 + replicas`` nodes. Any ``replicas`` nodes may be lost at once; more only if
no neighbours in this ring are among them. The other nodes go on from the newest local checkpoint of
which every file is left: each node fetches the files that its ranks read, and they load it as any
other, under any layout.

Costs, for state of ``B`` bytes a node and ``k`` kept checkpoints: ``(k + 1) * (1 + replicas) * B``
of memory or disk (the next one is complete before the oldest is deleted), ``B`` more for the copy
from which shards are written, and ``replicas * B`` over the network for each checkpoint. Training
waits only for the copy to the host. The idea is that of GEMINI (Wang et al., SOSP 2023) and of the
local checkpoints of Megatron-LM and NVRx.
"""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.config import CheckpointConfig, LocalCheckpointConfig
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.discovery import Places
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.local.directory import (
    RunLock,
    bases,
    checkpoint_name,
    checkpoints_in,
    identity,
    remove_abandoned,
    remove_run,
    roomiest,
    run_key,
    runs_of,
)
from lightning_megatron.checkpoint.local.nodes import Nodes
from lightning_megatron.checkpoint.local.restore import LocalStock
from lightning_megatron.checkpoint.local.save import LocalSave
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot
from lightning_megatron.checkpoint.save.save_plan import PlannedSave
from lightning_megatron.checkpoint.save.saver import SaveOutcome, Saver
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class LocalRun:
    """Makes, keeps and deletes the local checkpoints of a run; making one is collective.

    Args:
        config: the options.
        places: directories of the run's shared checkpoints; the first rank's are used.
        peers: all ranks.
        background: the same ranks over a gloo group of its own.
        report: function that is called with the result of every save, in the thread that wrote.

    Attributes:
        nodes: the nodes of the ranks.
        stock: local checkpoints on the nodes, of this run and of those before it.

    Raises:
        ConfigError: no directory can be used, or nodes share it.
    """

    def __init__(
        self,
        config: LocalCheckpointConfig,
        places: Places,
        peers: Peers,
        background: Peers,
        *,
        report: Callable[[SaveOutcome], None] | None = None,
    ) -> None:
        self._config = config
        self._peers = peers
        self._key, token = peers.broadcast((run_key(places), uuid.uuid4().hex[:12]))
        self._name = f"{self._key}-{token}"
        self._bases = self._find_bases()
        self.nodes = Nodes.found(identity(self._bases), peers)
        self._leads = self.nodes.is_leader(peers.rank)
        if self.nodes.count > 1:
            self._leave_shared_bases(token)
        if self._leads:
            remove_abandoned(self._bases, self._key)
        self._locks: dict[Path, RunLock] = {}
        self._run: Path | None = None
        self.stock = LocalStock(
            peers, self.nodes, lambda: list(runs_of(self._key, self._bases)), self._other_run
        )
        self._saver = Saver(
            CheckpointConfig(mode="async"),
            peers,
            background,
            report,
            noun="local checkpoint",
            placed=self._placed,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._saver.is_busy

    @property
    def copies(self) -> int:
        """Number of nodes that have each file."""
        return 1 + min(self._config.replicas, self.nodes.count - 1)

    def save(
        self,
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        optimizers: Sequence[OptimizerSnapshot] = (),
        layout: Mapping[str, int] | None = None,
    ) -> None:
        """Begin to make a checkpoint; collective. Arguments are those of `Saver.save`."""
        path = self._bases[0] / self._name / checkpoint_name(state["global_step"])
        self._saver.save(path, model, state, optimizers=optimizers, layout=layout)

    def check(self) -> None:
        """Report saves that have ended; all ranks call it before every training step."""
        self._saver.check()

    def before_update(self) -> None:
        """Have the update wait for copies from a device."""
        self._saver.before_update()

    def drain(self) -> None:
        """Wait until no save is in flight."""
        self._saver.drain()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the save in flight; checkpoints stay for later runs. Not collective."""
        self._saver.close(timeout_s=timeout_s)
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def clean(self) -> None:
        """Delete all checkpoints of this run and of dead runs before it; not collective."""
        if not self._leads:
            return
        for run in runs_of(self._key, self._bases):
            if run == self._run or self._is_dead(run):
                remove_run(run)

    # Directories ----------------------------------------------------------------------------------

    def _find_bases(self) -> list[Path]:
        def each() -> list[Path]:
            try:
                return bases(self._config.directory)
            except CheckpointError as error:
                raise ConfigError(f"checkpoint.local: {error}") from error

        found: list[Path] = []
        self._peers.run("preparing local checkpoints", lambda: found.extend(each()), lambda _: None)
        return found

    def _leave_shared_bases(self, token: str) -> None:
        """Drop the directories that several nodes see; collective."""
        probes = [base / f".{token}.{self.nodes.of_rank[self._peers.rank]}" for base in self._bases]

        def put() -> None:
            for probe in probes if self._leads else ():
                probe.touch(mode=0o600)

        def look() -> list[Path]:
            return [base for base in self._bases if len(list(base.glob(f".{token}.*"))) > 1]

        def first(found: list[list[Path]]) -> set[Path]:
            return {base for part in found for base in part}

        what = "looking whether directories for local checkpoints are shared"
        self._peers.run(what, put, lambda _: None)
        try:
            shared = self._peers.run(what, look, first)
        finally:
            for probe in probes if self._leads else ():
                with suppress(OSError):
                    probe.unlink(missing_ok=True)
        self._bases = [base for base in self._bases if base not in shared]

        def check() -> None:
            if not self._bases:
                raise ConfigError(
                    f"checkpoint.local.directory={self._config.directory!r}: several machines see "
                    f"the same {', '.join(sorted(map(str, shared)))}, and each machine needs its "
                    "own; nearest valid: directory='/local/disk', a disk of each machine"
                )

        self._peers.run(what, check, lambda _: None)

    def _directory(self, needed: int) -> Path:
        """Return the directory of this run on this node; the first save makes it."""
        if self._run is None:
            base = roomiest(self._bases, needed * (self._config.keep + 1), self._key)
            self._run = self._made(base / self._name)
        return self._run

    def _other_run(self, name: str, needed: int) -> Path:
        return self._made(roomiest(self._bases, needed, self._key) / name)

    def _made(self, run: Path) -> Path:
        run.mkdir(mode=0o700, exist_ok=True)
        lock = self._locks.setdefault(run, RunLock(run))
        lock.take()
        return run

    def _is_dead(self, run: Path) -> bool:
        """Return whether no other process uses the directory of a run."""
        with suppress(OSError):
            lock = self._locks.get(run) or RunLock(run)
            if lock.take():
                lock.release()
                return True
        return False

    # Saving ---------------------------------------------------------------------------------------

    def _placed(self, planned: PlannedSave) -> LocalSave:
        return LocalSave(
            planned, self._directory, self.nodes, self._config.replicas, self._delete_older
        )

    def _delete_older(self) -> None:
        """Delete all but the newest, those of other runs first; in the thread that writes."""
        if not self._leads or self._run is None:
            return
        others = [run for run in runs_of(self._key, self._bases) if run != self._run]
        dead = [run for run in others if self._is_dead(run)]
        old = _newest_first([self._run]) + _newest_first(dead)
        for path in old[self._config.keep :]:
            try:
                remove(path)
            except OSError as error:  # costs memory, not the run; the next save tries again
                logger.warning("could not delete an old local checkpoint: %s", error)
        for run in dead:
            if not checkpoints_in(run):
                remove_run(run)


def _newest_first(runs: Sequence[Path]) -> list[Path]:
    dated: list[tuple[float, Path]] = []
    for run in runs:
        for path in checkpoints_in(run):
            taken = 0.0  # an unreadable one is deleted first
            with suppress(OSError, CheckpointError):
                taken = read_manifest(path).taken or 0.0
            dated.append((taken, path))
    return [path for _, path in sorted(dated, reverse=True)]
