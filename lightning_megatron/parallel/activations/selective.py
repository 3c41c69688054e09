"""Selective recomputation: a recomputed block keeps the results of some of its operations.

Matrix products take nearly all the time of a block, and their results little of its memory. Norms,
activation functions, dropout and the ``s x s`` weights of attention that is not fused take much
memory and next to no time (Korthikanti et al., arXiv 2205.05198). So the first run of a block saves
the results of the expensive operations; the recomputation takes those and runs the rest.

Saved results are copies, because a tp sum or the addition of a bias writes into the tensor that a
product has made, and the recomputation does so again. (For this reason torch's
``create_selective_checkpoint_contexts``, which saves aliases, is not used.) Sums over tp are
repeated. The result of an operation that draws random numbers (attention with dropout) is never
saved: later draws of the block would find the generator at another place than in the forward. For
the same reason users should not name ``aten.native_dropout`` and its like.

Operations inside of compiled functions cannot be chosen: flex attention, which is one, is computed
again, and so is Transformer Engine's, whose operators torch does not see.

Inside of a compiled graph the choice is a *policy*: the compiler asks it about every operator that
it traces, and heeds it when it cuts the graph into forward and backward. The policy copies nothing,
as a traced graph writes into no tensor, and the compiler sees to random numbers itself. There a sum
over tp is kept in place of the product that it adds up, whose size it has, or under sequence
parallelism ``1/tp`` of it. Gathers are repeated, as their results are ``tp`` times what a rank
keeps otherwise. (torch's hint to avoid in-place operations, logged once, concerns aliases.)
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    CallersMode,
    DisableTorchFunctionSubclass,
    tree_flatten,
    tree_map,
)
from lightning_megatron.comm.operators import result_of

Operation = Literal["attention", "context", "matmul", "norm", "activation"]
_CONTEXT = "lightning_megatron::context_attention"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",  # since 2.7
        _CONTEXT,
    ),
    "context": (_CONTEXT,),
    # Not bmm: where attention is not fused, it makes the s x s weights.
    "matmul": ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
    "norm": ("native_layer_norm", "_fused_rms_norm", "native_group_norm"),
    "activation": ("gelu", "silu", "relu", "sigmoid", "tanh", "leaky_relu", "elu", "hardswish"),
}
_ATEN = "aten."
OPERATIONS: tuple[str, ...] = get_args(Operation)
DEAR: tuple[str, ...] = ("attention", "matmul")
"""Operations that take most of a network's time; kept by default."""


def is_operation(name: str) -> bool:
    """Whether results can be kept under ``name``."""
    leaf = name.removeprefix(_ATEN)
    if leaf == name:
        return name in OPERATIONS
    found = getattr(torch.ops.aten, leaf, None) if leaf.isidentifier() else None
    return "default" in found.overloads() if found is not None else False


def kept_operations(names: Sequence[str]) -> frozenset[Any]:
    """The operators of ``names`` of which this version of torch knows.

    Args:
        names: members of `OPERATIONS`, or names of operators (``"aten.mm"``).
    """
    wanted = [
        leaf
        for name in names
        for leaf in ((name.removeprefix(_ATEN),) if name.startswith(_ATEN) else _NAMES[name])
    ]
    known = []
    for name in wanted:
        library, _, leaf = name.rpartition("::")
        operators = getattr(torch.ops, library or "aten")
        if hasattr(operators, leaf):
            known.append(getattr(operators, leaf).default)
    return frozenset(known)


class ResultStore(Protocol):
    """Place where tensors wait for the backward."""

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor."""
        ...

    def unpack(self, packed: Any) -> Any:
        """Give it back; anything else that is asked for is returned as it is."""
        ...


class SavedResults:
    """The results of operations in one run of a block, in order.

    Args:
        operations: whose results.
        keeper: where they wait; as they are, if None.
    """

    def __init__(self, operations: frozenset[Any], keeper: ResultStore | None = None) -> None:
        self.operations = operations
        self._keeper = keeper
        self._results: dict[Any, deque[Any]] = {op: deque() for op in operations}

    def concern(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether the result of a call is, or was, noted."""
        return func in self.operations and not _draws(func, args)

    def add(self, func: Any, result: Any) -> None:
        """Note a result."""
        self._results[func].append(tree_map(self._keep, result))

    @property
    def bytes(self) -> int:
        """Bytes of the noted results that are not kept elsewhere."""
        leaves = tree_flatten([list(results) for results in self._results.values()])[0]
        return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))

    def next(self, func: Any) -> Any:
        """The results of an operator in their order.

        Raises:
            RuntimeError: there are no more.
        """
        if not self._results[func]:
            raise RuntimeError(
                f"A block of which activations.recompute='selective' keeps {func} ran it more "
                "often in the backward than in the forward. Either it does not compute the same "
                "thing twice, or the backward runs twice (retain_graph=True); recompute='full' "
                "allows the latter"
            )
        result = self._results[func].popleft()
        return result if self._keeper is None else tree_map(self._keeper.unpack, result)

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().clone()
        return copy if self._keeper is None else self._keeper.pack(copy)


class Recording(CallersMode):
    """Runs everything, and notes results."""

    def __init__(self, notes: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunctionSubclass():  # the function of a tensor class was asked before
            result = func(*args, **(kwargs or {}))
        if self._notes.concern(func, args):
            self._notes.add(func, result)
        return result


class Replaying(CallersMode):
    """Takes what was noted from the notes, and runs the rest."""

    def __init__(self, notes: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._notes.concern(func, args):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return self._notes.next(func)


def _draws(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call of attention drops some of its weights."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(place < len(args) and args[place] > 0.0)
    return False


def traced_contexts(names: Sequence[str]) -> Any:
    """``context_fn`` for a compiler that traces a checkpoint.

    Args:
        names: operations whose results are kept.
    """
    # What is kept may be written into afterwards: the graph is made free of that.
    return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        partial(_policy, kept_in_graphs(names)), allow_cache_entry_mutation=True
    )


def kept_in_graphs(names: Sequence[str]) -> frozenset[Any]:
    """The operators whose results a graph keeps.

    Args:
        names: operations whose results are kept.
    """
    sums = (result_of("sum"), result_of("sum_scatter")) if "matmul" in names else ()
    return kept_operations(names).union(sums)


def _policy(
    operations: frozenset[Any], context: Any, func: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if func in operations and not _draws(func, args):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
