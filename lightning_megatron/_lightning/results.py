"""Results that ``self.log`` collects, the metrics in them, and loggers.

Metrics are of torchmetrics, which Lightning builds its own results on: of its private names are
used `_forward_cache`, `_update_count`, `_computed` and `_defaults` of ``Metric`` (1.0 to 1.9).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

# Of the module's `log`


@contextmanager
def replaced_log(module: LightningModule, ours: Callable[..., None]) -> Iterator[None]:
    """Within the block, ``module.log`` is ``ours``.

    Replaced: the attribute ``log`` of this instance. Lightning keeps the last call of a batch, and
    a step on microbatches calls it several times. ``log_dict`` calls it, too. Unnecessary when the
    Trainer lets a strategy receive what is logged.
    """
    before = vars(module).get("log")
    vars(module)["log"] = ours
    try:
        yield
    finally:
        vars(module).pop("log", None)
        if before is not None:
            vars(module)["log"] = before


# Of what it collects


def training_sums(trainer: Trainer) -> dict[str, Metric]:
    """Metrics that hold the sums over the epoch of the tensors that are logged in training, by key.

    Private: `_results` of the epoch's loop, a `_ResultCollection` of `_ResultMetric`; of these
    ``is_tensor`` and ``meta.on_epoch``. Needed to undo what a batch has logged that is left out.
    """
    results = trainer.fit_loop.epoch_loop._results
    return {key: m for key, m in results.items() if m.is_tensor and m.meta.on_epoch}


# Of metrics

EVERYBODY: Literal["everybody"] = "everybody"
"""All processes, in the place of a process group."""
AmongRanks: TypeAlias = "dist.ProcessGroup | Literal['everybody'] | None"
"""Ranks among which metrics are synchronised; None for no other rank."""
_SYNC = Metric.sync


def synchronize_metrics(among: Callable[[Metric], AmongRanks] | None) -> None:
    """Have metrics without a ``process_group`` synchronise among these ranks.

    Replaced: `torchmetrics.Metric.sync`, where a metric that has no group takes the world. A metric
    may be made anywhere: by a callback, in a hook, in an object of the user's. Unnecessary when
    torchmetrics lets a process set its default group.

    Args:
        among: gives the ranks of a metric when it is synchronised; None for torchmetrics' own way.
    """

    @wraps(_SYNC)
    def sync(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        group = process_group or metric.process_group
        if group is None and among is not None:
            group = among(metric)
            if group is None:
                return
        given = None if group == EVERYBODY else group
        _SYNC(metric, dist_sync_fn, given, should_sync, distributed_available)

    kind: Any = Metric
    kind.sync = _SYNC if among is None else sync


def initial_states(metric: Metric) -> dict[str, Any]:
    """The values of a metric's states before any update, by name.

    Private: `torchmetrics.Metric._defaults`.
    """
    return metric._defaults


def value_on_batch(metric: Metric) -> Any:
    """Value of a metric on its latest batch; None where it was only updated.

    Private: `torchmetrics.Metric._forward_cache`, which Lightning logs for ``on_step``.
    """
    return metric._forward_cache


def set_value_on_batch(metric: Metric, value: Tensor | None) -> None:
    """Set the value of a metric on its latest batch, for Lightning to log."""
    cached: Any = value
    metric._forward_cache = cached


def count_update(metric: Metric) -> None:
    """Count an update of a metric.

    Private: `torchmetrics.Metric._update_count`; the public ``update_count`` cannot be set.
    """
    metric._update_count += 1


def count_first_update(metric: Metric) -> None:
    """Count an update of a metric that has seen none; without one, ``compute`` warns."""
    metric._update_count = max(metric._update_count, 1)


UPDATE_COUNT = "_update_count"
"""Attribute in which a metric counts its updates."""


def forget_computed(metric: Metric) -> None:
    """Have a metric compute its value again, after its states were changed.

    Private: `torchmetrics.Metric._computed`.
    """
    metric._computed = None


# Of loggers


def uploads_checkpoints(logger: Any) -> bool:
    """Whether a logger was asked to upload checkpoints.

    Private: `_log_model` of WandbLogger, MLFlowLogger and LitLogger, `_log_model_checkpoints` of
    NeptuneLogger. Needed to say that they upload files only.
    """
    return any(getattr(logger, f"_log_model{end}", False) for end in ("", "_checkpoints"))
