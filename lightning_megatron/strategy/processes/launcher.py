"""Starts the processes of one machine, and ends them all when one of them dies.

Lightning's launcher looks at its children every five seconds, and kills everything, itself
included, with a signal that leaves no time for a word. Here the same is done sooner, and said. The
children do likewise when their parent dies while they are still waiting to be connected; later on
`fault_tolerance.failures.peer_watch` looks after everybody.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron._lightning.launch import ScriptLauncher, limit_threads
from lightning_megatron.fault_tolerance.failures.board import Ending
from lightning_megatron.fault_tolerance.failures.peer_watch import PeerWatch
from lightning_megatron.fault_tolerance.failures.root_cause import describe_exit
from lightning_megatron.launch.attempt import Peer

_FAILED = 1


class Launcher(ScriptLauncher):
    """Lightning's, with an observer that says what it does.

    Args:
        environment: of this process.
        processes: of this machine.
        nodes: of the run.
        check: called before processes are started; it raises where they could not work.

    Attributes:
        watch: the observer; whoever ends the processes himself closes it.
    """

    watch: PeerWatch | None = None

    def __init__(
        self,
        environment: ClusterEnvironment,
        processes: int,
        nodes: int,
        check: Callable[[], None],
    ) -> None:
        super().__init__(environment, processes, nodes)
        self._check = check

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._check()
            env.announce_parent()
            self.start_children()
            if self.procs:
                self.watch = PeerWatch(self._failed, self._first_rank(), self._leave)
        limit_threads(self.num_processes)
        return function(*args, **kwargs)

    def codes(self) -> dict[int, int]:
        """Exit code, or minus a signal, of each child that has ended, by rank."""
        first = self._first_rank() + 1
        codes = {rank: process.poll() for rank, process in enumerate(self.procs, first)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _first_rank(self) -> int:
        return self.cluster_environment.node_rank() * self.num_processes

    def _failed(self) -> list[Ending]:
        host = Peer.here().host
        first = self._first_rank() + 1
        return [
            Ending(
                rank=rank,
                how="died",
                what=describe_exit(code),
                host=host,
                pid=self.procs[rank - first].pid,
            )
            for rank, code in self.codes().items()
            if code
        ]

    def end_children(self, patience_s: float) -> None:
        """Give the children so many seconds together to end, then kill them."""
        if self.watch is not None:
            self.watch.close()
        deadline = time.monotonic() + patience_s
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill(signal.SIGKILL)

    def _leave(self) -> None:
        self.kill(signal.SIGKILL)
        os._exit(_FAILED)


def watch_parent() -> PeerWatch | None:
    """End this process if rank 0, which started it, dies; until the watch is closed."""
    parent = env.started_by()
    if parent is None:
        return None
    ending = Ending(
        rank=0,
        how="died",
        what=describe_exit(None),
        host=Peer.here().host,
        pid=parent,
    )
    return PeerWatch(lambda: [] if os.getppid() == parent else [ending], rank=-1)
