"""Functions of torch, and the kind of each: the one table that this library's tensors ask.

A tensor that is split over ranks, is on another stage or is still in a file needs to know of each
function what it does: whether it works element by element, along a dim, reads values or asks for
the format only. `TORCH_FUNCTIONS` says so once. Each class of tensors has a small map from kinds
to what it does about them, and does something safe with all others:

=================================  ============================  ==============================
class                              its map                       of a kind that is not there
=================================  ============================  ==============================
`split_tensor.SplitTensor`         ``split_tensor.RULES``        the whole, gathered over tp
`context_tensor.ContextTensor`     ``context_tensor.RULES``      the whole, gathered over cp
`weights.PartWeight` and its like  ``weights.RULES``             the whole
`stage_weights.StageTensor`        sets of `stage_functions`     run by the stage that has it
`lazy_tensor.LazyTensor`           ``lazy_tensor.ITSELF``        the values, which are fetched
`stored_tensor.StoredTensor`       rules of operators            the values, which are read
`absent.Absent`                    refuses what reads values     run on meta, for the shape
=================================  ============================  ==============================

So a function that is missing here is right all the same, at the cost of the values. A wrong kind is
wrong in every class: ``elementwise`` means that each element of the result comes from one element
of each operand, after broadcasting.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import init

from lightning_megatron._torch.kernels import foreach_functions

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]
"""Function that a class of tensors calls in place of one of torch: it gets that, and arguments."""

Kind = Literal[
    # What the tensor is, whatever its values are.
    "format",
    "strides",
    "shape",
    "learning",
    "version",
    "memory",
    "storage",
    "repr",
    "new",
    # The tensor as an object of autograd.
    "gradient",
    "set_gradient",
    "delete_gradient",
    "data",
    "set_data",
    "hook",
    "retain_grad",
    "requires_grad_",
    "set_learning",
    "detach_",
    "backward",
    "backward_of_all",
    "differentiate",
    # Values for others.
    "reads",
    "array",
    "foreign",
    "deep_copy",
    "pickle",
    # Element by element.
    "elementwise",
    "by_channel",
    "like",
    "same",
    "detached",
    "moved",
    "foreach",
    # Random numbers.
    "draws",
    "drawn_like",
    "dropout",
    # Along dims.
    "along",
    "sum",
    "mean",
    "logsumexp",
    "extremum",
    "pair_or_extremum",
    "softmax",
    "log_softmax",
    "norm",
    "norm_or_matrix_norm",
    "gather",
    # Products, norms of layers, losses.
    "matmul",
    "matrix_product",
    "linear",
    "layer_norm",
    "attention",
    "cross_entropy",
    "nll_loss",
    # Views, and what takes pieces or puts them together.
    "reshape",
    "shaped_as",
    "flatten",
    "unflatten",
    "permute",
    "adjoint",
    "unsqueeze",
    "squeeze",
    "join",
    "expand",
    "repeat_interleave",
    "item",
    "set_item",
    "reshape_in_place",
]


Total = Literal["sum", "mean", "norm", "any", "all", "max", "min"]


@dataclass(frozen=True)
class TorchFunction:
    """Kind of a function of torch, and where its arguments are."""

    kind: Kind
    """Kind."""
    dim_at: int = 1
    """Place of the argument that names dims, of functions along dims."""
    default_dim: int | None = None
    """Dim that is taken where none is named; None for all dims."""
    in_place: bool = False
    """Whether what has this name and an underscore does the same in place."""
    of_each: str = ""
    """Name of what a function of lists does to each tensor."""
    total: Total | None = None
    """Number to which all elements are reduced when no dim is named, parts one by one."""


_BINARY = "add sub mul truediv floordiv mod pow and or xor div"
_NAMES: Mapping[TorchFunction, str] = {
    TorchFunction("format"): """dim ndimension is_floating_point is_complex is_signed element_size
        get_device is_contiguous is_inference is_same_size has_names __hash__ .dtype .device
        .layout .ndim .is_cuda .is_cpu .is_meta .is_sparse .is_quantized .is_mkldnn .is_nested
        .is_xpu .is_mps .is_vulkan .output_nr .itemsize .names""",
    TorchFunction("strides"): "stride",
    TorchFunction("shape"): ".shape size numel nelement __len__ .nbytes",
    TorchFunction("learning"): ".requires_grad .grad_fn .is_leaf",
    TorchFunction("version"): "._version ._backward_hooks",
    TorchFunction("memory"): "as_subclass storage_offset is_pinned is_shared ._base .retains_grad",
    TorchFunction("storage"): "data_ptr storage untyped_storage",
    TorchFunction("repr"): "__repr__ __format__",
    TorchFunction("new"): "new_empty new_zeros new_ones new_full new_tensor new_empty_strided",
    TorchFunction("gradient"): ".grad",
    TorchFunction("set_gradient"): ".grad=",
    TorchFunction("delete_gradient"): "-.grad",
    TorchFunction("data"): ".data",
    TorchFunction("set_data"): ".data=",
    TorchFunction("hook"): "register_hook",
    TorchFunction("retain_grad"): "retain_grad",
    TorchFunction("requires_grad_"): "requires_grad_",
    TorchFunction(
        "set_learning"
    ): ".requires_grad= ._backward_hooks= register_post_accumulate_grad_hook",
    TorchFunction("detach_"): "detach_",
    TorchFunction("backward"): "backward",
    TorchFunction("reads"): """item tolist equal allclose is_nonzero __bool__ __float__ __int__
        __index__ __complex__ __contains__""",
    TorchFunction("array"): "numpy __array__",
    TorchFunction("foreign"): "__dlpack__",
    TorchFunction("deep_copy"): "__deepcopy__",
    TorchFunction("pickle"): "__reduce_ex__ __reduce__",
    TorchFunction(
        "elementwise", in_place=True
    ): """abs absolute add sub subtract mul multiply div divide true_divide floor_divide remainder
        fmod pow float_power neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
        square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit
        relu relu6 gelu silu mish softplus elu selu celu leaky_relu hardtanh hardsigmoid hardswish
        logsigmoid softsign tanhshrink softshrink hardshrink threshold expit clamp clamp_min
        clamp_max clip where masked_fill lerp addcmul addcdiv maximum minimum fmax fmin eq ne lt le
        gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite isclose isreal
        isposinf isneginf logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
        bitwise_not bitwise_xor sign sgn signbit round floor ceil trunc fix frac nan_to_num erf
        erfc erfinv atan2 hypot xlogy xlog1py logaddexp logaddexp2 copysign heaviside ldexp digamma
        lgamma entr ndtr rsub copy fill zero type_as""",
    TorchFunction("elementwise"): " ".join(
        f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")
    )
    + " __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__ __pos__ __abs__ __invert__",
    TorchFunction("by_channel"): "prelu",
    TorchFunction("like"): "zeros_like ones_like full_like empty_like",
    TorchFunction("same"): "clone contiguous",
    TorchFunction("detached"): "detach",
    TorchFunction(
        "moved"
    ): "to float double half bfloat16 int long short bool char byte cpu cuda type",
    TorchFunction("draws"): """normal normal_ uniform_ bernoulli bernoulli_ exponential_ geometric_
        cauchy_ log_normal_ random_ trunc_normal_ kaiming_uniform_ kaiming_normal_
        dropout1d dropout2d dropout3d""",
    TorchFunction("drawn_like"): "rand_like randn_like randint_like",
    TorchFunction("dropout", in_place=True): "dropout alpha_dropout feature_dropout",
    TorchFunction("along", total="any"): "any",
    TorchFunction("along", total="all"): "all",
    TorchFunction("along"): """prod nansum nanmean median nanmedian std var cumsum cumprod
        logcumsumexp cummax cummin""",
    TorchFunction("along", default_dim=-1): "sort argsort",
    TorchFunction("along", dim_at=2, default_dim=-1): "topk kthvalue",
    TorchFunction("along", dim_at=2): "normalize",
    TorchFunction("along", default_dim=0): "select unbind narrow index_select",
    TorchFunction("along", dim_at=2, default_dim=0): "chunk split split_with_sizes tensor_split",
    TorchFunction("sum", total="sum"): "sum",
    TorchFunction("mean", total="mean"): "mean",
    TorchFunction("logsumexp"): "logsumexp",
    TorchFunction("extremum"): "argmax argmin",
    TorchFunction("extremum", total="max"): "amax",
    TorchFunction("extremum", total="min"): "amin",
    TorchFunction("pair_or_extremum", total="max"): "max",
    TorchFunction("pair_or_extremum", total="min"): "min",
    TorchFunction("softmax"): "softmax",
    TorchFunction("log_softmax"): "log_softmax",
    TorchFunction("norm", dim_at=2, total="norm"): "norm linalg_vector_norm",
    TorchFunction("norm_or_matrix_norm", total="norm"): "linalg_norm",
    TorchFunction("gather"): "gather",
    TorchFunction("matmul"): "matmul __matmul__",
    TorchFunction("matrix_product"): "bmm mm __rmatmul__",
    TorchFunction("linear"): "linear",
    TorchFunction("layer_norm"): "layer_norm rms_norm",
    TorchFunction("attention"): "scaled_dot_product_attention",
    TorchFunction("cross_entropy"): "cross_entropy",
    TorchFunction("nll_loss"): "nll_loss",
    TorchFunction("reshape"): "view reshape",
    TorchFunction("shaped_as"): "view_as reshape_as",
    TorchFunction("flatten"): "flatten",
    TorchFunction("unflatten"): "unflatten",
    TorchFunction("permute"): "transpose permute movedim moveaxis swapaxes swapdims t .T .mT",
    TorchFunction("adjoint"): "adjoint .H .mH",
    TorchFunction("unsqueeze"): "unsqueeze",
    TorchFunction("squeeze"): "squeeze",
    TorchFunction("join"): "cat concat concatenate stack",
    TorchFunction("expand"): "expand",
    TorchFunction("repeat_interleave", dim_at=2): "repeat_interleave",
    TorchFunction("item"): "__getitem__",
    TorchFunction("set_item"): "__setitem__",
    TorchFunction("reshape_in_place"): """t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_
        resize_ resize_as_ set_ as_strided_""",
}
"""Names by what they do: ``.shape`` reads an attribute, ``.grad=`` sets it, ``-.grad`` deletes it.

Any other is that of functions of torch and methods of tensors.
"""


def _named(name: str) -> Iterator[Any]:
    """Functions of torch with a name; none where this version has none."""
    attribute = getattr(Tensor, name.strip("-.="), None)
    if "." in name:
        access = "__set__" if name.endswith("=") else "__delete__" if name[0] == "-" else "__get__"
        spaces, name = [attribute], access
    else:
        spaces = [Tensor] if name.startswith("__") else [torch, F, Tensor, torch.special, init]
        if name.startswith("linalg_"):
            spaces, name = [torch.linalg], name.removeprefix("linalg_")
    found = (getattr(space, name, None) for space in spaces)
    yield from (func for func in found if callable(func))


def _functions() -> Iterator[tuple[Callable[..., Any], TorchFunction]]:
    for about, names in _NAMES.items():
        for name in names.split():
            for each in (name, f"{name}_") if about.in_place else (name,):
                yield from ((func, about) for func in _named(each))
    for func, of_each in foreach_functions().items():
        yield func, TorchFunction("foreach", of_each=of_each)
    yield torch.autograd.grad, TorchFunction("differentiate")
    yield torch.autograd.backward, TorchFunction("backward_of_all")


TORCH_FUNCTIONS: Mapping[Callable[..., Any], TorchFunction] = dict(_functions())
"""The table, by the function that ``__torch_function__`` gets."""


OF_MEMORY: frozenset[Kind] = frozenset(
    (
        *("format", "strides", "learning", "version", "memory", "storage", "new"),
        *("retain_grad", "set_gradient", "set_learning"),
    )
)
"""Kinds that depend neither on values nor on the shape."""


def kind_of(func: Callable[..., Any]) -> Kind | None:
    """Kind of a function of torch; None if it is not in the table."""
    found = TORCH_FUNCTIONS.get(func)
    return None if found is None else found.kind


def kind_of_operator(operator: Any) -> Kind | None:
    """Kind of an operator, which ``__torch_dispatch__`` gets: that of the function of its name."""
    name = operator.overloadpacket.__name__
    return kind_of(getattr(torch, name, None) or getattr(Tensor, name, None))  # type: ignore[arg-type]


def name_of(func: Any) -> str:
    """Name of a function, a method, an in-place method or an attribute."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        name = str(getattr(func.__self__, "__name__", name))
    return name.strip("_").removeprefix("linalg_")


CHANGES = {
    "__iadd__": "+=",
    "__isub__": "-=",
    "__imul__": "*=",
    "__itruediv__": "/=",
    "__ifloordiv__": "//=",
    "__imod__": "%=",
    "__ipow__": "**=",
    "__iand__": "&=",
    "__ior__": "|=",
    "__ixor__": "^=",
    "__setitem__": "x[...] = y",
    "__set__": "x.data = y",
}
"""Functions whose names do not end in ``_``, and that change their first argument."""


def changes(func: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name in CHANGES or (name.endswith("_") and not name.endswith("__"))
    return in_place or bool(kwargs and kwargs.get("inplace"))


def communicates(func: Callable[..., Any]) -> bool:
    """Whether a function may write into its argument what other ranks sent."""
    return str(getattr(func, "__module__", "")).startswith("torch.distributed")


def by_place(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Give a function that changes its argument that by place; ``torch.nn.init`` names it."""
    if args or not changes(func):
        return args, kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}


def given_by(args: Args, kwargs: Kwargs, **defaults: Any) -> tuple[Any, ...]:
    """Arguments after the first, by name or place."""
    return tuple(
        kwargs.get(name, args[place] if len(args) > place else default)
        for place, (name, default) in enumerate(defaults.items(), 1)
    )


def dims_of(dim: Any, count: int) -> tuple[int, ...] | None:
    """Dims that an argument names, all if it names none; None if it is no number.

    A truth value in its place is another argument: ``x.var(False)`` is of all elements.
    """
    if dim is None or dim == ():
        return tuple(range(count))
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    if any(isinstance(d, bool) or not isinstance(d, int) for d in dims):
        return None
    return tuple(d % count for d in dims)


def told_by_shape(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, shape: torch.Size
) -> torch.Size | int:
    """Result of a function of the kind ``shape`` of a tensor that has ``shape``."""
    if func == _SHAPE:
        return shape
    if func == Tensor.size:
        (dim,) = given_by(args, kwargs, dim=None)
        return shape if dim is None else shape[dim]
    if func == Tensor.__len__:
        return shape[0]
    of_each: int = args[0].element_size() if func == _BYTES else 1
    return shape.numel() * of_each


_PROPERTIES: Any = Tensor
_SHAPE = _PROPERTIES.shape.__get__
_BYTES = _PROPERTIES.nbytes.__get__
