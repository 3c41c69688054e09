"""Losses of sequences of which each cp rank has a part: the loss of whole sequences, on each rank.

Targets are whole. A rank takes those of its positions, and what its positions add up to is summed
over cp: one message of one number, as every rank can count the whole targets by itself. A rank
without any label so divides by the number of all. Padding belongs to no sequence.

Gradients are means over dp x cp, so that of a rank's own sum counts cp-fold
(`layers.context_split`).
"""

from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.context import Context
from lightning_megatron.whole.context_part import Place
from lightning_megatron.whole.context_rows import join_rows, sum_over_context
from lightning_megatron.whole.splits import part_of


def loss_rows(x: Tensor, targets: Tensor, context: Context | None) -> tuple[Tensor, Place | None]:
    """Rows ``[b, rows, ...]`` of this rank before a loss, and their place.

    Args:
        x: output of a `PipelineSequential`, or inside of one ``[b, local, ...]``.
        targets: targets of the whole sequences.
        context: split of sequences inside of a `PipelineSequential`.

    Returns:
        ``x`` and None where the sequences are whole.

    Raises:
        ConfigError: the targets are those of other sequences.
    """
    part = part_of(x)
    if part is not None and part.place.residual is not None:
        raise ConfigError(
            "sequence_parallel=True and cp > 1: a loss got the residual stream of a "
            "PipelineSequential; nearest valid: a ColumnParallelLinear as its last item"
        )
    if part is not None and (
        part.is_settled or part.place.form == "columns" or not part.is_behind(x)
    ):
        return part.whole_of(x), None
    if part is not None:
        rows, place = part.part, part.place
    elif context is not None:
        place = place_in_trunk(context, x.shape[1], targets)
        rows = x.narrow(1, 0, sum(count for _, count in place.own))
    else:
        return x, None
    expected = place.shape(rows)[:-1]
    if targets.shape != expected:
        raise ConfigError(
            f"cp={place.axis.size}: targets of shape {tuple(targets.shape)} for an output of shape "
            f"{tuple(place.shape(rows))}; nearest valid: targets of shape {tuple(expected)}, those "
            "of whole sequences, which the loss cuts"
        )
    return rows, place


def place_in_trunk(context: Context, local: int, targets: Tensor) -> Place:
    """Place of this rank's ``local`` positions, inside of a `PipelineSequential`.

    Raises:
        ConfigError: the targets are not those of whole sequences.
    """
    length = targets.shape[1] if targets.dim() > 1 else -1
    layout = context.layout(local)
    if length not in context.lengths(local):
        raise ConfigError(
            f"cp={context.cp.size}: targets of shape {tuple(targets.shape)} for sequences of "
            f"{layout.length} positions; nearest valid: the targets of whole sequences, which the "
            "loss cuts"
        )
    context.join()  # what the loss returns is of whole sequences
    return Place(context.layout(local, length), context.cp, 0, length)


def own_loss_targets(targets: Tensor, place: Place) -> Tensor:
    """Targets ``[b, rows]`` of this rank's positions."""
    by_position = targets if place.form == "rows" else targets.view(-1, place.count)
    return place.cut(by_position, 1)


def reduced_over_context(loss: Tensor, ignored: Tensor, place: Place, reduction: str) -> Tensor:
    """Reduce losses ``[b, rows]`` of this rank's positions to those of whole sequences.

    Args:
        loss: 0 where the position is ignored.
        ignored: which of the whole targets are ignored.
        place: place of the positions.
        reduction: ``mean``, ``sum`` or ``none``.
    """
    if reduction == "none":
        return join_rows(loss, place.rows, place.axis, 1).view(ignored.shape)
    total = sum_over_context(loss.sum(), place.axis)
    return total if reduction == "sum" else total / (~ignored).sum()
