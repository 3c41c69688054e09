"""The dashboard, the rules and docs/monitoring.md name all metrics of a run, and no others."""

import json
import re
import time
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_megatron import (
    CheckpointConfig,
    FaultTolerance,
    Fp16Precision,
    GradientMonitor,
    HangDetector,
    LocalCheckpointConfig,
    Monitor,
    NumberGuard,
    PrometheusEndpoint,
    ReplicaCheck,
    SlowRankDetector,
)
from lightning_megatron.cli import main
from lightning_megatron.cli.dashboards import FILES
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.monitoring.prometheus import PREFIX, exposed, is_ours
from lightning_megatron.optim import PercentileClip
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.monitoring.test_prometheus import samples as parsed
from tests.strategy.small import WIDTH, Small, loader, make_trainer, samples

SHIPPED = {
    name: (files("lightning_megatron.monitoring.dashboards") / name).read_text() for name in FILES
}
PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
ELSEWHERE = {
    *("mem/peak_allocated_gib", "mem/peak_reserved_gib", "mem/peak_allocated_fraction"),
    *("mem/alloc_retries", "mem/ooms"),
    *("data/padding_fraction", "data/length_mean", "data/length_max", "data/tokens_per_batch"),
    "cp/imbalance",
    *("moe/load_max_over_mean", "moe/dead_experts", "moe/dropped_fraction", "moe/entropy"),
    *("moe/balance_loss", "moe/z_loss"),
    *(
        f"comm/{where}_node_mib/{axis}"
        for where in ("intra", "inter")
        for axis in ("tp", "cp", "ep", "dp", "pp")
    ),
    *(f"comm/{what}/{axis}" for what in ("calls", "mib") for axis in ("cp", "ep")),
    *(f"time/{what}/{axis}" for what in ("comm_s", "comm_exposed_s") for axis in ("cp", "ep")),
}
"""Metrics of GPUs, several nodes, the cp axis, experts and padding, which no run here has."""
LEFT_OUT = {
    "comm_calls_": "MiB and seconds say more",
    "straggler_worst_": "straggler_score has all ranks and sections",
    "straggler_score_max": "the lowest score is the one that matters",
    "dist_heartbeat_age_s_": "the same is there for each rank",
    "dist_collective_seq_": "the same is there for each rank",
    "mem_worst_rank": "the same is there for each rank",
    "optim_gradient_": "parts of optim_noise_scale",
    "ckpt_local_age_seconds": "a panel shows the steps that a crash would cost",
}
"""Beginnings of names that the dashboard does not show, and why."""


def names_in(text: str) -> set[str]:
    """Metrics that queries name, without what Prometheus adds to the name of a counter or info."""
    return set(re.findall(rf"\b{PREFIX}_([a-z0-9_]+)", text))


def queries() -> list[str]:
    board = json.loads(SHIPPED["grafana.json"])
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


PER_RANK = {
    "mem_rss_bytes": ("rank",),
    "mem_peak_rss_bytes": ("rank",),
    "loss_of": ("rank",),
    "straggler_score": ("rank", "section"),
    "dist_heartbeat_age_seconds": ("rank",),
    "dist_section": ("rank", "section"),
    "dist_section_age_seconds": ("rank",),
    "dist_collective_seq": ("group", "rank"),
}
"""Labels of the metrics that are served of each rank."""


class Fetching(Small):
    """Reads the page once all that it is to have has been logged."""

    def __init__(
        self, endpoint: PrometheusEndpoint, heartbeats: int = 0, fails: bool = False
    ) -> None:
        super().__init__()
        self.endpoint, self.heartbeats, self.fails, self.page = endpoint, heartbeats, fails, ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 4:
            raise ZeroDivisionError("of the first attempt")
        if not self.endpoint.url or self.trainer.global_step < 13:
            return
        until = time.monotonic() + 120
        while not self.page or len(ranks_of(self.page, "dist_collective_seq")) < self.heartbeats:
            assert time.monotonic() < until, self.page  # they tell of it a few times a second
            with urllib.request.urlopen(self.endpoint.url + "/metrics", timeout=60) as answer:
                self.page = answer.read().decode()


def keys_of(page: str, name: str) -> list[str]:
    """What the page tells under the name of a metric, with labels."""
    return [key for key in parsed(page) if key.startswith(f"{PREFIX}_{name}{{")]


def ranks_of(page: str, name: str) -> set[str]:
    """Ranks that a metric is told of."""
    return {key.partition('rank="')[2].partition('"')[0] for key in keys_of(page, name)}


class Split(Fetching):
    """Has something to send over tp."""

    def __init__(self, endpoint: PrometheusEndpoint) -> None:
        super().__init__(endpoint)
        self.net: nn.Module = nn.Sequential(
            ColumnParallelLinear(WIDTH, WIDTH), RowParallelLinear(WIDTH, WIDTH)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss([part.float() for part in batch])


def everything(folder: str, fails: bool) -> tuple[set[str], str]:
    guard = FaultTolerance(
        folder,
        hang=HangDetector(check_s=0.1, run_dir=folder),
        slow_rank=SlowRankDetector(window=3),
        numbers=NumberGuard("skip"),
        replicas=ReplicaCheck(every=2),
    )
    monitor = Monitor(folder, every=2, peak_tflops=1, noise_scale=True, prometheus=0)
    saving = ModelCheckpoint(Path(folder, "saved"), every_n_train_steps=2)
    local = LocalCheckpointConfig(every_n_steps=3, directory=str(Path(folder, "local")))
    trainer = make_trainer(
        {"pp": 2, "zero": 0, "checkpoint": CheckpointConfig(local=local)},
        4,
        callbacks=[guard, monitor, saving],
        enable_checkpointing=True,
        log_every_n_steps=2,
        max_steps=13,
        max_epochs=-1,
    )
    module = Fetching(monitor.member(PrometheusEndpoint), 4, fails)
    trainer.fit(module, loader(samples(80), dp=2), ckpt_path="auto")
    return set(trainer.callback_metrics), module.page


def scaled(folder: str) -> tuple[set[str], str]:
    endpoint = PrometheusEndpoint(0, every_n_steps=2)
    clipping = GradientMonitor(clip=PercentileClip())
    trainer = make_trainer(
        {"tp": 2},
        2,
        callbacks=[Monitor(folder, every=2), clipping, endpoint],
        precision=None,
        plugins=Fp16Precision(),
        log_every_n_steps=2,
        max_steps=13,
        max_epochs=-1,
    )
    module = Split(endpoint)
    trainer.fit(module, loader(samples(80)))
    return set(trainer.callback_metrics), module.page


Runs = list[list[tuple[set[str], str]]]
"""By run and rank: names that are logged, and the page of Prometheus."""


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Eventful runs."""
    folder = str(tmp_path_factory.mktemp("run"))
    with pytest.raises(WorkerError, match="of the first attempt"):
        pool.run(4, everything, folder, True)
    return [pool.run(4, everything, folder, False), pool.run(2, scaled, folder)]


@pytest.fixture(scope="module")
def logged(runs: Runs) -> set[str]:
    return {name for run in runs for name in run[0][0] if is_ours(name)}


@pytest.fixture(scope="module")
def served(runs: Runs) -> set[str]:
    """Names without the prefix."""
    keys = [key for run in runs for key in parsed(run[0][1])]
    return {key.partition("{")[0].removeprefix(f"{PREFIX}_") for key in keys}


def test_every_rank_logs_what_the_first_does(runs: Runs) -> None:
    for first, *others in runs:
        expected = {name for name in first[0] if is_ours(name)}
        assert [expected - names for names, _ in others] == [set()] * len(others)


def test_ranks_are_served_apart(runs: Runs) -> None:
    page = runs[0][0][1]
    for name, labels in PER_RANK.items():
        assert ranks_of(page, name) == {"0", "1", "2", "3"}, name
        assert all(f'{label}="' in key for key in keys_of(page, name) for label in labels)
    current = [key for key in keys_of(page, "dist_section") if parsed(page)[key] == 1]
    assert f'{PREFIX}_dist_section{{rank="0",section="data"}}' in current
    assert len(current) == 4  # each rank is in one section


def serves(metric: str) -> str:
    """Name under which Prometheus has a metric, without the prefix."""
    name, _, is_counter = exposed(metric)
    return name.removeprefix(f"{PREFIX}_") + ("_total" if is_counter else "")


def test_queries_name_what_a_run_serves(served: set[str]) -> None:
    known = served | {serves(metric) for metric in ELSEWHERE}
    assert names_in(" ".join(queries())) - known == set()
    assert names_in(SHIPPED["alerts.yml"]) - known == set()


def test_all_that_is_served_is_shown(served: set[str]) -> None:
    left_out = {name for name in served if name.startswith(tuple(LEFT_OUT))}
    assert served - names_in(" ".join(queries())) == left_out
    assert not [start for start in LEFT_OUT if not any(n.startswith(start) for n in left_out)]


def rows(pattern: str) -> set[str]:
    """Names at the beginning of the rows of the tables of docs/monitoring.md."""
    return set(re.findall(rf"^\| `({pattern})` \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_lists_what_is_logged(logged: set[str]) -> None:
    listed = {
        name.replace("AXIS", axis)
        for name in rows("[a-z]+/[^`]+")
        for axis in ("tp", "cp", "ep", "dp", "pp")
    }
    assert listed == logged | ELSEWHERE


def test_the_page_lists_what_is_served(served: set[str]) -> None:
    listed = {name.removeprefix(f"{PREFIX}_") for name in rows(f"{PREFIX}_[^`]+")}
    assert listed <= served
    of_ranks = {name for name in served if name.startswith(("dist_", "straggler_score", "loss_of"))}
    extremes = ("_min", "_median", "_mean", "_max", "_worst_rank")
    assert {name for name in of_ranks if not name.endswith(extremes)} <= listed


def test_panels_stand_side_by_side() -> None:
    board = json.loads(SHIPPED["grafana.json"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert x + w <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all("instance=~" in query for query in queries())


def test_rules_and_scrape_configuration_are_read_by_prometheus() -> None:
    scraped = yaml.safe_load(SHIPPED["prometheus.yml"])
    assert scraped["rule_files"] == ["alerts.yml"]
    [job] = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9400"]}]
    assert PrometheusEndpoint()._port == 9400
    [group] = yaml.safe_load(SHIPPED["alerts.yml"])["groups"]
    assert all(rule.keys() <= {"alert", "expr", "for", "annotations"} for rule in group["rules"])


def test_the_command_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboards"]) == 0
    assert {path.name: path.read_text() for path in Path("monitoring").iterdir()} == SHIPPED
    assert "prometheus --config.file=monitoring/prometheus.yml" in capsys.readouterr().out
    assert main(["dashboards"]) == 2
    assert "exists; nearest valid: another directory, or --overwrite" in capsys.readouterr().err
    assert main(["dashboards", "--overwrite"]) == 0
    Path("file").touch()
    assert main(["dashboards", "file"]) == 2
