"""Names the rank that hangs, instead of letting all of them wait for half an hour.

One rank that stands still, in a data loader, a lock or a broken file system, stops all ranks: they
wait for it in the next collective, until that fails after `ConnectionConfig.timeout_s` and names
nobody. `HangDetector` watches from outside the training thread, from outside the process even
(`fault_tolerance.hangs.node_monitor`), which section every rank is in, since when, and whether it
waits for others. On several nodes the monitors also watch each other
(`fault_tolerance.hangs.node_board`).
"""

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.hangs.diagnosis import SILENT
from lightning_megatron.fault_tolerance.hangs.heartbeat import Member, Pages
from lightning_megatron.fault_tolerance.hangs.json_lines import PATIENCE_S
from lightning_megatron.fault_tolerance.hangs.node_board import Node
from lightning_megatron.fault_tolerance.hangs.node_monitor import MonitorConfig
from lightning_megatron.fault_tolerance.hangs.node_watch import NodeWatchConfig
from lightning_megatron.fault_tolerance.hangs.report import title
from lightning_megatron.fault_tolerance.hangs.section_limits import Limit, Limits
from lightning_megatron.fault_tolerance.hangs.watchdog import Watchdog, start_monitor, this_member
from lightning_megatron.launch import interfaces
from lightning_megatron.monitoring.rank_stats import LabelledMetric, rank_metrics_of
from lightning_megatron.monitoring.sections import SECTIONS
from lightning_megatron.monitoring.window import LoggingSteps
from lightning_megatron.services import MegatronServices, services_of

Action = Literal["abort", "raise", "report"]
FOLDER = "hangs"
_MEMORY, _NEEDED = Path("/dev/shm"), 4 << 20
_SHORTEST_S, _SHORTEST_AUTO_S, _LONGEST_AUTO_S = 5.0, 10.0, 120.0
_HELD_S = 60.0
"""How long a rank waits to be ended."""


_NEEDS = "it needs the sections of a step"


class HangDetector(pl.Callback):
    """Reports which rank hangs, where and in what, and ends the run.

    A report goes to stderr, and with the stacks of all threads of all ranks to
    ``run_dir/hangs/attempt_A-step_S.txt`` and ``.json``; it is also an event of kind ``hang``. It
    works where the rank itself can do nothing: with Python's lock held by a C call, or stopped by a
    signal. Works under `MegatronStrategy`, while it fits; validation and checkpoints included.

    On several nodes each watches its own ranks (``attempt_A-node_of_rank_R-step_S.txt``), and what
    one finds all report and act upon. Nodes also watch each other: one that loses its power or its
    cable, or stands still as a whole, is named on the others, "node1 (ranks 2, 3) has been silent
    since step 17", once it was silent for ``node_limit`` and the run has waited for it; on that
    node, if it still runs, the one it cannot reach. For this the monitor of rank 0's node listens
    at a port that the system chooses, on the interface that gloo uses; the others must reach it.
    With ``torchrun --nnodes 1:2 --max-restarts 3`` the run goes on with the nodes that are left,
    unless the one that is lost holds torchrun's own store (``--rdzv-endpoint``): without it no
    agent can restart anything. `FaultTolerance` says how to put that store elsewhere.

    It also tells how the ranks of its node are: the section of each, how long it has been in it,
    its last sign of life and how many collectives of each group it has begun. `PrometheusEndpoint`
    has them at any moment, also in a hang (``dist/section``, ``dist/section_age_s``,
    ``dist/heartbeat_age_s``, ``dist/collective_seq``); the last two are logged as well, with
    ``_min``, ``_mean``, ``_max`` and ``_worst_rank`` after their names.

    Args:
        limit: seconds a rank may spend in one section (``data forward backward optimizer checkpoint
            validation other``) without waiting for others; a dictionary gives them by section.
            ``"auto"`` takes eight times the longest stay so far, and at least a minute for parts of
            a step and five minutes for others; ten where a section is new, 30 for the start of the
            run. Numbers hold from the third batch on.
        action: what follows the report: all ranks end (``"abort"``, exit code 86, for launchers
            that restart; those that cannot end themselves are killed), `HangError` is raised in the
            training thread of all ranks (``"raise"``; who does not get to see it within 20 seconds
            ends), or nothing (``"report"``).
        check_s: seconds between looks.
        run_dir: where the report goes; None for the Trainer's ``default_root_dir``.
        node_limit: seconds that another node may be silent while ranks here wait. A connection that
            is down for less is a pause, no fault. ``"auto"``: 120, or if ``limit`` is a number,
            that, but at least 10 and at most 120.

    Raises:
        ConfigError: an argument is none of these.
    """

    def __init__(
        self,
        limit: Limit = "auto",
        action: Action = "abort",
        check_s: float = 0.5,
        run_dir: str | os.PathLike[str] | None = None,
        node_limit: float | Literal["auto"] = "auto",
    ) -> None:
        if action not in get_args(Action):
            raise ConfigError(
                f"action={action!r}: must be 'abort', 'raise' or 'report'; nearest valid: 'abort'"
            )
        if not check_s > 0:
            raise ConfigError(f"check_s={check_s}: must be positive; nearest valid: check_s=0.5")
        self._limits, self._action, self._check_s = Limits(limit), action, float(check_s)
        self._node_limit = _node_limit(node_limit, limit)
        self._run_dir = run_dir
        self._watchdog: Watchdog | None = None
        self._pages: Pages | None = None
        self._logging = LoggingSteps()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        services = services_of(trainer, self, _NEEDS)
        rank = trainer.global_rank
        meeting = self._meet(this_member(rank), services)
        members, directory = meeting.members, meeting.directory
        first = members[0].rank == rank
        self._watchdog = Watchdog(
            services.clock,
            directory,
            rank,
            self._limits,
            self._check_s,
            lambda report: self._tell(services, report),
        )
        self._watchdog.start()
        services.held = self._held
        _barrier()  # the monitor opens the pages of all ranks
        self._pages = pages = Pages(directory, [member.rank for member in members])
        rank_metrics_of(trainer).set_source("hang detector", lambda: heartbeats(pages))
        if first:
            run_dir = self.directory_of_files(trainer)
            attempt = services.events.attempt
            whole = len(meeting.nodes) == 1
            config = MonitorConfig(
                members=tuple(members),
                reports=str(Path(run_dir).absolute() / FOLDER),
                name=f"attempt_{attempt}" if whole else f"attempt_{attempt}-node_of_rank_{rank}",
                action=self._action,
                check_s=self._check_s,
                watch=None if whole else meeting.watch(self._node_limit),
            )
            start_monitor(directory, config)
        if meeting.listening is not None:
            meeting.listening.close()  # the monitor has it

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._pages is not None and self._logging.now(trainer):
            pl_module.log_dict(_in_short(self._pages), batch_size=1)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # What has ended the others is known: this rank is ended for the same, and says no more.
        if self._watchdog is not None and self._watchdog.held:
            self._watchdog.await_end(_HELD_S)
        self._stop()

    def _held(self) -> bool:
        watchdog = self._watchdog
        return watchdog is not None and watchdog.held

    def directory_of_files(self, trainer: pl.Trainer) -> str | os.PathLike[str]:
        """Directory that the first rank of each node writes its reports into."""
        return self._run_dir or trainer.default_root_dir

    def _stop(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        self._pages = None
        if watchdog is not None:
            watchdog.stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rank_metrics_of(trainer).set_source("hang detector", None)
        self._stop()

    def _meet(self, member: Member, services: MegatronServices) -> "_Meeting":
        """Who runs where, and a directory that the ranks of this node share; collective."""
        everyone = _gather((_node(), member))
        by_node: dict[tuple[str, ...], list[Member]] = {}
        for node, one in everyone:
            by_node.setdefault(node, []).append(one)
        parts = sorted(
            (sorted(part, key=lambda m: m.rank) for part in by_node.values()),
            key=lambda part: part[0].rank,
        )
        place = next(i for i, part in enumerate(parts) if member in part)
        made, address, token, listening = "", ("", 0), "", None
        if parts[place][0] == member:
            made = tempfile.mkdtemp(prefix="lightning_megatron-", dir=_in_memory())
        if member.rank == 0 and len(parts) > 1:
            listening, address = _listen(services)
            token = secrets.token_hex(16)
        shared = {rank: rest for rank, *rest in _gather((member.rank, made, address, token))}
        _, address, token = shared[0]
        return _Meeting(
            members=parts[place],
            directory=Path(shared[parts[place][0].rank][0]),
            nodes=tuple(Node(part[0].host, tuple(m.rank for m in part)) for part in parts),
            node=place,
            address=address,
            token=token,
            listening=listening,
        )

    def _tell(self, services: MegatronServices, report: Mapping[str, Any]) -> None:
        for culprit in report["culprits"]:
            services.events.write(
                "hang",
                report=report["path"],
                rank_of_fault=culprit["rank"],
                section=culprit["section"],
                seconds=culprit["seconds"],
                detail=report["reason"],
                action=report["action"],
                **({"silence": title(report)} if report["reason"] == SILENT else {}),
            )


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """What the ranks know of each other before they are watched."""

    members: list[Member]
    """Those of this node."""
    directory: Path
    """Theirs, in memory."""
    nodes: tuple[Node, ...]
    node: int
    """This one, of all."""
    address: tuple[str, int]
    """Of the board."""
    token: str
    listening: socket.socket | None
    """At that address, on rank 0."""

    def watch(self, limit: float) -> NodeWatchConfig:
        """The same for the monitor; ``limit`` in seconds."""
        return NodeWatchConfig(
            nodes=self.nodes,
            node=self.node,
            limit=limit,
            address=self.address,
            token=self.token,
            listening=None if self.listening is None else self.listening.fileno(),
        )


def _node_limit(given: object, limit: Limit) -> float:
    if given == "auto":
        seconds = limit if isinstance(limit, int | float) else _LONGEST_AUTO_S
        return float(min(max(seconds, _SHORTEST_AUTO_S), _LONGEST_AUTO_S))
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ConfigError(
            f"node_limit={given!r}: must be 'auto' or positive seconds; nearest valid: "
            "node_limit='auto'"
        )
    if given < _SHORTEST_S:
        raise ConfigError(
            f"node_limit={given!r}: nodes post once a second, and connect anew within "
            f"{PATIENCE_S:g}; nearest valid: node_limit={_SHORTEST_S:g}"
        )
    return float(given)


def _listen(services: MegatronServices) -> tuple[socket.socket, tuple[str, int]]:
    """A socket at which the other nodes reach this one, and its address."""
    try:
        listening = interfaces.listen(_address(services))
    except OSError as error:
        raise ConfigError(
            f"HangDetector: rank 0's machine has no address where the others reach it ({error}); "
            "nearest valid: ConnectionConfig(bind=) with the interface that leads to them"
        ) from error
    host, port, *_ = listening.getsockname()
    return listening, (host, port)


def _address(services: MegatronServices) -> str:
    """Where this machine listens for the others, as gloo does."""
    if services.on_one_machine:
        return interfaces.address_of(interfaces.loopback())
    name = (env.chosen_interface() or "").partition(",")[0]
    if name:
        return interfaces.address_of(name)
    assert services.cluster_environment is not None
    meeting = services.cluster_environment.main_address
    place = interfaces.leading_to(meeting)
    if place is None:
        raise OSError(f"several interfaces may lead to MASTER_ADDR={meeting}")
    return place.address


def _in_memory() -> Path | None:
    """Where files cost no disk; None if that is nowhere, or full, as in containers it may be."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _NEEDED:
            return _MEMORY
    return None


def heartbeats(pages: Pages) -> list[LabelledMetric]:
    """How the ranks of this node are at this moment."""
    now, beats = time.monotonic(), pages.read()
    ages: dict[tuple[str, ...], float] = {}
    stays, sections, begun = ages.copy(), ages.copy(), ages.copy()
    for rank, beat in beats.items():
        name = str(rank)
        ages[(name,)] = max(now - beat.alive, 0.0)
        stays[(name,)] = max(now - beat.since, 0.0)
        sections |= {(name, section): float(section == beat.section) for section in SECTIONS}
        begun |= {(name, group): float(c[0]) for group, c in beat.collectives.items()}
    return [
        LabelledMetric("dist/heartbeat_age_s", ("rank",), ages),
        LabelledMetric("dist/section", ("rank", "section"), sections),
        LabelledMetric("dist/section_age_s", ("rank",), stays),
        LabelledMetric("dist/collective_seq", ("rank", "group"), begun),
    ]


def _in_short(pages: Pages) -> dict[str, float]:
    """The same for loggers: over the ranks, with the one that is worst."""
    families = {family.name: family.values for family in heartbeats(pages)}
    found = {}
    ages = families["dist/heartbeat_age_s"]
    seqs = families["dist/collective_seq"]
    groups = sorted({group for _, group in seqs})
    # The first group is that of all ranks, or the first this rank has used.
    first = {(rank,): n for (rank, group), n in seqs.items() if group == groups[0]}
    for name, values, worst in (
        ("dist/heartbeat_age_s", ages, max),
        ("dist/collective_seq", first, min),
    ):
        if values:
            numbers = list(values.values())
            found[f"{name}_min"], found[f"{name}_max"] = min(numbers), max(numbers)
            found[f"{name}_mean"] = sum(numbers) / len(numbers)
            found[f"{name}_worst_rank"] = float(worst(values, key=lambda k: values[k])[0])
    return found


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _node() -> tuple[str, ...]:
    """Where processes see each other: the machine, and its table of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError as error:
        raise ConfigError(
            f"HangDetector needs the kernel's view of processes: {error}; nearest valid: Linux"
        ) from error
