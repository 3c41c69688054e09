"""Bytes and calls of every axis are those of the algorithm; waiting is what it is."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CommunicationMonitor, PipelineConfig, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.strategy.small import GLOBAL_BATCH, WIDTH, Small, dp_of, loader, make_trainer

MIB = 1 << 20
PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH)


class Parallel(pl.LightningModule):
    """The second rank comes later than the first; most of all in the middle of a window."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.up, self.down = ColumnParallelLinear(8, 16), RowParallelLinear(16, 8)

    def be_late(self, batch_idx: int) -> None:
        waits = self.folder / f"waits{batch_idx}"
        if self.trainer.global_rank == 0:
            waits.touch()
            return
        while not waits.exists():
            time.sleep(0.001)
        time.sleep(self.lateness(batch_idx))

    def lateness(self, batch_idx: int) -> float:
        return 0.15 if batch_idx == 2 else 0.03

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.be_late(batch_idx)
        x = batch.requires_grad_()
        return self.down(self.up(x)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def monitored(layout: Mapping[str, Any], devices: int) -> dict[str, float]:
    monitor = CommunicationMonitor(every=2)
    trainer = make_trainer(layout, devices, callbacks=[monitor])
    trainer.fit(Small(), loader(dp=dp_of(devices, layout)))
    assert {k: pytest.approx(float(v)) for k, v in monitor.latest.items()} == {
        k: v for k, v in trainer.callback_metrics.items() if k in monitor.latest
    }
    return monitor.latest


def of_node(layout: Mapping[str, Any], devices: int) -> dict[str, float]:
    """As `monitored`, where pairs of ranks take each other for a node."""
    host = f"node{int(os.environ['RANK']) // 2}"
    with mock.patch("socket.gethostname", return_value=host):
        return monitored(layout, devices)


def monitored_parallel(sequence_parallel: bool, folder: str) -> dict[str, float]:
    monitor = CommunicationMonitor(every=2)
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    trainer = make_trainer(layout, 2, callbacks=[monitor])
    trainer.fit(
        Parallel(folder),
        DataLoader(torch.randn(32, 4, 8, dtype=torch.float64), batch_size=8),
    )
    return monitor.latest


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_data_parallel_ranks_send_each_gradient_once_and_gather_shards(
    pool: WorkerPool, zero: int
) -> None:
    first, second = pool.run(2, monitored, {"zero": zero}, 2)
    assert first == second
    whole = PARAMETERS * 8 / MIB
    # An all-reduce sends twice (p-1)/p of the whole, with a flag for every parameter; a gather or a
    # reduce-scatter once. ZeRO 3 gathers again for the backward, but for the unit that runs last.
    if zero == 0:
        expected, calls = 2 * (whole + 8 * 8 / MIB) / 2, 1
        assert (first["comm/mib/dp"], first["comm/calls/dp"]) == pytest.approx((expected, calls))
    elif zero == 1:
        # What a rank does not own goes out as gradients, what it owns as weights: once the whole.
        assert first["comm/mib/dp"] == pytest.approx(whole + 8 * 8 / MIB)
    else:
        assert 2 * whole / 2 < first["comm/mib/dp"] <= 3 * whole / 2
    assert 0 < first["time/comm_exposed_s/dp"] <= first["time/comm_s/dp"]
    assert {name.rpartition("/")[2] for name in first} == {"dp"}


def test_stages_send_activations_and_their_gradients(pool: WorkerPool) -> None:
    found = pool.run(2, monitored, {"pp": 2, "num_microbatches": 4}, 2)[0]
    # Each rank sends four messages: activations up, gradients down.
    assert found["comm/calls/pp"] == 4
    payload = GLOBAL_BATCH * WIDTH * 8
    assert payload <= found["comm/mib/pp"] * MIB <= payload + 4 * 4096
    assert 0 < found["time/comm_exposed_s/pp"] <= found["time/comm_s/pp"]


class Validated(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def validated(layout: Mapping[str, Any], every_n_batches: int) -> dict[str, float]:
    """Return what is logged of a run that validates after so many batches; never where it is 0."""
    monitor = CommunicationMonitor(every=2)
    trainer = make_trainer(
        layout,
        2,
        callbacks=[monitor],
        limit_val_batches=every_n_batches and 2,
        val_check_interval=every_n_batches or None,
    )
    trainer.fit(Validated(), loader(), loader())
    return monitor.latest


def test_what_validation_sends_belongs_to_no_batch(pool: WorkerPool) -> None:
    layout = {"pp": 2, "num_microbatches": 4}
    with_it, without = (pool.run(2, validated, layout, every)[0] for every in (1, 0))
    assert with_it["comm/calls/pp"] == without["comm/calls/pp"]
    # Shapes are sent again after a validation.
    assert with_it["comm/mib/pp"] == pytest.approx(without["comm/mib/pp"], rel=0.1)
    assert with_it["time/comm_exposed_s/pp"] <= with_it["time/comm_s/pp"]


WHOLE = PARAMETERS * 8
"""Bytes of all weights."""
FLAGS = 4 * 2 * 8
"""Of one flag for every parameter, with each copy or part of the gradients."""
MESSAGES = GLOBAL_BATCH * WIDTH * 8
"""Of the activations of a batch; each message has a header of 64 bytes."""


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Two nodes of two ranks: of a ring one rank of each node sends to the other node.
        ({"zero": 0}, {"dp": (4 * 1.5 * (WHOLE + FLAGS), 2 * 1.5 * (WHOLE + FLAGS))}),
        # A reduce-scatter and a gather around the same ring.
        ({"zero": 1}, {"dp": (4 * (1.5 * WHOLE + 3 * FLAGS), 2 * (1.5 * WHOLE + 3 * FLAGS))}),
        # Shards are summed over the copies, each of which is on a node of its own.
        (
            {"zero": ShardingConfig(stage=1, dp_replicate=2)},
            {"dp": (4 * (1.5 * WHOLE + 2 * FLAGS), 4 * (WHOLE / 2 + FLAGS))},
        ),
        # Ranks 0 and 1 are the last stages of two pipelines.
        (
            {"pp": 2, "num_microbatches": 2},
            {
                "pp": (2 * MESSAGES + 8 * 64, 2 * MESSAGES + 8 * 64),
                "dp": (2 * WHOLE + 2 * FLAGS, 0),
            },
        ),
        (
            {"pp": 4, "num_microbatches": 2},
            {"pp": (6 * MESSAGES + 12 * 64, 2 * MESSAGES + 4 * 64)},
        ),
    ],
)
def test_bytes_between_nodes_are_those_of_the_formula(
    pool: WorkerPool, layout: dict[str, Any], expected: dict[str, tuple[float, float]]
) -> None:
    """In all, and between nodes."""
    found = pool.run(4, of_node, layout, 4)[0]
    for kind, total_and_between in expected.items():
        inter, intra = (4 * found[f"comm/{x}_node_mib/{kind}"] * MIB for x in ("inter", "intra"))
        assert inter + intra == pytest.approx(4 * found[f"comm/mib/{kind}"] * MIB)
        assert (inter + intra, inter) == pytest.approx(total_and_between, abs=8)


class Wide(Small):
    """Activations that are worth taking apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(layers=[nn.Linear(64, 64), nn.Linear(64, 64)])


def wide_job(scatter_gather: Any) -> dict[str, float]:
    monitor = CommunicationMonitor(every=2)
    pp = PipelineConfig(degree=2, scatter_gather=scatter_gather)
    layout = {"pp": pp, "tp": 2, "num_microbatches": 2}
    host = f"node{int(os.environ['RANK']) // 2}"
    with mock.patch("socket.gethostname", return_value=host):
        data = TensorDataset(*(torch.randn(256, 64, dtype=torch.float64) for _ in range(2)))
        make_trainer(layout, 4, callbacks=[monitor]).fit(Wide(), DataLoader(data, batch_size=128))
    return monitor.latest


def test_activations_go_from_node_to_node_once(pool: WorkerPool) -> None:
    message = 64 * 64 * 8
    header, sums = 64, 8 * 8
    for choice, size in (("auto", message / 2 + sums), (False, message)):
        found = pool.run(4, wide_job, choice)[0]
        assert found["comm/calls/pp"] == 2
        assert found["comm/inter_node_mib/pp"] * MIB == pytest.approx(2 * (size + header), abs=2)
        assert found["comm/intra_node_mib/pp"] == 0
        gathered = found.get("comm/intra_node_mib/tp", 0.0) * MIB
        assert gathered == (message if choice else 0)


LATE_S = 0.8


class Late(Parallel):
    """The second rank is so late that nothing else matters; times its forwards and backwards."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.seconds: list[float] = []
        self.began = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.be_late(batch_idx)
        self.began = time.monotonic()
        return self.down(self.up(batch.requires_grad_())).square().mean()

    def lateness(self, batch_idx: int) -> float:
        return LATE_S

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.seconds.append(time.monotonic() - self.began)


def timed_outside(folder: str) -> tuple[dict[str, float], list[float]]:
    monitor, module = CommunicationMonitor(every=3), Late(folder)
    trainer = make_trainer({"tp": 2}, 2, callbacks=[monitor])
    trainer.fit(module, DataLoader(torch.randn(24, 4, 8, dtype=torch.float64), batch_size=8))
    return monitor.latest, module.seconds


def test_waiting_agrees_with_an_outside_clock(pool: WorkerPool, tmp_path: Path) -> None:
    (found, first), (_, second) = pool.run(2, timed_outside, str(tmp_path))
    # The first batch is not counted; in those after it, one rank of two waits in the forward, from
    # when it is there itself until the other one is.
    exposed = [(a + b) / 2 for a, b in zip(first, second, strict=True)][1:]
    assert LATE_S / 2 * 0.8 < found["time/comm_exposed_s/tp"] < sum(exposed) / 2 * 1.01
    assert found["time/comm_exposed_s/tp"] <= found["time/comm_s/tp"] < max(exposed) * 1.01


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_sum_activations_and_wait_for_the_late_one(
    pool: WorkerPool, sequence_parallel: bool, tmp_path: Path
) -> None:
    found = pool.run(2, monitored_parallel, sequence_parallel, str(tmp_path))[0]
    if not sequence_parallel:  # one sum forward, one backward
        assert found["comm/calls/tp"] == 2
        assert found["comm/mib/tp"] * MIB == pytest.approx(2 * 8 * 4 * 8 * 8)
    else:  # gather and reduce-scatter, forward and backward; each rank's batch is a slice here
        assert found["comm/calls/tp"] == 4
        assert found["comm/mib/tp"] * MIB == pytest.approx(4 * 8 * 4 * 8 * 8)
    # The mean of one rank that waits 30 ms and one that hardly does.
    assert found["time/comm_exposed_s/tp"] > 0.01
    # Also where the last batch, whose hidden seconds are known, was the quicker one.
    assert found["time/comm_s/tp"] >= found["time/comm_exposed_s/tp"]


def test_nothing_is_logged_where_nothing_is_sent() -> None:
    monitor = CommunicationMonitor(every=1)
    make_trainer({}, callbacks=[monitor]).fit(Small(), loader())
    assert monitor.latest == {}


def test_options_and_strategy_are_checked() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        CommunicationMonitor(every=0)
    with pytest.raises(ConfigError, match="under SingleDeviceStrategy"):
        make_trainer(None, callbacks=[CommunicationMonitor()]).fit(Small(), loader())
