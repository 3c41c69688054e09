"""Weight gradients that are computed later than the gradients of the activations.

A zero-bubble pipeline schedule (arXiv 2401.10241) runs the backward of a stage in two parts: the
*input* part, for which the previous stage waits, and the *weight* part, for which nobody waits.
Linear layers can separate the two, as each gradient is one matrix product. So during an input part,
linear layers *defer* weight gradients: they put the two factors of the product into a `WgradQueue`,
and the weight part multiplies them. Everything else of a backward runs once, in the input part,
including the weight gradients of other layers (norms, embeddings, convolutions). All saved
activations but the factors are freed there. Recomputation, shared weights and a module called twice
need no care, as each product is a task of its own.

The backward of a compiled graph cannot be divided. So where a network is compiled, layers that may
defer (under schedules that split backwards, and only there) break the graph: the code between them
is compiled, and their products run uncompiled, by the libraries that a compiler would call anyway.

Layers of this package and plain ``nn.Linear`` can defer. A weight that is no parameter (made by a
parametrization, for example) is never deferred, because the graph behind it is gone by the time of
the weight part.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_megatron._torch.graphs import compile_with_callers_only, differentiates_again
from lightning_megatron._torch.kernels import in_shape
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.whole.memory import on_memory, saved_tensors


class WgradTask(NamedTuple):
    """Weight gradients that are still to be computed."""

    targets: list[Tensor]
    """Weights, and views of weights."""
    compute: Callable[[], list[Tensor]]
    """Function that returns their gradients."""


class WgradFactors(NamedTuple):
    """Factors of the gradients of a weight and its bias."""

    grad_no: Tensor | None
    """Gradient of the output, ``[n, out]``; None if not needed (`unquantized_gradient`)."""
    x_ni: Tensor
    """Input, ``[n, in]``."""
    gradient: Any = None
    """Result of ``gemm.prepare_gradient(grad_no)``."""
    gemm: GemmBackend | None = None
    """Backend that multiplies; None: torch."""


_breaking: list[Callable[..., Any]] = []
_Called = TypeVar("_Called", bound=Callable[..., Any])


def breaks_graphs(function: _Called) -> _Called:
    """Mark a function that calls itself by `WgradQueue.outside_graphs`, or one that does."""
    _breaking.append(function)
    return function


class WgradQueue:
    """Weight gradients that the layers of one rank have deferred.

    Attributes:
        collecting: whether layers defer in the current backward.
        enabled: whether the backward of the current forward (or recomputation) may defer. If not,
            plain linear layers call torch's own function, which costs less.
    """

    def __init__(self) -> None:
        self.collecting = False
        self.enabled = True
        self._tasks: list[WgradTask] = []
        self._outside: Callable[..., Any] | None = None

    def outside_graphs(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` between the graphs of a compiler that is about to trace it."""
        assert self._outside is not None
        return self._outside(function, *args)

    def load(self) -> None:
        """Prepare for compilation; not at import, as it imports the compiler."""
        self._outside = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
        for function in _breaking:
            compile_with_callers_only(function)

    def add(self, targets: list[Tensor], compute: Callable[[], list[Tensor]]) -> None:
        """Defer the gradients of ``targets``; called in a layer's backward."""
        self._tasks.append(WgradTask(targets, compute))

    def take(self) -> list[WgradTask]:
        """Return and remove the deferred tasks."""
        tasks, self._tasks = self._tasks, []
        return tasks


@on_memory
def add_gradients(tasks: list[WgradTask]) -> None:
    """Compute deferred gradients, add them to ``.grad``, and empty the list on the way."""
    total: dict[int, tuple[Tensor, Tensor]] = {}
    tasks.reverse()
    while tasks:
        targets, compute = tasks.pop()
        with torch.no_grad():  # as in a backward; what is gathered again is waited for in place
            gradients = compute()
        for target, gradient in zip(targets, gradients, strict=True):
            known = total.get(id(target))
            total[id(target)] = target, gradient if known is None else known[1].add_(gradient)
    if total:
        torch.autograd.backward(
            [target for target, _ in total.values()], [g for _, g in total.values()]
        )


def can_defer(weights: Sequence[Tensor | None]) -> bool:
    """Whether ``weights`` can get gradients after the graph has been freed."""
    return torch.is_grad_enabled() and all(
        w is None or w.is_leaf or (w._is_view() and w._base is not None and w._base.is_leaf)
        for w in weights
    )


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def attach(module: nn.Module, wgrad_queue: WgradQueue) -> None:
    """Let the linear layers inside ``module`` put tasks into ``wgrad_queue`` while it collects."""
    wgrad_queue.load()
    for child in module.modules():
        if isinstance(child, ParallelLayer):
            child.wgrad_queue = wgrad_queue
        elif type(child) is nn.Linear:
            _replace_forward(child, wgrad_queue, getattr(child, GEMM_BACKEND, None))


def end_graphs(module: nn.Module) -> None:
    """Let layers that no compiler may trace run between compiled graphs.

    These are layers split over tp with a `GemmBackend`: the backends share scales over tp and keep
    histories of them, which no graph can. Mixtures of experts are others: numbers of rows follow
    from the data.
    """
    never = WgradQueue()
    never.enabled = False
    never.load()
    for child in module.modules():
        if isinstance(child, ParallelLayer) and (child.tp_size > 1 or child.never_in_graphs):
            child.without_graphs = never


def without_graphs(layers: Sequence[ParallelLayer]) -> WgradQueue | None:
    """Queue that calls layers with one input between graphs; None if they may be traced."""
    first = layers[0]
    if first.wgrad_queue is not None:
        found: WgradQueue | None = first.wgrad_queue
        return found
    own = any(getattr(layer, GEMM_BACKEND, None) is not None for layer in layers)
    return first.without_graphs if own else None


def set_gemm_backend(layer: nn.Module, gemm: GemmBackend | None) -> None:
    """Set the backend of a linear layer, one of this package or a plain ``nn.Linear``."""
    setattr(layer, GEMM_BACKEND, gemm)
    if type(layer) is nn.Linear:
        taken = getattr(layer.__dict__.get("forward"), "__self__", None)
        wgrad_queue = taken.wgrad_queue if isinstance(taken, _ReplacedForward) else None
        _replace_forward(layer, wgrad_queue, gemm)


def _replace_forward(
    layer: nn.Linear, wgrad_queue: WgradQueue | None, gemm: GemmBackend | None
) -> None:
    # On the instance, so that its class, and what looks at it, stay as they are. A method, as a
    # compiler makes one graph for all layers whose forwards are methods with the same code.
    object.__setattr__(layer, "forward", _ReplacedForward(layer, wgrad_queue, gemm).run)


GEMM_BACKEND = "gemm"
"""Attribute of a linear layer with its `GemmBackend` (`layers.gemm`)."""


@breaks_graphs
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wgrad_queue: WgradQueue | None,
    gemm: GemmBackend | None = None,
) -> Tensor:
    """``F.linear`` with weight gradients that can be deferred, and with any `GemmBackend`.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
        wgrad_queue: queue of deferred weight gradients; None: never defer.
        gemm: backend that multiplies; None: torch.
    """
    if wgrad_queue is not None and torch.compiler.is_compiling():
        y: Tensor = wgrad_queue.outside_graphs(linear, x, weight, bias, wgrad_queue, gemm)
        return y
    if wgrad_queue is not None and not (wgrad_queue.enabled and can_defer((weight, bias))):
        wgrad_queue = None
    if wgrad_queue is None and gemm is None:
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, wgrad_queue, gemm)  # type: ignore[no-untyped-call]
    return result


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a product with ``x``: autocast's where it is on (as for ``F.linear``)."""
    kind = x.device.type
    # Autocast has not heard of the meta device.
    if not x.is_meta and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def rows(x: Tensor) -> Tensor:
    """``[..., features]`` as ``[n, features]``."""
    return x.reshape(-1, x.shape[-1])


def weight_gradient(factors: WgradFactors, weight: Tensor) -> Tensor:
    """Gradient ``[out, in]`` of a weight, in its own dtype."""
    grad_no, x_ni, gradient, gemm = factors
    if gemm is not None:
        return gemm.weight_gradient(gradient, x_ni).to(weight.dtype)
    assert grad_no is not None
    return grad_no.t().mm(x_ni).to(weight.dtype)


def bias_gradient(grad_no: Tensor, bias: Tensor) -> Tensor:
    """Gradient ``[out]`` of a bias, in its own dtype."""
    return grad_no.sum(0).to(bias.dtype)


def output(
    x: Tensor, weight: Tensor, gemm: GemmBackend | None, bias: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Output ``[..., out]`` with bias, no view, and what `prepare_gradient` needs of it."""
    weight = weight.to(x.dtype)
    if gemm is None:
        bias = None if bias is None else bias.to(x.dtype)
        y, kept = F.linear(rows(x), weight, bias), None
    else:
        y, kept = gemm.output(rows(x), weight)
        if bias is not None:
            y = add_bias(y, bias)
    return (y if x.dim() == 2 else in_shape(y, (*x.shape[:-1], y.shape[-1]))), kept


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """``y + bias``; ``y`` may be written into.

    In a compiled graph it is not: this would save nothing there, and in torch 2.11 a function that
    writes into its result has wrong gradients.
    """
    return y + bias if torch.compiler.is_compiling() else y.add_(bias)


def prepare_gradient(grad_no: Tensor, kept: Any, gemm: GemmBackend | None) -> Any:
    """Gradient of an output in the form that `input_gradient` and `weight_gradient` take."""
    return grad_no if gemm is None else gemm.prepare_gradient(grad_no, kept)


def unquantized_gradient(
    grad_no: Tensor, bias: Tensor | None, gemm: GemmBackend | None
) -> Tensor | None:
    """Gradient of an output in its own format; None if only a `GemmBackend` needs it.

    A deferred task then holds the gradient in the backend's format only.
    """
    return grad_no if gemm is None or bias is not None else None


def input_gradient(
    gradient: Any, weight: Tensor, dtype: torch.dtype, gemm: GemmBackend | None
) -> Tensor:
    """Gradient ``[n, in]`` of an input of format ``dtype``, from `prepare_gradient`'s result."""
    if gemm is not None:
        return gemm.input_gradient(gradient, weight.to(dtype))
    grad_no: Tensor = gradient
    return grad_no.mm(weight.to(grad_no.dtype))


class _ReplacedForward(NamedTuple):
    """Forward of a plain ``nn.Linear`` that computes as `ColumnParallelLinear` does."""

    layer: nn.Linear
    wgrad_queue: WgradQueue | None
    gemm: GemmBackend | None

    @breaks_graphs
    def run(self, x: Tensor) -> Tensor:
        """Compute the layer's output."""
        return linear(x, self.layer.weight, self.layer.bias, self.wgrad_queue, self.gemm)


class _Linear(Function):
    """``x, weight, bias -> y``."""

    @staticmethod
    @on_memory
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wgrad_queue: WgradQueue | None,
        gemm: GemmBackend | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.wgrad_queue = wgrad_queue
        ctx.parameters = weight, bias
        ctx.gemm = gemm
        ctx.save_for_backward(x, weight)
        y, ctx.kept = output(x, weight, gemm, bias)
        return y

    @staticmethod
    @on_memory
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_tensors(ctx)
        if differentiates_again():
            given, backends = (x, *ctx.parameters), (ctx.gemm,)
            return *twice(F.linear, given, (grad,), ctx.needs_input_grad, backends), None, None
        needs, gemm = ctx.needs_input_grad, ctx.gemm
        grad_no, x_ni = rows(grad), rows(x)
        gradient = prepare_gradient(grad_no, ctx.kept, gemm)
        grad_x = input_gradient(gradient, weight, x.dtype, gemm).view(x.shape) if needs[0] else None
        wide_no = unquantized_gradient(grad_no, ctx.parameters[1], gemm)
        gradients = linear_gradients(
            ctx.parameters,
            needs[1:3],
            lambda: [WgradFactors(wide_no, x_ni, gradient, gemm)],
            ctx.wgrad_queue,
        )
        return grad_x, *gradients, None, None


def twice(
    function: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    needs: Sequence[bool],
    gemm: Sequence[GemmBackend | None],
    *,
    sequence: bool = False,
) -> list[Tensor | None]:
    """Gradients of a linear layer that can be differentiated, by those of torch's functions.

    Args:
        function: function that computes what the layer did.
        inputs: its input, and its parameters.
        gradients: gradients of its outputs.
        needs: whether each input needs a gradient.
        gemm: backends of the layer's products.
        sequence: whether activations are split along the sequence.

    Raises:
        ConfigError: the products are those of a backend, or the input was cast or gathered.
    """
    is_cast = needs[0] and not (inputs[0] is not None and inputs[0].requires_grad)
    if any(gemm) or is_cast or sequence:
        raise ConfigError(
            "create_graph=True: the gradient of a gradient through a linear layer that computes in "
            "FP8, in the format of autocast or under sequence_parallel=True, whose backward "
            "differentiates once; nearest valid: precision='32-true' or 'bf16-true', and "
            "sequence_parallel=False"
        )
    wanted = {n: x for n, x in enumerate(inputs) if x is not None and needs[n]}
    with torch.enable_grad():
        outputs, given = function(*inputs), list(wanted.values())
        found = torch.autograd.grad(outputs, given, gradients, create_graph=True)
    of_each = dict(zip(wanted, found, strict=True))
    return [of_each.get(n) for n in range(len(inputs))]


def linear_gradients(
    parameters: Sequence[Tensor | None],
    needs: Sequence[bool],
    factors: Callable[[], list[WgradFactors]],
    wgrad_queue: WgradQueue | None,
) -> list[Tensor | None]:
    """Compute or defer the gradients of weights and biases.

    Args:
        parameters: ``weight, bias, weight, bias, ...`` (a bias may be None), as they were passed to
            the function: a saved tensor, once unpacked, may no longer lead to the parameter.
        needs: whether each parameter needs a gradient.
        factors: function that returns the factors of each pair.
        wgrad_queue: queue that takes the gradients while it collects.

    Returns:
        The gradient of every parameter; None if it needs none or if it is deferred.
    """
    wanted = [
        i
        for i, (p, need) in enumerate(zip(parameters, needs, strict=True))
        if need and p is not None
    ]

    def compute() -> list[Tensor]:
        pairs = factors()
        found = []
        for i in wanted:
            pair, parameter = pairs[i // 2], parameters[i]
            assert parameter is not None
            if i % 2 and pair.grad_no is not None:
                found.append(bias_gradient(pair.grad_no, parameter))
            else:
                found.append(weight_gradient(pair, parameter))
        return found

    gradients: list[Tensor | None] = [None] * len(parameters)
    if not wanted:
        return gradients
    if wgrad_queue is not None and wgrad_queue.collecting:
        wgrad_queue.add([p for i in wanted if (p := parameters[i]) is not None], compute)
        return gradients
    for i, gradient in zip(wanted, compute(), strict=True):
        gradients[i] = gradient
    return gradients
