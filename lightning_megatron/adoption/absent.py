"""Absent tensors: outputs of items that another pipeline stage computes.

The forward of an adopted model runs on every stage. What it does between items of other stages, it
does with tensors that have a shape and no values. Whatever is computed from one is absent too, so
that it shows which arguments of an item depend on items before it, and have to be received.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron._torch.wrappers import stand_in, writes
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.torch_functions import kind_of, kind_of_operator

_GRADIENTS = frozenset(("backward", "backward_of_all", "differentiate"))
_READ = (
    "pp > 1: code of the model between its items, or a loss, reads values of an activation or a "
    "weight, which only an earlier pipeline stage has; nearest valid: pp=1, or trunk=[...] of "
    "adopt() with that code inside of an item, or without the item that it comes from"
)


_WRITTEN = (
    "pp > 1: code of the model between its items writes an activation into a tensor of its own, on "
    "a pipeline stage that does not have the activation; nearest valid: torch.cat or torch.where, "
    "which make a new tensor, the code inside of an item, or pp=1"
)


class Absent(Tensor):
    """Tensor of which only shape, dtype and device are known.

    Attributes:
        value: the tensor itself, once the stage before has sent it. Functions of torch then take
            it in place of this one.
    """

    _twin: Tensor
    value: Tensor | None = None

    @classmethod
    def of(cls, twin: Tensor, device: torch.device) -> "Absent":
        """Return the absent tensor with the shape of ``twin``, which is on the meta device."""
        made: Absent = stand_in(cls, twin, twin.shape, device)
        made._twin = twin
        return made

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kind_of(func) in _GRADIENTS:
            raise ConfigError(_READ)
        given = (tuple(args), dict(kwargs or {}))
        known = with_values(given)
        if all(a is b for a, b in zip(tree_flatten(given)[0], tree_flatten(known)[0], strict=True)):
            return super().__torch_function__(func, types, *given)  # type: ignore[no-untyped-call]
        return func(*known[0], **known[1])

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" or kind_of_operator(func) == "reads":
            raise ConfigError(_READ)
        if writes(func) and any(isinstance(x, Tensor) for x in _written(func, args, kwargs or {})):
            raise ConfigError(_WRITTEN)
        found: list[torch.device] = []

        def twin(leaf: Any) -> Any:
            if isinstance(leaf, Absent):
                found.append(leaf.device)
                return leaf._twin
            return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

        given = tree_map(twin, (tuple(args), dict(kwargs or {})))
        options = given[1]
        device = torch.device(options["device"]) if options.get("device") is not None else found[0]
        if "device" in options:
            options["device"] = torch.device("meta")
        out = func(*given[0], **options)
        return tree_map(lambda x: Absent.of(x, device) if isinstance(x, Tensor) else x, out)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype})"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an operator changes, but for absent tensors."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return [x for x in found if not isinstance(x, Absent)]


def absent_like(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with an absent tensor in place of each tensor on meta."""
    return tree_map(lambda x: Absent.of(x, device) if isinstance(x, Tensor) else x, tree)


def with_values(tree: Any) -> Any:
    """Return ``tree`` with the value in place of each absent tensor that has one."""

    def known(leaf: Any) -> Any:
        return leaf if not isinstance(leaf, Absent) or leaf.value is None else leaf.value

    return tree_map(known, tree)


def on_meta(tree: Any) -> Any:
    """Return ``tree`` with a tensor on meta in place of each tensor."""

    def twin(leaf: Any) -> Any:
        if isinstance(leaf, Absent):
            return leaf._twin
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    return tree_map(twin, tree)
