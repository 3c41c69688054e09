"""`lightning-megatron adopt --show`: how `adopt` would split a model, without training anything.

A model of transformers is built from its ``config.json`` on the meta device, which takes no memory.
Any other class is called with the arguments that are given, and runs once if there is an input.
"""

import argparse
import ast
import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_megatron.errors import ConfigError


def adopt(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `adopt`.

    Returns:
        The exit code: 0; mistakes of the user are a `ConfigError`.
    """
    options = _parser().parse_args(list(args))
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    model = _model(options.show, _keywords(options.init))
    example = _example(options.example, model)
    for line in report(model, example, tuple(options.tp), tuple(options.pp)):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron adopt",
        description="Say how adopt(model) splits a model over tp and pp.",
    )
    add = parser.add_argument
    add(
        "--show",
        required=True,
        metavar="MODEL",
        help="a directory or config.json of transformers, or my.module:Class of your own",
    )
    add(
        "--init",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of the class, as Python literals",
    )
    add(
        "--example",
        metavar="my.module:function",
        help="function that returns the arguments of a small call, a tuple or a dict; by default "
        "the model's example_input_array. With one, the pairs are found by running the model",
    )
    add("--tp", type=int, nargs="+", default=[1, 2, 4, 8], help="degrees in the table of bytes")
    add("--pp", type=int, nargs="+", default=[1, 2, 4], help="degrees in the table of bytes")
    return parser


def report(model: Any, example: Any, tp: Sequence[int], pp: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        model: the model; it is adopted.
        example: arguments of a small call, a tuple or a dict, or None.
        tp: degrees of tp.
        pp: degrees of pp.
    """
    from lightning_megatron.adoption.adopt import adopt as adopted
    from lightning_megatron.adoption.huggingface import is_huggingface, plan_of
    from lightning_megatron.adoption.own_plans import OWN_PLANS
    from lightning_megatron.adoption.propose import propose

    reasons: Mapping[str, str] = {}
    if is_huggingface(model) and plan_of(model).styles:
        plan, kind = plan_of(model), model.config.model_type
        source = "this library" if kind in OWN_PLANS else "transformers"
        title = f"plan of {source} for {kind}"
    else:
        args = example if isinstance(example, tuple) else ()
        kwargs = example if isinstance(example, dict) else {}
        found = propose(model, args, kwargs)
        plan, reasons, title = found.plan, found.reasons, f"proposed {found.basis}"
    yield f"{type(model).__name__}: {title}"
    shapes = {n: [tuple(p.shape) for p in m.parameters()] for n, m in model.named_modules()}
    styles, items = dict(plan.styles), list(plan.items)
    adopted(model, tp_plan=styles, trunk=items or None)
    yield ""
    yield from _styles(styles, shapes, reasons)
    yield from _whole(model, styles, reasons)
    yield ""
    yield f"items of a pipeline: {', '.join(_patterns(items)) or 'none found, so pp=1'}"
    yield ""
    yield from _bytes(model, items, tp, pp)
    yield ""
    yield "to give it yourself, or to change it:"
    yield "  adopt("
    yield "      model,"
    yield f"      tp_plan={_as_code(_merged(styles))},"
    yield f"      trunk={_patterns(items)!r},"
    yield "  )"


def _styles(
    styles: Mapping[str, str], shapes: Mapping[str, Any], reasons: Mapping[str, str]
) -> Iterator[str]:
    rows: dict[tuple[str, ...], int] = {}
    for name, style in styles.items():
        size = " ".join("x".join(map(str, shape)) for shape in shapes.get(name, ()))
        row = (_starred(name), style, size, _starred(reasons.get(name, "")))
        rows[row] = rows.get(row, 0) + 1
    table: list[tuple[str, ...]] = [("split over tp", "style", "shapes", "times", "why")]
    table += [(*row[:3], str(count), row[3]) for row, count in rows.items()]
    yield from _table(table)


def _whole(model: Any, styles: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules with whole parameters."""
    rows: dict[tuple[str, str], int] = {}
    known: set[Any] = set()
    for name, module in model.named_modules():
        held = sum(p.numel() for p in module.parameters(recurse=False) if p not in known)
        known.update(module.parameters(recurse=False))
        inside = any(name == n or name.startswith(f"{n}.") for n in styles)
        if held and not inside:
            row = (_starred(name) or "the model itself", _starred(reasons.get(name, "")))
            rows[row] = rows.get(row, 0) + held
    if rows:
        yield ""
        head = ("whole on every tp rank", "parameters", "why")
        yield from _table([head, *((n, f"{held:,}", why) for (n, why), held in rows.items())])


def _bytes(model: Any, items: Sequence[str], tp: Sequence[int], pp: Sequence[int]) -> Iterator[str]:
    """Yield a table of the bytes of the weights that the fullest rank holds."""
    degrees = [p for p in pp if p <= max(len(items), 1)]
    table = [("weights per rank", *(f"pp={p}" for p in degrees))]
    notes = []
    for degree in tp:
        problems = _problems(model, degree)
        if problems:
            notes.append(f"tp={degree}: {problems[0]}")
            table.append((f"tp={degree}", *("-" for _ in degrees)))
            continue
        part = _part(model, degree)
        sizes = (_size(_fullest(part, model, items, p)) for p in degrees)
        table.append((f"tp={degree}", *sizes))
    yield from _table(table)
    yield from notes


def _problems(model: Any, tp: int) -> list[str]:
    from lightning_megatron.layers.base import ParallelLayer
    from lightning_megatron.topology.degrees import Degrees

    return [
        f"{name}: {problem}"
        for name, layer in model.named_modules()
        if isinstance(layer, ParallelLayer)
        for problem in layer.problems(Degrees(tp=tp))
    ]


def _part(model: Any, tp: int) -> Any:
    """Return a copy of the model on the meta device as the first tp rank holds it."""
    from lightning_megatron.adoption.stage_program import meta_copies
    from lightning_megatron.layers.base import ParallelLayer
    from lightning_megatron.topology.axis import Axis

    (part,) = meta_copies([model])
    one = Axis("ep", 0, (0,), None)
    axis = Axis("tp", 0, tuple(range(tp)), None)
    topology: Any = SimpleNamespace(tp=axis, ep=one, cp=one, sequence_parallel=False)
    shares: dict[int, tuple[Any, str]] = {}
    ties = []
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owner = shares.setdefault(id(parameter), (module, name))
            if owner != (module, name):
                ties.append((module, name, *owner))
    for module in part.modules():
        if isinstance(module, ParallelLayer):
            module.distribute(topology)
    for module, name, owner, own in ties:
        setattr(module, name, getattr(owner, own))
    return part


def _fullest(part: Any, model: Any, items: Sequence[str], pp: int) -> int:
    """Bytes of the weights on the stage that holds the most."""
    from lightning_megatron.schedules.partition import partition_by_cost

    everything = {id(p): p for p in part.parameters()}
    if pp == 1:
        return sum(map(_bytes_of, everything.values()))
    costs = [sum(p.numel() for p in model.get_submodule(n).parameters()) for n in items]
    of_items = [{id(p): p for p in part.get_submodule(n).parameters()} for n in items]
    inside = {key for held in of_items for key in held}
    outside = {key: p for key, p in everything.items() if key not in inside}
    stages = partition_by_cost(costs, pp)
    held = [{k: p for i in stage for k, p in of_items[i].items()} | outside for stage in stages]
    return max(sum(map(_bytes_of, stage.values())) for stage in held)


def _bytes_of(parameter: Any) -> int:
    size: int = parameter.numel() * parameter.element_size()
    return size


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _starred(name: str) -> str:
    return re.sub(r"(?<![^.,\s])\d+(?=[.,]|$)", "*", name)


def _patterns(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(_starred, names)))


def _merged(styles: Mapping[str, str]) -> dict[str, str]:
    """Styles by pattern, where all names that a pattern fits have one style; else by name."""
    found: dict[str, set[str]] = {}
    for name, style in styles.items():
        found.setdefault(_starred(name), set()).add(style)
    return {
        (_starred(name) if len(found[_starred(name)]) == 1 else name): style
        for name, style in styles.items()
    }


def _as_code(styles: Mapping[str, str]) -> str:
    lines = "".join(f"          {name!r}: {style!r},\n" for name, style in styles.items())
    return f"{{\n{lines}      }}" if lines else "{}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()


def _model(target: str, keywords: Mapping[str, Any]) -> Any:
    import torch

    path = Path(target)
    if path.is_dir() or path.name == "config.json":
        if keywords:
            raise ConfigError(
                f"--init {' '.join(keywords)}: {target} says itself how its model is built; "
                "nearest valid: without --init"
            )
        return _from_config(path if path.is_dir() else path.parent)
    made = _named(target, "--show")
    if isinstance(made, type) or not isinstance(made, torch.nn.Module):
        if not callable(made):
            raise ConfigError(
                f"--show {target}: is a {type(made).__name__}; nearest valid: a class"
            )
        try:
            made = made(**keywords)
        except TypeError as error:
            raise ConfigError(
                f"--show {target}: {error}; nearest valid: --init NAME=VALUE for its arguments"
            ) from None
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"--show {target}: makes a {type(made).__name__}; nearest valid: a torch.nn.Module"
        )
    return copy.deepcopy(made)


def _from_config(directory: Path) -> Any:
    """Return the model that a directory of transformers describes, on the meta device."""
    import torch

    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--show {directory}: has no config.json; nearest valid: a directory that "
            "save_pretrained of transformers wrote"
        )
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError:
        raise ConfigError(
            f"--show {directory}: transformers is not installed; nearest valid: "
            "pip install lightning-megatron[hf]"
        ) from None
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    named = (config.architectures or ["AutoModel"])[0]
    build = getattr(transformers, named, transformers.AutoModel.from_config)
    with torch.device("meta"):
        return build(config)


def _example(target: str | None, model: Any) -> Any:
    made = getattr(model, "example_input_array", None) if target is None else None
    if target is not None:
        made = _named(target, "--example")
        made = made() if callable(made) else made
    if made is None or isinstance(made, tuple | dict):
        return made
    return (made,)


def _named(target: str, option: str) -> Any:
    module, _, name = target.partition(":")
    if not name:
        module, _, name = target.rpartition(".")
    try:
        found: Any = import_module(module) if module else None
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise
        found = None
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(
            f"{option} {target}: there is no such name and no such directory; nearest valid: "
            "my.module:Class, or a directory with a config.json"
        )
    return found


def _keywords(given: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--init {text}: must be NAME=VALUE; nearest valid: --init width=64")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found
