"""Where a machine keeps local checkpoints.

::

    /dev/shm/lightning_megatron-1000/      for each user; or the directory that was given
        3f0c...-a81b.../                   of one run: where its shared checkpoints are, and a token
            lock                           held while the run lives
            step=00000120.ckpt/            files of some ranks, copies of others' (inventory.py)

A run finds what runs before it have left by the first half of the name: who keeps shared
checkpoints in the same places is the same run, started again. The token keeps apart those that
run at the same time; the lock, which the system takes back from the dead, tells whose files nobody
will miss. Directories are readable by their owner alone, and one that belongs to somebody else is
refused, as anybody may write to /dev/shm.

Room in memory is not what the file system says: its size is a limit, and the memory may be used up
before. So what the machine and the control group of the process have left counts as well.
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
"""Name of a run's directory; nothing else is ever deleted."""
_SUFFIX = ".ckpt"
_RESERVE = 1.1
_ABANDONED_S = 24 * 3600.0
"""Age after which files of a dead run that nobody has gone on with are deleted."""


def bases(given: str | None) -> list[Path]:
    """Return the directories in which runs of this user keep local checkpoints, preferred first.

    They are made if they are not there.

    Args:
        given: `LocalCheckpointConfig.directory`.

    Raises:
        CheckpointError: none can be used, which says why.
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
    """Refuse what somebody else has put there."""
    found = path.lstat()
    if not stat.S_ISDIR(path.stat().st_mode) or found.st_uid != os.getuid():
        raise CheckpointError(f"{path} is not a directory of this user")
    if not os.access(path, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path} cannot be written")


def identity(directories: Sequence[Path]) -> tuple[object, ...]:
    """Return what only processes have in common that see the same directories."""
    machine = os.uname().nodename
    with contextlib.suppress(OSError):  # other systems than Linux
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    places = [(path.stat().st_dev, path.stat().st_ino) for path in directories]
    return machine, tuple(places)


def run_key(places: Places) -> str:
    """Return what runs have in common that keep their shared checkpoints in the same places."""
    text = "\n".join(map(str, (*places.trees, "", *places.folders)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def free_bytes(directory: Path) -> int:
    """Return how many bytes can be written to a directory.

    Raises:
        OSError: it cannot be looked at.
    """
    free = shutil.disk_usage(directory).free
    if _is_in_memory(directory):
        free = min([free, *_memory_left()])
    return free


def check_room(directory: Path, needed: int) -> None:
    """Refuse to begin what the machine has no room for.

    Args:
        directory: where files are to be written.
        needed: bytes that the node's ranks write and receive.

    Raises:
        CheckpointError: it names both figures, and what would take less.
    """
    free = free_bytes(directory)
    if free < needed * _RESERVE:
        raise CheckpointError(
            f"{directory.parent} has no room for a local checkpoint: {needed:,} bytes of this node "
            f"and of copies for others, {free:,} free; nearest valid: "
            "LocalCheckpointConfig(keep=1), replicas=0, or directory='/local/disk'"
        )


def roomiest(directories: Sequence[Path], needed: int, key: str) -> Path:
    """Return the first of some directories that has room for so many bytes, else the emptiest.

    Args:
        directories: what `bases` returned.
        needed: bytes.
        key: of runs whose files will give way.
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
    """Yield the directories of the runs that have a key."""
    for base in directories:
        with contextlib.suppress(OSError):
            yield from sorted(p for p in base.glob(f"{key}-*") if p.is_dir() and not p.is_symlink())


def checkpoints_in(run: Path) -> list[Path]:
    """Return the published local checkpoints of a run, in no order."""
    with contextlib.suppress(OSError):
        return [p for p in run.iterdir() if p.suffix == _SUFFIX and not p.name.startswith(".")]
    return []


def checkpoint_name(step: int) -> str:
    """Return the name of a local checkpoint."""
    return f"step={step:08d}{_SUFFIX}"


class RunLock:
    """The lock of a run's directory, held until `release` or the end of the process.

    It is a lock of the process, which those that it forks (workers of a DataLoader) do not inherit
    and cannot keep.

    Args:
        run: the directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._file: int | None = None

    def take(self) -> bool:
        """Try to get it; return whether no other process has it."""
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
        """Let it go."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def remove_run(run: Path) -> None:
    """Delete what a run has left; never raises."""
    for path in checkpoints_in(run):
        with contextlib.suppress(OSError):
            remove(path)  # no half of it is ever taken for a whole
    shutil.rmtree(run, ignore_errors=True)


def remove_abandoned(directories: Sequence[Path], key: str) -> None:
    """Delete what dead runs have left that nobody went on with for a day; never raises.

    Args:
        directories: what `bases` returned.
        key: of this run, whose own are left alone.
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


def _memory_left() -> list[int]:
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
        limit = int((folder / "memory.max").read_text())  # "max" is no number: there is none
        used = int((folder / "memory.current").read_text())
        stat_lines = (folder / "memory.stat").read_text().splitlines()
        # Cached files count as used, and are given up when something else needs the memory.
        cached = [int(line.split()[1]) for line in stat_lines if line.startswith("inactive_file ")]
        return [max(limit - used + sum(cached), 0)]
    return []
