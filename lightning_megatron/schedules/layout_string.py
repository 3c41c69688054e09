"""Megatron-LM's layout string: which layers stand on which pipeline stage, in one line.

``--pipeline-model-parallel-layout`` of Megatron-LM spells the network out, stage by stage:
``"Et*3|(tt|)*29,m|L"`` is a first stage of the embedding and 3 layers, 29 stages of 2 layers, one
of 1 layer, and a last one of the loss. The same string means the same here:

=========== =========================================================================
``E``       all items before the layers; once, at the very beginning
``t``       one layer; any other small letter too (``m`` marks Megatron's MTP layers)
``L``       all items behind the layers (norm, head), and the loss; once, at the end
``|``       the border between two stages
``x*n``     n times the letter x
``(..)*n``  n times what stands in the parentheses; they may be nested
``,``       nothing, like a blank
=========== =========================================================================

The layers are the items of those parts of the ``PipelineSequential`` that are lists, and single
items between such parts. Without a list every item is a layer. Stages are counted along the
network, over all ranks, so a string for Megatron's virtual stages can be taken over. Two things
differ: ``E`` and ``L`` may be left out where they stand for no item, and a stage without an item is
refused.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_megatron.errors import raise_if_any
from lightning_megatron.schedules.partition import nearest_counts

_MOST_SYMBOLS = 10_000


class TrunkParts(NamedTuple):
    """Numbers of items before, among and behind the layers."""

    before: int
    layers: int
    after: int

    @classmethod
    def of(cls, item_names: Sequence[str]) -> "TrunkParts":
        """Count by the names that ``PipelineSequential`` gives.

        >>> TrunkParts.of(["embedding", "layers.0", "layers.1", "norm", "head"])
        TrunkParts(before=1, layers=2, after=2)
        """
        listed = [index for index, name in enumerate(item_names) if "." in name]
        first, last = (listed[0], listed[-1]) if listed else (0, len(item_names) - 1)
        return cls(first, last + 1 - first, len(item_names) - 1 - last)


class _Symbol(NamedTuple):
    """A character that means something, or a whole number."""

    text: str
    position: int


class _FaultError(Exception):
    """A string that cannot be read, with a change that mends this fault."""

    def __init__(self, position: int, rule: str, remedy: str) -> None:
        super().__init__(rule)
        self.position = position
        self.rule = rule
        self.remedy = remedy


def is_layout(text: str) -> bool:
    """Whether ``text`` is meant as a layout string rather than as a name; it may be wrong."""
    return any(mark in text for mark in "|*()")


def layout_counts(text: str, parts: TrunkParts, num_stages: int) -> list[int]:
    """Number of items on every stage.

    Args:
        text: the layout string.
        parts: of the network.
        num_stages: number of stages, over all pipeline ranks.

    Raises:
        ConfigError: when `layout_problems` finds a fault.

    >>> layout_counts("Et*3|(tt|)*2L", TrunkParts(before=1, layers=7, after=2), num_stages=4)
    [4, 2, 2, 2]
    """
    raise_if_any(layout_problems(text, parts, num_stages))
    return [sum(_items_of(symbol, parts) for symbol in stage) for stage in _stages(_expanded(text))]


def syntax_problems(text: str) -> list[str]:
    """Faults of a layout string whatever the network; empty when it can be read.

    >>> print(*syntax_problems("Et*|tL"))
    partition='Et*|tL': character 3: * is followed by how often what stands before it is taken; \
nearest valid: partition='Et*1|tL'
    """
    try:
        _expanded(text)
    except _FaultError as fault:
        where = f"character {fault.position + 1}"
        return [_problem(text, f"{where}: {fault.rule}", repr(_mended(fault.remedy)))]
    return []


def layout_problems(text: str, parts: TrunkParts, num_stages: int) -> list[str]:
    """Faults of a layout string for a network; empty when it will work.

    Args:
        text: the layout string.
        parts: of the network, which has at least as many items as stages.
        num_stages: number of stages, over all pipeline ranks (pp * stages_per_rank).

    >>> print(*layout_problems("Ett|tL", TrunkParts(1, 4, 2), num_stages=2))
    partition='Ett|tL': it names 3 layers (t*3), the network has 4; nearest valid: \
partition='Ett|ttL'
    """
    problems = syntax_problems(text)
    if problems:
        return problems
    symbols = _expanded(text)
    stages = _stages(symbols)
    rule = _ends_fault(symbols, parts) or _count_fault(stages, parts, num_stages)
    rule = rule or _empty_fault(symbols, parts)
    return [] if rule is None else [_problem(text, rule, _nearest(stages, parts, num_stages))]


def _problem(text: str, rule: str, nearest: str) -> str:
    return f"partition={text!r}: {rule}; nearest valid: partition={nearest}"


def _ends_fault(symbols: Sequence[_Symbol], parts: TrunkParts) -> str | None:
    """Fault in the places of E and L."""
    for letter, items, place, right, end in (
        ("E", parts.before, "before", 0, "beginning"),
        ("L", parts.after, "behind", len(symbols) - 1, "end"),
    ):
        found = [i for i, symbol in enumerate(symbols) if symbol.text == letter]
        wrong = next((i for i in found if i != right), None)
        if wrong is not None:
            position = symbols[wrong].position + 1
            return f"character {position}: {letter} stands once, at the very {end}"
        if not found and items:
            count = "an item" if items == 1 else f"{items} items"
            return f"it has no {letter}, the network has {count} {place} its layers"
    return None


def _count_fault(
    stages: Sequence[Sequence[_Symbol]], parts: TrunkParts, num_stages: int
) -> str | None:
    if len(stages) != num_stages:
        return f"it makes {len(stages)} stages, pp*stages_per_rank is {num_stages}"
    letters = [s.text for stage in stages for s in stage if s.text not in "EL"]
    if len(letters) == parts.layers:
        return None
    kinds = ", ".join(f"{kind}*{letters.count(kind)}" for kind in dict.fromkeys(letters))
    named = f"{len(letters)} layers ({kinds})" if kinds else "no layers"
    return f"it names {named}, the network has {parts.layers}"


def _empty_fault(symbols: Sequence[_Symbol], parts: TrunkParts) -> str | None:
    borders = [symbol.position for symbol in symbols if symbol.text == "|"]
    for number, stage in enumerate(_stages(symbols)):
        if any(_items_of(symbol, parts) for symbol in stage):
            continue
        if stage:
            return (
                f"character {stage[0].position + 1}: {stage[0].text} stands alone on stage "
                f"{number} and for no item of this network, and no stage may be empty"
            )
        number_of_border = min(number, len(borders) - 1)
        side = "before" if number < len(borders) else "behind"
        return (
            f"character {borders[number_of_border] + 1}: stage {number}, {side} this |, is empty, "
            "which no stage may be"
        )
    return None


def _items_of(symbol: _Symbol, parts: TrunkParts) -> int:
    return {"E": parts.before, "L": parts.after}.get(symbol.text, 1)


def _nearest(stages: Sequence[Sequence[_Symbol]], parts: TrunkParts, num_stages: int) -> str:
    """A legal string with about the same layers per stage, or a list where there is none."""
    before, after = bool(parts.before), bool(parts.after)
    units = before + parts.layers + after
    if units < num_stages:
        return str(nearest_counts([], sum(parts), num_stages))
    wanted = [sum(s.text not in "EL" for s in stage) for stage in stages]
    wanted[0] += before
    wanted[-1] += after
    counts = nearest_counts(wanted, units, num_stages)
    counts[0] -= before
    counts[-1] -= after
    texts = ["t" * count if count < 4 else f"t*{count}" for count in counts]
    texts[0] = "E" * before + texts[0]
    texts[-1] += "L" * after
    return repr(_folded([f"{text}|" for text in texts[:-1]]) + texts[-1])


def _folded(stages: Sequence[str]) -> str:
    runs = [(text, len(list(run))) for text, run in itertools.groupby(stages)]
    return "".join(f"({text})*{n}" if n > 2 else text * n for text, n in runs)


def _mended(text: str) -> str:
    """``text`` after mending one fault after the other."""
    while True:
        try:
            _expanded(text)
        except _FaultError as fault:
            text = fault.remedy
        else:
            return text


def _stages(symbols: Sequence[_Symbol]) -> list[list[_Symbol]]:
    stages: list[list[_Symbol]] = [[]]
    for symbol in symbols:
        if symbol.text == "|":
            stages.append([])
        else:
            stages[-1].append(symbol)
    return stages


def _expanded(text: str) -> list[_Symbol]:
    """Letters and borders of ``text``, every repetition written out."""
    return _Reader(text).sequence(opened_at=None)


@dataclass
class _Reader:
    """Reads a layout string from left to right."""

    text: str
    at: int = 0

    def sequence(self, opened_at: int | None) -> list[_Symbol]:
        """Read up to the end, or to the parenthesis that closes the one at ``opened_at``."""
        found: list[_Symbol] = []
        while (char := self._peek()) and char != ")":
            found += self._repeated()
            if len(found) > _MOST_SYMBOLS:
                raise _FaultError(self.at - 1, f"more than {_MOST_SYMBOLS} letters come of it", "t")
        if char and opened_at is None:
            raise self._fault(self.at, 1, "", "there is no ( for this )")
        if not char and opened_at is not None:
            raise _FaultError(opened_at, "there is no ) for this (", self.text + ")")
        self.at += 1
        return found

    def _repeated(self) -> list[_Symbol]:
        """Read a letter, a border or a group, and how often it is taken."""
        element = self._element()
        if self._peek() != "*":
            return element
        star = self.at
        self.at += 1
        self._peek()
        first = self.at
        while self.at < len(self.text) and self.text[self.at] in "0123456789":
            self.at += 1
        number = self.text[first : self.at]
        if not number:
            rule = "* is followed by how often what stands before it is taken"
            raise self._fault(star, 1, "*1", rule)
        # Not int() of any number: a long one takes for ever, and is too large in any case.
        times = int(number) if len(number) < 9 else _MOST_SYMBOLS + 1
        if times == 0:
            raise self._fault(first, len(number), "1", "nothing is taken 0 times")
        if times * len(element) > _MOST_SYMBOLS:
            rule = f"more than {_MOST_SYMBOLS} letters come of it"
            raise self._fault(first, len(number), "1", rule)
        return element * times

    def _element(self) -> list[_Symbol]:
        char, position = self._peek(), self.at
        self.at += 1
        if char == "(":
            return self.sequence(opened_at=position)
        if char in "EL|" or ("a" <= char <= "z"):
            return [_Symbol(char, position)]
        if char == "*" or char.isdigit():
            rest = self.text[self.at :]
            length = 1 + len(rest) - len(rest.lstrip("0123456789"))
            raise self._fault(position, length, "", f"{char} stands behind nothing to repeat")
        mended = char.lower() if "a" <= char.lower() <= "z" else ""
        rule = f"{char!r} means nothing; there are E, L, small letters for layers and | , * ( )"
        raise self._fault(position, 1, mended, rule)

    def _peek(self) -> str:
        """The next character that counts, without reading it; empty at the end."""
        while self.at < len(self.text) and (self.text[self.at] == "," or self.text[self.at] == " "):
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _fault(self, start: int, length: int, instead: str, rule: str) -> _FaultError:
        remedy = self.text[:start] + instead + self.text[start + length :]
        return _FaultError(start, rule, remedy)
