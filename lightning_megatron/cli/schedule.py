"""`lightning-megatron schedule`: what a pipeline schedule looks like, and what it costs.

It simulates, so it needs no model, no process group and no torch.

The times that are given are those of a whole rank, whatever the number of stages on it, so that
step times of all schedules are in one unit: the forward of a microbatch through a rank, unless
`--forward` says otherwise.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.draw import draw_timeline, write_trace
from lightning_megatron.schedules.schedule import (
    AUTO,
    SCHEDULES,
    Kind,
    Schedule,
    load_schedule,
    make_schedule,
)
from lightning_megatron.schedules.search import StageCosts, choose_schedule
from lightning_megatron.schedules.simulate import Timeline, render, simulate

_TIMES = ("forward", "backward_input", "backward_weight", "send")
_LETTERS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
}


def schedule(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `schedule`.

    Returns:
        The exit code: 0, or 2 for a mistake of the user, a table that cannot run included.
    """
    options = _parser().parse_args(list(args))
    times = {name: _number_or_list(getattr(options, name)) for name in _TIMES}
    try:
        made = _schedule(options, times)
        timeline = simulate(
            made,
            forward=times["forward"],
            backward_input=times["backward_input"],
            backward_weight=times["backward_weight"],
            send=times["send"],
        )
        unit = "forwards of a rank" if options.forward == [1.0] else "in the unit of --forward"
        print(_report(timeline, options.width, unit))
        for path in (options.png, options.svg):
            if path is not None:
                draw_timeline(timeline, path, unit=unit, whole=options.whole)
                print(f"wrote {path}")
        if options.trace is not None:
            write_trace(timeline, options.trace)
            print(f"wrote {options.trace}")
    except BrokenPipeError:  # of our output, no mistake
        raise
    except (ValueError, OSError) as error:  # ValueError: also ConfigError and DeadlockError
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron schedule",
        description="Draw the timeline of a pipeline schedule and say what it costs.",
    )
    add = parser.add_argument
    add("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)}, custom or auto")
    add("--pp", type=int, help="number of pipeline ranks")
    add("--microbatches", type=int, help="number of microbatches")
    add("--stages-per-rank", type=int, help="parts of the network on each rank")
    add("--table", type=Path, help="for custom: .csv or .json file with the actions of each rank")
    for name in _TIMES:
        where = (
            "between neighbouring stages, or between each two"
            if name == "send"
            else "on a whole rank, or on each stage"
        )
        add(
            f"--{name.replace('_', '-')}",
            type=float,
            nargs="+",
            default=[0.0 if name == "send" else 1.0],
            metavar="TIME",
            help=f"time of one microbatch {where} (with auto: or for each rank)",
        )
    add(
        "--memory-limit",
        type=float,
        help="for auto: activations of a microbatch on a whole rank that a rank has room for",
    )
    add("--width", type=int, help="columns for the time axis; by default those of the terminal")
    add("--png", type=Path, metavar="FILE.png", help="draw the timeline into this file")
    add("--svg", type=Path, metavar="FILE.svg", help="the same as a vector graphic")
    add("--whole", action="store_true", help="draw all of a large timeline, without its numbers")
    add("--trace", type=Path, metavar="FILE.json", help="write a trace for ui.perfetto.dev")
    return parser


def _number_or_list(given: list[float]) -> float | list[float]:
    return given[0] if len(given) == 1 else given


def _schedule(options: argparse.Namespace, times: dict[str, float | list[float]]) -> Schedule:
    name = options.schedule
    if name == "custom" and options.table is not None and options.pp is None:
        return _with_split_times(load_schedule(options.table), times)
    missing = [f"--{o}" for o in ("pp", "microbatches") if getattr(options, o) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not given: the layout is needed; nearest valid: "
            f"--pp 4 --microbatches 8"
        )
    if name != AUTO:
        made = make_schedule(
            name, options.pp, options.microbatches, options.stages_per_rank, options.table
        )
        return _with_split_times(made, times)
    whole = StageCosts(**times)
    numbers = [options.stages_per_rank] if options.stages_per_rank else [1, 2]
    costs = {number: whole.split(number) for number in numbers}
    choice = choose_schedule(options.pp, options.microbatches, costs, options.memory_limit)
    unit = "forwards of a rank" if options.forward == [1.0] else "unit of --forward"
    print(choice.table(unit), end="\n\n")
    made = choice.schedule
    chosen = costs[made.stages_per_rank]
    times.update({n: getattr(chosen, n) for n in _TIMES})
    return made


def _with_split_times(made: Schedule, times: dict[str, float | list[float]]) -> Schedule:
    """Divide the times of a whole rank among its stages; transfers keep theirs."""
    for name, given in times.items():
        if isinstance(given, float) and name != "send":
            times[name] = given / made.stages_per_rank
    return made


def _report(timeline: Timeline, width: int | None, unit: str) -> str:
    made = timeline.schedule
    stages = f"{made.stages_per_rank} stage{'s' if made.stages_per_rank > 1 else ''}"
    live = " ".join(f"{stages / made.stages_per_rank:.3g}" for stages in timeline.peak_live)
    short = made.stages_per_rank == 2
    drawn = render(timeline, width, short=short)
    room = shutil.get_terminal_size().columns
    needed = max(map(len, drawn.splitlines()))
    hint = []
    if width is None and needed > room:
        beside = len(f"rank {made.num_ranks - 1}  ")
        drawn = render(timeline, max(room - beside, 1), short=short)
        hint = [f"there is no room for the numbers; --width {needed - beside} shows them"]
    return "\n".join(
        [
            f"{made.name}: {made.num_ranks} ranks with {stages} each, "
            f"{made.num_microbatches} microbatches",
            drawn,
            _legend(made),
            *hint,
            f"step time {timeline.step_time:.6g} {unit}, bubble {timeline.bubble_fraction:.1%} of "
            f"it; {timeline.flowing_step_time:.6g} when steps flow into each other",
            f"a rank holds activations of up to so many microbatches, rank by rank: {live}",
        ]
    )


def _legend(made: Schedule) -> str:
    """Meaning of the letters and numbers of the text."""
    kinds = {action.kind for row in made.actions for action in row}
    parts = [f"{kind.value} {_LETTERS[kind]}" for kind in Kind if kind in kinds]
    if made.stages_per_rank == 2:
        parts.append("small letters: the second stage of a rank")
    parts.append(
        "numbers: stage.microbatch" if made.stages_per_rank > 2 else "numbers: microbatches"
    )
    return "; ".join(parts)
