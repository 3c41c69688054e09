"""Detection of hangs: `HangDetector` names the rank that hangs.

One rank that stands still, in a data loader, a lock or a broken file system, stops all ranks: they
wait for it in the next collective, which fails after `ConnectionConfig.timeout_s` without naming a
rank. `HangDetector` watches the section of every rank, how long it lasts, and whether the rank
waits for others. It does so from another process (`fault_tolerance.hangs.node_monitor`), one for
each node; these also watch each other (`fault_tolerance.hangs.node_board`).
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
from lightning_megatron.comm.peers import Peers
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
from lightning_megatron.monitoring.window import LoggingSteps
from lightning_megatron.run_log.sections import SECTIONS
from lightning_megatron.services import MegatronServices, services_of

Action = Literal["abort", "raise", "report"]
FOLDER = "hangs"
_MEMORY, _NEEDED = Path("/dev/shm"), 4 << 20
_SHORTEST_S, _SHORTEST_AUTO_S, _LONGEST_AUTO_S = 5.0, 10.0, 120.0
_HELD_S = 60.0
"""Seconds that a rank waits to be ended."""
_NEEDS = "it needs the sections of a step"


class HangDetector(pl.Callback):
    """Reports which rank hangs, with section and stacks, and ends the run.

    A report goes to stderr, with the stacks of all threads of all ranks to
    ``run_dir/hangs/attempt_A-step_S.txt`` and ``.json``, and to the event log as kind ``hang``. It
    also works for ranks that can do nothing themselves: a C call holds the GIL, or a signal stopped
    the process. Works under `MegatronStrategy` in ``fit``, validation and checkpoints included.

    On several nodes each node watches its own ranks (``attempt_A-node_of_rank_R-step_S.txt``), and
    all report and act on the hang that one finds. Nodes also watch each other: one that loses power
    or its cable, or stands still as a whole, is named by the others, "node1 (ranks 2, 3) has been
    silent since step 17", after ``node_limit`` seconds of silence in which the run waited for it.
    That node, if it still runs, names the node that it cannot reach. For this the monitor of rank
    0's node listens at a port that the system chooses, on the interface that gloo uses; the others
    must reach it. With ``torchrun --nnodes 1:2 --max-restarts 3`` the run continues with the other
    nodes, unless the lost one holds torchrun's own store (``--rdzv-endpoint``), without which no
    agent can restart anything. `FaultTolerance` says how to put that store elsewhere.

    For each rank of the node `PrometheusEndpoint` has, also in a hang, the section
    (``dist/section``), the time in it (``dist/section_age_s``), the age of the last heartbeat
    (``dist/heartbeat_age_s``) and the collectives begun by group (``dist/collective_seq``). The
    last two are also logged, with ``_min``, ``_mean``, ``_max`` and ``_worst_rank`` after the name.

    Args:
        limit: seconds that a rank may spend in one section (``data forward backward optimizer
            checkpoint validation other``) without waiting for others; a dictionary gives them by
            section. ``"auto"`` is eight times the longest time so far, at least one minute for
            parts of a step and five for others; ten for a section that is new, 30 for the start of
            the run. Numbers hold from the third batch on.
        action: action after the report. ``"abort"``: all ranks end with exit code 86, for launchers
            that restart; ranks that cannot end themselves are killed. ``"raise"``: `HangError` is
            raised in the training thread of all ranks; a rank that does not raise it within 20
            seconds ends. ``"report"``: none.
        check_s: seconds between checks.
        run_dir: directory of the reports; None for the Trainer's ``default_root_dir``.
        node_limit: seconds that another node may be silent while ranks here wait. A connection that
            is down for less is no fault. ``"auto"``: 120; if ``limit`` is a number, that, but at
            least 10 and at most 120.

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
        self._limits = Limits(limit)
        self._action = action
        self._check_s = float(check_s)
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
        meeting = self._exchange_members(this_member(rank), services)
        members, directory = meeting.members, meeting.directory
        first = members[0].rank == rank
        self._watchdog = Watchdog(
            services.clock,
            directory,
            rank,
            self._limits,
            self._check_s,
            lambda report: self._report(services, report),
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
            pl_module.log_dict(_extremes(self._pages), batch_size=1)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # The hang is reported, and this rank is about to be ended: its exception is an effect.
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

    def _exchange_members(self, member: Member, services: MegatronServices) -> "_Members":
        """Exchange processes and nodes, and make a directory for this node's ranks; collective."""
        everyone = Peers().all_gather((_node_key(), member))
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
        shared = dict(Peers().all_gather((member.rank, (made, address, token))))
        _, address, token = shared[0]
        return _Members(
            members=parts[place],
            directory=Path(shared[parts[place][0].rank][0]),
            nodes=tuple(Node(part[0].host, tuple(m.rank for m in part)) for part in parts),
            node=place,
            address=address,
            token=token,
            listening=listening,
        )

    def _report(self, services: MegatronServices, report: Mapping[str, Any]) -> None:
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
class _Members:
    """Ranks of this node, all nodes, and the address of the board."""

    members: list[Member]
    """Ranks of this node."""
    directory: Path
    """Directory of these ranks, in memory."""
    nodes: tuple[Node, ...]
    node: int
    """Position of this node."""
    address: tuple[str, int]
    """Address of the board."""
    token: str
    listening: socket.socket | None
    """Socket at that address, on rank 0."""

    def watch(self, limit: float) -> NodeWatchConfig:
        """Config of the monitor for the other nodes; ``limit`` in seconds."""
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
            f"node_limit={given!r}: must be at least {_SHORTEST_S:g}, as nodes post once a "
            f"second and reconnect within {PATIENCE_S:g}; nearest valid: node_limit={_SHORTEST_S:g}"
        )
    return float(given)


def _listen(services: MegatronServices) -> tuple[socket.socket, tuple[str, int]]:
    """Socket to which the other nodes connect, and its address."""
    try:
        listening = interfaces.listen(_address(services))
    except OSError as error:
        raise ConfigError(
            f"HangDetector: rank 0's machine has no address that the others reach ({error}); "
            "nearest valid: ConnectionConfig(bind=) with the interface to them"
        ) from error
    host, port, *_ = listening.getsockname()
    return listening, (host, port)


def _address(services: MegatronServices) -> str:
    """Address at which this machine listens for the others: that of gloo."""
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
    """Directory in memory; None if there is none, or it is full, as in some containers."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _NEEDED:
            return _MEMORY
    return None


def heartbeats(pages: Pages) -> list[LabelledMetric]:
    """Present state of this node's ranks as metrics."""
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


def _extremes(pages: Pages) -> dict[str, float]:
    """Least, mean and highest of `heartbeats` with the worst rank, for loggers."""
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


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _node_key() -> tuple[str, ...]:
    """Key of a node: processes with one boot id and one pid namespace see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError as error:
        raise ConfigError(f"HangDetector needs /proc: {error}; nearest valid: Linux") from error
