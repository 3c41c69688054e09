"""Stacks of experts of other libraries, spread over ep, in place.

A mixture of transformers is a router, which returns the experts of each token and their weights,
and a module that holds the matrices of all experts in a few parameters, ``[E, ...]``. The router
stays the model's own, and runs on every token on all ranks of tp. The other one gets the class
`AdoptedExperts`: each rank of ep keeps the matrices of its experts, and tokens travel to them as in
a `MixtureOfExperts`. tp does not cut experts: its ranks divide the tokens, and with ``ep=tp`` the
experts.

What an expert computes is computed by one autograd node (`layers.experts.expert_mlp`) where it is
``down(f(gate(x)) * up(x))`` or ``down(f(up(x)))`` with an activation that we have. Any other
(biases, clamped or interleaved gates) runs in the module's own code, on the rows and experts of
this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from lightning_megatron._torch.kernels import in_shape
from lightning_megatron.adoption.classes import become, own_class
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.delayed_wgrad import breaks_graphs
from lightning_megatron.layers.experts.decisions import kept
from lightning_megatron.layers.experts.dispatch import start_experts
from lightning_megatron.layers.experts.expert_mlp import expert_mlp
from lightning_megatron.layers.experts.mixture import chosen_dispatch, most_tokens
from lightning_megatron.layers.experts.routing import Routes
from lightning_megatron.layers.experts.row_parts import RowParts
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.mlp import activation_function
from lightning_megatron.layers.size_checks import GATED, Activation
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import whole

_PACKED = ("gate_up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")


class AdoptedExperts(Experts):
    """Class in front of a module that holds the matrices of all experts of a mixture.

    Attributes:
        matrices: names of the parameters that `expert_mlp` takes; none where the module's own code
            computes.
        top_k: experts of a token, once it is known.
    """

    matrices: tuple[str, ...]

    @override
    def shard_dims(self) -> dict[str, int]:
        return dict.fromkeys(sorted(self.stacked), 0)

    @override
    def sizes(self) -> dict[str, tuple[int, int]]:
        if not self.matrices:
            return {}
        factor = 2 if self.matrices == _PACKED else 1
        wide, narrow = factor * self.mlp_size, self.hidden_size
        return dict(zip(self.matrices, ((wide, narrow), (narrow, self.mlp_size)), strict=True))

    @override
    def distribute(self, topology: Topology) -> None:
        super().distribute(topology)
        # A compiler does not trace what waits for numbers of tokens.
        self.__dict__["never_in_graphs"] = topology.tp.size > 1 or topology.ep.size > 1

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self.__dict__["never_in_graphs"] = False
        self.gemm = None

    @override
    @breaks_graphs
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Sum the weighted outputs of each token's experts.

        Args:
            hidden_states: tokens ``[..., h]``, equal on all tp ranks, or split over tp.
            top_k_index: experts of each, ``[t, k]``; ``num_experts`` for none.
            top_k_weights: their weights, ``[t, k]``.
        """
        topology = self.topology
        spread = topology is not None and (topology.tp.size > 1 or topology.ep.size > 1)
        if not spread and self.gemm is None and not hidden_states.is_meta:
            y: Tensor = own_class(self).forward(self, hidden_states, top_k_index, top_k_weights)
            return y
        given = hidden_states, top_k_index, top_k_weights
        if torch.compiler.is_compiling():
            caller = self.wgrad_queue or self.without_graphs
            if caller is None:  # the compiler is the user's own
                apart = torch.compiler.disable(self._apply_to)  # type: ignore[no-untyped-call]
                y = apart(*given)
            else:
                y = caller.outside_graphs(self._apply_to, *given)
            return y
        return self._apply_to(*given)

    def _apply_to(self, x: Tensor, chosen_tk: Tensor, weights_tk: Tensor) -> Tensor:
        topology = self.topology
        x, chosen_tk, weights_tk = whole((x, chosen_tk, weights_tk))
        rows, parts = x.reshape(-1, x.shape[-1]), None
        chosen_tk = kept(lambda: chosen_tk)
        if topology is not None and topology.tp.size > 1:
            parts = RowParts(len(rows), topology.tp)
            rows, weights_tk = parts.own(rows), parts.own(weights_tk)
            chosen_tk = chosen_tk[parts.start : parts.stop]
        ep = None if topology is None else topology.ep
        dispatch = "once" if topology is None else topology.dispatch
        if topology is not None and dispatch == "auto":
            dispatch = "once"
            if topology.ep.size > 1:
                dispatch = chosen_dispatch(topology, self.num_experts, chosen_tk.shape[1])
        most = most_tokens(topology, rows, parts)
        routes = Routes(chosen_tk, weights_tk)
        y = start_experts(rows, routes, _Stack(self), ep, dispatch, most).finish()
        # No view: ZeRO 3 hooks on outputs, and the caller may change this one in place.
        return in_shape(y if parts is None else parts.whole(y), x.shape).to(x.dtype)

    def compute(self, x_nh: Tensor, counts: Sequence[int], scale_n: Tensor) -> Tensor:
        """Apply each expert that this rank holds to its rows; see `Experts.forward`."""
        if not self.matrices:
            return self._own_code(x_nh, counts, scale_n)
        return expert_mlp(
            x_nh,
            [self.get_parameter(name) for name in self.matrices],
            counts,
            self.activation,
            scale_n=scale_n,
            gradient_factor=self.gradient_factor,
            wgrad_queue=self.wgrad_queue,
            gemm=None if self.gemm is None else [self.gemm[name] for name in self.matrices],
            packed=self.matrices == _PACKED,
        )

    def _own_code(self, x_nh: Tensor, counts: Sequence[int], scale_n: Tensor) -> Tensor:
        if not len(x_nh):  # all ranks compute gradients, zeros among them
            return x_nh + sum(p.sum() * 0 for p in self.parameters(recurse=False))
        held = torch.arange(len(counts), device=x_nh.device)
        sizes = torch.tensor(list(counts), device=x_nh.device)
        index = held.repeat_interleave(sizes, output_size=len(x_nh))
        factor = self.gradient_factor
        x, scale = _scaled(x_nh, 1 / factor), _scaled(scale_n, 1 / factor)
        with self._as_held():
            y = own_class(self).forward(self, x, index.unsqueeze(-1), scale.unsqueeze(-1))
        return _scaled(y, factor)

    @contextmanager
    def _as_held(self) -> Iterator[None]:
        """Context in which the module believes that the experts of this rank are all."""
        everywhere, self.num_experts = self.num_experts, self.held
        try:
            yield
        finally:
            self.num_experts = everywhere


class _Stack:
    """Experts of this rank, as `start_experts` calls them."""

    def __init__(self, experts: AdoptedExperts) -> None:
        self._experts = experts
        self.num_experts = experts.num_experts
        self.held = experts.held
        self.number = experts.number

    def __call__(self, x_nh: Tensor, counts: Sequence[int], scale_n: Tensor, /) -> Tensor:
        return self._experts.compute(x_nh, counts, scale_n)


class _Scale(Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _scaled(x: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return x
    y: Tensor = _Scale.apply(x, factor)  # type: ignore[no-untyped-call]
    return y


def as_experts(module: nn.Module, name: str) -> None:
    """Spread the experts of a module over ep, in place.

    Args:
        module: holds parameters ``[E, ...]`` alone, and ``num_experts``.
        name: its name in the model.

    Raises:
        ConfigError: it is built in another way.
    """
    raise_if_any(_problems(module, name))
    parameters = dict(module.named_parameters(recurse=False))
    matrices = _matrices(module, parameters)
    experts = become(module, AdoptedExperts)
    experts.stacked = frozenset(parameters)
    experts.matrices = matrices
    experts.init_std = experts.out_init_std = _init_std(module)
    if matrices:
        experts.hidden_size, experts.mlp_size = parameters["down_proj"].shape[1:]
        found = _activation(module, gated=matrices == _PACKED)
        assert found is not None
        experts.activation = found


def _problems(module: nn.Module, name: str) -> list[str]:
    what = f"tp_plan: {name} ({type(module).__name__})"
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or isinstance(module, nn.ModuleList):
        return [
            f"{what}: style 'moe_tp_experts' takes a module with num_experts and a parameter "
            "[num_experts, ...] for the matrices of all of them; nearest valid: no style for it"
        ]
    return [
        f"{what}: its parameter {key} of shape {tuple(p.shape)} is no stack of num_experts="
        f"{count}, and ep cannot spread it; nearest valid: no style for the module"
        for key, p in module.named_parameters()
        if "." in key or not p.dim() or p.shape[0] != count
    ]


def _matrices(module: nn.Module, parameters: dict[str, nn.Parameter]) -> tuple[str, ...]:
    """Names of the parameters of experts that `expert_mlp` computes; none for others."""
    gated = getattr(module, "has_gate", None)
    flags = {"has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
    plain = all(getattr(module, key, None) is value for key, value in flags.items())
    if not isinstance(gated, bool) or not plain or not _is_of_transformers(module):
        return ()
    names = _PACKED if gated else _PLAIN
    if gated and (
        not getattr(module, "is_concatenated", False)
        or getattr(type(module), "_apply_gate", None) is not _default_gate()
    ):
        return ()
    if set(parameters) != set(names) or _activation(module, gated=gated) is None:
        return ()
    return names


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether the forward is that which the flags of transformers describe."""
    function: Any = own_class(module).forward
    return hasattr(function, "__wrapped__") and function.__module__.startswith("transformers.")


def _default_gate() -> Any:
    from transformers.integrations.moe import _default_apply_gate

    return _default_apply_gate


def _activation(module: nn.Module, *, gated: bool) -> Activation | None:
    """Name of the activation that gives the numbers of the module's own; None if none does."""
    own: Callable[[Tensor], Tensor] | None = getattr(module, "act_fn", None)
    if not callable(own):
        return None
    probe = torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        expected = own(probe)
    for name in get_args(Activation):
        same = (name in GATED) == gated
        if same and torch.equal(activation_function(name)(probe), expected):
            found: Activation = name
            return found
    return None


def _init_std(module: nn.Module) -> float | None:
    std = getattr(getattr(module, "config", None), "initializer_range", None)
    return float(std) if isinstance(std, int | float) else None
