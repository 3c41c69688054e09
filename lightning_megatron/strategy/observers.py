"""Whether anybody but the optimizers may look at gradients, or at weights in parts.

ZeRO 1 and 2 bring each gradient to the rank that owns it, and ``.grad`` is None everywhere. Users
may look at ``.grad`` all the same, to clip, log or change it, and must see then what they would see
under ``DistributedDataParallel``: the whole mean. Making it whole costs an all-reduce in place of a
reduce-scatter, so it is done only where somebody may look:

* under manual optimization, where the step itself may;
* where the module or a callback overrides a hook that runs between the backward and the moment
  when gradients are cleared (`HOOKS`);
* where code of the module or of a callback mentions gradients (`strategy.code_inspection`).

Weights and gradients of which ranks hold parts (tp, ZeRO 3, stages of a pipeline) are looked after
by `layers.weights`; `parallel.stage_numbers` watches a pipeline where such code exists, or such
that mentions parameters.

Callbacks of Lightning and of this package do not count: the former look at no gradient, the latter
know where gradients are.
"""

from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.strategy.code_inspection import names_in, own_functions

HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of modules and callbacks that exist to look at gradients, or can."""

_HARMLESS = frozenset(
    {
        "autograd",
        "enable_grad",
        "gradient_clip_algorithm",
        "gradient_clip_val",
        "is_grad_enabled",
        "no_grad",
        "requires_grad",
        "requires_grad_",
        "set_grad_enabled",
        "set_to_none",
        "zero_grad",
        "accumulate_grad_batches",
    }
)


def looks_at_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the module or a callback of the user's may look at ``.grad``."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return not module.automatic_optimization or any(
        name in HOOKS or _mentions(function)
        for observer in (module, *callbacks)
        for name, function in own_functions(observer)
    )


_WEIGHTS = frozenset(
    (
        *("parameters", "named_parameters", "get_parameter", "parameters_to_vector"),
        *("vector_to_parameters", "state_dict", "weight", "bias", "data"),
    )
)
_BUILDERS = frozenset(("__init__", "configure_model", "configure_optimizers", "reset_parameters"))
"""Functions that run before there are parts, or hand parameters to an optimizer."""


def looks_at_weights(trainer: Trainer, module: LightningModule) -> tuple[bool, bool]:
    """Whether somebody may compute with weights or gradients; and whether steps of training may.

    Steps may call any function of the module that is no hook, and of its submodules any but the
    ``forward`` of what holds its weights itself.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    words = _WEIGHTS | _names_of_slices(module)
    in_step = any(
        _mentions(function, words)
        for part in module.modules()
        for name, function in own_functions(part)
        if name not in (*_BUILDERS, *HOOKS, *_NO_STEPS)
        and not name.startswith("on_")
        and not name.endswith("dataloader")
        and (part is module or name != "forward" or _holds_layers_in_slices(part))
    )
    somewhere = any(
        name in HOOKS or _mentions(function, words)
        for observer in (module, *callbacks)
        for name, function in own_functions(observer)
        if name not in _BUILDERS
    )
    by_hand = not module.automatic_optimization and looks_at_gradients(trainer, module)
    return somewhere or in_step or by_hand, in_step or by_hand


_NO_STEPS = ("setup", "teardown", "validation_step", "test_step", "predict_step")


def _holds_layers_in_slices(part: nn.Module) -> bool:
    """Whether weights of layers inside of a module are slices, of which its code may not know."""
    return not isinstance(part, ParallelLayer) and bool(_names_of_slices(part))


def _names_of_slices(module: nn.Module) -> frozenset[str]:
    """Local names of the parameters of which ranks hold slices; those of experts are no weight."""
    return frozenset(
        name
        for layer in module.modules()
        if isinstance(layer, ParallelLayer)
        for name, shard in layer.tensor_shards.items()
        if shard.dim is not None
    )


def _mentions(function: FunctionType, words: frozenset[str] = frozenset()) -> bool:
    """Whether a function has a word for gradients, or one of ``words``."""
    return any(
        name in words or ("grad" in name and name not in _HARMLESS) for name in names_in(function)
    )


def transforms_batches(module: LightningModule) -> bool:
    """Whether hooks of the module or of its data change a batch before it is trained on."""
    sources = (module, getattr(module.trainer, "datamodule", None))
    return any(
        source is not None and is_overridden(hook, source)
        for source in sources
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
    )
