"""Takes a module off its layout after a run, so that it is the user's again.

With whole parameters and neither tensor nor pipeline parallelism every rank holds the whole
network. Nothing that a run needs has to stay then: hooks, changed forwards, the layers' places in
the layout and with them every process group go, and the module can be called, copied, pickled, and
given to any other Trainer. Where a rank holds a part of the network only, the layout stays with it;
so that nobody takes the part for the whole, calls of the module and of what is directly in it raise
an error that says what to do (`refuse_calls`).
"""

from typing import Any

from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.batch_norm import use_own_statistics
from lightning_megatron.layers.delayed_wgrad import GEMM_BACKEND, set_gemm_backend
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.forward_wrapper import BlockForward, unwrap
from lightning_megatron.zero.whole_parameters import WholeParameters


def is_whole(parallel: ParallelModule) -> bool:
    """Whether every rank holds the whole network, in plain tensors."""
    topology = parallel.topology
    alone = topology.tp.size == topology.ep.size == topology.pp.size == 1
    return alone and isinstance(parallel.data, WholeParameters)


def restore(parallel: ParallelModule) -> None:
    """Leave nothing of a run in a module that `is_whole`; parameters are released already."""
    module = parallel.module
    unwrap(module)
    use_own_statistics(module)
    for child in module.modules():
        held = getattr(child.__dict__.get("forward"), "__self__", None)
        if isinstance(held, BlockForward):
            held.remove()
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
            for stage in child.stage_items:
                stage.groups = {}


_GUARD = "_lightning_megatron_guard"
"""Attribute under which a module remembers what refuses its calls."""


def refuse_calls(parallel: ParallelModule, layout: str) -> None:
    """Have calls of a module of which this rank holds a part raise an error.

    Args:
        parallel: the module on its layout.
        layout: in words.
    """
    module = parallel.module
    module.__dict__.setdefault(_GUARD, _Guard(module, layout))


def allow_calls(module: nn.Module) -> None:
    """Undo `refuse_calls`, if need be."""
    guard: _Guard | None = module.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


class _Guard:
    def __init__(self, module: nn.Module, layout: str) -> None:
        self._layout = layout
        held = (child for child in module.children() if any(True for _ in child.parameters()))
        guarded = [module, *held]
        self._hooks = [m.register_forward_pre_hook(self._refuse) for m in guarded]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _refuse(self, module: nn.Module, args: Any) -> None:
        if getattr(module, "writes_alike", None) is not None:  # `generate`, on all ranks
            return
        raise ConfigError(
            f"{type(module).__name__} is called outside of a run, but this rank holds a part of it "
            f"only ({self._layout}); nearest valid: "
            "plain.load_state_dict(lightning_megatron.gather(module)) with plain a new module of "
            "the same kind, or the call in a validation_step or predict_step"
        )
