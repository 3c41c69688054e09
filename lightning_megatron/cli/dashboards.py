"""`lightning-megatron dashboards`: files for Prometheus and Grafana.

    lightning-megatron dashboards monitoring

writes a scrape configuration, rules for alerts and a dashboard for the metrics that
`PrometheusEndpoint` serves.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

FILES = {
    "prometheus.yml": "scrape configuration: prometheus --config.file={}",
    "alerts.yml": "rules for alerts, which prometheus.yml names",
    "grafana.json": "dashboard: in Grafana, Dashboards > New > Import",
}
"""Each is in the package `monitoring.dashboards`; with what to do with it."""


def dashboards(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `dashboards`.

    Returns:
        The exit code: 0; 2 if a file stands there already, or cannot be written.
    """
    options = _parser().parse_args(list(args))
    folder: Path = options.directory
    standing = [name for name in FILES if (folder / name).exists()]
    if standing and not options.overwrite:
        print(
            f"lightning-megatron: {folder / standing[0]} exists; nearest valid: another directory, "
            "or --overwrite",
            file=sys.stderr,
        )
        return 2
    shipped = files("lightning_megatron.monitoring.dashboards")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).write_text((shipped / name).read_text("utf-8"), "utf-8")
    except OSError as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    width = max(len(str(folder / name)) for name in FILES)
    for name, text in FILES.items():
        print(f"{folder / name!s:<{width}}  {text.format(folder / name)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron dashboards",
        description="Write a Prometheus configuration, alert rules and a Grafana dashboard for the "
        "metrics of a run with Monitor(prometheus=9400).",
    )
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path("monitoring"),
        metavar="DIRECTORY",
        help="where they go; default: monitoring",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that stand there")
    return parser
