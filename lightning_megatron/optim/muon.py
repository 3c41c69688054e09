"""Muon: each update is the momentum of a matrix, orthogonalised.

(Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM
Training", arXiv 2502.16982.) A few Newton-Schulz iterations turn the momentum ``M = U S V'`` into
approximately ``U V'``, so all directions of a matrix learn at one rate. There is one state tensor
where AdamW has two. For an ``m x n`` matrix, ``m <= n``, each of five iterations costs ``4 m^2 n +
2 m^3`` operations.

The scale of an update depends on the matrix's shape. ``scale="rms"`` (Moonshot) gives it the root
mean square that AdamW's usually has, 0.2, so that AdamW's learning rate and weight decay can be
used unchanged; ``scale="spectral"`` (Jordan) leaves its singular values at 1, above 1 for tall
matrices.

Muon is meant for the matrices inside a network. AdamW updates vectors, embeddings and heads, in the
same optimizer: their groups have ``"muon": False`` (`muon_groups` makes the groups). With
``state_dtype`` the moving averages of both are quantized between steps (`optim.quantized_state`).
For matrices, ``torch.optim.Muon`` has the same options and computes the same numbers. A parameter
of three dimensions, such as the experts of a mixture, is a stack of matrices along the first, each
of which is orthogonalised by itself.

Under tp and ZeRO, momentum is sharded and averaged like the parameter. Then every matrix is
gathered on one of the ranks that share it, is orthogonalised there, and its shards are scattered
back (`optim.owner_all_to_all`, with the bytes): in the number format of the iteration, 2 bytes an
element each way. The numbers are those of one process. Matrices of a stack that is divided along
its first dimension are whole where they are, and stay there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_megatron.errors import at_least, below_one, raise_if_any, whole_numbers
from lightning_megatron.optim.adamw import MOMENTS, adamw_step
from lightning_megatron.optim.owner_all_to_all import OwnerAllToAll
from lightning_megatron.optim.quantized_state import (
    QuantizedStateOptimizer,
    StateFormat,
    state_dtype_problems,
)
from lightning_megatron.optim.shard_spec import ShardAxis, ShardSpec, unsharded

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration; singular values end between 0.7 and 1.2."""
Scale = Literal["rms", "spectral"]
_Alike: TypeAlias = tuple[int, torch.dtype, tuple[str, ...]]
"""Index of a group, number format, and names of the axes that share a matrix."""


def orthogonalize(
    matrix: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> Tensor:
    """Bring the singular values of a matrix near 1, in its own number format.

    Args:
        matrix: ``[m, n]``.
        steps: number of iterations.
        coefficients: ``a, b, c`` in ``a X + (b X X' + c (X X')^2) X``.
        eps: least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def orthogonalize_flops(shape: Sequence[int], steps: int = 5) -> int:
    """Number of floating-point operations of `orthogonalize`.

    >>> orthogonalize_flops((4, 2), 1) == orthogonalize_flops((2, 4), 1) == 4 * 16 + 2 * 8
    True
    """
    m, n = sorted(shape)
    return steps * (4 * m * m * n + 2 * m**3)


class Muon(QuantizedStateOptimizer):
    """Optimizer with orthogonalised momentum for matrices, and AdamW for the rest.

    Args:
        params: parameters or groups of them. AdamW updates groups with ``"muon": False``. In groups
            without the key, Muon updates parameters of two dimensions and AdamW all others; with
            ``"muon": True`` parameters of three dimensions are stacks of matrices where
            ``"stacks": True``.
        lr: learning rate of both.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves in a step.
        momentum: weight of the old momentum.
        nesterov: whether to look one step of momentum ahead.
        scale: scale of the update, ``"rms"`` or ``"spectral"``, see the module.
        ns_steps: number of Newton-Schulz iterations.
        ns_dtype: number format of the iteration and of its messages; by default float64 for
            parameters in float64 and bfloat16 for all others.
        betas: AdamW's decay rates of the moments.
        eps: AdamW's number added to the root of the second moment.
        state_dtype: number format of momentum and moments between steps; None: that of the
            parameters.

    Raises:
        ConfigError: an option is out of range, or a group for Muon holds a parameter that is
            neither a matrix nor a stack of them.
    """

    averages = {"momentum_buffer": True, **MOMENTS}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        scale: Scale = "rms",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        state_dtype: StateFormat | None = None,
    ) -> None:
        problems = at_least(0.0, lr=lr, weight_decay=weight_decay, eps=eps)
        problems += state_dtype_problems(state_dtype)
        problems += whole_numbers(1, ns_steps=ns_steps) + below_one(
            **{"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}
        )
        if scale not in get_args(Scale):
            problems.append(f"scale={scale!r}: must be 'rms' or 'spectral'; nearest valid: 'rms'")
        if ns_dtype is not None and not (
            isinstance(ns_dtype, torch.dtype) and ns_dtype.is_floating_point
        ):
            problems.append(
                f"ns_dtype={ns_dtype!r}: must be a floating-point dtype; nearest valid: "
                "ns_dtype=torch.bfloat16, or None"
            )
        raise_if_any(problems)
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "scale": scale,
                "ns_steps": ns_steps,
                "betas": betas,
                "eps": eps,
                "muon": None,
            },
        )
        self.set_state_dtype(state_dtype, "state_dtype=None")
        self._ns_dtype = ns_dtype
        self._specs: Mapping[Tensor, ShardSpec] = {}
        self._exchanges: dict[_Alike, tuple[list[Tensor], OwnerAllToAll]] = {}
        raise_if_any(
            [
                f"Muon group {index}: muon=True, but a parameter has shape {tuple(p.shape)}; "
                "nearest valid: muon=False for all parameters that are no matrices, as "
                "muon_groups(...) does"
                for index, group in enumerate(self.param_groups)
                for p in group["params"]
                if group["muon"] and p.ndim != 2 and not (group.get("stacks") and p.ndim == 3)
            ]
        )

    def set_shard_specs(self, specs: Mapping[Tensor, ShardSpec]) -> None:
        """Store how the parameters are sharded (`optim.shard_spec.ShardAware`)."""
        super().set_shard_specs(specs)
        self._specs = specs
        self._exchanges = {}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients; collective over ranks that share them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            matrices: dict[_Alike, list[Tensor]] = {}
            others = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["muon"] or (group["muon"] is None and p.ndim == 2):
                    shared = _shared_axes(p, self._shard_spec(p))
                    axes = tuple(axis.name for axis in shared)
                    matrices.setdefault((index, p.dtype, axes), []).append(p)
                else:
                    others.append(p)
            for alike, members in matrices.items():
                self._step_matrices(alike, members, group)
            self._step_others(others, group)
        return loss

    def _step_matrices(
        self, alike: _Alike, members: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        """Update matrices of a group that the same ranks share, with one exchange."""
        lr = float(group["lr"])
        wide = torch.float64 if alike[1] == torch.float64 else torch.bfloat16
        ns_dtype = self._ns_dtype or wide
        updates = [u.to(ns_dtype) for p in members for u in _unstacked(self._averaged(p, group))]
        exchange = self._exchange(alike, members, group["ns_steps"])
        whole = exchange.gather_on_owners(updates)
        results = {i: orthogonalize(m, group["ns_steps"]) for i, m in whole.items()}
        scattered = iter(exchange.scatter_from_owners(results))
        for p in members:
            p.mul_(1 - lr * group["weight_decay"])
            factor = -lr * update_scale(self._shard_spec(p).full_shape[-2:], group["scale"])
            for matrix in _unstacked(p):
                matrix.add_(next(scattered).to(p.dtype), alpha=factor)

    def _averaged(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum with the gradient, and return the matrix to orthogonalise."""
        gradient, momentum = p.grad, group["momentum"]
        assert gradient is not None
        averages: dict[str, Tensor] = {}
        if self._format is not None:
            gradient, (_, averages) = gradient.float(), self.begin_update(p, ("momentum_buffer",))
        elif "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = (averages or self.state[p])["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        if averages:
            self.end_update(p, averages)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _exchange(self, alike: _Alike, members: list[Tensor], steps: int) -> OwnerAllToAll:
        """Return the exchange of the last step if it had the same matrices, else a new one."""
        known = self._exchanges.get(alike)
        if known is None or [id(p) for p in known[0]] != [id(p) for p in members]:
            specs = [spec for p in members for spec in _matrix_specs(p, self._shard_spec(p))]
            costs = [float(orthogonalize_flops(spec.full_shape, steps)) for spec in specs]
            known = self._exchanges[alike] = (members, OwnerAllToAll(specs, costs))
        return known[1]

    def _shard_spec(self, p: Tensor) -> ShardSpec:
        return self._specs.get(p) or unsharded(p)

    def _step_others(self, params: list[Tensor], group: Mapping[str, Any]) -> None:
        if self._format is not None:
            for p in params:
                assert p.grad is not None
                time, moments = self.begin_update(p, MOMENTS)
                adamw_step(p, p.grad.float(), moments, time, group)
                self.end_update(p, moments)
            return
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        if not params:
            return
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def update_scale(shape: Sequence[int], scale: Scale) -> float:
    """Factor of the orthogonalised update of a matrix.

    >>> update_scale((4, 100), "rms"), update_scale((4, 1), "spectral")
    (2.0, 2.0)
    """
    if scale == "rms":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def _unstacked(tensor: Tensor) -> Sequence[Tensor]:
    """Matrices of a stack, or the only one, as views."""
    return tensor.unbind() if tensor.ndim == 3 else (tensor,)


def _shared_axes(p: Tensor, spec: ShardSpec) -> tuple[ShardAxis, ...]:
    """Axes that share a matrix: of a stack not those whose ranks hold other matrices of it."""
    if p.ndim == 2:
        return spec.axes
    return tuple(
        axis if axis.dim is None else replace(axis, dim=axis.dim - 1)
        for axis in spec.axes
        if axis.dim != 0
    )


def _matrix_specs(p: Tensor, spec: ShardSpec) -> list[ShardSpec]:
    """Spec of each matrix of which this rank holds a part, in the order of `_unstacked`."""
    if p.ndim == 2:
        return [spec]
    axes = _shared_axes(p, spec)
    return [ShardSpec(name=spec.name, full_shape=spec.full_shape[1:], axes=axes)] * p.shape[0]
