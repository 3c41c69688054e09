"""The table of parameters that Lightning's ModelSummary prints before training.

The callback counts what one process holds, and takes no other count.
"""

from collections.abc import Callable

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import _format_summary_table


class Summary:
    """Summary that the callback prints, in place of Lightning's.

    The callback reads ``total_parameters``, ``trainable_parameters``, ``model_size``,
    ``total_training_modes`` and ``total_flops``, too.
    """

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return each column's title and texts."""
        raise NotImplementedError

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        # Private: the name by which `ModelSummary.on_fit_start` asks for the columns.
        return self.columns()


def replace_summary(callback: ModelSummary, make: Callable[..., Summary]) -> None:
    """Have a callback print the summary ``make(trainer, module)``.

    Replaced: `ModelSummary._summary` of this instance.
    """
    vars(callback)["_summary"] = make


def replace_printing(callback: ModelSummary, show: Callable[..., None]) -> None:
    """Have a callback print with ``show``, which takes what ``ModelSummary.summarize`` takes.

    Replaced: ``ModelSummary.summarize`` of this instance, which a subclass may override in public.
    """
    vars(callback)["summarize"] = show


def restore_summary(callback: ModelSummary) -> None:
    """Undo `replace_summary` and `replace_printing`."""
    for name in ("_summary", "summarize"):
        vars(callback).pop(name, None)


def summary_depth(callback: ModelSummary) -> int:
    """How many levels of modules a callback shows; -1 for all.

    Private: `ModelSummary._max_depth`.
    """
    return callback._max_depth


def format_table(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    *columns: tuple[str, list[str]],
) -> str:
    """The text that ``ModelSummary.summarize`` prints.

    Private: `lightning.pytorch.utilities.model_summary.model_summary._format_summary_table`.
    """
    return _format_summary_table(
        total_parameters,
        trainable_parameters,
        model_size,
        total_training_modes,
        total_flops,
        *columns,
    )
