"""The table of parameters that Lightning prints before training, of the whole module.

Lightning's callbacks count what one process holds, which is the whole module only where nothing is
spread. Elsewhere the rows here are those of the module before it was put on its layout, with what
this rank (the one that prints: rank 0) holds of them beside, in the column that Lightning has for
its DeepSpeed strategy. Operations are counted by Lightning while it runs ``example_input_array``;
where it has not, the lines that would say 0 are left out.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import (
    get_human_readable_count,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_megatron._lightning.summary import (
    Summary,
    format_table,
    replace_printing,
    replace_summary,
    restore_summary,
    summary_depth,
)
from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.whole.memory import own_weights

_CENSUS = "_lightning_megatron_census"
"""Attribute under which a module remembers what it was, for a second Trainer."""


class Census:
    """List of the modules and parameters in a module before a layout spreads it.

    Args:
        module: whole; parameters may be on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.rows = {
            name: (class_name(part), part.training) for name, part in module.named_modules() if name
        }
        named = list(module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self._canonical = {name: first.setdefault(id(p), name) for name, p in named}
        self._sizes = {name: (p.numel(), p.element_size(), p.requires_grad) for name, p in named}

    def count(self, name: str = "") -> int:
        """Parameters inside the part of this name; those that it shares with itself once."""
        return sum(self._sizes[key][0] for key in self._names(name))

    def trained(self) -> int:
        """Parameters of the module that are not frozen."""
        sizes = [self._sizes[key] for key in self._names("")]
        return sum(size for size, _, is_trained in sizes if is_trained)

    def megabytes(self) -> float:
        """Size of all parameters."""
        sizes = [self._sizes[key] for key in self._names("")]
        return sum(size * width for size, width, _ in sizes) / 1e6

    @own_weights
    def held(self, module: nn.Module, name: str = "") -> int:
        """Number of parameters held by this process, of those that `count` counts."""
        parameters = {
            self._canonical[full]: parameter
            for full, parameter in module.named_parameters(remove_duplicate=False)
            if full in self._canonical and _is_in(full, name)
        }
        return sum(_local(parameter).numel() for parameter in parameters.values())

    def _names(self, part: str) -> set[str]:
        return {first for full, first in self._canonical.items() if _is_in(full, part)}


class LayoutSummary(Summary):
    """Summary of a module on its layout, in the form that Lightning's callbacks print.

    Args:
        module: on its layout.
        census: of the module before that.
        max_depth: levels of the module that get rows; -1 for all.
    """

    total_flops = 0

    def __init__(self, module: nn.Module, census: Census, max_depth: int) -> None:
        self._module = module
        self._census = census
        self._names = [n for n in census.rows if max_depth == -1 or n.count(".") < max_depth]
        self.total_parameters = census.count()
        self.trainable_parameters = census.trained()
        self.model_size = census.megabytes()
        modes = [training for _, training in census.rows.values()]
        self.total_training_modes = {"train": modes.count(True), "eval": modes.count(False)}

    @override
    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table: modules, their parameters, those that this rank holds."""
        names, rows = self._names, [self._census.rows[name] for name in self._names]
        held = [self._census.held(self._module, name) for name in names]
        numbers = [*range(len(names)), " "]
        return [
            (" ", list(map(str, numbers))),
            ("Name", [*names, "all"]),
            ("Type", [*(kind for kind, _ in rows), type(self._module).__name__]),
            (
                "Params",
                [*map(_short, map(self._census.count, names)), _short(self._census.count())],
            ),
            ("Params per Device", [*map(_short, held), _short(self._census.held(self._module))]),
            ("Mode", [*("train" if training else "eval" for _, training in rows), "-"]),
            ("FLOPs", ["-"] * len(numbers)),
        ]


def remember_whole(module: nn.Module) -> None:
    """Remember what a module consists of before a layout spreads it."""
    module.__dict__[_CENSUS] = Census(module)


def summarise_layout(trainer: Trainer, module: nn.Module, *, spread: bool) -> None:
    """Have Lightning's summaries tell of the whole module.

    Args:
        trainer: has the callbacks.
        module: what it is about to train.
        spread: whether this rank holds a part of it only.
    """
    census = module.__dict__[_CENSUS]
    for callback in _summaries(trainer):
        if spread:
            replace_summary(callback, partial(_layout_summary, census, summary_depth(callback)))
        if type(callback) is RichModelSummary:
            replace_printing(callback, _show_rich)
        elif type(callback) is ModelSummary:
            replace_printing(callback, _show)


def leave_summaries(trainer: Trainer, module: nn.Module, *, spread: bool) -> None:
    """Undo `summarise_layout`, and what it knows if the module is whole again."""
    for callback in _summaries(trainer):
        restore_summary(callback)
    if not spread:
        module.__dict__.pop(_CENSUS, None)


def _summaries(trainer: Trainer) -> list[ModelSummary]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, ModelSummary)]


def _layout_summary(
    census: Census, max_depth: int, trainer: Trainer, module: LightningModule
) -> LayoutSummary:
    del trainer
    return LayoutSummary(module, census, max_depth)


def _show(
    columns: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **options: Any,
) -> None:
    """Print as ``ModelSummary.summarize`` does, but no operations that nobody has counted."""
    del options
    shown = [column for column in columns if total_flops or column[0] != "FLOPs"]
    table = format_table(
        total_parameters,
        trainable_parameters,
        model_size,
        total_training_modes,
        total_flops,
        *shown,
    )
    log = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.info("\n%s", table if total_flops else _without_operations(table))


def _show_rich(*args: Any, **options: Any) -> None:
    """Print as ``RichModelSummary.summarize`` does, but no operations that nobody has counted."""
    from rich import get_console

    console = get_console()
    with console.capture() as capture:
        RichModelSummary.summarize(*args, **options)
    text = capture.get()
    console.file.write(text if options["total_flops"] else _without_operations(text))


def _without_operations(table: str) -> str:
    return "".join(
        line for line in table.splitlines(keepends=True) if "total flops" not in line.lower()
    )


def _is_in(name: str, part: str) -> bool:
    return not part or name.startswith(f"{part}.")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_short: Callable[[int], str] = get_human_readable_count
