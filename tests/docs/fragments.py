"""Python that is not executed: it parses, its imports resolve, its calls fit what they call."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_megatron.errors import ConfigError
from tests.docs.pages import Block

ELSEWHERE = {
    "accelerate",
    "datasets",
    "deepspeed",
    "flash_attn",
    "megatron",
    "mlflow",
    "nemo",
    "torchvision",
    "transformer_engine",
    "wandb",
}
"""Packages of others, which pages may show without their being installed."""

_IMPORTED = {"lightning_megatron", "lightning", "torch", "torchmetrics", "numpy"}
_CHECKED = ("lightning_megatron", "lightning")
"""Packages of which calls are held against signatures."""

_UNKNOWN = object()


def problems(block: Block, known: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a block; ``known`` is what the page has imported, and grows."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        yield block.problem(error.lineno or 1, f"SyntaxError: {error.msg}")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (block.problem(node.lineno, text) for text in _import(node, known))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            known[node.name] = _UNKNOWN  # the page's own
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = _mismatch(node, known)
            if text:
                yield block.problem(node.lineno, text)


def _import(node: ast.Import | ast.ImportFrom, known: dict[str, Any]) -> Iterator[str]:
    names = (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    )
    for module in names:
        top = module.partition(".")[0]
        if top not in _IMPORTED and top not in sys.stdlib_module_names:
            if top not in ELSEWHERE and find_spec(top) is None:
                yield f"no module `{top}`; packages of others stand in tests/docs/fragments.py"
            continue
        try:
            found = import_module(module)
        except ImportError as error:
            yield f"{type(error).__name__}: {error}"
            continue
        for alias in node.names:
            if isinstance(node, ast.Import):
                shown = found if alias.asname else import_module(top)
                known[alias.asname or top] = shown
            elif not hasattr(found, alias.name) and _submodule(module, alias.name) is None:
                yield f"`{module}` has no `{alias.name}`"
            else:
                value = getattr(found, alias.name, None) or _submodule(module, alias.name)
                known[alias.asname or alias.name] = value


def _submodule(module: str, name: str) -> Any:
    try:
        return import_module(f"{module}.{name}")
    except ImportError:
        return None


def _resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, known)
        if inspect.ismodule(owner) or inspect.isclass(owner):
            return getattr(owner, node.attr, _UNKNOWN)
    return _UNKNOWN


def _mismatch(call: ast.Call, known: dict[str, Any]) -> str | None:
    function = _resolve(call.func, known)
    module = getattr(function, "__module__", None) or ""
    if function is _UNKNOWN or module.partition(".")[0] not in _CHECKED:
        return None
    name = ast.unparse(call.func)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    left_out = [arg for arg in call.args if _is_ellipsis(arg) or isinstance(arg, ast.Starred)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    partial = bool(left_out) or len(keywords) < len(call.keywords)
    given = [arg for arg in call.args if arg not in left_out]
    try:
        (signature.bind_partial if partial else signature.bind)(*given, **keywords)
    except TypeError as error:
        return f"{name}: {error}"
    return _wrong_values(call, function, known)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _wrong_values(call: ast.Call, function: Any, known: dict[str, Any]) -> str | None:
    """What the configuration says to its values, where all of them are written out."""
    from lightning_megatron import MegatronStrategy

    if not (function is MegatronStrategy or dataclasses.is_dataclass(function)):
        return None
    for node in ast.walk(call):
        value = _resolve(node, known) if isinstance(node, ast.Name) else None
        plain = isinstance(node, ast.Name) and not dataclasses.is_dataclass(value)
        if (plain and value is not MegatronStrategy) or (
            isinstance(node, ast.Constant) and node.value is Ellipsis
        ):
            return None
    try:
        made = eval(compile(ast.Expression(call), "<page>", "eval"), dict(known))
    except ConfigError as error:
        return f"{ast.unparse(call)}: {error}"
    if function is not MegatronStrategy:
        return None
    options = made.options
    model = options.tp * options.pp.degree * options.cp.degree
    ranks = max(model, 1) * max(options.zero.dp_replicate, 1) * max(options.ep.degree, 1)
    wrong = [*options.problems(ranks), *options.group_problems(None)]
    return f"{ast.unparse(call)}: {'; '.join(wrong)}" if wrong else None
