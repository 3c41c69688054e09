"""Cutting a batch into microbatches.

One Lightning batch is this data-parallel rank's share of the global batch. Its microbatches may
have different sizes: each counts with its share of the samples, so that the loss and its gradient
are those of the whole batch for any loss that is a mean over samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.graphs import tree_flatten, tree_map, tree_unflatten
from lightning_megatron.errors import ConfigError

SplitBatch = Callable[[Any, int], Sequence[Any]]
"""A module's own ``split_batch(batch, num_microbatches)``."""

DEFAULT_PER_RANK = 4
"""Microbatches per pipeline rank when the user gives neither size nor number: the bubble of 1F1B
is then at most a fifth of the step."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchRule:
    """Rule for the number of microbatches of a batch."""

    size: int | None = None
    """Samples per microbatch; the last one may be smaller."""
    number: int | None = None
    """Microbatches per batch; a batch with fewer samples gives one per sample."""
    default: int = 1
    """Number when neither is given."""

    def count(self, batch_size: int | None) -> int:
        """Number of microbatches of a batch; ``batch_size`` None: it is not known."""
        if self.size is not None:
            if batch_size is None:
                raise ConfigError(
                    f"microbatch_size={self.size}: the batch holds no tensor whose first dimension "
                    "could be the sample; nearest valid: num_microbatches=..., or define "
                    "split_batch(batch, num_microbatches) in the module"
                )
            return max(-(-batch_size // self.size), 1)
        number = self.number or self.default
        return number if batch_size is None else max(min(number, batch_size), 1)

    @property
    def single(self) -> bool:
        """Whether a batch is never cut."""
        return self.size is None and (self.number or self.default) == 1


@dataclass(frozen=True)
class Microbatches:
    """The pieces of one batch."""

    batches: tuple[Any, ...]
    """Each of the same structure as the batch."""
    weights: tuple[float, ...]
    """Share of the samples in each; they add up to 1."""
    repeated: int = 0
    """Number of filling microbatches at the end, which weigh nothing."""

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.batches)

    @property
    def counted(self) -> int:
        """Number of pieces that count."""
        return len(self.batches) - self.repeated


def batch_size_of(batch: Any) -> int | None:
    """First dimension of the first tensor that has one."""
    leaves, _ = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return None


def split(
    batch: Any, rule: MicrobatchRule, own: SplitBatch | None = None, *, at_least: int = 1
) -> Microbatches:
    """Cut ``batch`` on the first dimension of its tensors.

    Args:
        batch: nested tuples, lists and dicts; lists of strings and numbers as long as the batch are
            cut like tensors, scalars go to every microbatch.
        rule: how many pieces.
        own: the module's own way to cut.
        at_least: number of pieces, where the rule gives fewer. If there are not that many samples
            the last piece is repeated, with no weight.

    Raises:
        ConfigError: the tensors disagree about the number of samples, or the batch holds an object
            that cannot be cut.
    """
    size = batch_size_of(batch)
    by_rule = rule.count(size)
    count = max(by_rule, at_least if size is None else min(at_least, size))
    pieces: tuple[Any, ...]
    weights: tuple[float, ...]
    if count == 1:
        pieces, weights = (batch,), (1.0,)
    else:
        if own is not None:
            pieces = tuple(own(batch, count))
            sizes = [batch_size_of(piece) or 1 for piece in pieces]
        else:
            sizes = _sizes(size or 0, count, rule.size if count == by_rule else None)
            pieces = _cut(batch, sizes)
        total = sum(sizes)
        weights = tuple(s / total if total else 1 / count for s in sizes)
    missing = max(at_least - len(pieces), 0)
    return Microbatches(pieces + pieces[-1:] * missing, weights + (0.0,) * missing, missing)


def _sizes(batch_size: int, count: int, size: int | None) -> list[int]:
    if size is not None:
        return [min(size, batch_size - start) for start in range(0, batch_size, size)]
    small, larger = divmod(batch_size, count)
    return [small + (index < larger) for index in range(count)]


def _cut(batch: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
    total = sum(sizes)
    leaves, spec = tree_flatten(batch, is_leaf=lambda node: _is_column(node, total))
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            if leaf.shape[0] != total:
                raise _cannot_cut(f"a tensor of shape {tuple(leaf.shape)} beside {total} samples")
            columns.append(torch.split(leaf, list(sizes)))
        elif isinstance(leaf, list):
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            columns.append([leaf[s : s + n] for s, n in zip(starts, sizes, strict=True)])
        elif leaf is None or isinstance(leaf, Tensor | str | bytes | int | float | bool):
            columns.append([leaf] * len(sizes))
        else:
            raise _cannot_cut(f"a {type(leaf).__name__}")
    return tuple(tree_unflatten(list(row), spec) for row in zip(*columns, strict=True))


def _is_column(node: Any, total: int) -> bool:
    """Whether ``node`` is a list with one plain value per sample, as collating makes it."""
    return is_plain_list(node) and len(node) == total


def is_plain_list(node: Any) -> bool:
    """Whether ``node`` is a list of strings and numbers, which is cut and joined like a tensor."""
    return isinstance(node, list) and all(
        isinstance(item, str | bytes | int | float | bool) for item in node
    )


def _cannot_cut(what: str) -> ConfigError:
    return ConfigError(
        f"The batch holds {what}, which cannot be cut into microbatches; nearest valid: define "
        "split_batch(batch, num_microbatches) in the module, or num_microbatches=1"
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``sum(w * v)`` of equally shaped tensors."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def detach(output: Any) -> Any:
    """``output`` without its autograd graph."""
    if isinstance(output, Tensor):
        return output.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
