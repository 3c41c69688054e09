"""Exceptions of the package.

A mistake in a configuration is reported once, as one `ConfigError` that lists everything that is
wrong, on every rank and before any process group forms, so that fixing a layout takes one try.
"""

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or more options cannot work together.

    Args:
        problems: one sentence per fault, each with the values, the rule that they break and the
            nearest legal choice.

    Attributes:
        problems: the faults, in the order given, without repetitions.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        given = [problems] if isinstance(problems, str) else list(problems)
        self.problems: tuple[str, ...] = tuple(dict.fromkeys(given))
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))
            text = f"{len(self.problems)} options are wrong:\n{lines}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        """Rebuild from the list of faults, so that the error crosses process boundaries."""
        return type(self), (self.problems,)


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise one `ConfigError` that holds all `problems`, or do nothing when there are none."""
    if problems:
        raise ConfigError(problems)


class ConnectError(RuntimeError):
    """The processes of a run could not find each other."""


class MissingRanksError(ConnectError):
    """Some processes of a run have not come within the time that the others wait.

    Args:
        text: what to tell the user.
        ranks: who is missing, where that is known.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type["MissingRanksError"], tuple[str, tuple[int, ...]]]:
        """Rebuild from both, so that the error crosses process boundaries."""
        return type(self), (str(self), self.ranks)


class RestartLimitError(RuntimeError):
    """A run has been restarted often enough."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or is not one of ours."""


class DamagedCheckpointError(CheckpointError):
    """The content of a checkpoint is not what was written: looking again will not help."""


class NoSuchCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""
