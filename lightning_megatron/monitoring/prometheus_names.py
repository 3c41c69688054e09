"""Names of metrics as Prometheus wants them: a prefix, words, the base unit last.

``perf/tokens_per_s`` is ``lightning_megatron_perf_tokens_per_second``; ``mem/peak_rss_gib`` becomes
``lightning_megatron_mem_peak_rss_bytes``, and its value is multiplied accordingly; names that end
in ``_total`` are counters (https://prometheus.io/docs/practices/naming).
"""

import re
from typing import NamedTuple

PREFIX = "lightning_megatron"
NAMESPACES = frozenset({
    *("perf", "mem", "time", "comm", "pp", "optim", "loss"),
    *("straggler", "ckpt", "ft", "dist", "data", "precision"),
})  # fmt: skip
"""First parts of the names of our metrics."""

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
"""How our names end, what they end in there, and by what values are multiplied."""


class Exposed(NamedTuple):
    """What Prometheus is told of a metric."""

    name: str
    factor: float
    is_counter: bool


def exposed(metric: str) -> Exposed:
    """Return the name for Prometheus; that of a counter without its ``_total``."""
    words = re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")
    counter = words.endswith("_total")
    words = words.removesuffix("_total")
    for ours, theirs, factor in _UNITS:
        if words.endswith(ours):
            return Exposed(f"{PREFIX}_{words.removesuffix(ours)}{theirs}", factor, counter)
    return Exposed(f"{PREFIX}_{words}", 1.0, counter)


def is_ours(metric: str) -> bool:
    """Whether a callback of this package has logged it."""
    namespace, slash, _ = metric.partition("/")
    return bool(slash) and namespace in NAMESPACES
