"""Every metric that is promised is logged, and served with the ranks told apart."""

import time
import urllib.request
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import (
    FaultTolerance,
    HangDetector,
    Monitor,
    NumberGuard,
    PrometheusEndpoint,
    SlowRankDetector,
)
from lightning_megatron.testing import WorkerPool
from tests.monitoring.test_prometheus import samples as parsed
from tests.strategy.small import Small, loader, make_trainer, samples

LOGGED = [
    "perf/tokens_per_s",
    "perf/tokens_per_s_per_device",
    "perf/samples_per_s",
    "perf/step_time_s",
    "perf/tflops_per_device",
    "perf/mfu",
    "perf/hfu",
    "mem/rss_gib",
    "mem/peak_rss_gib",
    "mem/worst_rank",
    "time/data_wait_s",
    "time/data_wait_fraction",
    "data/wait_s",
    "time/comm_s/pp",
    "time/comm_exposed_s/pp",
    "comm/calls/pp",
    "comm/mib/pp",
    "time/comm_s/dp",
    "time/comm_exposed_s/dp",
    "comm/calls/dp",
    "comm/mib/dp",
    "pp/bubble_fraction",
    "pp/bubble_fraction_ideal",
    "pp/imbalance",
    "optim/grad_norm",
    "optim/param_norm",
    "optim/lr",
    "optim/skipped_steps",
    "optim/rollbacks",
    "loss/avg",
    "loss/max",
    "loss/max_rank",
    "straggler/score_min",
    "straggler/score_median",
    "straggler/score_max",
    "straggler/worst_1",
    "straggler/worst_1_rank",
    "straggler/worst_2",
    "straggler/worst_2_rank",
    "straggler/worst_3",
    "straggler/worst_3_rank",
    "ckpt/stall_s",
    "ckpt/duration_s",
    "ckpt/bytes",
    "ckpt/gb_per_s",
    "ckpt/saves_total",
    "ckpt/failures_total",
    "ckpt/age_s",
    "ckpt/last_good_step",
    "ft/goodput",
    "ft/restarts_total",
    "ft/steps_lost_total",
    "ft/hangs_total",
    "ft/rollbacks_total",
    "dist/heartbeat_age_s_min",
    "dist/heartbeat_age_s_mean",
    "dist/heartbeat_age_s_max",
    "dist/heartbeat_age_s_worst_rank",
    "dist/collective_seq_min",
    "dist/collective_seq_mean",
    "dist/collective_seq_max",
    "dist/collective_seq_worst_rank",
]
"""On CPUs in a run that nothing happens to. A loss scale, memory of devices, detection and recovery
of a restart are there where these are."""

OF_RANKS = {
    "mem_rss_bytes": ("rank",),
    "mem_peak_rss_bytes": ("rank",),
    "loss_of": ("rank",),
    "straggler_score": ("rank", "section"),
    "dist_heartbeat_age_seconds": ("rank",),
    "dist_section": ("rank", "section"),
    "dist_section_age_seconds": ("rank",),
    "dist_collective_seq": ("group", "rank"),
}


class Fetching(Small):
    """Looks at the endpoint from inside the last step."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.endpoint: PrometheusEndpoint = monitor.member(PrometheusEndpoint)
        self.page = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.03)  # heartbeats tell of collectives a few times a second
        if batch_idx == 9 and self.endpoint.url:
            deadline = time.monotonic() + 30
            while (
                len(_ranks(self._look(), "dist_collective_seq")) < 4 and time.monotonic() < deadline
            ):
                time.sleep(0.6)  # more than two requests a second are turned away
        return super().training_step(batch, batch_idx)

    def _look(self) -> str:
        with urllib.request.urlopen(self.endpoint.url + "/metrics", timeout=10) as answer:
            self.page = answer.read().decode()
        return self.page


def _ranks(page: str, name: str) -> set[str]:
    """Ranks that a metric is told of."""
    found = [key for key in parsed(page) if key.startswith(f"lightning_megatron_{name}{{")]
    return {key.partition('rank="')[2].partition('"')[0] for key in found}


def watched(folder: str) -> tuple[set[str], str]:
    guard = FaultTolerance(
        folder,
        hang=HangDetector(check_s=0.1, run_dir=folder),
        slow_rank=SlowRankDetector(window=3),
        numbers=NumberGuard("skip"),
    )
    monitor = Monitor(folder, every=2, peak_tflops=1, prometheus=0)
    saving = ModelCheckpoint(Path(folder, "saved"), every_n_train_steps=2)
    trainer = make_trainer(
        {"pp": 2, "zero": 1},
        4,
        callbacks=[guard, monitor, saving],
        enable_checkpointing=True,
        log_every_n_steps=2,
    )
    module = Fetching(monitor)
    trainer.fit(module, loader(samples(80), dp=2))
    return set(trainer.callback_metrics), module.page


def test_all_names_are_there(pool: WorkerPool, tmp_path: Path) -> None:
    by_rank = pool.run(4, watched, str(tmp_path))
    for names, _ in by_rank:
        assert not set(LOGGED) - names
    page = parsed(by_rank[0][1])
    for name, labels in OF_RANKS.items():
        found = [key for key in page if key.startswith(f"lightning_megatron_{name}{{")]
        assert _ranks(by_rank[0][1], name) == {"0", "1", "2", "3"}, name
        assert all(f'{label}="' in key for key in found for label in labels)
    current = [k for k, v in page.items() if "_dist_section{" in k and v == 1]
    assert 'lightning_megatron_dist_section{rank="0",section="forward"}' in current
    assert len(current) == 4  # each rank is in one section
