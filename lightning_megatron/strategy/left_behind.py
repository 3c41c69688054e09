"""Tensors that items of a trunk leave in attributes, for the step to use behind the trunk.

A block may append a loss of its own to a list (the load of experts), or a forward hook keep what a
layer has computed. In one process the step adds that to its loss. Under a pipeline it does so on
the last stage only, where the items of the other stages have never run: the weights of these would
train without that part of the loss, and nothing would tell. So the first forwards of a stage are
watched, and later ones now and then, as a loss may begin after a warm-up: a tensor that takes part
in a backward, that a stage before the last has left in an attribute or a global which
``training_step`` mentions, ends the run.

Under cp the items have run, each on this rank's part of the sequences and its padding: a mean of
what they leave is not that of the whole sequences. That ends the run, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.runner import StageBoundary
from lightning_megatron.strategy.code_inspection import functions_from, methods_of, names_in

_WATCHED, _EVERY = 8, 64
"""Forwards that are looked at: so many first ones, and each so many-th after them."""
_CONTAINERS = (dict, list, tuple, set)


class LeftBehind:
    """Refuses losses that would be lost between stages, or be those of a part of the sequences.

    Args:
        module: the user's.
        trunks: each `PipelineSequential` in it, reduced to this rank's stages.
        rank: this rank on the pipeline axis.
        cp: degree of context parallelism.
    """

    def __init__(
        self,
        module: LightningModule,
        trunks: Sequence[PipelineSequential],
        rank: int,
        cp: int = 1,
    ) -> None:
        self._module = module
        self._trunks = trunks
        self._rank = rank
        self._cp = cp
        functions = list(functions_from(methods_of(module), "training_step"))
        self._names = frozenset[str]().union(*map(names_in, functions))
        self._globals = [function.__globals__ for function in functions]
        self._forwards = 0
        self._before: list[Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block a step runs one stage.

        Raises:
            ConfigError: its items have left a tensor where the step looks for it.
        """
        self._forwards += 1
        if self._forwards > _WATCHED and self._forwards % _EVERY:
            yield
            return
        # The code before the call runs on all stages; what it leaves is there on the last, too.
        hooks = [trunk.register_forward_pre_hook(self._note) for trunk in self._trunks]
        if self._cp > 1:
            hooks += [trunk.register_forward_hook(self._refuse_part) for trunk in self._trunks]
        try:
            yield
        except StageBoundary:
            self._refuse(
                f"items of the PipelineSequential on pipeline rank {self._rank} leave tensors "
                "there, and training_step uses them behind its trunk, which is on the last stage, "
                "where these items do not run; nearest valid: items that take and return a tuple "
                "(x, loss so far), or pp=1"
            )
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._before = []

    def _note(self, *_: Any) -> None:
        self._before = [tensor for _, tensor in self._found()]

    def _refuse_part(self, *_: Any) -> None:
        self._refuse(
            f"items of the PipelineSequential leave tensors there that are of one of cp={self._cp} "
            "parts of the sequences, and training_step uses them behind its trunk; nearest valid: "
            "items that take and return a tuple (x, loss of each position [b, s]), or cp=1"
        )

    def _refuse(self, reason: str) -> None:
        known = {id(tensor) for tensor in self._before}
        place = next((place for place, tensor in self._found() if id(tensor) not in known), None)
        if place is not None:
            raise ConfigError(f"{place}: {reason}")

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors with a graph in attributes and globals that the step mentions, by name."""
        for scope in self._globals:
            for name in self._names & scope.keys():
                if not isinstance(scope[name], ModuleType):
                    for tensor in _tensors(scope[name], depth=2):
                        yield name, tensor
        for path, child in self._module.named_modules():
            for name, content in vars(child).items():
                if name in self._names:
                    place = f"self.{path}.{name}" if path else f"self.{name}"
                    for tensor in _tensors(content):
                        yield place, tensor


def _tensors(content: Any, depth: int = 4) -> Iterator[Tensor]:
    """Tensors in a value, in containers and in plain objects, that take part in a backward."""
    if isinstance(content, Tensor):
        if content.grad_fn is not None:
            yield content
    elif depth and not isinstance(content, nn.Module | type):
        items: Any = ()
        if isinstance(content, dict):
            items = content.values()
        elif isinstance(content, _CONTAINERS) or hasattr(content, "maxlen"):
            items = content
        elif not callable(content) and hasattr(content, "__dict__"):
            items = vars(content).values()
        for item in tuple(items):
            yield from _tensors(item, depth - 1)
