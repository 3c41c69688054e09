"""A run that a cluster takes the machines from leaves a checkpoint behind.

A spot node, a pod that is moved, a job at the end of its time: a signal comes first, and some
seconds later the end. It may reach one rank, all, or their launcher. Ctrl-C in a terminal and the
interrupt of a notebook are such signals, too. The strategy has all ranks agree on a batch to end
with (`strategy.coordinated_stop`); in between, this callback saves, and on Slurm has the job queued
again.

The checkpoint stands where ``fit(ckpt_path="auto")`` looks, and the run that goes on from it takes,
bit for bit, the steps that this one would have taken. It may hold the middle of an epoch; while
gradients are accumulated it holds the state before the accumulation, and in a validation the state
before that.

How long it takes: the rest of the batch, perhaps one more, a save that is under way, and the save.
torchrun kills workers 30 s after it has passed SIGTERM on, Kubernetes pods 30 s after theirs.
"""

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron._lightning.connectors import cluster_environment, requeue_path
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.errors import CheckpointError, ConfigError, raise_if_any
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.signals import Stop
from lightning_megatron.services import services_of

_NAME = "preempted-step={}.ckpt"
_SCONTROL_S = 20.0


_NEEDS = "it needs the coordinated stop"


class Preemption(pl.Callback):
    """Saves a checkpoint on all ranks and ends the run when a signal reaches one of them.

    DataLoader workers are shielded from these signals and SIGUSR2 if others than their parent
    send. A second signal, five seconds or more after the first (Ctrl-C: two), ends its process at
    once.

    Args:
        signals: by name or number.
        grace_s: seconds after the first signal when a process ends without a checkpoint, wherever
            it may hang; None leaves that to the cluster.
        exit_code: of every rank; 130 after SIGINT, whatever this is. 143 is what a process that
            SIGTERM ended is expected to have; launchers take anything but 0 for a failure.
        requeue: whether global rank 0 runs ``scontrol requeue`` once the checkpoint is there;
            ``"auto"``: where Lightning would, on SIGUSR1 or the ``requeue_signal`` of its
            ``SLURMEnvironment``. This replaces Lightning's handlers.
        dirpath: where the checkpoint goes; None: where the first ``ModelCheckpoint`` puts its own,
            else ``default_root_dir``.

    Raises:
        ConfigError: an option is none of these, the strategy is not a `MegatronStrategy`, or there
            is no Slurm job to queue again.
    """

    def __init__(
        self,
        signals: Sequence[str | int] = ("SIGTERM", "SIGUSR1", "SIGINT"),
        grace_s: float | None = None,
        exit_code: int = 143,
        requeue: bool | Literal["auto"] = "auto",
        dirpath: str | None = None,
    ) -> None:
        problems = []
        if grace_s is not None and not grace_s > 0:
            problems.append(f"grace_s={grace_s}: must be positive; nearest valid: grace_s=None")
        if not 0 <= exit_code <= 255:
            problems.append(f"exit_code={exit_code}: must be 0 to 255; nearest valid: 143")
        if requeue not in (True, False, "auto"):
            problems.append(
                f"requeue={requeue!r}: must be True, False or 'auto'; nearest valid: 'auto'"
            )
        found = [_number(name) for name in signals]
        problems += [f for f in found if isinstance(f, str)]
        raise_if_any(problems)
        self._signals = tuple(number for number in found if isinstance(number, int))
        self._grace_s = grace_s
        self._exit_code = exit_code
        self._requeue = requeue
        self._dirpath = dirpath
        self._trainer: pl.Trainer | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        stopping = services_of(trainer, self, _NEEDS).stop
        if self._requeue is True and env.slurm_job() is None:
            raise ConfigError(
                "Preemption(requeue=True) outside of a Slurm job; nearest valid: requeue='auto'"
            )
        self._trainer = trainer
        stopping.signals = self._signals
        stopping.flag.grace_s = self._grace_s
        stopping.flag.exit_code = self._exit_code
        stopping.replaces_requeue = True
        stopping.before_leaving = self._leave

    def _leave(self, stop: Stop) -> None:
        """Save, and have the job queued again; on all ranks."""
        trainer = self._trainer
        assert trainer is not None
        services = services_of(trainer, self, _NEEDS)
        begun, saved = time.monotonic(), None
        lines = ["nothing has been trained that would have to be saved"]
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            saved, lines = self._save(trainer, stop)
        services.events.write(
            "preempted",
            signal=str(stop),
            path=saved,
            seconds=time.monotonic() - begun,
            exit_code=services.stop.flag.code_for(stop.number),
        )
        if trainer.is_global_zero:
            lines += self._queue_again(trainer, stop)
            announce(f"{stop}: the run ends at step {trainer.global_step}", lines)
        services.barrier("preempted")  # nobody ends before the job is in the queue

    def _save(self, trainer: pl.Trainer, stop: Stop) -> tuple[str | None, list[str]]:
        """The checkpoint, if it came about, and what to tell; on global rank 0."""
        path, every = self._target(trainer)
        if trainer.is_global_zero:
            announce(f"{stop}: saving step {trainer.global_step}, then the run ends")
        begun = time.monotonic()
        try:
            trainer.save_checkpoint(
                str(path)
            )  # returns when it stands, and not before older ones do
        except CheckpointError as error:  # raised on all ranks
            return None, [f"saving failed: {error}"]
        if not trainer.is_global_zero:
            return None, []
        if not is_checkpoint(path):
            return None, [f"saving failed, see above: {path}"]
        self._remove_older(trainer, path, every)
        return str(path), [
            f"saved in {time.monotonic() - begun:.1f} s: {path}",
            "fit(ckpt_path='auto') goes on from there",
        ]

    def directory_of_checkpoints(self, trainer: pl.Trainer) -> AnyPath:
        """Directory that its checkpoints go to, which all machines of a run have to share."""
        return self._target(trainer)[0].parent

    def _target(self, trainer: pl.Trainer) -> tuple[AnyPath, str]:
        """Path to save to, and the pattern of such names."""
        if self._dirpath is None and _requeues(trainer):
            # Whence Lightning starts in a job that was queued again, without a ckpt_path.
            return storage_path(requeue_path(trainer)), "hpc_ckpt_*.ckpt"
        name = _NAME.format(trainer.global_step)
        if self._dirpath is not None:
            return storage_path(self._dirpath) / name, _NAME.format("*")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                return storage_path(callback.dirpath) / name, _NAME.format("*")
        return storage_path(trainer.default_root_dir) / name, _NAME.format("*")

    def _remove_older(self, trainer: pl.Trainer, path: AnyPath, every: str) -> None:
        """All but the one before it, should this one be spoiled."""
        others = [other for other in path.parent.glob(every) if other.name != path.name]
        others.sort(key=lambda other: int(re.sub(r"\D", "", other.name) or 0))
        for other in others[:-1]:
            trainer.strategy.remove_checkpoint(str(other))

    def _queue_again(self, trainer: pl.Trainer, stop: Stop) -> list[str]:
        """Result of the requeue, on global rank 0."""
        wanted, job = self._requeue, env.slurm_job()
        if wanted == "auto":  # not for SIGTERM, which is how a job is cancelled
            wanted = stop.number == _requeues(trainer)
        if not wanted or job is None or not re.fullmatch(r"[0-9_-]+", job):
            return []
        command = ["scontrol", "requeue", job]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"{' '.join(command)} failed: {error}"]
        if done.returncode:
            return [f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr}"]
        return [f"Slurm job {job} is queued again"]


def _requeues(trainer: pl.Trainer) -> int:
    """The signal at which Lightning would queue the job again; 0 if it would not."""
    environment = cluster_environment(trainer)
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return 0
    return int(environment.requeue_signal or signal.SIGUSR1)


def _number(name: str | int) -> int | str:
    """Number of a signal; a text with the problem if there is no such signal."""
    try:
        return int(signal.Signals[name] if isinstance(name, str) else signal.Signals(name))
    except (KeyError, ValueError):
        return f"signals={name!r}: there is no such signal; nearest valid: 'SIGTERM'"
