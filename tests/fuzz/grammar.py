"""Programs of torch expressions, as lines of text: what a user may write with a tensor ``x``.

`program` draws lines one by one. Each is a template of `tests.fuzz.templates` whose blanks are
filled by what fits the tensor that the lines before have made in one process, where they run while
they are drawn. A line that one process refuses is drawn again. So a program is text that holds in
one process, and can be pasted into a table of cases::

    x = x.reshape(2, 12)
    x[:, 3:] = 0.5
    x = x.var(0, True)

Beside ``x`` and ``torch`` a line may name what `names` gives: numbers that all ranks have alike.
"""

import math
import random
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.templates import STATEMENTS, TEMPLATES

Program = tuple[str, ...]

LARGEST = 400
"""Elements that a tensor may have."""
MOST_LINES = 4
"""Templates of a program."""


def tensor(*shape: int) -> Tensor:
    """Numbers between -1.5 and 1.5, no two of them equal, that follow from the shape."""
    places = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return ((places * 0.7548776662 + len(shape) * 0.31) % 1 * 3 - 1.5).reshape(shape)


def indices(high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 up to ``high``."""
    return (tensor(*shape).abs() * 1e4).long() % high


def mask(*shape: int) -> Tensor:
    """About half of all places."""
    return tensor(*shape) > 0.1


class Learning:
    """Tensors that learn beside the input: one for each shape, made when it is first named."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, *shape: int) -> Tensor:
        if shape not in self.made:
            self.made[shape] = tensor(*shape).requires_grad_()
        return self.made[shape]


def names(x: Tensor, learning: Learning) -> dict[str, Any]:
    """What a line may name."""
    return {
        **{"x": x, "x0": x, "torch": torch, "F": F, "nn": nn, "D": torch.distributions},
        **{"t": tensor, "i": indices, "m": mask, "p": learning},
    }


def run(program: Program, x: Tensor, learning: Learning) -> Tensor:
    """Run a program; returns what it leaves in ``x``."""
    space = names(x, learning)
    for line in program:
        exec(line, space)
    return torch.as_tensor(space["x"])


def program(choice: random.Random, x: Tensor, expressions_only: bool = False) -> Program:
    """Draw a program that begins with ``x``."""
    lines: list[str] = []
    space = names(x, Learning())
    for _ in range(choice.randint(1, MOST_LINES)):
        for _ in range(6):
            drawn = _line(choice, space["x"], expressions_only)
            tried = _after(drawn, space)
            if tried is not None:
                lines += drawn
                space = tried
                break
        if space["x"].dim() == 0:
            break
    return tuple(lines)


def _after(lines: list[str], space: dict[str, Any]) -> dict[str, Any] | None:
    """Names after lines; None if one process refuses them, or they do not fit the rest."""
    space = dict(space)
    # A line that fails may have changed ``x`` before.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for line in lines:
                exec(line, space)
            x = space["x"] = torch.as_tensor(space["x"])
    except Exception:
        return None
    fits = 0 < x.numel() <= LARGEST and x.dim() < 6 and not x.is_complex()
    return space if fits and bool(x.detach().double().abs().max() < 1e6) else None


def _line(choice: random.Random, x: Tensor, expressions_only: bool) -> list[str]:
    if not x.is_floating_point():
        return ["x = x.double()"]
    known = TEMPLATES if expressions_only else {**TEMPLATES, **STATEMENTS}
    (group,) = choice.choices(list(known), [weight for weight, _ in known.values()])
    template = choice.choice(known[group][1].strip().splitlines()).strip()
    if choice.random() < 0.3:
        template = template.removeprefix("x = x.clone(); ")
    text = _filled(choice, x, template)
    return [part.strip() for part in (text if group in STATEMENTS else f"x = {text}").split(";;")]


# Blanks -------------------------------------------------------------------------------------------

_WORDS: Mapping[str, str] = {
    "unary": """abs sin cos tanh sigmoid atan erf square neg floor round sign expm1 relu asinh
        trunc frac clone contiguous detach positive sinc""",
    "activation": """relu gelu silu mish softplus elu selu celu leaky_relu hardtanh hardsigmoid
        hardswish logsigmoid softsign tanhshrink softshrink relu6""",
    "reduction": "sum mean prod amax amin logsumexp nansum nanmean",
    "pair": "max min median nanmedian mode sort cummax",
    "spread": "var std",
    "op": "+ - * /",
    "comparison": "> < >= <= == !=",
    "n": "-2 0.5 1.5 3 -0.25 2.0",
    "order": '1 2 2.0 3 float("inf") 0.5',
    "k": "1 2 3",
    "bit": "0 1",
    "at_0": "0 -1 1",
    "keep": "|, True|, keepdim=True|, False|",
    "reduced": '|, reduction="sum"|, reduction="none"|, reduction="mean"|',
    "options": "|, ignore_index=1|, label_smoothing=0.1|, reduction='sum'|, reduction='none'"
    "|, ignore_index=0, reduction='sum', label_smoothing=0.2",
}
"""Words for blanks that depend on nothing."""


def _filled(choice: random.Random, x: Tensor, template: str) -> str:
    """Fill the blanks of a template by what fits ``x``."""
    filler = _Filler(choice, x)
    return re.sub(r"\{(\w+)\}", lambda found: filler.fill(found[1]), template)


class _Filler:
    """What fits a tensor."""

    def __init__(self, choice: random.Random, x: Tensor) -> None:
        self.choice, self.shape = choice, tuple(x.shape) or (1,)
        self.last: dict[str, str] = {}

    def fill(self, blank: str) -> str:
        """Text for a blank; one that ends with ``_same`` is filled as the last of its name."""
        if blank.endswith("_same"):
            return self.last[blank.removesuffix("_same")]
        if blank in _WORDS:
            words = _WORDS[blank]
            text = self.choice.choice(words.split("|") if "|" in words else words.split())
        else:
            text = getattr(self, f"_{blank}")()
        self.last[blank] = text
        return text

    def _dim(self) -> int:
        count = max(len(self.shape), 1)
        return self.choice.randrange(-count, count)

    def _d(self) -> str:
        return str(self._dim())

    def _dims(self) -> tuple[int, ...]:
        count = max(len(self.shape), 1)
        dims = self.choice.sample(range(count), self.choice.randint(1, count))
        return tuple(d - count * self.choice.randint(0, 1) for d in dims)

    def _ds(self) -> str:
        return self.choice.choice([self._d(), str(self._dims())])

    def _at(self) -> str:
        return self.choice.choice([self._d(), f"dim={self._d()}"])

    def _along(self) -> str:
        """Dims and ``keepdim`` of a reduction."""
        dims = self._ds()
        forms = ["", dims, f"dim={dims}", f"{dims}, True", f"{dims}, keepdim=True"]
        return self.choice.choice([*forms, f"dim={dims}, keepdim=False", f"axis={dims}"])

    def _correction(self) -> str:
        """Arguments of a variance."""
        dims = self._ds()
        forms = ["", dims, f"dim={dims}", f"{dims}, True", f"{dims}, False", "False"]
        forms += [f"{dims}, False, True", f"dim={dims}, unbiased=False", "unbiased=False"]
        forms += [f"{dims}, correction=0", "correction=0", f"{dims}, keepdim=True"]
        return self.choice.choice([*forms, f"dim={dims}, correction=1, keepdim=True"])

    def _perm(self) -> str:
        return str(tuple(self.choice.sample(range(len(self.shape)), len(self.shape))))

    def _shape(self) -> str:
        """Another shape, perhaps with a -1."""
        left, sizes = math.prod(self.shape), []
        for _ in range(self.choice.randint(0, 3)):
            size = self.choice.choice([n for n in (1, 2, 3, 4, 6, 8) if left % n == 0])
            sizes.append(size)
            left //= size
        sizes.insert(self.choice.randint(0, len(sizes)), left)
        if self.choice.random() < 0.4:
            sizes[self.choice.randrange(len(sizes))] = -1
        return ", ".join(map(str, sizes))

    def _grown(self) -> str:
        """Sizes of an expansion by one dim of one."""
        return ", ".join(str(n) if n > 1 else "2" for n in (*self.shape, 1))

    def _keeps(self) -> str:
        return ", ".join(self.choice.choice(["-1", str(n)]) for n in self.shape)

    def _repeats(self) -> str:
        return ", ".join(str(self.choice.choice([1, 1, 2])) for _ in self.shape)

    # Operands ---------------------------------------------------------------------------------

    def _broadcast(self) -> str:
        shape = [n if self.choice.random() < 0.7 else 1 for n in self.shape]
        return ", ".join(map(str, shape[self.choice.randint(0, len(shape)) :]))

    def _t(self) -> str:
        return f"t({self._broadcast()})"

    def _o(self) -> str:
        learns, plain = f"p({self._broadcast()})", self._t()
        others = [self.fill("n"), "x.detach()", f"x.mean({self._d()}, True)", "x0.mean()"]
        return self.choice.choice([plain, plain, learns, learns, *others])

    def _like(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return self.choice.choice([f"t({sizes})", f"t({sizes})", f"p({sizes})", "t(*x.shape)"])

    def _mask(self) -> str:
        return f"m({self._broadcast()})"

    def _mask_like(self) -> str:
        return f"m({', '.join(map(str, self.shape))})"

    def _mask_index(self) -> str:
        return f"m({', '.join(map(str, self.shape[: self.choice.randint(1, 3)]))})"

    def _right(self) -> str:
        """Matrix on the right of ``@``."""
        return f"{self.choice.choice('tp')}({self.shape[-1]}, {self.choice.randint(1, 4)})"

    def _left(self) -> str:
        return f"{self.choice.choice('tp')}({self.choice.randint(1, 4)}, {self.shape[-2:][0]})"

    def _rows(self) -> str:
        return f"{self.choice.choice('tp')}(3, {self.shape[-1]})"

    def _classes(self) -> str:
        """Classes of which dim 1 has the scores."""
        sizes = ", ".join(map(str, (*self.shape[:1], *self.shape[2:])))
        return f"i({(*self.shape, 1, 1)[1]}, {sizes})"

    def _index(self) -> str:
        """Index of one dim, or of several."""
        size = self.choice.choice(self.shape) if self.shape else 1
        first = self.choice.randrange(size)
        forms = ["0", "-1", str(first), ":", ":", f"{first}:", f":{first + 1}", "1:", ":-1", "::2"]
        forms += [
            "None",
            "...",
            f"i({size}, 2)",
            f"i({size}, 3)",
            f"[0, {first}]",
            f"{first - size}",
        ]
        forms += [f"m({size})", f"i({size}, 2, 1)", f"torch.tensor({first})", "slice(0, 2)"]
        return self.choice.choice([*forms, f"{first}:{first + 2}", "True"])
