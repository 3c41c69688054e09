"""Options of saving and loading."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from lightning_megatron.errors import at_least, lists_of_names, switches, whole_numbers

PARTS = ("optimizer", "lr_schedulers", "loops", "callbacks")
"""Parts of a checkpoint, other than weights, that `CheckpointConfig.exclude` may name."""


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointConfig:
    """Options of local checkpoints, which are on the machines' own memory or disks."""

    every_n_steps: int | None = None
    """Optimizer steps between two local checkpoints. None chooses the interval so that training
    waits at most 1 % of the time and the machines write at most a third of it. A checkpoint that
    is due while the one before is still being written follows as soon as that is complete."""
    directory: str | None = None
    """Directory of each machine, in memory or on a disk of its own; environment variables like
    ``$SCRATCH`` are expanded on each machine. None takes ``/dev/shm`` if it has room, else the
    system's directory for temporary files."""
    replicas: int = 1
    """Number of other nodes that keep a copy of each node's files; so many nodes may be lost at
    once. With 0 the files of a node are lost with it, and only killed processes are survived."""
    keep: int = 2
    """Number of complete local checkpoints that are kept; a new one is written before one goes."""

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
                    f"directory={self.directory!r}: must be a directory of the machine, not a URL; "
                    "nearest valid: directory=None, or a path without a scheme"
                )
        return [f"checkpoint.local.{fault}" for fault in faults]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Options of saving checkpoints during training, and of loading them."""

    format: Literal["auto", "directory", "file"] = "auto"
    """Form of a checkpoint. A ``"file"`` is what Lightning itself writes: ``torch.load`` and
    ``load_from_checkpoint`` read it in any process, and any layout goes on from it. Rank 0 writes
    it, tensor by tensor, while training waits. A ``"directory"`` is written by all ranks together,
    and the other options work with it. ``"auto"`` takes a file where tp, pp, cp and ep are 1,
    ``zero`` is at most 2, weights and optimizer state take at most 4 GB, and no other option needs
    a directory."""
    mode: Literal["async", "sync"] = "sync"
    """``"sync"`` writes while training waits. ``"async"`` copies the state to host memory and
    writes it while training goes on; a reader during training (a logger that uploads checkpoints)
    then finds a checkpoint later than the call that saved it."""
    on_error: Literal["continue", "raise"] = "continue"
    """Reaction to a save that failed: go on training with one warning, or raise the error."""
    max_failed_saves: int | None = None
    """Number of failed saves in a row after which training ends despite ``on_error="continue"``;
    None for no limit, as a night of training is worth more than some checkpoints."""
    when_busy: Literal["wait", "supersede"] = "wait"
    """Behaviour of a save while another is in flight: ``"wait"`` for it, or ``"supersede"`` it by
    giving it up (at most every other time, so that some checkpoint is always finished)."""
    incremental: bool = False
    """Whether files of unchanged tensors (a frozen trunk) are hard links to those of the checkpoint
    before. Off by default, as a bit that flips on the disk is then in every checkpoint that shares
    the file. Where links are impossible, checkpoints are written in full, with one warning."""
    local: bool | LocalCheckpointConfig = False
    """Local checkpoints between the shared ones: in the memory or on a disk of each machine, each
    with a copy on another machine. ``ckpt_path="auto"`` goes on from the newest of both kinds. True
    takes the defaults of `LocalCheckpointConfig`."""
    keep: int | None = None
    """Number of the newest checkpoints of each ModelCheckpoint that are kept, beside those that a
    ModelCheckpoint holds as best or last; None leaves deleting to the callbacks. It is meant for
    ``save_top_k=-1``. An older one is deleted when a newer one is complete and verified."""
    weights: Literal["all", "trainable"] = "all"
    """Weights that are saved. ``"trainable"`` leaves out parameters that do not learn when a
    checkpoint is saved, as the model below adapters: a checkpoint is then as small as the adapters
    and their optimizer state. Whoever loads it begins with the same model, which is checked
    (`checkpoint.frozen_weights`). Buffers are saved."""
    exclude: Sequence[str] = ()
    """Parts of a checkpoint that ``ckpt_path`` does not load: patterns of names of weights, like
    ``head.*``, and ``optimizer``, ``lr_schedulers``, ``loops`` (progress) and ``callbacks``. The
    module keeps its own values for these weights; their optimizer state begins anew."""
    weights_only: bool = True
    """Whether ``ckpt_path`` leaves out objects of classes that are not registered with
    ``torch.serialization.add_safe_globals``, as reading them may run any code of whoever wrote the
    checkpoint. Lightning does not pass the argument of the same name of ``Trainer.fit`` on to
    strategies that load after their setup."""
    drain_timeout_s: float = 600.0
    """Seconds that a run that ends with an exception waits for the save in flight."""

    @property
    def local_options(self) -> LocalCheckpointConfig | None:
        """Options of local checkpoints; None if there are none."""
        if isinstance(self.local, LocalCheckpointConfig):
            return self.local
        return LocalCheckpointConfig() if self.local else None

    @property
    def needs_directory(self) -> list[str]:
        """Options that work with checkpoint directories only, as they are set."""
        return [
            f"{name}={value!r}"
            for name, value, default in (
                ("mode", self.mode, "sync"),
                ("incremental", self.incremental, False),
                ("local", self.local, False),
                ("keep", self.keep, None),
            )
            if value != default
        ]

    def problems(self) -> list[str]:
        """Faults of the options."""
        problems = []
        for name, choices in (
            ("format", ("auto", "directory", "file")),
            ("mode", ("async", "sync")),
            ("on_error", ("continue", "raise")),
            ("when_busy", ("wait", "supersede")),
            ("weights", ("all", "trainable")),
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
        faults += switches(incremental=self.incremental, weights_only=self.weights_only)
        problems += [f"checkpoint.{fault}" for fault in faults]
        if self.format == "file" and (others := self.needs_directory):
            problems.append(
                f"checkpoint.format='file', {', '.join(others)}: one file is written while "
                "training waits, in full, to one place; nearest valid: format='directory'"
            )
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
                f"checkpoint.keep={self.keep!r}: must be an integer of at least 2, as the newest "
                "may turn out to be damaged; nearest valid: keep=2"
            )
        return problems


def exclusion_problems(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Faults of `CheckpointConfig.exclude`, given the names in a checkpoint.

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
