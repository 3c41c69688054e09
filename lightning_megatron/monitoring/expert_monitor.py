"""Use of experts: how unequally tokens go to them, and what is left unused or dropped.

Logs, every `every` batches, about each mixture of experts in the tokens of these batches:

* ``load_max_over_mean``: choices of the most used expert over the mean of all, 1 at best. The rank
  that holds it works so much longer than the mean where each rank holds one expert, and at every
  exchange the others wait for it; with several experts a rank it is an upper bound;
* ``dead_experts``: experts that no token chose. They learn nothing, and stay so without a balance
  loss or a bias (`RouterConfig`);
* ``dropped_fraction``: choices that an expert beyond its capacity refused, over all choices;
* ``entropy``: mean over tokens of the entropy of the router's scores, in nats: ``ln E`` where the
  router does not prefer any of ``E`` experts, 0 where it always puts everything on one.

``moe/load_max_over_mean`` and the others are of the worst layer, for the entropy the lowest;
``moe_layers/load_max_over_mean/trunk.layers.3.mlp`` are those of each. ``moe/balance_loss`` and
``moe/z_loss`` are means over sequences and layers, without their factors. No loss that
``training_step`` returns holds them.

A router counts its tokens once in a step, in training only, however often blocks are recomputed.
One small sum over all ranks brings the counts together. They are those of the whole batches, the
same under every layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.checkpoint.chunks import clean_name
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any, whole_numbers
from lightning_megatron.layers.experts.router import Router, RouterStatistics
from lightning_megatron.monitoring.rank_stats import (
    LabelledMetric,
    Values,
    number_device,
    rank_metrics_of,
)
from lightning_megatron.services import services_if_any
from lightning_megatron.whole.memory import weights_in_parts

_TOTALS = ("tokens", "dropped", "entropy", "balance_loss", "z_loss", "sequences")
_OF_LAYERS = ("load_max_over_mean", "dead_experts", "dropped_fraction", "entropy")
_ON_BAR = "moe/load_max_over_mean"


@dataclass(frozen=True)
class LayerUse:
    """Use of the experts of one layer, in a window."""

    load_max_over_mean: float
    """Choices of the most used expert over the mean."""
    dead_experts: int
    """Experts without a token."""
    dropped_fraction: float
    """Choices that were dropped over all choices."""
    entropy: float
    """Mean entropy of the scores, in nats."""
    balance_loss: float
    """Mean over sequences, without its factor."""
    z_loss: float
    """Mean over sequences, without its factor."""


def use_of(counts: list[float], totals: Mapping[str, float]) -> LayerUse | None:
    """Use of a layer's experts; None if no token was routed.

    Args:
        counts: choices of each expert.
        totals: sums of `RouterStatistics`.

    >>> use_of([6, 2, 0, 0], {"tokens": 5, "dropped": 2, "sequences": 1}).load_max_over_mean
    3.0
    """
    chosen = sum(counts)
    tokens, sequences = totals.get("tokens", 0.0), totals.get("sequences", 0.0)
    if not chosen or not tokens:
        return None
    dropped = totals.get("dropped", 0.0)
    return LayerUse(
        max(counts) * len(counts) / chosen,
        sum(not count for count in counts),
        dropped / (chosen + dropped),
        totals.get("entropy", 0.0) / tokens,
        totals.get("balance_loss", 0.0) / sequences if sequences else 0.0,
        totals.get("z_loss", 0.0) / sequences if sequences else 0.0,
    )


class ExpertMonitor(pl.Callback):
    """Logs ``moe/...`` and ``moe_layers/...``; nothing without a `MixtureOfExperts`.

    Works under any strategy.

    Args:
        every: batches between two values.

    Attributes:
        latest: use of the experts of each layer in the last window, by the layer's name.

    Raises:
        ConfigError: ``every`` is smaller than one batch.
    """

    def __init__(self, every: int = 50) -> None:
        raise_if_any(whole_numbers(1, every=every))
        self._every = every
        self._batches = 0
        self._experts: dict[str, int] = {}
        self._before: dict[str, RouterStatistics] = {}
        self.latest: dict[str, LayerUse] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0
        found = {name: router.num_experts for name, router in _routers(pl_module)}
        # What is there is of a fit before this one.
        self._before = {name: router.statistics.now() for name, router in _routers(pl_module)}
        services = services_if_any(trainer)
        if services is not None and services.topology.pp.size > 1:
            by_stage = Peers.over(services.topology.pp).all_gather(found)
            found = {name: number for stage in by_stage for name, number in stage.items()}
        self._experts = dict(sorted(found.items(), key=lambda item: _by_number(item[0])))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        if not self._experts or self._batches % self._every:
            return
        self.latest = self._window(pl_module, number_device(trainer))
        if not self.latest:
            return
        for name in _OF_LAYERS:
            values: Values = {
                (layer,): float(getattr(use, name)) for layer, use in self.latest.items()
            }
            rank_metrics_of(trainer).put_metric(LabelledMetric(f"moe/{name}", ("layer",), values))
        worst = _worst(list(self.latest.values()))
        pl_module.log(_ON_BAR, worst.pop(_ON_BAR), prog_bar=True, batch_size=1)
        pl_module.log_dict({**worst, **_by_layer(self.latest)}, batch_size=1)

    def _window(self, pl_module: pl.LightningModule, device: torch.device) -> dict[str, LayerUse]:
        """Use of all layers since the last window; collective."""
        routers = dict(_routers(pl_module))
        rows = [self._row(name, routers, device) for name in self._experts]
        sums = torch.cat(rows)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        numbers: list[float] = sums.tolist()
        found, place = {}, 0
        for name, experts in self._experts.items():
            end = place + experts
            totals = dict(zip(_TOTALS, numbers[end : end + len(_TOTALS)], strict=True))
            use = use_of(numbers[place:end], totals)
            if use is not None:
                found[name] = use
            place = end + len(_TOTALS)
        return found

    def _row(self, name: str, routers: Mapping[str, Router], device: torch.device) -> Tensor:
        """Sums of a window, ``[E + 6]``; zeros where another stage has it, or no token came."""
        experts = self._experts[name]
        row = torch.zeros(experts + len(_TOTALS), dtype=torch.float64, device=device)
        if name not in routers:
            return row
        now = routers[name].statistics.now()
        window = now.since(self._before.get(name, RouterStatistics()))
        self._before[name] = now
        if window.counts_e is not None:
            row[:experts] = window.counts_e.to(row)
        for place, total in enumerate(_TOTALS, experts):
            if total in window.totals:
                row[place] = window.totals[total].to(row)
        return row


def _routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """Routers of this rank, by the names of their mixtures."""
    with weights_in_parts():  # without those of other stages
        found = [(n, part) for n, part in module.named_modules() if isinstance(part, Router)]
    for name, part in found:
        yield clean_name(name).removesuffix("router").rstrip("."), part


def _worst(layers: list[LayerUse]) -> dict[str, float]:
    """Values of the worst layer, and means of the losses."""
    found = {f"moe/{name}": float(max(getattr(x, name) for x in layers)) for name in _OF_LAYERS}
    found["moe/entropy"] = min(x.entropy for x in layers)
    for name in ("balance_loss", "z_loss"):
        found[f"moe/{name}"] = math.fsum(getattr(x, name) for x in layers) / len(layers)
    return found


def _by_layer(layers: Mapping[str, LayerUse]) -> dict[str, float]:
    return {
        f"moe_layers/{name}/{layer}": float(getattr(use, name))
        for layer, use in layers.items()
        for name in _OF_LAYERS
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    """Key that sorts ``layers.10`` behind ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
