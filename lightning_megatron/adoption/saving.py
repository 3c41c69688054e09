"""`save_pretrained` of models of transformers under any layout.

No rank holds the whole model. So saving is collective: the strategy gives every model of
transformers a function that gathers its whole weights on the first rank (`SaveTogether`), which
then writes the directory as one process would, while the others wait for the outcome.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_megatron.adoption.classes import CopiedWhole, become
from lightning_megatron.adoption.huggingface import is_huggingface
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.memory import own_weights

SaveTogether: TypeAlias = Callable[[str, Callable[[Mapping[str, Any]], None]], None]
"""Function that gathers the whole ``state_dict``, and calls another one with it on the first rank.

Its first argument is the beginning of error messages."""


class SavedWhole(CopiedWhole):
    """Class in front of a model of transformers, whose ``save_pretrained`` saves the whole."""

    surrounds = ("save_pretrained",)

    @own_weights
    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Save the whole model as one process would; under a strategy, on all ranks together."""
        together: SaveTogether | None = self.__dict__.get("_gathered")
        save: Any = super().save_pretrained  # type: ignore[misc]  # of transformers
        if together is not None and kwargs.get("distributed_checkpoint"):
            raise ConfigError(
                "save_pretrained(distributed_checkpoint=True): transformers would take this "
                "rank's parts for the whole; nearest valid: trainer.save_checkpoint, whose "
                "directories hold parts of all ranks, or distributed_checkpoint=False"
            )
        if _state_of(args, kwargs) is not None:
            save(save_directory, *args, **kwargs)
        elif together is None:
            if any(isinstance(p, StoredTensor) for p in self.parameters()):
                kwargs["state_dict"] = _read(self)
            save(save_directory, *args, **kwargs)
        else:

            def write(state: Mapping[str, Any]) -> None:
                whole, options = as_one_process(self, state), dict(kwargs)
                given = list(args)
                if len(given) > 1:
                    given[1] = whole
                else:
                    options["state_dict"] = whole
                with _whole_count(self):
                    save(save_directory, *given, **options)

            together(f"save_pretrained({os.fspath(save_directory)!r})", write)


def save_whole(module: nn.Module) -> list[SavedWhole]:
    """Have all models of transformers in ``module``, itself included, save the whole."""
    return [become(child, SavedWhole) for child in module.modules() if is_huggingface(child)]


def gather_with(model: SavedWhole, together: SaveTogether | None) -> None:
    """Give a model what all ranks do together, or with None take it away."""
    if together is None:
        model.__dict__.pop("_gathered", None)
    else:
        model.__dict__["_gathered"] = together


def note_whole(model: Any) -> None:
    """Note the parameters of the model, their order and ties, before it is divided."""
    first: dict[int, str] = {}
    values = model.state_dict(keep_vars=True)
    model.__dict__["_whole_parameters"] = model.num_parameters()
    model.__dict__["_whole_names"] = {n: first.setdefault(id(v), n) for n, v in values.items()}


def as_one_process(model: SavedWhole, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` in the order of the whole model, in which files are filled, and tied."""
    first: dict[str, str] = model.__dict__["_whole_names"]
    names = dict.fromkeys([*(name for name in first if name in state), *state])
    return {name: state.get(first.get(name, name), state[name]) for name in names}


@contextmanager
def _whole_count(model: nn.Module) -> Iterator[None]:
    """Within the block the model counts the parameters of all ranks: the index tells them."""
    model.__dict__["num_parameters"] = lambda *_, **__: model.__dict__["_whole_parameters"]
    try:
        yield
    finally:
        del model.__dict__["num_parameters"]


def _state_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The third argument of ``save_pretrained`` after the directory."""
    return args[1] if len(args) > 1 else kwargs.get("state_dict")


def _read(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict``, with the values of what is still in files."""
    read: dict[int, Tensor] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            if isinstance(value, Tensor):
                if id(value) not in read:
                    read[id(value)] = (
                        value.read() if isinstance(value, StoredTensor) else value.detach()
                    )
                state[name] = read[id(value)]
    return state
