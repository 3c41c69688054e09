"""`lightning-megatron data bench`: how fast a datamodule gives batches, and how long a step waits.

It makes the datamodule's training loader, takes some batches that do not count, so that workers
have started and files are in memory, and then times as many as it is told. With ``--step-ms`` it
rests that long after each batch, in place of a training step: workers go on in the meantime, and
the wait for the next batch is what a training step of that duration would wait.

There is one process and no strategy: the loader is what the datamodule makes. Tokens are the
elements of ``tokens`` or ``input_ids`` of a batch, or those of its first tensor of whole numbers
with two dimensions; padding counts like any other token.
"""

import argparse
import json
import time
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_megatron.cli.option_errors import explain
from lightning_megatron.cli.train import config_file, whole_numbers_first
from lightning_megatron.errors import ConfigError, raise_if_any, whole_numbers

_TOKEN_KEYS = ("tokens", "input_ids")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured; times are in seconds."""

    data: str
    """Class of the datamodule."""
    setup: float
    """From its construction to its loader."""
    first_batch: float
    """From the loader to the first batch."""
    batches: int
    epochs: int
    """Times that the loader was begun."""
    samples: int
    tokens: int | None
    """None where batches hold no tokens."""
    elapsed: float
    """For all timed batches, the rests after them included."""
    wait: float
    """For batches alone."""
    wait_p50: float
    wait_p95: float
    wait_max: float

    @property
    def rates(self) -> dict[str, float | None]:
        """Samples and tokens a second, and the share of the time that was waiting."""
        return {
            "samples_per_s": self.samples / self.elapsed,
            "tokens_per_s": None if self.tokens is None else self.tokens / self.elapsed,
            "wait_share": self.wait / self.elapsed,
        }


def bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        options: those of the command.
        rest: arguments that are options of the datamodule.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: an option is wrong, or the datamodule gives no batches.
    """
    parser, config = _parse(options, rest)
    begin = time.perf_counter()
    # jsonargparse renamed it in 4.49.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = make(config).data
    found = measure(made, begin, options.batches, warmup=options.warmup, step=options.step_ms / 1e3)
    if options.json:
        print(json.dumps({**asdict(found), **found.rates}, indent=1))
    else:
        print("\n".join(f"{name:<13}{text}" for name, text in _lines(found, options.step_ms)))
    return 0


def measure(
    data: pl.LightningDataModule, begin: float, batches: int, *, warmup: int = 0, step: float = 0.0
) -> Timing:
    """Take batches of a datamodule.

    Args:
        data: the datamodule.
        begin: `time.perf_counter()` before it was made.
        batches: number of batches that are timed.
        warmup: number of batches before them.
        step: seconds of rest after each batch.

    Raises:
        ConfigError: its training loader gives no batches.
    """
    data.prepare_data()
    data.setup("fit")
    stream = _Stream(data.train_dataloader())
    ready = time.perf_counter()
    held = [next(stream)]
    first = time.perf_counter() - ready
    for _ in islice(stream, warmup):
        time.sleep(step)
    waits, sizes, tokens = np.zeros(batches), 0, 0
    epochs, start = stream.epochs, time.perf_counter()
    for number in range(batches):
        asked = time.perf_counter()
        held = [next(stream)]
        waits[number] = time.perf_counter() - asked
        sizes += extract_batch_size(held[0])
        tokens += _tokens(held[0]) or 0
        time.sleep(step)
    name = f"{type(data).__module__}.{type(data).__qualname__}"
    return Timing(
        data=name,
        setup=ready - begin,
        first_batch=first,
        batches=batches,
        epochs=stream.epochs - epochs + 1,
        samples=sizes,
        tokens=tokens if _tokens(held[0]) is not None else None,
        elapsed=time.perf_counter() - start,
        wait=float(waits.sum()),
        wait_p50=float(np.percentile(waits, 50)),
        wait_p95=float(np.percentile(waits, 95)),
        wait_max=float(waits.max()),
    )


class _Stream:
    """Batches of a loader, begun anew where it ends."""

    def __init__(self, loaders: Any) -> None:
        self.epochs = 0
        several = isinstance(loaders, list | tuple | dict)
        self._loader = CombinedLoader(loaders, "max_size_cycle") if several else loaders
        self._several = several
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        end: Any = object()
        batch = next(self._batches, end)
        if batch is end:
            self.epochs += 1
            self._batches = iter(self._loader)
            batch = next(self._batches, end)
        if batch is end:
            raise ConfigError(
                "the training loader gives no batches; nearest valid: more data, or a smaller "
                "batch size"
            )
        return batch[0] if self._several else batch


def _tokens(batch: Any) -> int | None:
    if isinstance(batch, dict):
        for key in _TOKEN_KEYS:
            if isinstance(batch.get(key), torch.Tensor):
                return int(batch[key].numel())
    parts = batch.values() if isinstance(batch, dict) else batch
    for part in parts if isinstance(batch, dict | list | tuple) else [batch]:
        whole = isinstance(part, torch.Tensor) and not part.dtype.is_floating_point
        if whole and part.ndim == 2:
            return int(part.numel())
    return None


def _parse(options: argparse.Namespace, rest: Sequence[str]) -> tuple[Any, Any]:
    """Parser of the datamodule's options, and what it read."""
    wrong = whole_numbers(1, batches=options.batches) + whole_numbers(0, warmup=options.warmup)
    if not options.step_ms >= 0:
        wrong.append(f"step_ms={options.step_ms}: must be at least 0; nearest valid: step_ms=0")
    raise_if_any(wrong)
    parser = LightningArgumentParser(
        prog="lightning-megatron data bench", exit_on_error=False, allow_abbrev=False
    )
    parser.add_lightning_class_args(
        pl.LightningDataModule, "data", subclass_mode=True, required=False
    )
    whole_numbers_first(parser)
    if options.config is not None:
        parser.set_defaults({"data": _data_of(options.config)})
    given = [*(["--data", options.data] if options.data is not None else []), *rest]
    try:
        config = parser.parse_args(given)
    except ArgumentError as error:
        raise ConfigError(explain(str(error), parser, {}, given)) from error
    if config.data is None:
        raise ConfigError(
            "data bench: no datamodule; nearest valid: --data TextDataModule, or --config FILE"
        )
    return parser, config


def _data_of(name: str) -> dict[str, Any]:
    path = config_file(name)
    if path is None:
        raise ConfigError(f"config={name!r}: no such file, and no recipe of that name")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config={name!r}: cannot be read: {error}") from error
    found = content.get("data") if isinstance(content, dict) else None
    if isinstance(found, str):
        found = {"class_path": found}
    if not isinstance(found, dict):
        raise ConfigError(f"config={name!r}: has no `data`; give --data CLASS")
    if "class_path" not in found:
        # As `fit` reads it: options of the datamodule that it has where none is named.
        default = "lightning_megatron.data.text.TextDataModule"
        found = {"class_path": default, "init_args": found}
    return found


def _lines(found: Timing, step_ms: float) -> Iterator[tuple[str, str]]:
    rates = found.rates
    yield "data", found.data
    yield "setup", f"{found.setup:.3f} s, first batch {found.first_batch:.3f} s after it"
    epochs = f", in {found.epochs} epochs" if found.epochs > 1 else ""
    yield "batches", f"{found.batches:,} of {found.samples / found.batches:,.6g} samples{epochs}"
    yield "samples/s", f"{rates['samples_per_s']:,.0f}"
    if rates["tokens_per_s"] is not None:
        yield "tokens/s", f"{rates['tokens_per_s']:,.0f}"
    yield (
        "wait",
        f"median {1e3 * found.wait_p50:.3g} ms, 95 % below {1e3 * found.wait_p95:.3g} ms, "
        f"at most {1e3 * found.wait_max:.3g} ms",
    )
    if step_ms:
        share = found.wait / found.elapsed
        yield "wait share", f"{share:.2%} of the time, with steps of {step_ms:g} ms"
