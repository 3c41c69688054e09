"""Mistakes in the options of a command, in one sentence each.

jsonargparse answers a typo with the usage of the whole command, and with what each member of a
union would have wanted. Here its message, a tree, is followed to the option that it is about; the
sentence then says what may stand there, and what was probably meant. A message of another form is
passed on without its boilerplate.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_megatron.cli.init import recipe_names
from lightning_megatron.errors import ConfigError

_KEY = re.compile(r'^Parser key "([^"]+)":\s*')
_OWNER = re.compile(r"^( *(?:- )?)Problem with given class_path '([^']+)':\s*$", re.MULTILINE)
_UNKNOWN = re.compile(
    r"Option '([^']+)' is not accepted|does not accept option '([^']+)'"
    r"|unrecognized arguments: (?:--)?([^\s=]+)"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_MODULE = re.compile(r"No module named '([^']+)'")
_NO_GROUP = re.compile(r"Unable to load config ['\"](.*?)['\"]")
_OTHER_CLASS = re.compile(r"(?:not correspond to a|Not a valid) subclass of (\w+)")
_GIVEN = re.compile(r"(?:Given value|Got value): (.*)$", re.MULTILINE)
_EXPECTED = re.compile(r"Expected a (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_SUBTYPES = re.compile(r"^\s*(?:- )?Subtypes: \[(.*)\]$", re.MULTILINE)
_LITERAL = re.compile(r"Literal\[([^\]]*)\]")
_NUMBER = re.compile(r"<class 'int'>|Literal\[\d")
_CLASS = re.compile(r"<class '([\w.]+)'>")
_CAUSE = re.compile(
    r"^ *- (?!Expected a|Does not validate|Not a valid|Problem with|a (?:class|dict))(.+)$",
    re.MULTILINE,
)
_BOILERPLATE = re.compile(
    r"^\s*(?:- )?(?:Does not validate|Subtypes|Errors:|Given value|Expected a )"
)

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "NoneType": "null",
}
_LINES = 5
"""Most lines that are passed on of a message."""
_MANY = 20
"""More names than this are not listed."""


@dataclass(frozen=True)
class _Place:
    """The option that a message is about."""

    key: str
    """Name of the option, from the command on; empty where the message names none."""
    owner: str
    """Import path of the class whose option that is; empty for options of the command."""
    text: str
    """Rest of the message, which says what is wrong with it."""
    types: str
    """Types of its value, as jsonargparse writes them."""


def explain(message: str, parser: Any, defaults: dict[str, str], args: Sequence[str]) -> str:
    """Return one sentence, or a few lines, in place of a message of jsonargparse.

    Args:
        message: what jsonargparse says.
        parser: of the command.
        defaults: import paths of classes, by the option under which their own options stand.
        args: the command line.
    """
    place = _follow(message)
    unknown = _UNKNOWN.search(place.text)
    if unknown:
        name = next(group for group in unknown.groups() if group)
        return _unknown(name, place, parser, defaults)
    if re.match(r"Parser key \"config\"|Problems parsing config", message):
        return _config(message, args)
    given = _GIVEN.search(message)
    value = given[1] if given else ""
    no_module, no_class = _NO_MODULE.search(place.text), _NO_CLASS.search(place.text)
    if no_module:
        return (
            f"{place.key}={place.owner or value}: there is no module {no_module[1]!r}, in the "
            "current folder either"
        )
    no_group = _NO_GROUP.search(place.text)
    if no_group:
        return (
            f"{place.key}={no_group[1]}: is a group of options, of which each is given by its name"
        )
    if no_class and _NUMBER.search(place.types):
        return _wrong_value(place, no_class[1])
    if no_class or _OTHER_CLASS.search(place.text):
        return _wrong_class(place, no_class[1] if no_class else value, found=no_class is None)
    cause = _CAUSE.search(place.text)
    if cause:
        return f"{place.key}={value}: {cause[1]}"
    own = _GIVEN.search(place.text)
    if own or _EXPECTED.search(place.text):
        return _wrong_value(place, own[1] if own else value)
    lines = [line for line in place.text.splitlines() if line.strip()]
    lines = [line for line in lines if not _BOILERPLATE.search(line)] or lines
    owner = f" ({place.owner})" if place.owner else ""
    about = f"{place.key}{owner}: " if place.key else ""
    return about + "\n".join(line.rstrip() for line in lines[:_LINES])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return what was probably meant by a name with dots.

    >>> nearest("trainer.max_step", ["trainer.max_steps", "model.lr"])
    'trainer.max_steps'
    >>> nearest("lr", ["trainer.max_steps", "model.lr"])
    'model.lr'
    >>> nearest("recompute", ["compile", "activations.recompute"])
    'activations.recompute'
    """
    names = list(known)
    parent, _, leaf = name.rpartition(".")
    beside = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    below = [n for n in names if n.startswith(parent) and n.rpartition(".")[2] == leaf]
    close = get_close_matches(leaf, beside, n=1, cutoff=0.8 if below else 0.6)
    if close:
        return beside[close[0]]
    elsewhere = [n for n in names if n.rpartition(".")[2] == leaf]
    if elsewhere:
        return get_close_matches(name, elsewhere, n=1, cutoff=0.0)[0]
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.75)), None)


def unknown_strategy(given: Any) -> str | None:
    """Return what is wrong with a strategy that is given by name; None if nothing is.

    >>> unknown_strategy("dpd")
    "trainer.strategy='dpd': no strategy has this name; did you mean 'ddp'?"
    """
    names = StrategyRegistry.available_strategies()
    try:
        if not isinstance(given, str) or given.lower() == "auto" or given.lower() in names:
            return None
    except ConfigError as error:  # nearly a name of this package's
        return f"trainer.{error}"
    kinds = [kind.__name__ for kind in _below_class(Strategy)]
    close = nearest(given, ["auto", *names, *kinds])
    hint = f"; did you mean {close!r}?" if close else f": there are {', '.join(names)}"
    return f"trainer.strategy={given!r}: no strategy has this name{hint}"


def options_of(class_path: str) -> list[str]:
    """Return the options of a class, those of nested configurations with dots."""
    kind = _class_of(class_path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False)
    found = []
    for option in _options(parser):
        found.append(option)
        if option in (numbers := _numbers_or_configs(kind)):
            found += [f"{option}.{field.name}" for field in fields(numbers[option])]
    return found


def _numbers_or_configs(kind: Any) -> dict[str, Any]:
    """Configs by the option that takes one in place of a number, which a parser does not list."""
    hints = get_type_hints(kind.__init__)
    return {
        option: member
        for option, hint in hints.items()
        for member in get_args(hint)
        if isinstance(member, type) and is_dataclass(member)
    }


def _options(parser: Any) -> list[str]:
    known = (action for action in parser._actions if action.option_strings)
    return [action.dest for action in known if not action.dest.endswith("help")]


def _follow(message: str) -> _Place:
    """Go down a message to what it ends with."""
    keys: list[str] = []
    owner, types, text = "", "", message
    while True:
        key, problem = _KEY.match(text), _OWNER.search(text)
        if key:
            keys.append(key[1])
            text = text[key.end() :]
            text = textwrap.dedent(text.strip("\n"))
            subtypes = _SUBTYPES.search(text)
            types = subtypes[1] if subtypes else ""
        elif problem:
            owner = problem[2]
            text = _below(text[problem.end() :], len(problem[1]))
        else:
            return _Place(".".join(keys), owner, text, types)


def _below(text: str, indent: int) -> str:
    """The lines at the beginning that are further in than ``indent``."""
    lines = []
    for line in text.strip("\n").splitlines():
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines))


def _unknown(name: str, place: _Place, parser: Any, defaults: dict[str, str]) -> str:
    if name == "class_path":
        return f"{place.key}: options of the class stand under init_args, beside class_path"
    if not place.owner:
        if not any(name == option.lstrip("-") for option in _given_like_options(place.text)):
            return f"{name}: there are no words beside options, which begin with --"
        known = _options(parser)
        for prefix, class_path in defaults.items():
            known += [f"{prefix}.{option}" for option in options_of(class_path)]
        close = nearest(name, known)
        command = parser.prog.replace("[options] ", "")
        hint = f"did you mean `{close}`?" if close else f"`{command} --help` lists all"
        return f"no option `{name}`; {hint}"
    kind = place.owner.rpartition(".")[2]
    try:
        known = options_of(place.owner)
    except (AttributeError, ImportError, TypeError, ValueError):
        known = []
    close = nearest(name, known)
    hint = f"did you mean `{close}`?" if close else _listed(known, place)
    return f"no option `{name}` of {kind} ({place.key}.{name}); {hint}"


def _given_like_options(text: str) -> list[str]:
    """The options of a message: all that is not a stray word."""
    stray = re.search(r"unrecognized arguments: (.*)", text)
    if stray is None:
        return [next(group for group in found if group) for found in _UNKNOWN.findall(text)]
    return [word.partition("=")[0] for word in stray[1].split() if word.startswith("--")]


def _listed(names: list[str], place: _Place) -> str:
    own = [name for name in names if "." not in name]
    if 0 < len(own) <= _MANY:
        return f"it has {', '.join(own)}"
    return f"`lightning-megatron fit --{place.key}.help {place.owner}` lists all"


def _wrong_value(place: _Place, value: str) -> str:
    types = place.types or "; ".join(_EXPECTED.findall(place.text))
    literals = [
        text.strip().strip("'\"") for found in _LITERAL.findall(types) for text in found.split(",")
    ]
    literals = list(dict.fromkeys(literals))
    rest = _LITERAL.sub("", types)
    names = [name.rpartition(".")[2] for name in _CLASS.findall(rest)]
    names += ["list"] if re.search(r"\b(?:list|Iterable)\[|Iterable", rest) else []
    names += ["dict"] if re.search(r"\bdict\[", rest) else []
    words = [_WORDS.get(name, f"a {name}") for name in dict.fromkeys(names) if name != "Iterable"]
    if literals:
        words = [*literals, *(word for word in words if word == "null")]
    text = f"{place.key}={value}: must be {_either(words)}"
    close = get_close_matches(value, literals, n=1, cutoff=0.6)
    if "fp8" in value.lower():
        text += "; FP8 is a plugin: --trainer.plugins+=Fp8Precision"
    elif close:
        text += f"; did you mean {close[0]}?"
    return text


def _either(words: list[str]) -> str:
    if len(words) < 2:
        return "".join(words) or "of another type"
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _wrong_class(place: _Place, name: str, *, found: bool) -> str:
    bases = [path for path in _CLASS.findall(place.types) if "." in path]
    wanted = _either([path.rpartition(".")[2] for path in bases])
    if found:
        return f"{place.key}={name}: is no {wanted or 'class of this kind'}"
    known = {kind.__name__ for path in bases for kind in _below_class(_class_of(path))}
    close = nearest(name, sorted(known))
    if close:
        return f"{place.key}={name}: no class has this name; did you mean {close}?"
    return (
        f"{place.key}={name}: no {wanted} of this package or of Lightning has this name; others "
        "are given by their import path, like my_package.MyClass"
    )


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _below_class(kind: type) -> list[type]:
    """The public subclasses of a class that are known so far, whatever their depth."""
    found: list[type] = []
    left = [kind]
    while left:
        kinds: list[type] = left.pop().__subclasses__()
        left += kinds
        found += [kind for kind in kinds if not kind.__name__.startswith("_")]
    return found


def _config(message: str, args: Sequence[str]) -> str:
    missing = re.search(r"File does not exist: '([^']+)'", message)
    if missing is None:
        files = [
            a.partition("=")[2] or b
            for a, b in zip(args, [*args[1:], ""], strict=True)
            if a.partition("=")[0] in ("--config", "-c")
        ]
        lines = message.partition(": ")[2].splitlines()
        return f"{', '.join(files)}: is no YAML: " + "\n".join(lines[: _LINES - 1])
    path = Path(missing[1])
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    there = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    if path.parent == Path():
        there += [f"{name}.yaml" for name in recipe_names()]
    close = get_close_matches(path.name, there, n=1)
    hint = f"did you mean {path.with_name(close[0])}?" if close else "`init` lists the recipes"
    return f"--config {path}: there is no such file; {hint}"
