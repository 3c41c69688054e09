"""Bytes that ranks send in a step, and the time that they wait for them, by axis.

Every `every` batches, for each of ``tp``, ``pp``, ``cp``, ``ep`` and ``dp`` over which anything is
sent, per batch and as the mean of the ranks:

============================  ======================================================================
``comm/calls/tp``             transfers a rank starts
``comm/mib/tp``               MiB it sends (of the cheapest known way, see `topology.meter`)
``comm/intra_node_mib/tp``    of these, MiB to ranks of its own node
``comm/inter_node_mib/tp``    of these, MiB to ranks of other nodes; both only where there are
                              several nodes
``time/comm_exposed_s/tp``    seconds in which it does nothing but wait for them
``time/comm_s/tp``            seconds that the transfers take: the exposed ones, and those hidden
                              behind other work (CPU only)
============================  ======================================================================

What a node's network interface sends is the MiB between nodes times the ranks of the node, plus
some per cent for headers. Ranks are on one node where they have one host name and one kernel.
`PrometheusEndpoint` serves ``lightning_megatron_comm_inter_node_bytes_tp`` and its like.

Exposed time is what a faster network, or more overlap, could win; in a pipeline it holds the bubble
as well (`PipelineMonitor` tells how much that is). Of pp all seconds are exposed ones: waiting of
receivers, and of senders whose messages have not left. Hidden seconds are taken in the last batch
of a window only, on a GPU exposed ones as well. What validation sends is left out. One small
collective a window brings the ranks together.
"""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron._torch.devices import on_host
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.rank_stats import gather_stats, number_device
from lightning_megatron.services import services_of
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.meter import Meter

_MIB = 1 << 20


class CommunicationMonitor(pl.Callback):
    """Logs calls, bytes and seconds of communication; nothing where there is one process.

    Works under `MegatronStrategy`.

    Args:
        every: batches between two values.

    Attributes:
        latest: what was logged last.

    Raises:
        ConfigError: ``every`` is smaller than one batch, or the strategy is another.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1; nearest valid: every=1")
        self._every = every
        self._batches = 0
        self._since: dict[str, tuple[int, int, int, float]] = {}
        self._paused: dict[str, tuple[int, int, int, float]] = {}
        self.latest: dict[str, float] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._topology(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The first batch pays for what happens once (connections, for example).
        if self._batches == 1:
            self._since = {
                kind: _read(meter) for kind, meter in self._topology(trainer).meters.items()
            }
        if (self._batches + 1) % self._every == 0:
            for kind, meter in self._topology(trainer).meters.items():
                meter.settle()
                meter.hidden_s, meter.timed = 0.0, True
                if self._only_last(trainer) and kind in self._since:
                    calls, sent, leaving, _ = self._since[kind]
                    self._since[kind] = calls, sent, leaving, meter.exposed_s

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
        if self._batches % self._every or self._batches == 1:
            return
        batches = min(self._every, self._batches - 1)
        mine: dict[str, float] = {}
        for kind, meter in self._topology(trainer).meters.items():
            meter.settle()
            meter.timed = False
            calls, sent, leaving, exposed = self._since[kind]
            mine[f"comm/calls/{kind}"] = (meter.calls - calls) / batches
            mine[f"comm/mib/{kind}"] = total = (meter.bytes - sent) / batches / _MIB
            if self._topology(trainer).nodes.count > 1:
                between = (meter.inter_node_bytes - leaving) / batches / _MIB
                mine[f"comm/inter_node_mib/{kind}"] = between
                mine[f"comm/intra_node_mib/{kind}"] = total - between
            only_last = self._only_last(trainer)
            waited = (meter.exposed_s - exposed) / (1 if only_last else batches)
            mine[f"time/comm_exposed_s/{kind}"] = waited
            if not only_last:
                mine[f"time/comm_s/{kind}"] = waited + meter.hidden_s
            self._since[kind] = _read(meter)
        found = {name: s.mean for name, s in gather_stats(mine, number_device(trainer)).items()}
        used = [k for k in self._topology(trainer).meters if found[f"comm/calls/{k}"]]
        self.latest = {name: v for name, v in found.items() if name.rpartition("/")[2] in used}
        pl_module.log_dict(self.latest, batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = {
            kind: _read(meter) for kind, meter in self._topology(trainer).meters.items()
        }

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for kind, (calls, sent, leaving, exposed) in self._since.items():
            now, before = _read(self._topology(trainer).meters[kind]), self._paused[kind]
            self._since[kind] = (
                calls + now[0] - before[0],
                sent + now[1] - before[1],
                leaving + now[2] - before[2],
                exposed + now[3] - before[3],
            )

    def _topology(self, trainer: pl.Trainer) -> Topology:
        return services_of(trainer, self, "it reads the counters").topology

    @staticmethod
    def _only_last(trainer: pl.Trainer) -> bool:
        """Whether waiting is known of the last batch of a window only, and nothing else is."""
        return not on_host(trainer.strategy.root_device)


def _read(meter: Meter) -> tuple[int, int, int, float]:
    return meter.calls, meter.bytes, meter.inter_node_bytes, meter.exposed_s
