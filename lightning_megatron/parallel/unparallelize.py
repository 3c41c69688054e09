"""Takes a module off its layout after a run, so that it is the user's again.

With whole parameters and neither tensor nor pipeline parallelism every rank holds the whole
network. Nothing that a run needs has to stay then: hooks, changed forwards, the layers' places in
the layout and with them every process group go, and the module can be called, copied, pickled, and
given to any other Trainer. Where a rank holds a part of the network only, whole tensors that were
gathered take the place of the parts first (`fill`). Where they were not, the layout stays with the
module; so that nobody takes the part for the whole, calls, ``state_dict``, copies and pickles of it
and of what is in it raise an error that says what to do (`refuse_use`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron._torch.graphs import WRAPPER_NAMES
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.batch_norm import use_own_statistics
from lightning_megatron.layers.delayed_wgrad import GEMM_BACKEND, set_gemm_backend
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.forward_wrapper import unwrap_all
from lightning_megatron.whole.memory import runs_layer
from lightning_megatron.zero.whole_parameters import WholeParameters


def is_whole(parallel: ParallelModule) -> bool:
    """Whether every rank holds the whole network, in plain tensors."""
    topology = parallel.topology
    alone = topology.tp.size == topology.ep.size == topology.pp.size == 1
    return alone and isinstance(parallel.data, WholeParameters)


def fill(
    parallel: ParallelModule, tensors: Mapping[str, Tensor], items: Sequence[nn.Module] | None
) -> None:
    """Put whole tensors in the place of this rank's parts; parameters are released already.

    Args:
        parallel: the module on its layout.
        tensors: all parameters and buffers, by every name in the whole module.
        items: skeleton of the trunk, for what other pipeline stages hold; None without a pipeline.
    """
    module = parallel.module
    parallel.data.dissolve()
    if parallel.trunk is not None and items is not None:
        held = parallel.trunk.items()
        parallel.trunk.refill(
            [s if isinstance(h, RemoteItem) else h for h, s in zip(held, items, strict=True)]
        )
    made: dict[int, nn.Parameter] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = _plain(f"{path}.") if path else ""
        for name, old in child._parameters.items():
            if old is not None:
                value = tensors[prefix + name]
                new = made.setdefault(id(value), nn.Parameter(value, old.requires_grad))
                setattr(child, name, new)  # recurrent networks have lists of their weights
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = tensors[prefix + name]
    module.to(next(iter(tensors.values())).device)


def _plain(name: str) -> str:
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def restore(parallel: ParallelModule) -> None:
    """Leave nothing of a run in a module with whole tensors; parameters are released already."""
    module = parallel.module
    unwrap_all(module)
    use_own_statistics(module)
    for child in module.modules():
        if getattr(child, GEMM_BACKEND, None) is not None:
            set_gemm_backend(child, None)
        if isinstance(child, ParallelLayer):
            child.withdraw()
        child.__dict__.pop("writers", None)  # of models that generate
        if isinstance(child, PipelineSequential):
            child.connect(None)
            child.split_sequences(None)
            child.__dict__.pop("draws", None)
            child.__dict__.pop("check", None)
            child.__dict__.pop("boundary", None)
            child.__dict__.pop("relay", None)
            for stage in child.stage_items:
                stage.groups = {}


_GUARD = "_lightning_megatron_guard"
"""Attribute under which a module remembers what refuses its use."""


def refuse_use(parallel: ParallelModule, layout: str) -> None:
    """Have calls, states, copies and pickles of a module in parts raise an error.

    Args:
        parallel: the module on its layout.
        layout: in words.
    """
    module = parallel.module
    module.__dict__.setdefault(_GUARD, _Guard(module, layout))


def allow_use(module: nn.Module) -> None:
    """Undo `refuse_use`, if need be."""
    guard: _Guard | None = module.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


class _Guard:
    """Refuses what takes a part for the whole, but to code of this library."""

    def __init__(self, module: nn.Module, layout: str) -> None:
        self._layout = layout
        self._held = [
            m
            for m in module.modules()
            if any(True for _ in m.parameters()) and not isinstance(m, torch.jit.ScriptModule)
        ]  # scripts take no hooks, and what they hold is whole
        self._writers = [m for m in self._held if hasattr(m, "writes_alike")]
        self._hooks: list[Any] = []
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        for child in [module, *(m for m in self._held if m is not module)]:
            self._hooks.append(child.register_forward_pre_hook(self._refuse_call))
            self._hooks.append(child.register_state_dict_pre_hook(self._refuse_state))  # type: ignore[no-untyped-call]
            held = {k: vars(child)[k] for k in ("__deepcopy__",) if k in vars(child)}
            self._before.append((child, held))
            vars(child)["__deepcopy__"] = _Refuse(self, child, "is copied (copy.deepcopy)")
            vars(child)["__reduce_ex__"] = _Refuse(self, child, "is pickled (torch.save)")

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, held in self._before:
            for name in ("__deepcopy__", "__reduce_ex__"):
                vars(module).pop(name, None)
            vars(module).update(held)

    def _refuse_call(self, module: nn.Module, args: Any) -> None:
        if all(getattr(m, "writes_alike", None) is None for m in self._writers):
            self.refuse(module, "is called")  # else it is `generate`, on all ranks

    def _refuse_state(self, module: nn.Module, *_: Any) -> None:
        if not runs_layer():
            self.refuse(module, "is asked for its state_dict")

    def refuse(self, module: nn.Module, what: str) -> None:
        raise ConfigError(
            f"{type(module).__name__} {what} outside of a run, but this rank holds a part of it "
            f"only ({self._layout}); nearest valid: MegatronStrategy(gather_at_end=True), which "
            "makes it whole after the run, or lightning_megatron.gather(module) on all ranks, "
            "which returns the state_dict for a new module, or the call in a validation_step or "
            "predict_step"
        )


class _Refuse:
    """Attribute in place of a special method."""

    def __init__(self, guard: _Guard, module: nn.Module, what: str) -> None:
        self._guard, self._module, self._what = guard, module, what

    def __call__(self, *_: Any) -> None:
        self._guard.refuse(self._module, self._what)
