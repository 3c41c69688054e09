"""The directories in which a machine keeps local checkpoints.

::

    /dev/shm/lightning_megatron-1000/      of each user; or the option ``directory``
        3f0c...-a81b.../                   of each run: a hash of its shared places, and a token
            lock                           locked while the run lives
            step=00000120.ckpt/            files of some ranks, copies of others (restore.py)

The first half of the name identifies a run that is started again: it keeps its shared checkpoints
in the same places. The token keeps apart runs at the same time. The lock, which the system releases
when a process dies, shows which runs are dead. Directories are readable by their owner alone, and
a directory of another user is refused, as anybody may write to /dev/shm.

The free space of a file system in memory is only a limit, as the memory may be used up before. So
the free memory of the machine and of the process' control group counts as well.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_megatron import env
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.discovery import Places
from lightning_megatron.errors import CheckpointError

_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_RUN = re.compile(r"[0-9a-f]{16}-[0-9a-f]{12}")
"""Names of the directories of runs; nothing else is ever deleted."""
_SUFFIX = ".ckpt"
_RESERVE = 1.1
_ABANDONED_S = 24 * 3600.0
"""Age after which the files of a dead run are deleted."""


def bases(given: str | None) -> list[Path]:
    """Return the directories for local checkpoints of this user, the preferred first.

    Missing directories are made.

    Args:
        given: `LocalCheckpointConfig.directory`.

    Raises:
        CheckpointError: no directory can be used; it has the reasons.
    """
    if given is not None:
        paths = [Path(os.path.abspath(os.path.expanduser(env.expanded(given))))]
    else:
        name = f"lightning_megatron-{os.getuid()}"
        parents = dict.fromkeys((_MEMORY, Path(tempfile.gettempdir())))
        paths = [parent / name for parent in parents if os.access(parent, os.W_OK | os.X_OK)]
    usable, faults = [], []
    for path in paths:
        try:
            path.mkdir(mode=0o700, parents=given is not None, exist_ok=True)
            _check_owner(path)
            usable.append(path)
        except (OSError, CheckpointError) as error:
            faults.append(str(error))
    if not usable:
        raise CheckpointError(
            f"no directory for local checkpoints: {'; '.join(faults)}; nearest valid: "
            "LocalCheckpointConfig(directory='/local/disk')"
        )
    return usable


def _check_owner(path: Path) -> None:
    """Refuse a directory of another user."""
    found = path.lstat()
    if not stat.S_ISDIR(path.stat().st_mode) or found.st_uid != os.getuid():
        raise CheckpointError(f"{path} is not a directory of this user")
    if not os.access(path, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path} cannot be written")


def identity(directories: Sequence[Path]) -> tuple[object, ...]:
    """Return a value that is equal for processes that see the same directories, and no others."""
    machine = os.uname().nodename
    with contextlib.suppress(OSError):  # other systems than Linux
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    places = [(path.stat().st_dev, path.stat().st_ino) for path in directories]
    return machine, tuple(places)


def run_key(places: Places) -> str:
    """Return a hash of the places in which a run keeps its shared checkpoints."""
    text = "\n".join(map(str, (*places.trees, "", *places.folders)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def free_bytes(directory: Path) -> int:
    """Return the number of bytes that can be written to a directory.

    Raises:
        OSError: the directory cannot be examined.
    """
    free = shutil.disk_usage(directory).free
    if _is_in_memory(directory):
        free = min([free, *memory_left()])
    return free


def check_room(directory: Path, needed: int) -> None:
    """Raise an error if the machine has too little room.

    Args:
        directory: directory to write to.
        needed: bytes that the node's ranks write and receive.

    Raises:
        CheckpointError: too few bytes are free; it has both figures and the remedies.
    """
    free = free_bytes(directory)
    if free < needed * _RESERVE:
        raise CheckpointError(
            f"{directory.parent} has no room for a local checkpoint: {needed:,} bytes of this node "
            f"and of copies for others, {free:,} free; nearest valid: "
            "LocalCheckpointConfig(keep=1), replicas=0, or directory='/local/disk'"
        )


def roomiest(directories: Sequence[Path], needed: int, key: str) -> Path:
    """Return the first directory with room for some bytes, else the one with most room.

    Args:
        directories: the result of `bases`.
        needed: number of bytes.
        key: key of runs whose files will be deleted.
    """

    def room(base: Path) -> int:
        return free_bytes(base) + sum(map(_size, runs_of(key, [base])))

    for base in directories:
        if room(base) >= needed * _RESERVE:
            return base
    return max(directories, key=room)


def _size(run: Path) -> int:
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def runs_of(key: str, directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories of the runs with a key."""
    for base in directories:
        with contextlib.suppress(OSError):
            yield from sorted(p for p in base.glob(f"{key}-*") if p.is_dir() and not p.is_symlink())


def checkpoints_in(run: Path) -> list[Path]:
    """Return the published local checkpoints of a run, in any order."""
    with contextlib.suppress(OSError):
        return [p for p in run.iterdir() if p.suffix == _SUFFIX and not p.name.startswith(".")]
    return []


def checkpoint_name(step: int) -> str:
    """Return the name of a local checkpoint."""
    return f"step={step:08d}{_SUFFIX}"


class RunLock:
    """The lock of a run's directory, held until `release` or the end of the process.

    Forked processes (workers of a DataLoader) do not inherit it.

    Args:
        run: the directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._file: int | None = None

    def take(self) -> bool:
        """Try to take the lock; return whether this process has it."""
        if self._file is not None:
            return True
        file = os.open(self.run / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def remove_run(run: Path) -> None:
    """Delete the directory of a run; never raises."""
    for path in checkpoints_in(run):
        with contextlib.suppress(OSError):
            remove(path)  # never taken for complete while it is deleted
    shutil.rmtree(run, ignore_errors=True)


def remove_abandoned(directories: Sequence[Path], key: str) -> None:
    """Delete the directories of dead runs after a day without a restart; never raises.

    Args:
        directories: the result of `bases`.
        key: key of this run, whose directories stay.
    """
    for base in directories:
        with contextlib.suppress(OSError):
            for run in base.iterdir():
                if not _RUN.fullmatch(run.name) or run.name.startswith(key) or run.is_symlink():
                    continue
                ages = [path.stat().st_mtime for path in (run, *run.iterdir())]
                lock = RunLock(run)
                if time.time() - max(ages) > _ABANDONED_S and lock.take():
                    remove_run(run)
                    lock.release()


def _is_in_memory(directory: Path) -> bool:
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == device:
                return kind.split()[0] in ("tmpfs", "ramfs")
    return False


def memory_left() -> list[int]:
    """Return the bytes of memory that this machine and each control group have left."""
    left = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "/")
        root = Path("/sys/fs/cgroup")
        inner = root / group.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            left += _group_memory(folder)
    return left


def _group_memory(folder: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())  # "max" is no number: no limit is set
        used = int((folder / "memory.current").read_text())
        stat_lines = (folder / "memory.stat").read_text().splitlines()
        # Cached files count as used, but are dropped when the memory is needed.
        cached = [int(line.split()[1]) for line in stat_lines if line.startswith("inactive_file ")]
        return [max(limit - used + sum(cached), 0)]
    return []
