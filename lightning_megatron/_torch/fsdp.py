"""FSDP2, the engine of ZeRO: when it reduces gradients, in which formats, and what it gathers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def reduce_gradients(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward, for ``root`` and the units in it (2.11-2.13).

    Its hooks run when the gradients of a unit's inputs are there; weight gradients that come later
    would never be reduced.
    """
    accumulate_gradients(root)
    state = root._get_fsdp_state()
    for inner in state._state_ctx.all_states:
        for group in reversed(parameter_groups(inner)):
            group.post_backward()
    state._root_post_backward_final_callback()


def accumulate_gradients(root: FSDPModule) -> None:
    """Add the latest gradients to those that wait to be reduced, in their format (2.11-2.13).

    FSDP2 does so at the end of a backward. Weight gradients that come later would be added up in
    the format of the parameters until the next one.
    """
    for inner in root._get_fsdp_state()._state_ctx.all_states:
        for group in parameter_groups(inner):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def gather_through(units: Sequence[FSDPModule], weight: DTensor, extension: Any) -> None:
    """Have FSDP2 gather a weight through ``extension``, or with None as it is (2.11-2.13).

    It looks for two functions on the shard; a subclass of Tensor, where they are meant to be, would
    meet every optimizer and checkpoint. What it prepared for another way of gathering is dropped.

    Args:
        units: one of which manages the weight.
        weight: sharded.
        extension: with ``before`` and ``after``.
    """
    for unit in units:
        for group in parameter_groups(unit._get_fsdp_state()):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                if getattr(info.module, info.param_name) is weight:
                    # Materialised weights are taken over at the first forward, else, and shards
                    # that need padding replaced.
                    parameter.reset_sharded_param()
                    parameter.all_gather_outputs = []
                    parameter.__dict__.pop("_unsharded_param", None)
    shard: Any = weight._local_tensor
    if extension is not None:
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = extension.before, extension.after
    elif hasattr(shard, "fsdp_pre_all_gather"):
        del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather


def move_outside_units(module: nn.Module, device: torch.device) -> None:
    """Bring to ``device`` what no unit of FSDP2 in ``module`` holds (2.11-2.13).

    A unit may keep its shards elsewhere, in host memory, and refuses to run once they have moved.
    """
    if isinstance(module, FSDPModule):
        return
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        module.to(device)
        return
    for child in module.children():
        move_outside_units(child, device)
    module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def gathers_through(weight: Tensor) -> bool:
    """Whether `gather_through` gave the weight an extension (2.11-2.13)."""
    return isinstance(weight, DTensor) and hasattr(weight._local_tensor, "fsdp_pre_all_gather")


def keep_reduced_gradients_wide(module: FSDPModule) -> None:
    """Have FSDP2 leave the gradients of narrow parameters in float32 (2.11-2.13).

    It casts what it has reduced to the format of the parameters and adds the microbatches up in
    that. The parameters' ``grad_dtype`` must be float32 then. And it takes the formats from the
    parameters that are trained when it reads them, which are none where all are frozen for a while.
    """
    for group in parameter_groups(module._get_fsdp_state()):
        _keep_group_wide(group)


def _keep_group_wide(group: Any) -> None:
    read_formats = group._init_mp_dtypes

    def read_formats_and_adjust() -> None:
        read_formats()
        if group._orig_dtype is None and group.fsdp_params:
            # Gradients come later, if parameters are trained again.
            group._orig_dtype = group.fsdp_params[0].orig_dtype
            group._reduce_dtype = group.fsdp_params[0].reduce_dtype
        if group._orig_dtype in (torch.bfloat16, torch.float16):
            group._orig_dtype = torch.float32

    # FSDP2 reads the formats when a module runs first, and when its parameters have changed.
    group._init_mp_dtypes = read_formats_and_adjust


def parameter_groups(state: Any) -> list[Any]:
    """Parameters that an FSDP2 module gathers and reduces together (2.11-2.13)."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11 has one group per module
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)
