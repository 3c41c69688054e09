"""Metrics of a run over HTTP for Prometheus, and a health check.

Global rank 0 serves, by default to its own machine only,

* ``/metrics``: the last values of the metrics in the namespaces of this package and of those that
  ``also`` names; metrics of each rank with the label ``rank``
  (``lightning_megatron_mem_rss_bytes{rank="3"}``); the step, the seconds since the last progress,
  and the number of events of each kind;
* ``/healthz``: 200 while the run makes progress, 503 after ``stale_s`` seconds without. Under
  `MegatronStrategy` each section of a step is progress, else each batch.

Names follow Prometheus (https://prometheus.io/docs/practices/naming): a prefix, words, the base
unit last. ``perf/tokens_per_s`` is ``lightning_megatron_perf_tokens_per_second``;
``mem/peak_rss_gib`` is ``lightning_megatron_mem_peak_rss_bytes``, its value in bytes; an axis stays
behind the unit (``comm/mib/tp`` is ``lightning_megatron_comm_bytes_tp``); names that end in
``_total`` are counters.
"""

import errno
import fnmatch
import importlib.util
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron.errors import raise_if_any
from lightning_megatron.monitoring.metrics_server import (
    Guard,
    MetricsServer,
    health_page,
    is_loopback,
)
from lightning_megatron.monitoring.rank_stats import RankMetrics, rank_metrics_of
from lightning_megatron.monitoring.window import WindowCallback
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.services import events_of, services_if_any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""Seconds until a port that was in use is tried again."""

PREFIX = "lightning_megatron"
NAMESPACES = frozenset({
    *("perf", "mem", "time", "comm", "pp", "cp", "moe", "optim", "loss"),
    *("straggler", "ckpt", "ft", "dist", "data", "precision"),
})  # fmt: skip
"""First parts of the names of this package's metrics."""

_UNITS = (
    ("_gb_per_s", "_bytes_per_second", 1e9),
    ("_per_s_per_device", "_per_second_per_device", 1.0),
    ("_per_s", "_per_second", 1.0),
    ("_gib", "_bytes", 2.0**30),
    ("_mib", "_bytes", 2.0**20),
    ("_gb", "_bytes", 1e9),
    ("_ms", "_seconds", 1e-3),
    ("_us", "_seconds", 1e-6),
    ("_s", "_seconds", 1.0),
    ("_percent", "_ratio", 0.01),
    ("_fraction", "_ratio", 1.0),
)
"""Ending of a metric, ending for Prometheus, factor of the value."""
_AXES = ("tp", "pp", "cp", "ep", "dp")


class Exposed(NamedTuple):
    """Name of a metric for Prometheus, and the factor of its values."""

    name: str
    factor: float
    is_counter: bool


def exposed(metric: str) -> Exposed:
    """Return the name for Prometheus; a counter loses its ``_total``, which the client adds."""
    words = re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")
    counter = words.endswith("_total")
    words = words.removesuffix("_total")
    last = metric.rpartition("/")[2]
    axis = f"_{last}" if last in _AXES else ""
    words = words.removesuffix(axis)
    for ours, theirs, factor in _UNITS:
        if words.endswith(ours):
            return Exposed(f"{PREFIX}_{words.removesuffix(ours)}{theirs}{axis}", factor, counter)
    return Exposed(f"{PREFIX}_{words}{axis}", 1.0, counter)


def is_ours(metric: str) -> bool:
    """Whether the name is in a namespace of this package."""
    namespace, slash, _ = metric.partition("/")
    return bool(slash) and namespace in NAMESPACES


class PrometheusEndpoint(WindowCallback):
    """Serves ``/metrics`` and ``/healthz`` from global rank 0; under any strategy.

    Needs the extra ``monitor`` (prometheus-client). A port that is in use costs one warning;
    training goes on, and the port is tried again, as a process of the attempt before may hold it.

    Args:
        port: port to listen on; 0 takes any that is free and logs its number.
        host: address to listen on; any but the loopback interface needs a ``token``.
        token: secret of the header ``Authorization: Bearer``; ``"@path"`` reads it from a file, so
            that it is in no configuration.
        stale_s: seconds without progress after which ``/healthz`` says 503.
        also: patterns of further metrics.
        every_n_steps: steps between two updates of the values; by default the Trainer's
            ``log_every_n_steps``.

    Attributes:
        url: address that it listens on; None while it does not.

    Raises:
        ConfigError: prometheus-client is missing; the port is out of range; other machines could
            reach the endpoint without a token.
    """

    def __init__(
        self,
        port: int = 9400,
        host: str = "127.0.0.1",
        token: str | None = None,
        stale_s: float = 600.0,
        also: Sequence[str] = ("*loss*",),
        every_n_steps: int | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        raise_if_any(_problems(port, host, token, stale_s))
        self._port = port
        self._host = host
        self._token = token
        self._stale_s = stale_s
        self._also = tuple(also)
        self._server: MetricsServer | None = None
        self._closed = threading.Event()
        self._values: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._log = EventLog()
        self._clock: SectionClock | None = None
        self._rank_metrics = RankMetrics()
        self._beat = time.monotonic()

    @property
    def url(self) -> str | None:
        """Address that it listens on; None while it does not."""
        return None if self._server is None else self._server.url

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not trainer.is_global_zero or self._server is not None:
            return
        services = services_if_any(trainer)
        self._beat = time.monotonic()
        self._clock = None if services is None else services.clock
        self._rank_metrics = rank_metrics_of(trainer)
        self._log = events_of(trainer)
        self._log.subscribe(self._count)
        self._closed = threading.Event()
        self._values = {}
        self._counts = Counter()
        application = self._application()
        try:
            self._listen(application)
        except OSError as error:
            logger.warning(
                "PrometheusEndpoint(port=%d): %s is not served, as %s; training goes on, and the "
                "port is tried again every %g s; nearest valid: port=0, which takes any free port",
                self._port,
                self._host,
                "the port is in use" if error.errno == errno.EADDRINUSE else error,
                _RETRY_S,
            )
            threading.Thread(
                target=self._keep_trying, args=(application,), name="metrics", daemon=True
            ).start()

    def _application(self) -> Guard:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        pages: Any = {"/metrics": make_wsgi_app(registry), "/healthz": health_page(self._health)}
        token = self._token
        if token is not None and token.startswith("@"):
            token = Path(token[1:]).expanduser().read_text("utf-8").strip()
            raise_if_any(_token_problems(token))
        return Guard(pages, token)

    def _listen(self, application: Guard) -> None:
        self._server = MetricsServer(application, self._host, self._port)
        rank_zero_info(f"Metrics are at {self._server.url}/metrics")

    def _keep_trying(self, application: Guard) -> None:
        while not self._closed.wait(_RETRY_S):
            try:
                self._listen(application)
            except OSError:
                continue
            if self._closed.is_set():
                self._shut()
            return

    def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _count(self, event: dict[str, Any]) -> None:
        self._counts[event["kind"]] += 1

    # Called in the server's threads ---------------------------------------------------------------

    def _age_s(self) -> float:
        last = self._beat if self._clock is None else max(self._clock.since, self._beat)
        return max(time.monotonic() - last, 0.0)

    def _health(self) -> tuple[bool, dict[str, Any]]:
        age = self._age_s()
        good = age <= self._stale_s
        facts: dict[str, Any] = {
            "status": "ok" if good else "no progress",
            "step": self._log.step,
            "seconds_since_progress": round(age, 3),
            "stale_after_seconds": self._stale_s,
        }
        if self._clock is not None:
            facts["section"] = self._clock.current
        return good, facts

    def collect(self) -> Iterable["Metric"]:
        """Present metrics, for prometheus-client."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        log, values = self._log, dict(self._values)
        info = {"run": log.run, "attempt": str(log.attempt)}
        yield InfoMetricFamily(f"{PREFIX}_run", "The run.", info)
        yield GaugeMetricFamily(f"{PREFIX}_step", "Optimizer steps done.", log.step)
        age = f"{PREFIX}_seconds_since_progress"
        yield GaugeMetricFamily(age, "Seconds since the last progress.", self._age_s())
        events = CounterMetricFamily(
            f"{PREFIX}_events", "Events of this attempt, by kind.", labels=["kind"]
        )
        for kind, count in sorted(self._counts.items()):
            events.add_metric([kind], count)
        yield events
        seen = {f"{PREFIX}_{own}" for own in ("run", "step", "seconds_since_progress", "events")}
        for labelled in self._rank_metrics.metrics():
            name, factor, _ = exposed(labelled.name)
            seen.add(name)
            description = f"{labelled.name} of each rank."
            of_ranks = GaugeMetricFamily(name, description, labels=labelled.labels)
            for labels, value in sorted(labelled.values.items()):
                of_ranks.add_metric(labels, value * factor)
            yield of_ranks
        for metric, value in sorted(values.items()):
            name, factor, is_counter = exposed(metric)
            if name not in seen:
                seen.add(name)
                family = CounterMetricFamily if is_counter else GaugeMetricFamily
                yield family(name, f"Last value of {metric}.", value * factor)

    # Hooks ----------------------------------------------------------------------------------------

    @override
    def on_window(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: dict[str, float]
    ) -> None:
        if trainer.is_global_zero:
            self._values = {
                name: value
                for name, value in metrics.items()
                if is_ours(name) or any(fnmatch.fnmatchcase(name, p) for p in self._also)
            }

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._beat = time.monotonic()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._beat, self._log.step = time.monotonic(), trainer.global_step

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._beat = time.monotonic()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()  # Lightning calls no teardown; the next attempt may want the port

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._closed.set()
        self._log.unsubscribe(self._count)
        self._shut()
        self._strategy = None


def _problems(port: int, host: str, token: str | None, stale_s: float) -> list[str]:
    problems = []
    if importlib.util.find_spec("prometheus_client") is None:
        problems.append(
            "PrometheusEndpoint needs the package prometheus-client: "
            "`pip install 'lightning-megatron[monitor]'`, or leave the callback out"
        )
    if not 0 <= port <= 65535:
        problems.append(
            f"port={port}: must lie between 0 and 65535; nearest valid: "
            f"{0 if port < 0 else 65535}; 0 takes any free port"
        )
    if token is None and not is_loopback(host):
        problems.append(
            f"host={host!r} without a token: other machines could read the metrics of the run; "
            "nearest valid: host='127.0.0.1', or a token of at least 16 characters"
        )
    if token is not None and not token.startswith("@"):
        problems += _token_problems(token)
    if not stale_s > 0:
        problems.append(f"stale_s={stale_s}: must be above 0; nearest valid: stale_s=600")
    return problems


def _token_problems(token: str) -> list[str]:
    if len(token) >= 16:
        return []
    return [f"token of {len(token)} characters: must have at least 16; nearest valid: 16 random"]
