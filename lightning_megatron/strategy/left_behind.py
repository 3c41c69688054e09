"""Contract of a trunk's items in training: what the loss is to learn from is what they return.

A block may append a loss of its own to a list (the load of experts), or a forward hook keep what a
layer has computed. In one process the step may add that to its loss. Under a pipeline the code
behind the trunk runs on the last stage only, where the items of the other stages have never run:
the weights of these would train without that part of the loss, and nothing would tell. Under cp the
items have run, each on this rank's part of the sequences and its padding: a mean of what they leave
is not that of the whole sequences.

So no item of a stage before the last, and none under cp, may leave a tensor that takes part in a
backward: in an attribute of its modules, of the user's module or of what is beside the trunk, or in
a global of a file with a class of the user's module. Whether the step uses it nobody can tell; what
only hooks look at is left as ``x.detach()``. After each forward of a stage in training its modules
are looked at, for some microseconds each; a tensor is one of the items' if its node in the graph is
younger than the call of the trunk.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron._torch.graphs import next_sequence_number, sequence_number
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.router import Router
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.runner import StageBoundary
from lightning_megatron.strategy.attributes import dotted, is_open, not_the_users
from lightning_megatron.whole.memory import weights_in_parts

_LIBRARIES = ("builtins.", "lightning.", "lightning_megatron.", "pytorch_lightning.", "torch.")
_NEWEST = 64
"""Items at the end of a list that are looked at."""
_PLAIN = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))
"""Types of most attributes, which hold no tensor."""


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
        files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
        self._globals = [
            vars(file)
            for file in dict.fromkeys(files)
            if file is not None and not f"{file.__name__}.".startswith(_LIBRARIES)
        ]
        self._began = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block a step runs one stage.

        Raises:
            ConfigError: its items have left a tensor where the step looks for it.
        """
        # The code before the call runs on all stages; what it leaves is there on the last, too.
        hooks = [trunk.register_forward_pre_hook(self._note) for trunk in self._trunks]
        if self._cp > 1:
            hooks += [trunk.register_forward_hook(self._refuse_part) for trunk in self._trunks]
        try:
            yield
        except StageBoundary:
            self._refuse(
                f"items of the PipelineSequential on pipeline rank {self._rank} leave tensors "
                "there that a loss may learn from, and code of training_step behind its trunk is "
                "on the last stage, where these items do not run; nearest valid: items that take "
                "and return a tuple (x, loss so far), x.detach() for what no loss uses, or pp=1"
            )
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, *_: Any) -> None:
        self._began = next_sequence_number()

    def _refuse_part(self, *_: Any) -> None:
        self._refuse(
            f"items of the PipelineSequential leave tensors there that are of one of cp={self._cp} "
            "parts of the sequences, and that a loss may learn from; nearest valid: items that "
            "take and return a tuple (x, loss of each position [b, s]), x.detach() for what no "
            "loss uses, or cp=1"
        )

    def _refuse(self, reason: str) -> None:
        new = (place for place, tensor in self._found() if sequence_number(tensor) >= self._began)
        place = next(new, None)
        if place is not None:
            raise ConfigError(f"{place}: {reason}")

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors with a graph in attributes of modules and in globals, by name."""
        seen = set[int]()
        with weights_in_parts():  # without those of other stages
            named = list(self._module.named_modules())
        for path, child in named:
            known = not_the_users(child)
            for name, content in vars(child).items():
                if type(content) in _PLAIN or name in known:
                    continue
                for tensor in () if _may_stay(child, name) else _tensors(content, seen):
                    yield f"self.{dotted(path, name)}", tensor
        for scope in self._globals:
            for name, content in tuple(scope.items()):
                if isinstance(content, Tensor | list | dict | set):
                    for tensor in _tensors(content, seen, depth=2):
                        yield name, tensor


def _may_stay(module: nn.Module, name: str) -> bool:
    """Whether torch makes a weight anew in each forward, or `auxiliary_loss` knows of the tensor.

    The former are those of ``weight_norm``, ``spectral_norm`` and pruning. The latter has losses
    that are right under cp, and is refused under pp.
    """
    if isinstance(module, Router):
        return name == "kept_losses"
    return any(of.startswith(f"{name}_") for of in module._parameters)


def _tensors(content: Any, seen: set[int], depth: int = 4) -> Iterator[Tensor]:
    """Tensors in a value, in containers and in plain objects, that take part in a backward.

    Args:
        content: any value.
        seen: objects that were looked at, to which others are added.
        depth: of containers in it.
    """
    if isinstance(content, Tensor):
        if content.grad_fn is not None:
            yield content
    elif depth and id(content) not in seen:
        seen.add(id(content))
        items = _inside(content)
        if not _PLAIN.issuperset(map(type, items)):
            for item in items:
                yield from _tensors(item, seen, depth - 1)


def _inside(content: Any) -> Sequence[Any]:
    """What a container or a plain object holds; of a list the part that forwards add to."""
    if isinstance(content, dict):
        return tuple(content.values())
    if isinstance(content, list):
        return content[-_NEWEST:]
    if isinstance(content, tuple | set | deque):
        return tuple(content)
    if callable(content) or isinstance(content, nn.Module) or not is_open(content):
        return ()
    return tuple(getattr(content, "__dict__", {}).values())
