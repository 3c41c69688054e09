"""Models and batches whose sequences are split over tp and cp."""

import functools
import math
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.layers import linear_functions, own_part, whole
from lightning_megatron.pipeline.timing import saved_bytes
from tests.adoption import harness
from tests.adoption.habits import HABITS, Habit
from tests.adoption.harness import Training

LENGTH = 12


job, reference = harness.job, harness.reference


def name_of_cache() -> str:
    """Name by which the forward of a model takes a cache: since transformers 5.24 another."""
    names = signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class _Shapes(TorchDispatchMode):
    """Notes whether a tensor ``[..., size]`` of at least so many rows is made."""

    def __init__(self, size: int, rows: int) -> None:
        super().__init__()
        self.size, self.rows, self.found = size, rows, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == self.size:
                self.found |= x.numel() >= self.size * self.rows
        return out


class Watched(Habit):
    """Notes which rows the norms of blocks see, and whether whole logits are made."""

    reads: bool = False

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        rows: set[int] = set()
        norm = self.lm.model.layers[0].input_layernorm
        own = type(norm).forward

        def forward(module: Any, x: Tensor) -> Tensor:
            rows.add(own_part(x).shape[1])
            return own(module, x)

        norm.forward = functools.partial(forward, norm)
        with _Shapes(64, 4 * LENGTH) as shapes:
            out = self.lm(**batch)
            if self.reads:
                whole(out.logits)
        del norm.forward
        self.notes += [*rows, shapes.found]
        return out.loss


class Reads(Watched):
    """Reads the logits."""

    reads = True


class Cached(Habit):
    """Asks for a cache, whose length is noted."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.lm(**batch, use_cache=True)
        self.notes.append(out.past_key_values.get_seq_length())
        return out.loss


class Given(Habit):
    """Gives a cache, whose length is noted."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        cache = DynamicCache()
        out = self.lm(**batch, **{name_of_cache(): cache})
        self.notes.append(cache.get_seq_length())
        return out.loss


class Attentions(Habit):
    """Asks for weights of attention."""

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        return self.lm(**batch, output_attentions=True).loss


class InnerHook(Habit):
    """A hook on what is inside of a block."""

    def __init__(self, adopted: bool, copies: int) -> None:
        super().__init__(adopted, copies)
        self.lm.model.layers[1].mlp.register_forward_hook(lambda *_: None)


class Counts(Habit):
    """A layer that counts positions itself."""

    def built(self, adopted: bool) -> Any:
        model = super().built(adopted)
        mlp = model.model.layers[1].mlp
        own = mlp.forward
        mlp.forward = lambda x: own(x) * torch.arange(x.shape[1]).unsqueeze(1)
        return model


class _Choosy(nn.Module):
    """Wants more positions than a trial has."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] > 3
        return self.own(x)


class Untried(Habit):
    """A layer that cannot be tried."""

    def built(self, adopted: bool) -> Any:
        model = super().built(adopted)
        model.model.layers[1].mlp = _Choosy(model.model.layers[1].mlp)
        return model


class _Trusted(LlamaDecoderLayer):
    exchanges_context = True


class Trusted(Untried):
    """One in a block whose class says that it acts on each position by itself."""

    def built(self, adopted: bool) -> Any:
        model = super().built(adopted)
        model.model.layers[1].__class__ = _Trusted
        return model


_OWN = (Watched, Reads, Cached, Given, Attentions, InnerHook, Counts, Untried, Trusted)
OWN_HABITS = {kind.__name__: kind for kind in _OWN}


def habit_job(name: str, layout: dict[str, Any], world: int) -> Any:
    """Train what a user has written around the adopted model; returns weights and notes."""
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    module = {**HABITS, **OWN_HABITS}[name](True, world // others)
    with harness.KeepDouble():
        trainer = harness.fit(module, MegatronStrategy(**layout), world)
    weights = gather(module)
    return (weights, module.notes) if trainer.global_rank == 0 else None


@functools.cache
def habit_reference(name: str) -> Any:
    """The same in one process, with the unmodified model."""
    module = {**HABITS, **OWN_HABITS}[name](False, 1)
    with harness.KeepDouble():
        harness.fit(module, "auto", 1)
    return module.state_dict(), module.notes


def regathering_job(family: str, layout: dict[str, Any], world: int) -> Any:
    """`job` with sequences gathered again in backwards, as on GPUs; and bytes that autograd keeps.

    Returns:
        Whole weights on rank 0; and the largest number of bytes of activations that the forward of
        one step keeps, with and without.
    """
    kept = {}
    weights = None
    for again in (False, True):
        with (
            patch.object(linear_functions, "regathers", lambda _, again=again: again),
            patch.object(Training, "training_step", _counting_step),
        ):
            _COUNTED.clear()
            weights = job(family, layout, world)
            kept[again] = max(_COUNTED)
    return weights, kept[True], kept[False]


_COUNTED: list[int] = []


def _counting_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
    with saved_bytes() as count:
        try:
            loss: Tensor = self.lm(**batch).loss
        finally:  # a stage of a pipeline ends by an exception
            _COUNTED.append(count[0])
    return loss
