"""Balance of context parallelism: how unequal the attention of cp ranks is.

Logs, every `every` batches, ``cp/imbalance``: of the pairs of a query and a key that see each
other, those of the rank with the most over the mean of the cp ranks, 1 at best; the highest of all
data-parallel ranks. At every exchange the others wait for that rank, so that attention takes so
much longer than it had to.

Without documents it follows from the order in which ranks hold the sequence: about 1 for
``"zigzag"`` under a causal mask. With packed documents it depends on where they lie in a row:
shorter ones, or rows sorted by length, bring it down. It is counted from the ``documents`` that the
trunk is given, by arithmetic; no time is measured. One small collective brings the ranks together.

The time of attention goes with the pairs of a query and a key that see each other. Under a causal
mask position ``i`` sees ``i + 1``, so the zig-zag order gives all ranks equally many. With packed
documents a position sees its own document only, and a rank that holds the end of a long document
has more to do than one that holds short ones; at every exchange the others wait for it.

Legend: b batch, s sequence.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.monitoring.rank_stats import gather_stats, number_device
from lightning_megatron.services import services_if_any
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.memory import weights_in_parts

_NAME = "cp/imbalance"


class ContextMonitor(pl.Callback):
    """Logs ``cp/imbalance``; nothing without context parallelism.

    Args:
        every: batches between two values.

    Attributes:
        latest: what was logged last; None until then.

    Raises:
        ConfigError: ``every`` is smaller than one batch.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1; nearest valid: every=1")
        self._every = every
        self._batches = 0
        self._hooks: list[RemovableHandle] = []
        self._most = self._mean = 0.0
        self.latest: float | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._remove_hooks()  # of a batch that did not end
        context = _context_of(trainer)
        if context is None:
            return
        self._batches += 1
        if self._batches % self._every:
            return
        self._most = self._mean = 0.0
        for trunk in pl_module.modules():
            if isinstance(trunk, PipelineSequential):
                hook = _Counting(self, context)
                self._hooks.append(trunk.register_forward_pre_hook(hook, with_kwargs=True))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        mine = self._most / self._mean if self._mean else 1.0
        self.latest = gather_stats({_NAME: mine}, number_device(trainer))[_NAME].highest
        pl_module.log(_NAME, self.latest, batch_size=1)

    def add(self, pairs: list[int]) -> None:
        """Count the pairs of one layer in one microbatch, by cp rank."""
        self._most += max(pairs)
        self._mean += sum(pairs) / len(pairs)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Counting:
    """Counts the pairs of each call of a trunk, in those of its layers that this rank has."""

    def __init__(self, monitor: ContextMonitor, context: Context) -> None:
        self._monitor = monitor
        self._context = context

    def __call__(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        documents = kwargs.get("documents")
        whole = documents if isinstance(documents, Tensor) else next(iter(args), None)
        if not trunk.training or not isinstance(whole, Tensor) or whole.ndim < 2:
            return
        length, context = whole.shape[1], self._context
        layout = ContextLayout(length, context.cp.size, context.order, context.tp)
        known: dict[tuple[bool, int | None], list[int]] = {}
        with weights_in_parts():  # without those of other stages
            layers = [m for m in trunk.modules() if isinstance(m, ParallelLayer)]
        for layer in layers:
            if not hasattr(layer, "window"):
                continue  # only layers with attention have a window
            window: Any = layer.window
            kind = bool(getattr(layer, "causal", True)), window
            if kind not in known:
                seen = seen_by_position(
                    length,
                    causal=kind[0],
                    window=window,
                    documents=documents if isinstance(documents, Tensor) else None,
                )
                known[kind] = pairs_by_rank(seen, layout)
            self._monitor.add(known[kind])


def _context_of(trainer: pl.Trainer) -> Context | None:
    """Split of sequences by the strategy; None where none are split."""
    services = services_if_any(trainer)
    if services is None or services.topology.cp.size == 1:
        return None
    return services.topology.context


def seen_by_position(
    length: int,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Count the keys that each query sees, ``[b, s]`` (``[1, s]`` without documents).

    Args:
        length: positions of the whole sequence.
        causal: whether a position sees none behind it.
        window: number of positions that each one sees before it (and, without ``causal``, behind
            it), itself included; all when None.
        documents: numbers of packed documents, ``[b, s]``; a change begins another one.

    >>> seen_by_position(5, window=3).tolist()
    [[1, 2, 3, 3, 3]]
    >>> seen_by_position(5, documents=torch.tensor([[4, 4, 4, 0, 0]])).tolist()
    [[1, 2, 3, 1, 2]]
    """
    device = None if documents is None else documents.device
    place = torch.arange(length, device=device).unsqueeze(0)
    first, last = torch.zeros_like(place), torch.full_like(place, length - 1)
    if documents is not None:
        changes = documents[:, 1:] != documents[:, :-1]
        first = (place * F.pad(changes, (1, 0))).cummax(1).values
        ends = place.masked_fill(~F.pad(changes, (0, 1), value=True), length)
        last = ends.flip(1).cummin(1).values.flip(1)
    if causal:
        last = torch.minimum(last, place)
    if window is not None:
        first = torch.maximum(first, place - (window - 1))
        last = torch.minimum(last, place + (window - 1))
    return last - first + 1


def pairs_by_rank(seen: Tensor, layout: ContextLayout) -> list[int]:
    """Add up the pairs of each cp rank, over the samples of a batch.

    Args:
        seen: result of `seen_by_position`.
        layout: split of the sequence; its padding attends to nothing.

    >>> layout = ContextLayout(length=8, cp=2)
    >>> pairs_by_rank(seen_by_position(8), layout)
    [18, 18]
    >>> pairs_by_rank(seen_by_position(8), ContextLayout(length=8, cp=2, order="contiguous"))
    [10, 26]
    """
    by_position = F.pad(seen.sum(0), (0, layout.padded - layout.length)).tolist()
    return [
        sum(sum(by_position[c.start : c.stop]) for c in layout.chunks(rank))
        for rank in range(layout.cp)
    ]
