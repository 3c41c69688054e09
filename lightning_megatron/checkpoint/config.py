"""Options of saving and loading."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from lightning_megatron.errors import at_least, lists_of_names, switches, whole_numbers

PARTS = ("optimizer", "lr_schedulers", "loops", "callbacks")
"""Parts of a checkpoint that `CheckpointConfig.exclude` may name, beside weights."""


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointConfig:
    """How often checkpoints are made on the machines themselves, and where they are kept."""

    every_n_steps: int | None = None
    """Optimizer steps between two local checkpoints; None: as often as keeps training waiting for
    at most a hundredth of the time, and the machines writing for at most a third of it. One that
    comes due while the one before is still being written is made as soon as that stands."""
    directory: str | None = None
    """Directory of each machine, in memory or on a disk of its own; ``$VARIABLES`` of the
    environment are expanded on each machine. None: ``/dev/shm`` where there is room for it, else
    the system's directory for temporary files."""
    replicas: int = 1
    """Other nodes that keep a copy of each node's files; so many nodes may be lost at once. 0 for
    none: then what a node has is lost with it, and only killed processes are survived."""
    keep: int = 2
    """Complete local checkpoints that are kept. While the next one is written there is one more."""

    def problems(self) -> list[str]:
        """Faults of the options."""
        faults = whole_numbers(0, replicas=self.replicas) + whole_numbers(1, keep=self.keep)
        if self.every_n_steps is not None:
            faults += whole_numbers(1, every_n_steps=self.every_n_steps)
        if self.directory is not None:
            if not isinstance(self.directory, str) or not self.directory:
                faults.append(
                    f"directory={self.directory!r}: must be the path of a directory; nearest "
                    "valid: directory=None, or directory='/local/disk'"
                )
            elif "://" in self.directory:
                faults.append(
                    f"directory={self.directory!r}: is no directory of the machine; nearest valid: "
                    "directory=None, or a path without a scheme"
                )
        return [f"checkpoint.local.{fault}" for fault in faults]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are saved during training, and what of them is loaded."""

    mode: Literal["async", "sync"] = "sync"
    """``"async"`` copies the state and writes while training goes on; whoever reads a checkpoint
    during training (a logger that uploads it) then finds it later than the call that saved it."""
    on_error: Literal["continue", "raise"] = "continue"
    """Whether training goes on, with one warning, after a save that failed."""
    max_failed_saves: int | None = None
    """Failed saves in a row after which training ends all the same; None for any number: a night's
    training is worth more than the checkpoints that a full disk costs."""
    when_busy: Literal["wait", "supersede"] = "wait"
    """What a save does that finds another in flight: wait for it, or give it up to take its place
    (every other time at most, so that some checkpoint is always finished)."""
    incremental: bool = False
    """Share files of unchanged tensors (a frozen trunk) with the checkpoint before, by hard links.
    Off by default, as a bit that flips on the disk is then in every checkpoint that has the file.
    Where links are impossible checkpoints are written in full, which is said once."""
    local: bool | LocalCheckpointConfig = False
    """Between shared checkpoints make some on the machines themselves, in memory or on a disk of
    their own, each with a copy on another machine. ``ckpt_path="auto"`` goes on from the newest of
    both kinds. True takes the defaults of `LocalCheckpointConfig`."""
    keep: int | None = None
    """Keep this many of the checkpoints that each ModelCheckpoint makes in turn, the newest, and
    what a ModelCheckpoint holds as best or last; None leaves deleting to the callbacks. For one
    with ``save_top_k=-1``: what is beyond ``keep`` goes when a newer one stands and is verified."""
    exclude: Sequence[str] = ()
    """Parts of a checkpoint that ``ckpt_path`` leaves out: patterns of names of weights, like
    ``head.*``, and ``optimizer``, ``lr_schedulers``, ``loops`` (progress) and ``callbacks``.
    Weights that are left out stay what the module has; their optimizer state begins anew."""
    drain_timeout_s: float = 600.0
    """Seconds that a run which ends with an exception waits for the save in flight."""

    @property
    def local_options(self) -> LocalCheckpointConfig | None:
        """Options of local checkpoints; None where there are to be none."""
        if isinstance(self.local, LocalCheckpointConfig):
            return self.local
        return LocalCheckpointConfig() if self.local else None

    def problems(self) -> list[str]:
        """Faults of the options."""
        problems = []
        for name, choices in (
            ("mode", ("async", "sync")),
            ("on_error", ("continue", "raise")),
            ("when_busy", ("wait", "supersede")),
        ):
            if (value := getattr(self, name)) not in choices:
                problems.append(
                    f"checkpoint.{name}={value!r}: must be one of {', '.join(choices)}; nearest "
                    f"valid: {name}={choices[0]!r}"
                )
        limit = self.max_failed_saves
        faults = [] if limit is None else whole_numbers(1, max_failed_saves=limit)
        faults += lists_of_names(exclude=self.exclude)
        faults += at_least(0.0, drain_timeout_s=self.drain_timeout_s)
        faults += switches(incremental=self.incremental)
        problems += [f"checkpoint.{fault}" for fault in faults]
        local: object = self.local
        if isinstance(local, LocalCheckpointConfig):
            problems += local.problems()
        elif not isinstance(local, bool):
            problems.append(
                f"checkpoint.local={self.local!r}: must be True, False or a LocalCheckpointConfig; "
                "nearest valid: local=True"
            )
        if self.keep is not None and whole_numbers(2, keep=self.keep):
            problems.append(
                f"checkpoint.keep={self.keep!r}: must be at least 2, as the newest may turn out "
                "to be damaged; nearest valid: keep=2"
            )
        return problems


def exclusion_problems(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Faults of what `CheckpointConfig.exclude` names, given the names of a checkpoint.

    >>> exclusion_problems(["haed.*"], ["head.weight", "net.bias"])  # doctest: +ELLIPSIS
    ["checkpoint.exclude=['haed.*']: nothing of the checkpoint ...; nearest valid: 'head.*'"]
    """
    known = list(names)
    parents = {name.rpartition(".")[0] for name in known if "." in name}
    choices = [*PARTS, *known, *sorted(f"{parent}.*" for parent in parents)]
    problems = []
    for pattern in patterns:
        if pattern in PARTS or any(fnmatchcase(name, pattern) for name in known):
            continue
        near = difflib.get_close_matches(pattern, choices, n=1, cutoff=0.0)
        problems.append(
            f"checkpoint.exclude=[{pattern!r}]: nothing of the checkpoint has this name; nearest "
            f"valid: {near[0]!r}"
        )
    return problems
