"""Differences of two looks at an attribute, and that they make another process's the same."""

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.strategy.attribute_changes import LIMIT, Look, apply, changes


class Meter:
    def __init__(self) -> None:
        self.total, self.parts = 0.0, [1]
        self.function = lambda: 0


def add(meter: Meter) -> None:
    meter.total += 1.5
    meter.parts.append(2)


def nest(content: dict[str, Any]) -> None:
    content["a"]["b"].append(3.5)
    content["c"] = None
    del content["gone"]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "append": (lambda: [1.0, 2.0], lambda x: x.append(3.0)),
    "insert": (lambda: [1.0, 2.0], lambda x: x.insert(0, 3.0)),
    "clear": (lambda: [1.0, 2.0], list.clear),
    "replace": (lambda: [[1.0], [2.0]], lambda x: x[1].append(3.0)),
    "tensors": (lambda: [torch.zeros(2)], lambda x: x.append(torch.ones(2))),
    "first tensor": (lambda: {"a": []}, lambda x: x["a"].append(torch.ones(2))),
    "tensor and number": (lambda: [torch.zeros(2)], lambda x: x.append(1.0)),
    "tensor in a list": (lambda: [torch.zeros(2), torch.zeros(2)], lambda x: x[1].add_(1)),
    "in place": (lambda: {"a": torch.zeros(2)}, lambda x: x["a"].add_(1)),
    "array": (lambda: {"a": np.zeros(2)}, lambda x: x["a"].__setitem__(1, 2.0)),
    "numbers by 0": (lambda: {"a": np.zeros(())}, lambda x: x["a"].__iadd__(1)),
    "counter": (lambda: Counter("ab"), lambda x: x.update("bc")),
    "factory": (lambda: defaultdict(lambda: [0]), lambda x: x["k"].append(1)),
    "nested": (lambda: {"a": {"b": [1]}, "gone": 1}, nest),
    "object": (Meter, add),
    "object in a list": (lambda: [Meter()], lambda x: add(x[0])),
    "set": (lambda: {"in": {1}}, lambda x: x["in"].add(2)),
    "queue": (lambda: {"in": deque([1, 2], maxlen=2)}, lambda x: x["in"].append(3)),
}


def plain(content: Any) -> Any:
    if isinstance(content, torch.Tensor | np.ndarray):
        return content.tolist()
    if isinstance(content, Meter):
        return plain({k: v for k, v in vars(content).items() if k != "function"})
    if isinstance(content, dict):
        return [(key, plain(value)) for key, value in content.items()]
    return [plain(item) for item in content] if isinstance(content, list) else content


@pytest.mark.parametrize("name", CASES)
def test_changes_of_one_are_made_in_another(name: str) -> None:
    make, change = CASES[name]
    content, other = make(), make()
    before = Look().at(content)
    assert changes(before.mark, Look().at(content).mark, content) == []
    change(content)
    found = changes(before.mark, Look().at(content).mark, content)
    assert found
    for one in found:
        apply(copy.deepcopy(one), other)
    assert plain(other) == plain(content)


def test_what_was_added_to_a_list_is_all_that_is_sent() -> None:
    content = [torch.zeros(2) for _ in range(5)]
    before = Look().at(content)
    content.append(torch.ones(2))
    [found] = changes(before.mark, Look().at(content).mark, content)
    assert found.start == 5
    assert len(found.value) == 1


def test_a_new_tensor_at_the_place_of_another_in_memory_is_another() -> None:
    content = {"a": torch.zeros(2)}
    before = Look().at(content)
    for _ in range(3):
        del content["a"]
        content["a"] = torch.zeros(2)
    assert changes(before.mark, Look().at(content).mark, content)


def test_a_look_keeps_no_tensor() -> None:
    content: list[Any] = [torch.zeros(2)]
    before = Look().at(content)
    content.clear()
    assert before.mark.items[0]() is None


def test_what_has_too_many_parts_is_looked_at_as_one() -> None:
    content = {number: number for number in range(LIMIT + 1)}
    before = Look().at(content)
    content[0] = 1
    assert changes(before.mark, Look().at(content).mark, content) == []


def test_what_holds_itself_is_looked_at() -> None:
    content: dict[str, Any] = {"a": 1}
    content["self"] = content
    before = Look().at(content)
    content["a"] = 2
    assert len(changes(before.mark, Look().at(content).mark, content)) == 1


def test_the_state_of_what_pickles_itself_is_hidden() -> None:
    look = Look().at({"rng": np.random.default_rng(0), "list": [1]})
    assert look.hidden
    assert not Look().at({"list": [1, None], "f": len}).hidden


def test_a_list_that_is_shorter_elsewhere_is_an_error() -> None:
    content = [1, 2]
    before = Look().at(content)
    content.append(3)
    [found] = changes(before.mark, Look().at(content).mark, content)
    with pytest.raises(LookupError, match="no place 2"):
        apply(found, [1])
