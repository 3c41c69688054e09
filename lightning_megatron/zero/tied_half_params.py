"""Low-precision copies of parameters that ZeRO does not hold.

Under ``bf16-mixed`` and its like ZeRO gathers parameters in the narrow format, so what a layer sees
is narrow, while the optimizer has float32. A parameter that several pipeline stages of one rank
share (an embedding and the head tied to it, under a V-shaped or interleaved schedule) belongs to no
stage that ZeRO could gather it for. Left in float32 it would turn the whole residual stream into
float32: other numbers than one process computes, and twice the bytes between stages.

So each gets a narrow copy, of which ``P`` elements cost ``2 P`` bytes, that takes its place in the
modules while a batch runs: a leaf, as gathered parameters are, with which recomputation, a backward
in two parts and FP8 products need no care. Its gradient is added up over microbatches in the format
of the reduction and given to the parameter when the batch ends.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lightning_megatron.whole.memory import memory_of_parts


@memory_of_parts
class TiedHalfParams:
    """Stands in for some parameters of a module while it runs.

    Args:
        module: which holds them, by whatever names.
        parameters: whole, with their values or at least their memory.
        dtype: of the copies.
        reduction: in which their gradients are added up; as the parameters, if None.
        stages: in whose forwards the copies must be there.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Collection[nn.Parameter],
        dtype: torch.dtype,
        reduction: torch.dtype | None,
        stages: Collection[nn.Module],
    ) -> None:
        self._shown = False
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            if parameter.is_floating_point():
                low = torch.empty_like(parameter, dtype=dtype)
                copy = nn.Parameter(low, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    copy.grad_dtype = reduction or parameter.dtype
                self._copies[parameter] = copy
        self._places = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter in self._copies
        ]
        if self._copies:
            for stage in stages:
                stage.register_forward_pre_hook(self._before_forward)
                stage.register_forward_hook(self._after_forward)

    def finish(self) -> None:
        """A batch has ended: put the parameters back, and give them the gradients."""
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                gradient = copy.grad.to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        self.drop()

    def drop(self) -> None:
        """Put the parameters back; gradients of a batch that did not end are lost."""
        for copy in self._copies.values():
            copy.grad = None
        if self._shown:
            for owner, name, parameter in self._places:
                owner._parameters[name] = parameter
        self._shown = False

    def _before_forward(self, *_: Any) -> None:
        if self._shown:
            return
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                copy.copy_(parameter)
                if parameter.requires_grad != copy.requires_grad:
                    copy.requires_grad_(parameter.requires_grad)
        for owner, name, parameter in self._places:
            owner._parameters[name] = self._copies[parameter]
        self._shown = True

    def _after_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():  # evaluation, which nobody ends
            self.drop()
