"""Views of computations: nested containers, operators, autograd and compiled graphs."""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

# The documentation of ``__torch_function__`` names it, and it has no public place (2.11-2.13).
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

# The way to see every operator of a block of code is documented, but lives in a private module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Undocumented in 2.11-2.13, though every distributed module of torch leans on it.
from torch.utils._pytree import register_pytree_node
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

EnableTorchFunction: Any = torch._C._EnableTorchFunction
"""Its opposite, which ``torch.overrides`` uses for the same (2.11-2.13)."""


def register_list(kind: type[list[Any]]) -> None:
    """Let functions of nested containers look into a class of lists of ours (2.11-2.13)."""
    register_pytree_node(kind, lambda values: (list(values), None), lambda values, _: list(values))


asks_classes: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether functions of torch ask the classes of their tensors here (2.11-2.13)."""


WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile and the checkpoint wrapper insert (2.11-2.13)."""


class CallersMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of eager code, and leaves compiled what is compiled (2.11-2.13).

    Below any other mode torch runs compiled functions as if they were not, which takes more time,
    and ends flex attention, an operator of higher order that compiles itself, in an error.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled functions run as such."""
        return True


def compile_with_callers_only(function: Any) -> None:
    """Trace a function as a part of who calls it, and never by itself (2.11-2.13).

    A function that ends a graph is met again when it is called in earnest, and would be compiled
    for every shape of its arguments.
    """
    types = importlib.import_module("torch._dynamo.types")
    found = importlib.import_module("torch._C._dynamo.eval_frame")
    skip = types.FrameAction.SKIP
    found.set_code_exec_strategy(function.__code__, types.FrameExecStrategy(skip, skip))


def current_function_mode() -> Any:
    """The innermost mode that sees functions of torch; None without any (2.11-2.13)."""
    overrides: Any = torch.overrides
    return overrides._get_current_function_mode()


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Within the block autograd does not see that ``tensor`` is written (2.11-2.13).

    What is gathered again in the backward has the values that the forward saved.
    """
    autograd: Any = torch.autograd
    kept: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return kept


def runs_backward() -> bool:
    """Whether this thread is within a backward (2.11-2.13; torch's checkpoint asks so too)."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_number() -> int:
    """Number of the backward that this thread is within; an inner one has its own (2.11-2.13)."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that this thread is within has ended (2.11-2.13).

    DDP and FSDP2 end their reductions so, and this comes behind them.
    """
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def gradient_accumulator(leaf: Tensor) -> Any:
    """Return the node that adds up the gradient of ``leaf``, and lives as long as it is held."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


runs_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether ``torch.vmap`` or a transform of ``torch.func`` runs (2.11-2.13)."""


def outside_transforms() -> AbstractContextManager[Any]:
    """Context of what a transform takes for constants, such as collectives (2.11-2.13)."""
    levels = importlib.import_module("torch._functorch.pyfunctorch")
    context: AbstractContextManager[Any] = levels.temporarily_clear_interpreter_stack()
    return context


def prepare_for_transforms(prepare: Callable[[Any], Any]) -> Callable[[], None]:
    """Have arguments of scripts and transforms of functions prepared (2.11-2.13).

    Neither asks the classes of its tensors: they compute with what a tensor has in memory.

    Args:
        prepare: function that returns what takes the place of some arguments.

    Returns:
        A function that undoes this.
    """
    transforms = importlib.import_module("torch._functorch.eager_transforms")
    places: list[tuple[Any, str]] = [
        (torch.jit.ScriptFunction, "__call__"),
        (importlib.import_module("torch._functorch.apis"), "vmap_impl"),
        (transforms, "grad_and_value_impl"),
        (transforms, "_vjp_with_argnums"),
        (transforms, "_jvp_with_argnums"),
    ]
    known = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, known, strict=True):
        setattr(owner, name, _prepared(function, prepare))

    def undo() -> None:
        for (owner, name), function in zip(places, known, strict=True):
            setattr(owner, name, function)

    return undo


def _prepared(function: Callable[..., Any], prepare: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepare((args, kwargs))
        return function(*args, **kwargs)

    return call


def runs_function() -> bool:
    """Whether the forward of an autograd function runs in this thread (2.11-2.13).

    Torch switches forward-mode differentiation off for it, and otherwise in inference mode alone.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def differentiates_again() -> bool:
    """Whether a backward that runs will be differentiated itself (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def input_shape(node: Any, place: int) -> torch.Size:
    """Shape of the gradients that a node of autograd takes at a place (2.11-2.13)."""
    shape: torch.Size = node._input_metadata[place].shape
    return shape


def break_graph() -> None:
    """End the graph that a compiler traces, before the call that leads here (2.11-2.13)."""
    importlib.import_module("torch._dynamo").graph_break()


def compare_memory_of_recomputed() -> None:
    """Let `torch.utils.checkpoint` compare what tensors have in memory (2.11-2.13).

    It notes shapes within the forward of a layer, where a weight in parts is the part, and compares
    them in the backward, where it would be the whole.
    """
    checks: dict[str, Any] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    known = checks["default"]
    if not hasattr(known, "__wrapped__"):

        @functools.wraps(known)
        def of_memory(x: Tensor) -> Any:
            with DisableTorchFunctionSubclass():
                return known(x)

        # Torch's own is in a file that is never compiled; this one would be, for every shape.
        checks["default"] = torch._disable_dynamo(of_memory)  # type: ignore[attr-defined]


def runs_compiled_backward() -> bool:
    """Whether this thread is within the backward of a compiled graph (2.11-2.13)."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name() == "CompiledFunctionBackward"


def sequence_number(tensor: Tensor) -> int:
    """Number of the node that has made a tensor: nodes of a thread are numbered in their order.

    Private: `Node._sequence_nr`.
    """
    assert tensor.grad_fn is not None
    number: int = tensor.grad_fn._sequence_nr()
    return number


def next_sequence_number() -> int:
    """Number that nodes have from now on at least."""
    with torch.enable_grad():
        return sequence_number(torch.zeros((), requires_grad=True).clone()) + 1
