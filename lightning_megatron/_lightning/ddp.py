"""The answer to ``isinstance(strategy, DDPStrategy)``, by which other code asks about data.

``isinstance(trainer.strategy, DDPStrategy)`` is how data modules, losses and command lines ask
whether each process reads samples of its own and gradients are averaged over all of them. Lightning
itself asks it twice: whether it may insert distributed samplers (which the strategy declines), and
whether it may run a module that went through ``torch.compile`` (which the strategy refuses).

The answer differs from strategy to strategy of one class, so that registering the class as a
virtual subclass would be wrong. ``isinstance`` looks at an object's ``__class__`` beside its type.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy


class SeenAsDDP(ParallelStrategy):
    """A strategy that ``isinstance`` takes for a DDPStrategy while it `divides_by_all`."""

    _ddp_kwargs: Mapping[str, Any] = MappingProxyType(
        {"find_unused_parameters": True, "broadcast_buffers": False}
    )
    """Options of ``DistributedDataParallel`` that describe what this strategy does.

    Private: `DDPStrategy._ddp_kwargs`, which callbacks ask for these two. It cannot be set.
    """

    @property
    def divides_by_all(self) -> bool:
        """Whether all processes read samples of their own, over which gradients are averaged."""
        raise NotImplementedError

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class that ``isinstance`` sees beside the type."""
        return _seen_as_ddp(type(self)) if self.divides_by_all else type(self)


@cache
def _seen_as_ddp(kind: type) -> type:
    """A class with the names of ``kind`` that is registered as a DDPStrategy; nothing is of it.

    It is no subclass: parsers of command lines look for a class by its name among all of those.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return DDPStrategy.register(type(kind.__name__, (), names))


def is_compiled(module: LightningModule) -> bool:
    """Whether a module has been through ``torch.compile`` as a whole.

    Private: ``LightningModule._compiler_ctx``, by which Lightning asks the same.
    """
    return module._compiler_ctx is not None
