"""One callback switches on everything that watches a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import Monitor
from lightning_megatron.errors import ConfigError
from lightning_megatron.run_log.events import read_events
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer

EVERYWHERE = {
    "perf/tokens_per_s",
    "perf/step_time_s",
    "time/data_wait_fraction",
    "mem/peak_rss_gib",
    "optim/grad_norm",
    "optim/param_norm",
    "ft/goodput",
}


def watched(layout: Mapping[str, Any], devices: int, folder: str) -> dict[str, float]:
    monitor = Monitor(folder, every=2, noise_scale=True, alerts=["perf/step_time_s > 1000 for 2"])
    module = Small()
    trainer = make_trainer(layout, devices, callbacks=[monitor], log_every_n_steps=2)
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("devices", "layout", "more"),
    [
        (1, {}, set()),
        (2, {"pp": 2}, {"pp/bubble_fraction", "comm/mib/pp", "time/comm_exposed_s/pp"}),
        (2, {"zero": 1}, {"comm/mib/dp", "optim/gradient_signal"}),
    ],
    ids=["one process", "pp=2", "zero 1"],
)
def test_every_layout_logs_the_same_names_and_its_own(
    pool: WorkerPool, tmp_path: Path, devices: int, layout: dict[str, Any], more: set[str]
) -> None:
    by_rank = pool.run(devices, watched, layout, devices, str(tmp_path))
    for metrics in by_rank:
        assert EVERYWHERE | more <= metrics.keys()
        assert metrics.keys() == by_rank[0].keys()
    kinds = [event["kind"] for event in read_events(tmp_path, rank=devices - 1)]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("start", "end", 4)


def test_options_reach_the_members() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        Monitor(every=0)
    with pytest.raises(ConfigError, match="perf/mfu"):
        Monitor(alerts=["perf/mfu is low"])
    names = {type(member).__name__ for member in Monitor(console=False).members}
    assert "ConsoleLine" not in names
    assert "PrometheusEndpoint" not in names
