"""Numbers of parameters in user's code, under a pipeline.

Under a pipeline ``self.parameters()`` are those of the rank's own stages. `StageNumbers` is a mode
of torch that sees the operations which user's code applies to parameters and gradients, and to what
was computed from them element by element:

* ``torch.nn.utils.get_total_norm``, and with it ``clip_grad_norm_``, gives the norm over the ranks
  of the whole model, each element counted once;
* numbers of several parameters that are united, in torch or on a walk over ``self.parameters()``,
  are refused by a `ConfigError`; counts and contents that such a walk takes, each true by itself,
  are warned of.

A number of one parameter is true on the ranks that have it: a weight in parts knows that it is one
(`layers.weights`). Code of this package, of optimizers and of ``torch.nn`` and
``torch.distributed`` is left alone. Within the mode every operation passes Python once more, so it
is entered only where somebody may look (`strategy.observers`), and lifted where the network runs.
What a compiler makes of a block runs without it; what a backward computes again is seen as it was
in the forward.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_megatron._torch import current_function_mode
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.memory import on_memory
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.parallel.gradients import GradientSet, counts

_REMEDY = (
    "nearest valid: gradient_clip_val or self.clip_gradients(optimizer, ...) to clip, "
    "trainer.strategy.gradients.norm() for the norm of all gradients, weight_decay of the "
    "optimizer for a penalty, lightning_megatron.gather(module) for whole weights"
)
_TOTAL_NORM: CodeType = inspect.unwrap(get_total_norm).__code__
_OWN = (
    *("torch.distributed", "torch.optim", "torch.nn.modules", "torch._dynamo", "torch._inductor"),
    "torch.autograd.graph",  # runs a backward
)
"""Libraries that are given parts on purpose."""
_TRACED = "<eval_with_key>"
"""Files of the code that torch writes for graphs, which is in no module."""
_SAME_SHAPE = frozenset(
    (
        *("abs", "add", "addcdiv", "addcmul", "bfloat16", "bool", "clamp", "clamp_max"),
        *("clamp_min", "clone", "contiguous", "copy", "cos", "cpu", "cuda", "data", "deepcopy"),
        *("detach", "div", "divide", "double", "empty_like", "eq", "exp", "fill", "float"),
        *("floor", "full_like", "ge", "grad", "gt", "half", "iadd", "idiv", "imul", "ipow"),
        *("isfinite", "isinf", "isnan", "isub", "itruediv", "le", "lerp", "log", "logical_not"),
        *("lt", "maximum", "minimum", "mul", "multiply", "nan_to_num", "ne", "neg", "negative"),
        *("ones_like", "pow", "radd", "rdiv", "reciprocal", "relu", "requires_grad", "rmul"),
        *("round", "rpow", "rsqrt", "rsub", "rtruediv", "sigmoid", "sign", "sin", "sqrt"),
        *("square", "sub", "subtract", "tanh", "to", "true_divide", "truediv", "type", "where"),
        *("zero", "zeros_like"),
    )
)
"""Operations that treat each element by itself."""
_REDUCTIONS = frozenset(
    ("sum", "mean", "norm", "vector_norm", "max", "min", "amax", "amin", "any", "all")
)
_ADDITIONS = frozenset(("add", "radd", "iadd", "sub", "rsub", "isub", "subtract"))
_COUNTS = frozenset(("numel", "nelement"))
_CONTENTS = frozenset(("tolist", "numpy", "array"))
_VIEWS = frozenset(("view", "reshape", "flatten", "ravel", "unsqueeze", "squeeze"))
_UNITING = frozenset(("cat", "stack", "concat", "concatenate", "hstack"))
_TO_PYTHON = frozenset(
    ("item", "tolist", "numpy", "array", "bool", "float", "int", "index", "complex")
)


class StageNumbers(TorchFunctionMode):
    """Refuses sums over the parameters of a stage, and makes norms those of all stages.

    Args:
        gradients: of the module on its layout.
        module: the user's.
    """

    def __init__(self, gradients: GradientSet, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._gradients = gradients
        self._topology = gradients.topology
        self._lifted = 0
        self._derived: Any = WeakIdKeyDictionary()
        """Parts that were computed from parameters and gradients."""
        self._numbers: Any = WeakIdKeyDictionary()
        """Under a pipeline, of which parameters numbers were computed."""
        self._walks: set[CodeType] = set()
        """Code of the user's that went through all parameters of a stage."""
        self._reads: dict[CodeType, str] = {}
        """Code of the user's that took numbers of parameters to Python."""
        self._adds: dict[CodeType, str] = {}
        """Code of the user's that added numbers of parameters to something else."""
        self._warned: set[str] = set()
        self._listen(self._walked)

    def follow(self, gradients: GradientSet) -> None:
        """Know the parameters of another partition."""
        self._gradients = gradients
        self.__dict__.pop("_by_parameter", None)
        self._listen(self._walked)

    def _listen(self, tell: Callable[[], None] | None) -> None:
        for item in self._module.modules():
            if isinstance(item, RemoteItem):
                item.on_visit(tell)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let everything be within the block."""
        on_top = current_function_mode() is self and not self._lifted
        self._lifted += 1
        if on_top:  # compiled code would trace the mode otherwise
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._lifted -= 1
            if on_top:
                super().__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave the mode, whatever has been entered since."""
        self._lifted += 1
        self._listen(None)
        if current_function_mode() is self:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._lifted:
            return func(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        parts = [name for t in tensors if (name := self._name_of(t)) is not None]
        numbers = (
            {n for t in tensors for n in self._numbers.get(t, ())} if self._numbers.data else set()
        )
        ends_norm = not parts and func in (torch.linalg.vector_norm, torch.tensor)
        if not (parts or numbers or ends_norm):
            return func(*args, **kwargs)
        frame, known = _caller()
        if frame is not None and frame.f_code is _TOTAL_NORM:
            return self._within_total_norm(func, args, kwargs, frame, begins=bool(parts))
        name = _name(func)
        if known or not (parts or numbers):
            result = func(*args, **kwargs)
            if parts and known == "torch" and name in _SAME_SHAPE:
                self._derive(result, parts[0])
            return result
        if not self._is_inside(frame):
            self._refuse_sums(name, set(parts), numbers)
            if frame is not None and numbers and name in _ADDITIONS:
                self._added(frame, name, args)
            if frame is not None and (name in _TO_PYTHON or name in _COUNTS):
                self._read(frame, name)
        if not parts:
            result = func(*args, **kwargs)
            self._number(result, numbers)
            return result
        return self._apply(func, name, args, kwargs, parts)

    # What is known -----------------------------------------------------------------------------

    @cached_property
    def _by_parameter(self) -> dict[int, str]:
        return {id(r.parameter): r.name for r in self._gradients.roles if not r.outside}

    def _name_of(self, tensor: Tensor) -> str | None:
        found: str | None = self._by_parameter.get(id(tensor))
        if found is None and self._derived.data:  # a weak reference to ask with is not for nothing
            found = self._derived.get(tensor)
        return found

    def _derive(self, result: Any, name: str) -> None:
        if isinstance(result, Tensor):
            self._derived[result] = name

    def _number(self, result: Any, names: set[str]) -> None:
        if isinstance(result, Tensor):
            self._numbers[result] = frozenset(names)

    # Operations --------------------------------------------------------------------------------

    def _apply(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
    ) -> Any:
        result = func(*args, **kwargs)
        if name in _SAME_SHAPE or name in _VIEWS or name.startswith("foreach"):
            self._derive(result, names[0])
        if name in _REDUCTIONS or name in _VIEWS:
            self._number(result, {names[0]})
        elif name == "foreach_norm":
            for of, each in zip(names, result, strict=False):
                self._number(each, {of})
        return result

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether a submodule computes with weights of its own, all of which are here."""
        owner = None if frame is None else frame.f_locals.get("self")
        return isinstance(owner, nn.Module) and owner is not self._module

    def _refuse_sums(self, name: str, parts: set[str], numbers: set[str]) -> None:
        """Refuse what unites several parameters, where each rank has those of its stages."""
        united = len(numbers) > 1 or (name in _UNITING and len(parts) > 1)
        if united:
            raise ConfigError(
                f"{name} unites values of several parameters ({', '.join(sorted(numbers or parts))}"
                f"), and with pp={self._topology.pp.size} each rank has those of its own stages; "
                f"{_REMEDY}"
            )

    def _read(self, frame: FrameType, name: str) -> None:
        """A number of a parameter goes to Python, where nobody sees what becomes of it."""
        above = frame if frame.f_back is None else frame.f_back
        if self._walks & {frame.f_code, above.f_code}:
            self._refuse_walk(frame, name)
        self._reads |= {frame.f_code: name, above.f_code: name}

    def _added(self, frame: FrameType, name: str, operands: Sequence[Any]) -> None:
        """A number of a parameter is added to a loss, or to the 0 with which ``sum`` begins.

        Where a rank has one parameter only, this is all there is to see of a sum over several.
        """
        others = [x for x in operands if not (isinstance(x, Tensor) and x in self._numbers)]
        if not any(isinstance(x, Tensor) or (type(x) is int and x == 0) for x in others):
            return
        codes = {frame.f_code, *_codes_in(frame.f_code)}
        if self._walks & codes:
            self._refuse_walk(frame, name)
        self._adds |= dict.fromkeys(codes, name)

    def _walked(self) -> None:
        """Somebody goes through parameters, and comes by those of another stage."""
        frame = _walker()
        if self._lifted or frame is None:
            return
        self._walks.add(frame.f_code)
        for numbers in (self._reads, self._adds):
            if frame.f_code in numbers:
                self._refuse_walk(frame, numbers[frame.f_code])

    def _refuse_walk(self, frame: FrameType, name: str) -> None:
        text = (
            f"{frame.f_code.co_name} goes through all parameters and takes numbers of them "
            f"({name}), and with pp={self._topology.pp.size} each rank has those of its own "
            f"stages; {_REMEDY}"
        )
        if name not in _COUNTS | _CONTENTS:
            raise ConfigError(text)
        if name not in self._warned:  # each of these values is true
            self._warned.add(name)
            warnings.warn(text, stacklevel=2)

    # torch.nn.utils.get_total_norm ---------------------------------------------------------------

    def _within_total_norm(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType,
        *,
        begins: bool,
    ) -> Any:
        """Put the norm over all ranks in the place of the last number that torch computes."""
        name = _name(func)
        if not begins and (name == "vector_norm" or func is torch.tensor):
            with self.lifted():
                known = frame.f_locals
                order = float(known["norm_type"])
                return self._total_norm(list(known["tensors"]), order)
        if name in ("foreach_norm", "vector_norm"):  # of no use: parts count once only
            first = args[0]
            with self.lifted():
                zeros = torch.zeros((), device=self._topology.device)
            return [zeros] * len(first) if name == "foreach_norm" else zeros
        with self.lifted():
            return func(*args, **kwargs)

    @on_memory
    def _total_norm(self, tensors: Sequence[Tensor], order: float) -> Tensor:
        if order <= 0:
            raise ConfigError(
                f"norm_type={order}: norms over several ranks are of a positive order, or inf; "
                "nearest valid: norm_type=2.0"
            )
        topology = self._topology
        held = {id(r.parameter): r for r in self._gradients.roles}
        held |= {id(r.parameter.grad): r for r in self._gradients.roles}
        total = torch.zeros((), dtype=torch.float64, device=topology.device)
        for tensor in tensors:
            role = held.get(id(tensor))
            if topology.rank == 0 if role is None else counts(role, topology, whole_rows=True):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                wide = torch.promote_types(local.dtype, torch.float32)
                norm = _local_norm(local, order, wide).to(total)
                total = torch.maximum(total, norm) if math.isinf(order) else total + norm**order
        if topology.world_size > 1:
            op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            dist.all_reduce(total, op=op)
        total = total if math.isinf(order) else total ** (1 / order)
        held_in = (*tensors, *self._gradients.parameters, total)
        return total.to(held_in[0].dtype)


def is_seen() -> bool:
    """Whether what runs here goes through a `StageNumbers`."""
    return isinstance(current_function_mode(), StageNumbers)


def unseen() -> AbstractContextManager[None]:
    """Within the block nothing does."""
    mode = current_function_mode()
    return mode.lifted() if isinstance(mode, StageNumbers) else nullcontext()


def _local_norm(local: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if not local.numel():
        return local.new_zeros((), dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(local.detach(), order, dtype=dtype)
    return norm


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):  # a union is made anew every time
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def _name(func: Any) -> str:
    """Name of an operation: a function, a method, an in-place method or a property."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        of = str(getattr(func.__self__, "__name__", ""))
        name = of if name == "__get__" else f"set_{of}"
    return name.strip("_").removeprefix("linalg_")


def _caller() -> tuple[FrameType | None, str]:
    """Caller of an operation, and the library it belongs to; none for user code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _TOTAL_NORM:
            return frame, ""
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_OWN) or frame.f_code.co_filename.startswith(_TRACED):
            return frame, "torch"
        if not module.startswith("torch."):
            own = module.startswith("lightning_megatron.")
            return frame, "own" if own or _is_layer(frame) else ""
        frame = frame.f_back
    return None, "torch"  # a thread of autograd's


def _walker() -> FrameType | None:
    """Code of the user that goes through parameters; None if a library does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != RemoteItem.__module__ and not module.startswith("torch.nn.modules"):
            return None if module.startswith(("torch.", "lightning")) else frame
        frame = frame.f_back
    return None


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code of the functions and generators that are written in a function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _is_layer(frame: FrameType) -> bool:
    """Whether a layer of the user's own computes with its part."""
    return isinstance(frame.f_locals.get("self"), ParallelLayer)
