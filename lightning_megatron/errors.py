"""Exceptions of the package, their printed text, and checks of options.

A mistake in a configuration is reported once, as one `ConfigError` that lists everything that is
wrong, on every rank and before any process group forms, so that fixing a layout takes one try.

The text of these errors says what to do, so a script that ends with one prints that text alone, on
one rank, and ends with exit code 2. For this the first of them that is raised in a process puts
a hook in front of `sys.excepthook`: importing the package changes nothing, nor does a run in which
nothing is wrong. Whoever catches the error, an interactive session included, has an ordinary
exception. ``LIGHTNING_MEGATRON_TRACEBACK=1`` brings the traceback back.
"""

import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from lightning_megatron import env

EXIT_CODE = 2
"""Exit code of a process that ends with an error of this package."""

_PATIENCE_S = 10.0
"""Seconds that other ranks wait before they print an error, as rank 0 may print it and the launcher
then ends them. Python takes seconds to end on a busy machine."""
_LONG_PATIENCE_S = 30.0
"""Seconds that other ranks wait where rank 0 is known to print the same error."""


class MegatronError(Exception):
    """Base of this package's errors, whose text says all that there is to know.

    Attributes:
        told_by_rank_0: whether rank 0 ends with the same error; None if that is not known.
    """

    told_by_rank_0: bool | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not isinstance(sys.excepthook, _Hook):
            sys.excepthook = _Hook(sys.excepthook)


class ConfigError(MegatronError, ValueError):
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


def summary(items: Sequence[str], limit: int = 10) -> str:
    """Join items to one line; those beyond ``limit`` are counted."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


class ConnectError(MegatronError, RuntimeError):
    """The processes of a run could not find each other."""


class MissingRanksError(ConnectError):
    """Some processes of a run have not come within the time that the others wait.

    Args:
        text: message to the user.
        ranks: missing ranks, as far as they are known.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type["MissingRanksError"], tuple[str, tuple[int, ...]]]:
        """Rebuild from both, so that the error crosses process boundaries."""
        return type(self), (str(self), self.ranks)


class RestartLimitError(MegatronError, RuntimeError):
    """A run has been restarted often enough."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint could not be written, is damaged, or is not one of ours."""


class DamagedCheckpointError(CheckpointError):
    """The content of a checkpoint is not what was written: looking again will not help."""


class TokenFileError(MegatronError, RuntimeError):
    """A file of tokens is missing, damaged, or in a format that is not read."""


class NoSuchTokensError(TokenFileError, FileNotFoundError):
    """A path holds no files of tokens."""


class ReplicaError(MegatronError, RuntimeError):
    """Ranks hold different values of what is to be equal on all of them."""


class NoSuchCheckpointError(CheckpointError, FileNotFoundError):
    """A path holds no checkpoint."""


# Sentences about values that are not valid, for one ConfigError -----------------------------------


def at_least(low: float, **values: Any) -> list[str]:
    """Problems of ``values`` below ``low``, and of those that are no numbers.

    >>> at_least(0.0, lr=-1.0)
    ['lr=-1.0: must be a number of at least 0.0; nearest valid: lr=0.0']
    >>> at_least(0.0, lr="1e-3")
    ["lr='1e-3': must be a number of at least 0.0; nearest valid: lr=0.001"]
    """
    return [
        f"{name}={value!r}: must be a number of at least {low}; nearest valid: {name}="
        f"{_nearest(low, value, float)}"
        for name, value in values.items()
        if not holds(lambda value: value >= low, value)
    ]


def below_one(**values: Any) -> list[str]:
    """Problems of ``values`` outside of [0, 1).

    >>> below_one(momentum=1.0)
    ['momentum=1.0: must lie in [0, 1); nearest valid: momentum=0.99']
    """
    return [
        f"{name}={value!r}: must lie in [0, 1); nearest valid: {name}="
        f"{'0.0' if holds(lambda value: value < 0, value) else '0.99'}"
        for name, value in values.items()
        if not holds(lambda value: 0.0 <= value < 1.0, value)
    ]


def whole_numbers(low: int, **values: Any) -> list[str]:
    """Problems of ``values`` that are no whole numbers from ``low`` on.

    >>> whole_numbers(1, window=1.5)
    ['window=1.5: must be a whole number of at least 1; nearest valid: window=1']
    >>> whole_numbers(1, window="20")
    ["window='20': must be a whole number of at least 1; nearest valid: window=20"]
    """
    return [
        f"{name}={value!r}: must be a whole number of at least {low}; nearest valid: {name}="
        f"{_nearest(low, value, int)}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < low
    ]


def lists_of_names(**values: Any) -> list[str]:
    """Problems of ``values`` that are one string, whose characters would each be a pattern.

    >>> lists_of_names(exclude="*.head")
    ["exclude='*.head': must be a list; nearest valid: exclude=['*.head']"]
    """
    return [
        f"{name}={value!r}: must be a list; nearest valid: {name}=[{value!r}]"
        for name, value in values.items()
        if isinstance(value, str)
    ]


def switches(**values: Any) -> list[str]:
    """Problems of ``values`` that are neither True nor False: the text ``"no"`` would switch on.

    >>> switches(plain_linear="no")
    ["plain_linear='no': must be True or False; nearest valid: plain_linear=False"]
    """
    return [
        f"{name}={value!r}: must be True or False; nearest valid: {name}="
        f"{str(value).lower() in ('true', 'yes', 'on', '1')}"
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def instances(**values: tuple[Any, type]) -> list[str]:
    """Problems of values that are of another type than the one beside them.

    >>> instances(given=({"real": 1.0}, complex))
    ["given={'real': 1.0}: must be a complex; nearest valid: given=complex(real=1.0)"]
    """
    problems = []
    for name, (value, kind) in values.items():
        if isinstance(value, kind):
            continue
        options = value.items() if isinstance(value, dict) else ()
        call = f"{kind.__name__}({', '.join(f'{key}={v!r}' for key, v in options)})"
        problems.append(
            f"{name}={value!r}: must be a {kind.__name__}; nearest valid: {name}={call}"
        )
    return problems


def numbers_or_instances(**values: tuple[Any, type]) -> list[str]:
    """Problems of values that are neither plain numbers nor of the type beside them.

    >>> numbers_or_instances(given=({"real": 1.0}, complex))
    ["given={'real': 1.0}: must be a number or a complex; nearest valid: given=complex(real=1.0)"]
    """
    plain = (int, float, str, type(None))  # whoever knows the numbers tells of texts
    return [
        problem.replace("must be a ", "must be a number or a ")
        for name, (value, kind) in values.items()
        if not isinstance(value, plain)
        for problem in instances(**{name: (value, kind)})
    ]


def _nearest(low: Any, value: Any, kind: type[int] | type[float]) -> Any:
    """Nearest valid number to one that is too small, of another type, or a text."""
    try:
        return max(low, kind(float(value)))
    except (TypeError, ValueError, OverflowError):
        return low


def holds(rule: Callable[[Any], bool], value: Any) -> bool:
    """Whether a rule about numbers holds for a value that may be no number."""
    try:
        return bool(rule(value))
    except TypeError:
        return False


# When nobody catches it ---------------------------------------------------------------------------


def tell(error: MegatronError) -> None:
    """Print an error that ends this process: once for all ranks that it has happened on.

    Rank 0 speaks, and so does a process that the user started on another node, whose output he
    reads there. The others wait for a while, in which the launcher ends them if rank 0 has ended;
    one that is still there has failed alone, and speaks for itself.
    """
    if env.shows_tracebacks():
        traceback.print_exception(error)
        return
    rank, by_hand = env.rank(), env.has_own_output()
    if rank and error.told_by_rank_0 is not False and not by_hand:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_LONG_PATIENCE_S if error.told_by_rank_0 else _PATIENCE_S)
        if error.told_by_rank_0:
            return
    who = f", {'node' if by_hand else 'rank'} {rank}" if rank else ""
    print(f"lightning-megatron{who}: {error}{_place(error)}", file=sys.stderr, flush=True)  # noqa: T201


class _Hook:
    """Replaces the traceback of our errors, and leaves all others to the hook before it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        interactive = sys.flags.interactive or hasattr(sys, "ps1")
        if interactive or not isinstance(error, MegatronError):
            self._before(kind, error, trace)
            return
        tell(error)
        raise SystemExit(EXIT_CODE)  # or Python would end with 1


def _place(error: MegatronError) -> str:
    """The user's line that led to an error, if any did."""
    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    libraries = tuple(
        sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not os.path.abspath(frame.filename).startswith((ours, *libraries))
        and os.path.isfile(frame.filename)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return (
        f"\n  ({last.filename}:{last.lineno}; LIGHTNING_MEGATRON_TRACEBACK=1 shows the way from "
        "there)"
    )
