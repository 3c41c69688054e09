"""Loss that balances the experts of an adopted mixture, over all samples of a step.

With ``output_router_logits=True`` a mixture of transformers adds ``E sum_e f_e P_e`` to its loss
(arXiv 2101.03961, equation 4): ``f_e`` is the share of the choices of all tokens and layers that
fell on expert ``e``, and ``P_e`` its mean probability. It is a product of means, so that the mean
of what data-parallel ranks compute from their own samples is another number than one process's, and
trains other weights.

So in a training step the function that computes it (``load_balancing_loss_func`` of the model's
file) is given the logits and the mask of all ranks. It computes the same number on each, and the
gradient of a rank's logits is summed over them.

Where the samples of a batch come one microbatch after the other, or the layers lie on several
stages, nobody has all of the logits: that is refused.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.comm.functional import all_gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology

_NAME = "load_balancing_loss_func"
_Loss = Callable[..., Any]


def balance_over_ranks(model: nn.Module) -> None:
    """Have a mixture of transformers balance its experts over the samples of all ranks, in place.

    Nothing is done to a model whose forward calls no such function.
    """
    scope = _scope(model)
    if scope is None or "_router_losses" in vars(model):
        return
    hooks = _Hooks(scope)
    model.__dict__["_router_losses"] = hooks
    model.register_forward_pre_hook(hooks.enter, with_kwargs=True)
    model.register_forward_hook(hooks.leave, always_call=True)


def _scope(model: nn.Module) -> dict[str, Any] | None:
    """Globals of the model's forward, if the function is among them."""
    code = inspect.unwrap(type(model).forward)
    found: dict[str, Any] = getattr(code, "__globals__", {})
    return found if callable(found.get(_NAME)) else None


class _Hooks:
    """Hooks around the forward of a model, within which the function gets what all ranks have."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope
        self._own: _Loss | None = None

    def __deepcopy__(self, memo: Any) -> "_Hooks":
        return _Hooks(self._scope)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        topology = _topology(model)
        asked = kwargs.get("output_router_logits")
        if asked is None:
            asked = getattr(cast(Any, model).config, "output_router_logits", False)
        if topology is None or not asked:
            return
        trains = model.training and torch.is_grad_enabled()
        _refuse(topology, trains)
        if trains and topology.batch.size > 1:
            self._own = self._scope[_NAME]
            self._scope[_NAME] = _over_ranks(self._own, topology.batch)

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._own is not None:
            self._scope[_NAME], self._own = self._own, None


def _topology(model: nn.Module) -> Topology | None:
    layers = (layer for layer in model.modules() if isinstance(layer, ParallelLayer))
    return next((layer.topology for layer in layers), None)


def _refuse(topology: Topology, trains: bool) -> None:
    problem = None
    if topology.pp.size > 1:
        problem = f"pp={topology.pp.size}: no pipeline stage has the router logits of all layers"
    elif topology.cp.size > 1:
        problem = f"cp={topology.cp.size}: no rank has the router logits of whole sequences"
    elif topology.sequence_parallel and topology.tp.size > 1:
        problem = "sequence_parallel=True: no rank has the router logits of whole sequences"
    elif trains and topology.auxiliary_seeds.uneven:
        problem = "batch_shares: the loss that balances experts counts all ranks alike"
    elif trains and (count := topology.auxiliary_seeds.counted) > 1:
        problem = (
            f"num_microbatches={count}: the loss that balances experts is a product of means over "
            "a whole batch, of which a microbatch has a part"
        )
    if problem is not None:
        raise ConfigError(
            f"output_router_logits=True, {problem}; nearest valid: output_router_logits=False, or "
            "a layout without that"
        )


def _over_ranks(own: _Loss, axis: Axis) -> _Loss:
    """The function, given the logits and the mask of all ranks of an axis."""
    signature = inspect.signature(own)
    if not {"gate_logits", "attention_mask"} <= signature.parameters.keys():
        raise ConfigError(
            f"output_router_logits=True: {own.__module__}.{own.__qualname__}{signature} takes no "
            "logits and mask of all samples; nearest valid: output_router_logits=False, or one "
            "data-parallel rank"
        )

    def loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        logits = given.arguments.get("gate_logits")
        if not isinstance(logits, tuple):
            return own(*args, **kwargs)
        sizes = _sizes(len(logits[0]), logits[0].device, axis)
        given.arguments["gate_logits"] = tuple(_joined(x, sizes, axis) for x in logits)
        mask = given.arguments.get("attention_mask")
        if mask is not None:
            given.arguments["attention_mask"] = _joined(mask.reshape(-1), sizes, axis)
        return own(*given.args, **given.kwargs)

    return loss


def _sizes(size: int, device: torch.device, axis: Axis) -> list[int]:
    """Number of tokens of each rank."""
    found = torch.zeros(axis.size, dtype=torch.int64, device=device)
    found[axis.rank] = size
    dist.all_reduce(found, group=axis.group)
    return [int(count) for count in found.tolist()]


def _joined(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """Rows of all ranks, in order."""
    most = max(sizes)
    padding = (0, 0) * (x.dim() - 1)
    whole = all_gather(F.pad(x, (*padding, 0, most - len(x))), axis, 0)
    if min(sizes) == most:
        return whole
    parts = zip(torch.split(whole, most), sizes, strict=True)
    return torch.cat([part[:size] for part, size in parts])
