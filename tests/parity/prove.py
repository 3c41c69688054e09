"""Modules train under every layout as in one process, or end in an error that helps.

That is the promise of this package for whatever a user writes: *the numbers of plain Lightning in
one process, or an error before they could differ that says what to write instead*. Here it is held.
A table names modules, layouts are data, and every module runs under the layouts that it can meet.
What it trained, noted and logged is compared with one run of plain Lightning in one process, which
is made once for each module, whatever the number of layouts.

A module is one entry of a table (`Entry`). It needs a LightningModule that brings its own data,
whose global batches are the same under every layout: each data-parallel rank reads its share
(`tests.parity.plain_modules.FromMemory` does that for batches from a function). All numbers are
float64, so that the order of a sum is worth 1e-15 and a defect more. A module that finds out
numbers on its way appends them to a list `notes`. The entry names the kinds of layout that the
module meets and, where the library cannot keep it true, the words of the error.

A layout is one entry of another table (`Layout`): the number of processes and the options of the
strategy. Layouts of a kind can go wrong for a module in the same way. So by default it meets those
that its entry asks for by `also`, and of each other kind one, chosen by the module's name; all are
met in `make test-all` (`meetings`).

Modules that a layout must train run one after the other in the same processes, and so do those
that it must refuse: `train_all` and `refuse_all` are the jobs of the workers. Where one rank alone
finds the error, its peers wait for it: the entry says so by `apart`, and the module gets a job of
its own. A failure names module, layout and rank; of a rank that is stuck, the last line of output
names the module.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import lightning as L
import torch

import lightning_megatron
from lightning_megatron import MegatronStrategy
from tests.parity.comparison import Found, check_found

REMEDIES = ("nearest valid", "zero=2 or lower", "train with pp=1")
"""Words with which our errors say what to write instead."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread a module over processes."""

    kind: str
    """What it puts to the test: layouts of a kind can go wrong in the same way."""
    ranks: int = 2
    options: Mapping[str, Any]
    """Options of the strategy."""
    thorough: bool = False
    """Whether modules meet it in `make test-all` only, unless they ask for it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A module and what is to be true of it.

    `refused`, `apart`, `warned` and `aside` go by the name of a layout or of a kind; the name of a
    layout comes first.
    """

    module: Callable[[], L.LightningModule]
    """A function or class of a module, which workers can import."""
    kinds: tuple[str, ...]
    """Kinds of layout that it meets."""
    also: tuple[str, ...] = ()
    """Layouts that it meets by default, in place of one that is chosen for it."""
    without: tuple[str, ...] = ()
    """Layouts of these kinds that it does not meet: another entry says what is true there."""
    thorough: bool = False
    """Whether it meets layouts in `make test-all` only, but for those of `also`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Pattern of the error in which it ends."""
    apart: tuple[str, ...] = ()
    """Where a rank ends alone, and its peers wait for it: refused in a job of its own."""
    warned: Mapping[str, str] = field(default_factory=dict)
    """Pattern of what rank 0 warns of once; elsewhere it does not."""
    aside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is not that of one process: ``weights``, ``notes`` or ``logged``. Say why."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Trainer, which by default trains one epoch and does nothing else."""
    seed: int = 5
    tolerance: float = 1e-10
    """Largest difference of a number."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A module under a layout."""

    name: str
    layout: str
    thorough: bool
    refused: str | None
    """Pattern of the error, if it is to end in one."""
    apart: bool


def of(entries: Mapping[str, Any], name: str, layout: Layout, default: Any = None) -> Any:
    """What is said of a layout: by its own name, else by that of its kind."""
    return entries.get(name, entries.get(layout.kind, default))


def meetings(table: Mapping[str, Entry], layouts: Mapping[str, Layout]) -> Iterator[Meeting]:
    """All modules of a table under all layouts that they meet."""
    for name, entry in table.items():
        for kind in entry.kinds:
            of_kind = [
                key
                for key, layout in layouts.items()
                if layout.kind == kind and key not in entry.without
            ]
            often = [
                key
                for key in of_kind
                if not (entry.thorough or layouts[key].thorough or key in entry.also)
            ]
            # Depends on the name alone: further entries leave the others where they are.
            chosen = set(entry.also).intersection(of_kind)
            if often and not chosen:
                chosen = {often[crc32(name.encode()) % len(often)]}
            for key in of_kind:
                yield Meeting(
                    name=name,
                    layout=key,
                    thorough=key not in chosen,
                    refused=of(entry.refused, key, layouts[key]),
                    apart=key in entry.apart or kind in entry.apart,
                )


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer that only trains."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*num_workers.*|.*GPU available.*|.*full_state.*")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "precision": "64-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return L.Trainer(strategy=strategy, **{**defaults, **options})


def train(entry: Entry, options: Mapping[str, Any] | str, directory: str) -> Found:
    """Train a module; a string names one of Lightning's own strategies."""
    L.seed_everything(entry.seed, verbose=False)
    module = entry.module().double()
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(strategy, default_root_dir=directory, **entry.trainer)
    trainer.fit(module)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    for number, optimizer in enumerate(trainer.optimizers):
        rates = [group["lr"] for group in optimizer.param_groups]
        logged |= {f"lr {number}.{group}": float(rate) for group, rate in enumerate(rates)}
    weights = lightning_megatron.gather(module)
    if type(module).predict_step is not L.LightningModule.predict_step:
        predicted = torch.cat(trainer.predict(module)).flatten()  # type: ignore[arg-type]
        logged |= {f"predicted {place}": float(x) for place, x in enumerate(predicted)}
    return weights, getattr(module, "notes", []), logged


def train_all(
    entries: Mapping[str, Entry], options: Mapping[str, Any] | str, directory: str
) -> dict[str, tuple[Found, list[str]]]:
    """Train modules one after the other; what each left behind and was warned of."""
    found = {}
    for name, entry in entries.items():
        print(name, flush=True)  # the last line of a rank that is stuck
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                left = train(entry, options, f"{directory}/{name}")
            except Exception as error:
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
        found[name] = left, [str(warning.message) for warning in caught]
    return found


def refuse_all(
    entries: Mapping[str, Entry], options: Mapping[str, Any], directory: str
) -> dict[str, str]:
    """The errors in which modules end that train one after the other; none for an empty text."""
    found = {}
    for name, entry in entries.items():
        print(name, flush=True)
        try:
            train(entry, options, f"{directory}/{name}")
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def check_trained(
    name: str,
    entry: Entry,
    place: tuple[str, Layout],
    found: tuple[Found, list[str]],
    alone: Found,
    rank: int,
) -> None:
    """Compare what a rank has of a module with what one process has.

    Args:
        name: of the module.
        entry: its entry.
        place: the layout and its name.
        found: what `train_all` gave on this rank.
        alone: what plain Lightning gave.
        rank: of the process.
    """
    left, said = found
    aside = of(entry.aside, *place, default=())
    parts = zip(("weights", "notes", "logged"), left, alone, strict=True)
    ours: Any = tuple(theirs if part in aside else mine for part, mine, theirs in parts)
    check_found(f"{name} on rank {rank} of {place[0]}", ours, alone, entry.tolerance)
    for where, words in entry.warned.items():
        here = where in (place[0], place[1].kind)
        times = sum(re.search(words, text) is not None for text in said)
        assert times == here or (here and rank), f"{name} on rank {rank} of {place[0]}: {said}"


def check_refused(name: str, layout: str, words: str, text: str) -> None:
    """An error has these words, and says what to write instead."""
    assert text, f"{name} trains under {layout}"
    assert re.search(words, text), f"{name} under {layout}: {text}"
    assert any(remedy in text for remedy in REMEDIES), f"{name} under {layout}: {text}"
