"""What the one table says of torch's functions is what they do."""

import typing
from collections import Counter

import pytest
import torch
from torch import Tensor

from lightning_megatron.whole import (
    context_tensor,
    split_tensor,
    weights,
)
from lightning_megatron.whole.torch_functions import (
    _NAMES,
    TORCH_FUNCTIONS,
    Kind,
    _named,
    kind_of,
    kind_of_operator,
    name_of,
)

UNTRIED = {"type_as", "empty_like", "new_empty"}
"""Functions whose results have no values to compare."""


REQUIRED = {"select", "narrow", "index_select"}
"""Functions to which the dim must be given."""


def _operands():
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.rand(3, 4, 6, generator=generator) * 0.8 + 0.1
    mask, number = x > y, (x * 9).long()
    yield from ((x,), (x, y), (x, y, z), (x, 0.3), (x, 0.2, 0.7), (0.3, x), (mask, x, y))
    yield from ((x, mask, 0.3), (mask,), (mask, mask), (number, number), (number,), (x, number))


def _of(func, operands):
    """The result, or the first operand where ``func`` changes it; None if it takes no such."""
    operands = [x.clone() if isinstance(x, Tensor) else x for x in operands]
    try:
        found = func(*operands)
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError, AssertionError):
        return None  # the last where there is no CUDA
    return found if isinstance(found, Tensor) else None


def _part(x):
    return x[1:3, ::2] if isinstance(x, Tensor) else x


def _elementwise():
    kinds = ("elementwise", "like", "same", "detached", "moved", "drawn_like")
    return [f for f, about in TORCH_FUNCTIONS.items() if about.kind in kinds]


def test_elementwise_functions_take_one_element_of_each_operand():
    untried = set()
    for func in _elementwise():
        tried = 0
        for operands in _operands():
            whole, part = _of(func, operands), _of(func, map(_part, operands))
            if whole is None or part is None:
                continue
            tried += 1
            assert part.shape == _part(whole).shape, name_of(func)
            if kind_of(func) != "drawn_like" and name_of(func) not in UNTRIED:
                torch.testing.assert_close(part, _part(whole), equal_nan=True, msg=name_of(func))
        untried |= set() if tried else {name_of(func)}
    # They take float64 in place, a limit, a format, or a GPU.
    assert untried <= {"float_power", "randint_like", "type", "cuda"}, untried


@pytest.mark.parametrize("dim", [0, -1])
def test_functions_along_a_dim_take_it_where_the_table_says(dim):
    x = torch.rand(4, 6, dtype=torch.float64) + 0.1
    tried = Counter()
    along = ("along", "sum", "mean", "logsumexp", "extremum", "pair_or_extremum")
    for func, about in TORCH_FUNCTIONS.items():
        if about.kind not in (*along, "softmax", "log_softmax", "norm", "repeat_interleave"):
            continue
        between = [(2,), (2.0,), ([1, 3],)] if about.dim_at == 2 else [()]
        behind = [(), (1,), (1, 2), (torch.tensor([0, 2]),)]
        for given in [(*first, dim, *last) for first in between for last in behind]:
            try:
                whole = func(x, *given)
            except (TypeError, RuntimeError, ValueError, IndexError):
                continue
            part = func(x[:, 1:3] if dim == 0 else x[1:3], *given)
            for a, b in zip(_tensors(whole), _tensors(part), strict=True):
                kept = a.dim() == 2
                at = 1 if dim == 0 and kept else 0
                torch.testing.assert_close(b, a.narrow(at, 1, 2), msg=f"{name_of(func)} {given}")
            tried[name_of(func)] += 1
            if about.default_dim == dim and name_of(func) not in REQUIRED:
                again = func(x, *given[: about.dim_at - 1])
                for a, b in zip(_tensors(whole), _tensors(again), strict=True):
                    torch.testing.assert_close(a, b)
    assert len(tried) > 40


def _tensors(found):
    return [found] if isinstance(found, Tensor) else list(found)


def test_totals_of_parts_are_those_of_the_whole():
    x = torch.rand(4, 6)
    for func, about in TORCH_FUNCTIONS.items():
        if about.total is not None:
            assert func(x > 0.5 if about.total in ("any", "all") else x).dim() == 0, name_of(func)


def test_a_function_has_one_kind_and_a_kind_has_functions():
    for about, names in _NAMES.items():
        for name in names.split():
            assert all(TORCH_FUNCTIONS[func].kind == about.kind for func in _named(name)), name
    assert {about.kind for about in TORCH_FUNCTIONS.values()} == set(typing.get_args(Kind))
    for rules in (split_tensor.RULES, context_tensor.RULES, weights.RULES):
        assert rules.keys() <= set(typing.get_args(Kind))


def test_kinds_are_found_by_what_torch_calls():
    properties: typing.Any = Tensor
    assert kind_of(properties.grad.__get__) == "gradient"
    assert kind_of(properties.grad.__set__) == "set_gradient"
    assert kind_of(properties.grad.__delete__) == "delete_gradient"
    assert kind_of(torch.add) == kind_of(Tensor.add_) == kind_of(Tensor.__iadd__) == "elementwise"
    assert kind_of(torch._foreach_add_) == "foreach"
    assert kind_of(torch.cholesky) is None
    assert kind_of(print) is None
    assert kind_of_operator(torch.ops.aten.new_zeros.default) == "new"
    assert kind_of_operator(torch.ops.aten.rand_like.default) == "drawn_like"
    assert kind_of_operator(torch.ops.aten._to_copy.default) is None
