"""Views of whole tensors that were gathered for one call, which refuse to be written to.

``weight.data[0].zero_()`` writes by a view into what it is a view of. Where ranks have parts, and
the view is none of them, it is one of a copy that was gathered for it, and what is written there
would be lost. ``weight.data[0] = 0`` says the same, and each rank keeps its part of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    tree_flatten,
    tree_map,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.torch_functions import CHANGES, changes


class CopiedView(Tensor):
    """View of a copy: any function may read it, and none may write to it."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = args[0] if args and changes(func) else kwargs.get("out")
        if isinstance(changed, CopiedView) and not _is_attribute(func):
            name = getattr(func, "__name__", str(func))
            raise ConfigError(
                f"{CHANGES.get(name, name)}: writes to a view of a tensor of which each rank holds "
                "a part; it was gathered for it, and the change would be lost; nearest valid: "
                "weight.data[index] = values on the weight or gradient itself, or the same on "
                "lightning_megatron.layers.whole(x)"
            )
        if not all(kind in (Tensor, cls) for kind in types) or func in _COPIES:
            args, kwargs = tree_map(_plain, (args, kwargs))
            return func(*args, **kwargs)
        views = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, CopiedView)]
        with DisableTorchFunctionSubclass():
            return as_views(func(*args, **kwargs), views)


_COPIES = (Tensor.__deepcopy__, Tensor.__reduce_ex__)
"""Functions after which somebody else has the values."""


def copies_in(gathered: Any, given: Any) -> list[Tensor]:
    """Tensors among the gathered arguments of a function that are not those that were given."""
    pairs = zip(tree_flatten(gathered)[0], tree_flatten(given)[0], strict=True)
    return [copy for copy, leaf in pairs if copy is not leaf and isinstance(copy, Tensor)]


def as_views(found: Any, copies: Sequence[Tensor]) -> Any:
    """Let the tensors among the results of a function refuse changes that are views of a copy."""
    if not copies:
        return found
    leaves = [found] if isinstance(found, Tensor) else tree_flatten(found)[0]
    tensors = [x for x in leaves if type(x) is Tensor and x.layout is copies[0].layout]
    if tensors:
        addresses = {x.untyped_storage().data_ptr() for x in copies} - {0}
        for x in tensors:
            if x.untyped_storage().data_ptr() in addresses:
                x.__class__ = CopiedView
    return found


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, CopiedView):
        return leaf
    with DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Whether a function with such a name changes no values."""
    kept: Any = Tensor
    return func in (Tensor.requires_grad_, kept.requires_grad.__set__, kept.grad.__set__)
