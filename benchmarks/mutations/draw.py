"""Mutations of a checkout: what can be mutated, how it is drawn, and how it is applied."""

import ast
import collections
import contextlib
import copy
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PACKAGE = "lightning_megatron"
FOLDERS = ("parallel", "layers", "pipeline", "strategy", "checkpoint", "data")
KINDS = ("comparison", "off by one", "wait", "operands", "removed", "negated", "and/or")

_FLIPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
_WAITS = re.compile(r"(^|_)(wait|synchronize|barrier)(_|$)")
_SAYS = re.compile(r"^(_?log(ger)?\.\w+|logging\.\w+|\w*warn\w*|.*\.warn|rank_zero_\w+|print)$")
_UNHEARD = ("__repr__", "__str__", "extra_repr")
_HEADS = (ast.If, ast.While, ast.For, ast.With)
_LEAPS = (ast.Raise, ast.Break, ast.Continue)
_PLAIN = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete, *_LEAPS)


@dataclass(frozen=True)
class Mutation:
    """One defect: a statement of a function, and what stands there instead."""

    path: str
    function: str
    """Qualified name, empty for statements of the module itself."""
    kind: str
    before: str
    """Source of the statement as `ast.unparse` writes it; of a compound one, its head."""
    after: str
    occurrence: int
    """Number of equal statements before it in the function."""
    line: int
    """In the checkout that it was drawn from."""


@dataclass(frozen=True)
class _Site:
    """A place that can be mutated, and how."""

    path: str
    function: str
    statement: ast.stmt
    node: ast.AST
    kind: str
    variant: int


def statements(body: Sequence[ast.stmt], function: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """All statements in their order, with the qualified name of the function that they are in."""
    for statement in body:
        yield function, statement
        inner = function
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{statement.name}".lstrip(".")
        for owner in (
            statement,
            *getattr(statement, "handlers", ()),
            *getattr(statement, "cases", ()),
        ):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(owner, name, ()), inner)


def head(statement: ast.stmt) -> str:
    """Source of a statement without what is indented under it."""
    if not isinstance(statement, _HEADS):
        return ast.unparse(statement)
    bare = copy.copy(statement)
    bare.body = [ast.Pass()]
    if not isinstance(bare, ast.With):
        bare.orelse = []
    return ast.unparse(bare).removesuffix("\n    pass")


def _name_of(call: ast.AST) -> str:
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_heard(function: str, statement: ast.stmt) -> bool:
    """Whether a mutation there may change what the package does, and not only what it says."""
    if function.rpartition(".")[2] in _UNHEARD:
        return False
    if isinstance(statement, ast.If):
        return not re.match(r"TYPE_CHECKING|__name__", ast.unparse(statement.test))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await) and not _SAYS.match(
            _name_of(statement.value)
        )
    if isinstance(statement, ast.Assign) and _is_text(statement.value):
        return False
    return isinstance(statement, _PLAIN + _HEADS)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement computes, without annotations and what only makes up messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "body", "orelse") and isinstance(node, ast.stmt):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            named = _name_of(child)
            if named.endswith(("Error", "Warning")) or _SAYS.match(named):
                continue
            yield child
            yield from _expressions(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _ways(node: ast.AST) -> list[tuple[str, int]]:
    """Kinds of mutations that an expression, or the head of a statement, admits, with a variant."""
    if isinstance(node, ast.Compare):
        return [("comparison", index) for index in range(len(_FLIPPED[type(node.ops[0])]))]
    if isinstance(node, ast.Constant):
        return [("off by one", 0)] if type(node.value) is int else []
    if isinstance(node, ast.Slice):
        ends = (node.lower, node.upper)
        computed = [end is not None and not isinstance(end, ast.Constant) for end in ends]
        return [("off by one", index) for index in (0, 1) if computed[index]]
    if isinstance(node, ast.BinOp):
        text = _is_text(node.left) or _is_text(node.right)  # a format or a path
        return [("operands", 0)] if isinstance(node.op, _SWAPPED) and not text else []
    if isinstance(node, ast.BoolOp):
        return [("and/or", 0)]
    if isinstance(node, ast.comprehension):
        return [("negated", index) for index in range(len(node.ifs))]
    return [("negated", 0)] if isinstance(node, ast.If | ast.While | ast.IfExp) else []


def _removal(statement: ast.stmt, bound: collections.Counter[str]) -> str | None:
    """Kind of mutation that its removal is; a name that nobody binds elsewhere stays."""
    if isinstance(statement, ast.Expr):
        name = _name_of(statement.value).rpartition(".")[2]
        return "wait" if _WAITS.search(name) else "removed"
    if isinstance(statement, ast.Assign):
        names = [name for target in statement.targets for name in _stored(target)]
        return "removed" if all(bound[name] > 1 for name in names) else None
    if isinstance(statement, ast.Return):
        return "removed" if statement.value is None else None
    return "removed" if isinstance(statement, (ast.AugAssign, ast.Delete, *_LEAPS)) else None


def _stored(node: ast.AST) -> list[str]:
    """Names that it binds."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    return [one.id for one in names if isinstance(one.ctx, ast.Store)]


def _bound(tree: ast.Module) -> dict[str, collections.Counter[str]]:
    """How many times each function binds its names, arguments included."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for function, statement in statements(tree.body):
        if isinstance(statement, ast.FunctionDef):
            inner = f"{function}.{statement.name}".lstrip(".")
            found[inner].update(a.arg for a in ast.walk(statement.args) if isinstance(a, ast.arg))
        parts: Sequence[ast.AST] = () if hasattr(statement, "body") else (statement,)
        if isinstance(statement, _HEADS):
            parts = list(_expressions(statement))
        found[function].update({name for part in parts for name in _stored(part)})
    return found


def sites(path: str, source: str) -> Iterator[_Site]:
    """All places of a file that can be mutated."""
    tree = ast.parse(source)
    bound = _bound(tree)
    for function, statement in statements(tree.body):
        if not _is_heard(function, statement):
            continue
        if kind := _removal(statement, bound[function]):
            yield _Site(path, function, statement, statement, kind, -1)
        if isinstance(statement, ast.Raise):
            continue
        for node in (statement, *_expressions(statement)):
            for kind, variant in _ways(node):
                yield _Site(path, function, statement, node, kind, variant)


def _mutate(node: Any, kind: str, variant: int) -> None:
    """Change a node of a copy of the tree."""
    one, what = ast.Constant(1), type(node)
    if kind == "comparison":
        node.ops[0] = _FLIPPED[type(node.ops[0])][variant]()
    elif kind == "operands":
        node.left, node.right = node.right, node.left
    elif kind == "and/or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif what is ast.Constant:
        node.value += 1
    elif what is ast.Slice and variant:
        node.upper = ast.BinOp(node.upper, ast.Sub(), one)
    elif what is ast.Slice:
        node.lower = ast.BinOp(node.lower, ast.Add(), one)
    elif what is ast.comprehension:
        node.ifs[variant] = _opposite(node.ifs[variant])
    else:
        node.test = _opposite(node.test)


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def mutation_of(site: _Site, source: str) -> Mutation | None:
    """The mutation of a place, unless the file would be the same or not compile with it."""
    copies: dict[int, Any] = {}
    changed = copy.deepcopy(site.statement, copies)
    if site.variant >= 0:
        _mutate(copies[id(site.node)], site.kind, site.variant)
    with contextlib.suppress(ValueError):  # an f-string that cannot be written back
        before = head(site.statement)
        equal = [one.lineno for one in _equal(source, site.function, before)]
        found = Mutation(
            site.path,
            site.function,
            site.kind,
            before,
            head(changed) if site.variant >= 0 else "pass",
            equal.index(site.statement.lineno),
            getattr(site.node, "lineno", site.statement.lineno),
        )
        return found if apply(source, found) is not None else None
    return None


def _equal(source: str, function: str, text: str) -> list[ast.stmt]:
    """Statements of a function that read so."""
    found: list[ast.stmt] = []
    for name, statement in statements(ast.parse(source).body):
        if name == function and isinstance(statement, _PLAIN + _HEADS):
            with contextlib.suppress(ValueError):
                if head(statement) == text:
                    found.append(statement)
    return found


def apply(source: str, mutation: Mutation) -> str | None:
    """The source with a mutation, or None where the statement is gone."""
    equal = _equal(source, mutation.function, mutation.before)
    if not equal:
        return None
    statement = equal[min(mutation.occurrence, len(equal) - 1)]
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: statement.lineno - 1])) + statement.col_offset
    text, after = source.encode(), mutation.after.encode()
    if isinstance(statement, _HEADS):
        if text[begin:].startswith(b"elif"):
            after = b"el" + after
        first = statement.body[0]
        line = min(n.lineno for n in (first, *getattr(first, "decorator_list", ())))
        end = sum(map(len, lines[: line - 1])) + first.col_offset
        after += b"\n" + b" " * (statement.col_offset + 4)
    else:
        assert statement.end_lineno is not None
        assert statement.end_col_offset is not None
        end = sum(map(len, lines[: statement.end_lineno - 1])) + statement.end_col_offset
    changed = (text[:begin] + after + text[end:]).decode()
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        compile(changed, mutation.path, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return None if same else changed


def draw(root: Path, number: int, seed: int) -> list[Mutation]:
    """Draw mutations of a checkout: the kinds take turns, and every folder has one at least."""
    chance = random.Random(seed)
    sources: dict[str, str] = {}
    places: dict[str, list[_Site]] = {kind: [] for kind in KINDS}
    for folder in FOLDERS:
        for file in sorted((root / PACKAGE / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            sources[path] = file.read_text()
            for site in sites(path, sources[path]):
                places[site.kind].append(site)
    found: dict[Mutation, Mutation] = {}  # of several kinds that read alike, the first
    turn = 0
    while len(found) < number:
        kind = KINDS[turn % len(KINDS)]
        if not any(places.values()):
            raise ValueError(f"no more than {len(found)} mutations can be drawn from {root}")
        wanted = FOLDERS[turn] if turn < len(FOLDERS) else ""
        among = [s for s in places[kind] if s.path.startswith(f"{PACKAGE}/{wanted}")]
        turn += 1
        if among or places[kind]:
            site = chance.choice(among or places[kind])
            places[kind].remove(site)
            if mutation := mutation_of(site, sources[site.path]):
                found.setdefault(replace(mutation, kind="", line=0), mutation)
    return list(found.values())
