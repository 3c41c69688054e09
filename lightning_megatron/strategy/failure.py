"""Failure of a run: each rank finds out who failed first, says so, and lets nobody wait.

The rank that failed by itself posts that (`fault_tolerance.failures.board`). The others, whose
exceptions are echoes, look for the cause, mark their own exception as secondary, and the first of
them prints one block. If there is no cause to be found, it names the machines that have not
answered. Under torchrun each leaves its error file, so that torchrun's summary names the same rank.
No collective: the peers may be gone, or in another one.
"""

import time
import traceback
import weakref

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_megatron import env
from lightning_megatron._lightning.launch import abort_group_at_exit
from lightning_megatron._torch.groups import abort_groups, default_store, own_connection
from lightning_megatron.errors import MegatronError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.failures.board import (
    SEARCH_S,
    VERDICT_S,
    Ending,
    EndingBoard,
    find_cause,
    looks,
)
from lightning_megatron.fault_tolerance.failures.peer_watch import PeerWatch
from lightning_megatron.fault_tolerance.failures.root_cause import is_echo, write_error_file
from lightning_megatron.fault_tolerance.signals import StopFlag
from lightning_megatron.launch import interfaces
from lightning_megatron.launch.attempt import Attempt
from lightning_megatron.run_log.events import PEER_LOST
from lightning_megatron.strategy.processes.launcher import Launcher
from lightning_megatron.strategy.processes.placement import Placement

_GRACE_S = 3.0
"""Seconds after a failure of rank 0 in which the processes that it started may go on."""
_ABORT_S = 10.0
"""Seconds in which the process groups of a process that failed must end, when it does."""
_LAUNCHER_S = 0.5
"""Seconds that a rank with an echo lives on, for torchrun to see first who died before."""
_PAUSE_S = 0.05


class PeerFailures:
    """Watches over the peers of this rank, and says why it fails, or why they did.

    Args:
        placement: where this process stands; the strategy.
        flag: tells that a signal asks this process to end.

    Attributes:
        board: where ranks post how they end; exists once the processes are connected.
    """

    def __init__(self, placement: Placement, flag: StopFlag) -> None:
        self._placement = placement
        self._flag = flag
        self._watch: PeerWatch | None = None
        self.board: EndingBoard | None = None

    def begin_watch(self, attempt: Attempt) -> None:
        """Begin a run of connected processes."""
        self.end_watch()
        if len(attempt.peers) > 1:
            store = own_connection(default_store())
            elastic = env.torch_elastic()
            board = self.board = EndingBoard(
                store,
                self._rank,
                attempt.peers,
                held_by_rank_0=elastic is None or not elastic.agent_store,
                address=interfaces.address_towards(self._meeting_address()),
            )
            run, world = weakref.ref(self), weakref.ref(dist.group.WORLD)

            def causes() -> list[Ending] | None:
                failures = run()
                if failures is None or world() is not dist.group.WORLD:
                    return None
                held = failures._placement.held
                return [] if held is not None and held() else board.deaths(failures._codes())

            answer = board.answer if board.answers else None
            self._watch = PeerWatch(causes, self._rank, answer=answer)

    def end_watch(self) -> None:
        """Leave in order."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        board, self.board = self.board, None
        if board is not None:
            board.post("left")

    def _meeting_address(self) -> str:
        environment = self._placement.cluster_environment
        return "" if environment is None else environment.main_address

    @property
    def _rank(self) -> int:
        return self._placement.global_rank

    def _codes(self) -> dict[int, int]:
        launcher = self._placement.launcher
        return launcher.codes() if isinstance(launcher, Launcher) else {}

    def note(self, exception: BaseException) -> None:
        """Post the cause, or find it; the first thing to do after an exception."""
        if self._watch is not None:
            self._watch.close()
        if self.board is None or isinstance(exception, SIGTERMException | SystemExit):
            return  # teardown posts that it has left
        if dist.is_initialized() and "nccl" in dist.get_backend():
            abort_group_at_exit(abort_groups, _ABORT_S)
        if isinstance(exception, KeyboardInterrupt):
            self.board.post("failed", "was interrupted (KeyboardInterrupt)")
            return  # others may have been as well, or wait for this one
        if is_echo(exception):
            self._find_cause(exception, self.board)
            return
        text = f"{type(exception).__name__}: {exception}"
        what = f"failed with {text.splitlines()[0]}"
        self.board.post("failed", what)
        if isinstance(exception, MegatronError) and self._rank:
            exception.told_by_rank_0 = self._rank_0_says(what, self.board)
        self._tell_torchrun(exception, text, time.time())

    def _rank_0_says(self, what: str, board: EndingBoard) -> bool:
        """Whether rank 0 fails with the same; it posts that at about the same time."""
        found: Ending | None = None
        for _ in looks(SEARCH_S):
            found = board.of(0)
            if found is not None or board.is_gone:
                break
        return board.is_gone or (found is not None and found.what == what)

    def _find_cause(self, exception: BaseException, board: EndingBoard) -> None:
        causes, first = find_cause(board, str(exception), self._codes)
        what = str(causes[0]) if causes else "a peer has gone; which one is not known"
        if first:
            announce(f"root cause: {what}", self._lines(causes), rank=self._rank)
        self._placement.events.write(
            "fault",
            what=PEER_LOST,
            rank_of_fault=causes[0].rank if causes else None,
            detail=what,
            action="end",
        )
        mark_secondary(exception, what)
        summary = f"secondary failure; root cause: {what}"
        self._tell_torchrun(exception, summary, time.time() + SEARCH_S)
        self._let_others_look(board)

    def _lines(self, causes: list[Ending]) -> list[str]:
        others = [f"then: {cause}" for cause in causes[1:9]]
        return [*others, "the other ranks lost their connections to it, which is secondary"]

    def _let_others_look(self, board: EndingBoard) -> None:
        """Live on until the launcher has seen who died before, and others have read the cause."""
        elastic = env.torch_elastic()
        wait = _LAUNCHER_S if elastic is not None and elastic.agent_store else 0.0
        if board.holds_store and len(board.machines) > 1:
            wait = VERDICT_S
        deadline = time.monotonic() + wait
        while not self._flag.number and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def _tell_torchrun(self, exception: BaseException, message: str, at: float) -> None:
        file = env.error_file()
        if file is not None:
            plain = isinstance(exception, MegatronError) and not env.shows_tracebacks()
            write_error_file(file, message, message if plain else traceback.format_exc(), at)

    def end_children(self, exception: BaseException) -> None:
        """End the processes that this one started, which may wait for it for ever.

        They get a moment to fail by themselves: when this exception is but the echo of theirs, it
        is their traceback that tells the user what went wrong. An error of ours tells it already.
        """
        launcher = self._placement.launcher
        if isinstance(launcher, Launcher):
            tells_all = isinstance(exception, MegatronError) and not is_echo(exception)
            launcher.end_children(0.0 if tells_all else _GRACE_S)


def mark_secondary(exception: BaseException, cause: str) -> None:
    """Have the traceback of an echo say what it is an echo of."""
    if len(exception.args) == 1 and isinstance(exception.args[0], str):
        exception.args = (f"SECONDARY FAILURE (root cause: {cause})\n{exception.args[0]}",)
