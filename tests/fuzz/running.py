"""Runs programs on ranks, many in one job, and says which do not hold.

A program holds if every rank has the value and the gradients of one process, or an error of ours.
Left out is what says nothing: a program that one process refuses, or of which it makes another
number when its input is moved by the last digit, and what is not finite.

Ranks agree after each program. Where they cannot, as one waits for another that does not come, the
job ends, and another goes on with the programs behind.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.errors import MegatronError
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.whole.splits import whole
from tests.fuzz import grammar
from tests.fuzz.grammar import Learning, Program
from tests.fuzz.subjects import PATIENCE, SUBJECTS, Shape, Subject

BATCH = 200
"""Programs of one job."""
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Trial:
    """Program, and the shape of the tensor that it begins with."""

    shape: Shape
    program: Program

    def __str__(self) -> str:
        """Return a line of a table of cases."""
        return f"({self.shape}, {self.program})"


@dataclass(frozen=True)
class Find:
    """A program that does not hold."""

    trial: Trial
    words: tuple[str, ...]
    """What each rank says."""

    def __str__(self) -> str:
        """Return the program and what ranks say."""
        said = "\n".join(f"    rank {rank}: {text}" for rank, text in enumerate(self.words))
        return f"{self.trial}\n{said}"


# On ranks -----------------------------------------------------------------------------------------

RIGHT, LEFT_OUT, REFUSED = "right", "left out", "refused"


@dataclass
class _Numbers:
    """What a program computes."""

    value: Tensor
    gradients: dict[str, Tensor]


def _compute(subject: Subject, trial: Trial, parallel: bool, factor: float = 1.0) -> _Numbers:
    torch.manual_seed(0)
    x, leaves = subject.make(trial.shape, parallel, factor)
    learning = Learning()
    out = grammar.run(trial.program, x, learning)
    if out.requires_grad:
        (out.double() * grammar.tensor(*out.shape)).sum().backward()
    others = {f"p{shape}": value for shape, value in sorted(learning.made.items())}
    gradients = {}
    for name, leaf in {**leaves, **others}.items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradients[name] = subject.whole_gradient(name, gradient) if parallel else gradient.clone()
    return _Numbers(whole(out.detach()), gradients)


def _difference(found: _Numbers, expected: _Numbers, tolerance: float) -> str:
    """Say what differs; empty if nothing does."""
    if found.value.dtype != expected.value.dtype:
        return f"{found.value.dtype} for {expected.value.dtype}"
    if found.value.shape != expected.value.shape:
        return f"shape {tuple(found.value.shape)} for {tuple(expected.value.shape)}"
    pairs = {"value": (found.value, expected.value)}
    pairs |= {f"gradient of {n}": (g, expected.gradients[n]) for n, g in found.gradients.items()}
    for name, (mine, other) in pairs.items():
        mine, other = mine.double(), other.double()
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        if not torch.allclose(mine, other, rtol=0, atol=tolerance * scale):
            return f"{name} is off by {float((mine - other).abs().max()):.2g}"
    return ""


def _is_finite(numbers: _Numbers) -> bool:
    tensors = (numbers.value, *numbers.gradients.values())
    return all(bool(t.isfinite().all()) for t in tensors)


def _is_unsteady(subject: Subject, trial: Trial, expected: _Numbers, tolerance: float) -> bool:
    """Whether one process computes something else from nearly the same input."""
    step = tolerance * 1e-3
    others = [_compute(subject, trial, False, 1 + sign * step) for sign in (1, -1)]
    return any(_difference(other, expected, tolerance * 10) for other in others)


def _outcome(subject: Subject, trial: Trial) -> str:
    is_narrow = any("float" in line and "float64" not in line for line in trial.program)
    tolerance = 1e-4 if is_narrow else TOLERANCE
    try:
        expected = _compute(subject, trial, False)
    except Exception:
        return LEFT_OUT
    if not _is_finite(expected):
        return LEFT_OUT
    try:
        found = _compute(subject, trial, True)
    except MegatronError as error:
        return f"{REFUSED}: {error}"[:300]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    wrong = _difference(found, expected, tolerance)
    if not wrong:
        return RIGHT
    return LEFT_OUT if _is_unsteady(subject, trial, expected, tolerance) else wrong


def _job(name: str, trials: Sequence[Trial]) -> list[str]:
    """What this rank says of each program, of those before which ranks lost each other."""
    subject, said = SUBJECTS[name], []
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    subject.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, trial in enumerate(trials):
            said.append(_outcome(subject, trial))
            if not _agree(place):
                break
    return said


def _agree(place: int) -> bool:
    """Whether all ranks are behind the same program."""
    mine = torch.tensor([place])
    every = [torch.full_like(mine, -1) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(every, mine)
    except RuntimeError:
        return False
    return all(int(other) == place for other in every)


# From outside -------------------------------------------------------------------------------------


def draw(name: str, count: int, seed: int = 0) -> list[Trial]:
    """Draw programs, each from a generator of its own."""
    shapes = SUBJECTS[name].shapes
    trials = []
    for number in range(count):
        choice = random.Random(f"{name} {seed} {number}")
        shape = choice.choice(shapes)
        x = grammar.tensor(*shape).requires_grad_() * 1
        trials.append(Trial(shape, grammar.program(choice, x)))
    return trials


def try_all(pool: WorkerPool, name: str, trials: Sequence[Trial]) -> Iterator[tuple[str, ...]]:
    """Yield what ranks say of each program."""
    rest = list(trials)
    while rest:
        batch = rest[:BATCH]
        try:
            said = list(zip(*pool.run(SUBJECTS[name].world_size, _job, name, batch), strict=False))
        except WorkerError as error:
            if len(batch) > 1:  # which of them ends a worker?
                for one in batch:
                    yield from try_all(pool, name, [one])
                rest = rest[len(batch) :]
                continue
            said = [tuple(str(failure)[:300] for failure in error.failures)]
        if len(said) < len(batch):
            said[-1] = tuple(f"ranks lost each other: {text}" for text in said[-1])
        yield from said
        rest = rest[len(said) :]


def holds(words: Sequence[str]) -> bool:
    """Whether all ranks are right, or all are told why not."""
    kinds = {text.split(":")[0] for text in words}
    return kinds in ({RIGHT}, {LEFT_OUT}, {REFUSED})


def search(pool: WorkerPool, name: str, trials: Sequence[Trial], most: int = 10) -> list[Find]:
    """Return the smallest programs that do not hold."""
    said = zip(trials, try_all(pool, name, trials), strict=True)
    finds = [Find(trial, words) for trial, words in said if not holds(words)]
    return [_smaller(pool, name, find) for find in finds[:most]] + finds[most:]


def _smaller(pool: WorkerPool, name: str, find: Find) -> Find:
    """Drop lines as long as what is left does not hold."""
    program = find.trial.program
    shorter = [Trial(find.trial.shape, program[:n] + program[n + 1 :]) for n in range(len(program))]
    shorter = [trial for trial in shorter if trial.program]
    for trial, words in zip(shorter, try_all(pool, name, shorter), strict=True):
        if not holds(words):
            return _smaller(pool, name, Find(trial, words))
    return find
