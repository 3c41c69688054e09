"""Text about copies that differ: which ranks, which tensors, and the likeliest causes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_megatron.fault_tolerance.numbers.diagnosis import in_words
from lightning_megatron.fault_tolerance.replica_comparison import Difference, suspects

_HARDWARE = (
    "a bit that flipped in a rank's memory (resume from an earlier checkpoint, test the machines)"
)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """State of a run in which copies differ, as far as it tells why."""

    equal_at: int | None = None
    """Step after which they were equal; None if they have not been compared before."""
    begun: bool = True
    """Whether a step was taken since the run began."""
    by_hand: bool = False
    """Whether the module optimizes by hand."""
    trained: Collection[str] = ()
    """Names of the tensors that an optimizer steps on."""


def describe(found: Sequence[Difference], circumstances: Circumstances) -> str:
    """One sentence of who differs in what, and one of why that may be.

    Args:
        found: at least one difference.
        circumstances: of the run.
    """
    names = list(dict.fromkeys(one.name for one in found))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    tensors = shown if len(names) == 1 else f"{len(names)} tensors ({shown})"
    causes = "; or ".join(_causes(found, circumstances))
    return f"{_who(found)} {tensors}{_since(circumstances)}. Likely causes: {causes}"


def _since(circumstances: Circumstances) -> str:
    if circumstances.equal_at is None:
        return ""
    return f", which was equal on all ranks after step {circumstances.equal_at}"


def _who(found: Sequence[Difference]) -> str:
    unclear = [one for one in found if not one.wrong]
    if not unclear:
        wrong = suspects(found)
        verb = "differs" if len(wrong) == 1 else "differ"
        return f"{in_words(wrong)} {verb} from the majority in"
    groups = " and ".join(in_words(group) for group in unclear[0].groups)
    return f"no majority shows which are right: {groups} differ in"


def _causes(found: Sequence[Difference], circumstances: Circumstances) -> list[str]:
    """The likeliest first; what can be told from the differences comes before what cannot."""
    if not circumstances.begun:
        return [
            "a hook before the first step (setup, on_fit_start, on_train_start) writes these "
            "weights by what ranks do not share (draws, a file that only one has)"
        ]
    causes = []
    written = not any(one.name in circumstances.trained for one in found)
    if any(0 in one.groups[-1] and len(one.groups[-1]) == 1 for one in found):
        causes.append("code that writes weights on rank 0 alone (`if trainer.is_global_zero`)")
    if circumstances.by_hand and not written:
        causes.append(
            "gradients that no `manual_backward` has made, or that were changed by numbers of a "
            "rank's own samples: bring what depends on samples together by self.all_gather"
        )
    causes.append(
        "a step or hook that writes these weights, or their gradients, by numbers of a rank's own "
        "(its samples, draws, its part of a tensor): draw from a generator with one seed, and take "
        "means by self.all_gather"
    )
    causes.append(_HARDWARE)
    return causes
