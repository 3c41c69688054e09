"""Summary at the end of training: where the files are, and the command to resume."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The traces of a finished run."""

    log_dir: str | None
    """Folder of the logger."""
    checkpoint: str | None
    """The newest checkpoint."""
    step: int
    """Optimizer steps done."""
    tp: int | None
    """Degree of tensor parallelism; None under another strategy."""
    pp: int | None
    """Degree of pipeline parallelism; None under another strategy."""
    max_pp: int = 1
    """The longest pipeline that the model allows."""


def other_layout(outcome: Outcome) -> dict[str, str]:
    """Return strategy options of another layout with as many model-parallel ranks, if there is one.

    All in the pipeline where the model has enough layers, else all in tensor parallelism.
    """
    if outcome.tp is None or outcome.pp is None:
        return {}
    ranks = outcome.tp * outcome.pp
    for tp, pp in ((1, ranks), (ranks, 1)):
        if (tp, pp) != (outcome.tp, outcome.pp) and pp <= outcome.max_pp:
            return {"--trainer.strategy.tp": str(tp), "--trainer.strategy.pp": str(pp)}
    return {}


def with_options(args: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return a command line in which `options` replace what `args` says about them."""
    kept: list[str] = []
    skip = False
    for arg in args:
        name, _, value = arg.partition("=")
        if skip:
            skip = False
        elif name in options or name.removesuffix(".degree") in options:
            skip = not value
        else:
            kept.append(arg)
    return kept + [part for pair in options.items() for part in pair]


def resume_command(args: Sequence[str], outcome: Outcome) -> str | None:
    """Return the command that trains on from the checkpoint, as long again, in another layout."""
    if outcome.checkpoint is None:
        return None
    options = {
        **other_layout(outcome),
        "--trainer.max_steps": str(2 * outcome.step),
        "--ckpt_path": outcome.checkpoint,
    }
    return shlex.join(["lightning-megatron", *with_options(args, options)])


def report(args: Sequence[str], outcome: Outcome) -> str:
    """Return the text to print after `fit`.

    Args:
        args: the command line of the run, without the program's name.
        outcome: what the run left behind.
    """
    lines = [f"Trained to step {outcome.step}."]
    if outcome.log_dir:
        lines.append(f"  log         {outcome.log_dir}")
    if outcome.checkpoint:
        lines.append(f"  checkpoint  {outcome.checkpoint}")
    command = resume_command(args, outcome)
    if command:
        where = "under another layout" if other_layout(outcome) else "from here"
        lines += ["", f"Go on {where}:", f"  {command}"]
    return "\n".join(lines)
