"""FSDP2, the engine of ZeRO: when it reduces gradients, in which formats, and what it gathers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass

# Until 2.14 FSDP2 adds gradients up beside ``.grad`` where they are reduced in another format than
# they come in. 2.15 does it in ``.grad``, which autograd then keeps in that format, and takes the
# format of reduced gradients from the ``grad_dtype`` of each parameter. Remove the older way when
# 2.15 is the oldest version supported.
_ADDS_BESIDE = hasattr(FSDPParam, "to_accumulated_grad_if_needed")


def reduce_gradients(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward, for ``root`` and the units in it (2.11-2.15).

    Its hooks run when the gradients of a unit's inputs are there; weight gradients that come later
    would never be reduced. (2.15 has ``finalize_backward``, which also ends the iteration: there it
    forgets the forwards of other microbatches in a pipeline.)
    """
    accumulate_gradients(root)
    state: Any = root._get_fsdp_state()
    # 2.15 asks who ends the backward; a backward that has ended leaves no answer.
    state._state_ctx.manual_backward_finalization_active = False
    for inner in state._state_ctx.all_states:
        for group in reversed(parameter_groups(inner)):
            group.post_backward()
    state._root_post_backward_final_callback()


def accumulate_gradients(root: FSDPModule) -> None:
    """Add the latest gradients to those that wait to be reduced, in their format (2.11-2.14).

    FSDP2 does so at the end of a backward. Weight gradients that come later would be added up in
    the format of the parameters until the next one. From 2.15 on autograd does so.
    """
    if not _ADDS_BESIDE:
        return
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
                    _forget_gathered(parameter)
    shard: Any = weight._local_tensor
    if extension is not None:
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = extension.before, extension.after
    elif hasattr(shard, "fsdp_pre_all_gather"):
        del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather


def gather_at_rest(unit: FSDPModule) -> Callable[[], None]:
    """Have FSDP2 gather the parameters of a unit as they are at rest (2.11-2.15).

    Args:
        unit: whose parameters are sharded at this moment, as they are to be when this is undone.

    Returns:
        A function that undoes it.
    """
    groups = parameter_groups(unit._get_fsdp_state())
    policies = [group.mp_policy for group in groups]
    shards = [p.sharded_param._local_tensor for group in groups for p in group.fsdp_params]
    extensions = [{n: vars(x).pop(n) for n in _EXTENSION if n in vars(x)} for x in shards]

    def gather_by(chosen: Sequence[Any]) -> None:
        for group, policy in zip(groups, chosen, strict=True):
            group.mp_policy = policy
            group._init_mp_dtypes()
            for parameter in group.fsdp_params:
                _forget_gathered(parameter)

    def undo() -> None:
        for shard, extension in zip(shards, extensions, strict=True):
            vars(shard).update(extension)
        gather_by(policies)

    gather_by([replace(policy, param_dtype=None) for policy in policies])
    return undo


def _forget_gathered(parameter: Any) -> None:
    """Drop what FSDP2 has prepared to gather a parameter in one format."""
    parameter.all_gather_outputs = []
    parameter.__dict__.pop("_unsharded_param", None)


_EXTENSION = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


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
    """Have FSDP2 leave gradients in the ``grad_dtype`` of their parameters (2.11-2.15).

    That is float32 for narrow parameters while a batch runs. Until 2.14 FSDP2 casts what it has
    reduced to the format of the parameters, and adds the microbatches up in that. And it takes the
    formats from the parameters that are trained when it reads them, which are none where all are
    frozen for a while. 2.15 reads ``grad_dtype``, but once, before the first forward.
    """
    for group in parameter_groups(module._get_fsdp_state()):
        if _ADDS_BESIDE:
            _keep_group_wide(group)
        else:
            _follow_gradient_types(group)


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


def _follow_gradient_types(group: Any) -> None:
    reduce = group.post_backward

    def follow_and_reduce(*args: Any) -> None:
        for parameter in group.fsdp_params:
            parameter.sharded_grad_dtype = parameter.sharded_param.grad_dtype
        reduce(*args)

    group.post_backward = follow_and_reduce


def let_units_run_first(root: FSDPModule) -> None:
    """Allow units inside ``root`` to run before it has (2.11-2.13).

    FSDP2 takes what runs first for the root, and refuses to run the actual one afterwards.
    """
    state = root._get_fsdp_state()
    assert isinstance(root, nn.Module)
    for module in list(root.modules())[1:]:
        if isinstance(module, FSDPModule):
            add_hook(module, lambda *_: state._lazy_init(), first=True)


def fill_missing_gradients(module: FSDPModule, lacked: set[Any]) -> list[Any]:
    """Have FSDP2 reduce zeros for trained parameters without a gradient (2.11-2.13).

    It reduces what gradients there are, and where a layer runs for some samples only, ranks would
    reduce different ones: with NCCL a hang or wrong numbers, with gloo the end of the process. A
    unit that was not gathered for this backward is left alone. (2.13 has
    ``reduce_scatter_unused_params``, which does not tell who had no gradient.)

    Args:
        module: a unit.
        lacked: to which parameters are added whose reduced gradient holds nothing of this rank,
            and from which they are removed when it does.

    Returns:
        The parameters that may come into ``lacked``, as objects of FSDP2; ``sharded_param`` is what
        the optimizer sees.
    """
    groups = parameter_groups(module._get_fsdp_state())
    for group in groups:
        _fill_group(group, lacked)
    return [parameter for group in groups for parameter in group.fsdp_params]


def _fill_group(group: Any, lacked: set[Any]) -> None:
    reduce = group.post_backward
    later = False

    def fill_and_reduce(*args: Any) -> None:
        nonlocal later
        # Where gradients are reduced later (`reduce_gradients`), the unit has been freed by then.
        later = later or not group.reduce_grads
        if not group.reduce_grads or not (later or group.is_unsharded):
            reduce(*args)
        elif _ADDS_BESIDE:
            _fill_beside(group, lacked)
            reduce(*args)
        else:
            with _filled(group, lacked):
                reduce(*args)

    group.post_backward = fill_and_reduce


def _fill_beside(group: Any, lacked: set[Any]) -> None:
    parameters = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    for parameter in parameters:
        parameter.accumulate_unsharded_grad_if_needed()
    if any(p.unsharded_accumulated_grad is not None for p in parameters):
        for parameter in parameters:  # all are to be in one format
            parameter.to_accumulated_grad_if_needed()
    held = {parameter: _gradient_to_reduce(parameter) for parameter in parameters}
    dtype = next((gradient.dtype for gradient in held.values() if gradient is not None), None)
    for parameter, gradient in held.items():
        whole = parameter.unsharded_param
        if _lacks_gradient(parameter, gradient, lacked):
            # There, as `whole` may be a subclass of Tensor whose ``.grad`` must be of it, too.
            parameter.unsharded_accumulated_grad = torch.zeros(
                whole.shape, dtype=dtype or whole.dtype, device=whole.device
            )


@contextmanager
def _filled(group: Any, lacked: set[Any]) -> Iterator[None]:
    take = group._get_unsharded_grad_to_reduce

    def take_or_fill(parameter: Any) -> Tensor | None:
        if not hasattr(parameter, "_unsharded_param"):
            return None
        if _lacks_gradient(parameter, parameter.unsharded_param.grad, lacked):
            zeros: Tensor = parameter.unsharded_zero_grad_data
            return zeros
        found: Tensor | None = take(parameter)
        return found

    group._get_unsharded_grad_to_reduce = take_or_fill
    try:
        yield
    finally:
        del group._get_unsharded_grad_to_reduce  # the method is seen again


def _lacks_gradient(parameter: Any, gradient: Tensor | None, lacked: set[Any]) -> bool:
    """Whether zeros must be reduced; writes into ``lacked`` what of that is known of this rank."""
    if gradient is not None:
        lacked.discard(parameter)
        return False
    if not parameter.unsharded_param.requires_grad:
        return False
    if parameter.sharded_param.grad is None:
        lacked.add(parameter)
    return True


def _gradient_to_reduce(parameter: Any) -> Tensor | None:
    known: Tensor | None = parameter.unsharded_accumulated_grad
    latest: Tensor | None = parameter.unsharded_param.grad
    return latest if known is None else known


def call_before_backward(module: FSDPModule, hook: Callable[[], None]) -> None:
    """Call ``hook`` when the backward reaches a unit, before it is gathered (2.11-2.15)."""
    for group in parameter_groups(module._get_fsdp_state()):
        group.pre_backward = _after(hook, group.pre_backward)


def _after(hook: Callable[[], None], method: Callable[..., None]) -> Callable[..., None]:
    def hook_and_method(*args: Any) -> None:
        hook()
        method(*args)

    return hook_and_method


def handle_shards_as_memory(module: FSDPModule) -> None:
    """Have FSDP2 handle the shards of a unit without asking their classes for rules (2.11-2.15).

    Each gather and reduction reads and writes attributes of every shard, and a class that knows
    more than memory makes tens of calls of each. Classes are asked as ever in a reduction that
    calls hooks of the user's with the shards.

    Args:
        module: a unit.
    """
    for group in parameter_groups(module._get_fsdp_state()):
        group._to_unsharded = _on_memory(group._to_unsharded)
        group.post_backward = _on_memory(group.post_backward, unless=partial(_calls_hooks, group))


def _on_memory(
    method: Callable[..., None], unless: Callable[[], bool] | None = None
) -> Callable[..., None]:
    def on_memory(*args: Any) -> None:
        with DisableTorchFunctionSubclass():
            if unless is None or not unless():
                method(*args)
                return
        method(*args)

    return on_memory


def _calls_hooks(group: Any) -> bool:
    return any(
        getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
        for parameter in group.fsdp_params
    )


_HOOKS = "_lightning_megatron_hooks"
"""Attribute under which a unit remembers hooks that are this package's."""


def add_hook(unit: FSDPModule, hook: Callable[..., Any], *, first: bool = False) -> None:
    """Call ``hook`` before each forward of a unit, as long as it is one."""
    assert isinstance(unit, nn.Module)
    handle = unit.register_forward_pre_hook(hook, prepend=first)
    vars(unit).setdefault(_HOOKS, []).append(handle)


def let_copy(unit: FSDPModule) -> None:
    """Let ``copy.deepcopy`` make a plain module of a unit, which FSDP2 refuses (2.11-2.15)."""
    vars(unit)["__deepcopy__"] = partial(_plain_copy, unit)


def _plain_copy(unit: FSDPModule, memo: dict[int, Any]) -> nn.Module:
    """Copy of a unit as the module that it was before."""
    kind: type[nn.Module] = type(unit).__mro__[2]
    dropped = {handle.id for handle in _hooks_of(unit)}
    made = kind.__new__(kind)
    memo[id(unit)] = made
    vars(made).update(copy.deepcopy(_without_hooks(vars(unit), dropped), memo))
    forget_units(made, [unit])
    return made


def forget_units(copied: nn.Module, units: Sequence[FSDPModule]) -> None:
    """Take from a copy of a module what FSDP2 and this package have added to the original.

    Args:
        copied: of a module with units in it, or in a unit.
        units: of the original.
    """
    dropped = {handle.id for unit in units for handle in _hooks_of(unit)}
    for module in copied.modules():
        vars(module).update(_without_hooks(vars(module), dropped))
        for name in _MANAGED:
            vars(module).pop(name, None)


def _without_hooks(attributes: dict[str, Any], dropped: set[int]) -> dict[str, Any]:
    """Attributes of a module without what FSDP2 and this package have added to it."""
    found = {k: v for k, v in attributes.items() if k not in _OF_UNIT}
    for name, hooks in found.items():
        if "_hooks" in name and isinstance(hooks, dict):
            found[name] = type(hooks)((k, hook) for k, hook in hooks.items() if k not in dropped)
    return found


_OF_UNIT = ("__deepcopy__", _HOOKS, STATE_KEY, REGISTRY_KEY)
_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes of units, and of all modules in them."""


def _hooks_of(unit: FSDPModule) -> list[RemovableHandle]:
    """Handles of hooks on a unit that FSDP2 and this package have registered (2.11-2.15)."""
    state: Any = unit._get_fsdp_state()
    found = [*vars(unit).get(_HOOKS, ())]
    found += [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in parameter_groups(state):
        found += group._module_to_pre_save_state_dict_hook_handle.values()
        found += group._module_to_pre_load_state_dict_hook_handle.values()
        found += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    return found


def undo_sharding(unit: FSDPModule) -> None:
    """Make a unit the module that it was, but for its parameters (2.11-2.15)."""
    assert isinstance(unit, nn.Module)
    for handle in _hooks_of(unit):
        handle.remove()
    for module in unit.modules():
        for name in _MANAGED:
            vars(module).pop(name, None)
    for name in _OF_UNIT:
        vars(unit).pop(name, None)
    _module_state_mapping.pop(unit, None)
    unit.__class__ = type(unit).__mro__[2]


def leave_other_tensors(module: FSDPModule) -> None:
    """Have a unit run with the tensors that ``torch.func.functional_call`` lends it (2.11-2.15).

    FSDP2 puts what it gathers in the place of any tensor.
    """
    for group in parameter_groups(module._get_fsdp_state()):
        _leave_in_group(group)


def _leave_in_group(group: Any) -> None:
    before, after = group.pre_forward, group.post_forward
    lent: list[dict[Any, Any]] = []

    def pre_forward(*args: Any) -> Any:
        lent.append(_lent(group))
        if lent[-1] and len(lent[-1]) == len(group.fsdp_params):
            return args[1:]
        if torch.is_inference_mode_enabled():  # what is gathered serves other forwards, too
            with torch.inference_mode(False), torch.no_grad():
                found = before(*args)
        else:
            found = before(*args)
        _put(lent[-1])
        return found

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        others = lent.pop() if lent else {}
        if others and len(others) == len(group.fsdp_params):
            return output
        found = after(module, args, output)
        _put(others)
        return found

    group.pre_forward, group.post_forward = pre_forward, post_forward


def _lent(group: Any) -> dict[Any, Any]:
    """Tensors in the places of parameters, by the parameter as FSDP2 knows it."""
    found = {}
    for parameter in group.fsdp_params:
        info = parameter._module_info
        there = info.module._parameters.get(info.param_name)
        known = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        if there is not None and all(there is not getattr(parameter, n, None) for n in known):
            found[parameter] = there
    return found


def _put(tensors: dict[Any, Any]) -> None:
    for parameter, tensor in tensors.items():
        parameter._setattr_on_modules(tensor)


def parameter_groups(state: Any) -> list[Any]:
    """Parameters that an FSDP2 module gathers and reduces together (2.11-2.13)."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11 has one group per module
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, also where an earlier Trainer has sharded the module."""
    own = type(module)
    # FSDP2 derives a class of its own, from itself and from the original.
    return (own.__mro__[2] if isinstance(module, FSDPModule) else own).__name__
