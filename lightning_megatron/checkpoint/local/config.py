"""Options of local checkpoints."""

from dataclasses import dataclass

from lightning_megatron.problems import whole_numbers


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
