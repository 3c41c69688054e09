"""Weights in their format at rest for hooks between steps, under mixed precision.

Under ``bf16-mixed`` and its like parameters are narrow while steps run (`zero.owned_rows`), or are
gathered narrow (ZeRO 3). Lightning runs hooks outside of autocast, so under
``DistributedDataParallel`` a hook that calls a layer, copies it or reads a weight meets float32.
Here it does, too: before a hook around epochs of which the module or a callback of the user's has
one, all ranks bring the weights into their format at rest, and before the next batch they make them
narrow again. That costs one gather of float32 weights for a group of such hooks, and nothing where
there are none.

Hooks around single batches see what steps see, as a gather for each of them would cost more than
the step's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_megatron.strategy.code_inspection import own_functions

HOOKS = tuple(
    f"on_{kind}_{when}"
    for kind in ("train", "validation", "test", "predict")
    for when in ("start", "epoch_start", "epoch_end", "end")
) + ("on_sanity_check_start", "on_sanity_check_end")
"""Hooks of modules and callbacks around epochs."""


def overridden(trainer: Trainer, module: LightningModule) -> set[str]:
    """Hooks around epochs that the module or a callback of the user's has."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    written = (name for each in (module, *callbacks) for name, _ in own_functions(each))
    return set(written).intersection(HOOKS)


class WideWeights(Callback):
    """The first of the callbacks, which calls ``widen`` before the others' hooks and the module's.

    Args:
        trainer: that calls callbacks.
        hooks: names of the hooks before which weights are to be wide; the same on all ranks.
        widen: makes them so; collective.
    """

    def __init__(self, trainer: Trainer, hooks: set[str], widen: Callable[[], None]) -> None:
        self._callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for name in hooks:
            setattr(self, name, self._called)
        self._widen = widen
        self._callbacks.insert(0, self)

    def _called(self, *_: Any) -> None:
        # What is allocated in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            self._widen()

    def close(self) -> None:
        """Be no callback any more."""
        self._callbacks.remove(self)
