"""One line a window: how far training is, how fast, and what stands in its way."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron.monitoring.window import WindowCallback


class ConsoleLine(WindowCallback):
    """Prints a line of what the other callbacks log, on rank 0; under any strategy.

    ``step 1,200 of 5,000 | loss 2.031 | 6.41k tokens/s | MFU 41.2 % | data wait 1.3 % |
    goodput 97.8 %``. What nobody logs is left out: rates come from `ThroughputMonitor`, goodput
    from `EventLogWriter`. Lines go through Lightning's logger, so they reach log files as well.

    Args:
        every_n_steps: length of a window; by default the Trainer's ``log_every_n_steps``.
    """

    @override
    def on_window(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: dict[str, float]
    ) -> None:
        rank_zero_info(console_line(trainer.global_step, trainer.max_steps, metrics))


def console_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """Return the line.

    Args:
        step: optimizer steps done.
        max_steps: how many there are to be; -1 where nobody knows.
        metrics: what was logged last.
    """
    parts = [f"step {step:,}" + (f" of {max_steps:,}" if max_steps > 0 else "")]
    loss = training_loss(metrics)
    if loss is not None:
        parts.append(f"loss {metrics[loss]:.4g}")
    if "perf/tokens_per_s" in metrics:
        parts.append(f"{_short(metrics['perf/tokens_per_s'])} tokens/s")
    for name, title in _SHARES.items():
        if name in metrics:
            parts.append(f"{title} {100 * metrics[name]:.1f} %")
    return " | ".join(parts)


_SHARES = {
    "perf/mfu": "MFU",
    "time/data_wait_fraction": "data wait",
    "pp/bubble_fraction": "bubble",
    "ft/goodput": "goodput",
}


def training_loss(metrics: dict[str, Any]) -> str | None:
    """Return the metric that is the loss of training: the shortest name that says so."""
    names = [name for name in metrics if "loss" in name.lower() and not _is_other(name.lower())]
    return min(names, key=lambda name: (len(name), name), default=None)


def _is_other(name: str) -> bool:
    return name.startswith(("val", "test", "optim/", "loss/max", "moe")) or "loss_scale" in name


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
