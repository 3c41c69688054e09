"""What the package does behind the back of a line of code, found in its syntax.

Each figure is a list of names with their files, so that two records can be compared. Where syntax
cannot decide, the figure is a heuristic; the comment beside it says what it misses.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.house.source import Module, Source

TENSORS = ("torch.Tensor", "torch.nn.Parameter", "torch.distributed.tensor.DTensor")
FUNCTION_MODE = "torch.overrides.TorchFunctionMode"
DISPATCH_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
PROTOCOLS = ("typing.Protocol", "typing_extensions.Protocol")

FRAMES = frozenset(
    ("_getframe", "_current_frames", "currentframe", "f_locals", "f_globals", "f_back", "f_code")
    + ("tb_frame", "walk_stack")
)
BYTECODE = frozenset(
    ("co_names", "co_consts", "co_code", "co_varnames", "co_argcount", "co_freevars")
    + ("co_cellvars", "get_instructions", "getclosurevars")
)
METHODS = frozenset(
    ("forward", "log", "training_step", "validation_step", "state_dict", "backward")
    + ("load_state_dict", "_load_from_state_dict", "_get_iterator", "save_pretrained", "generate")
    + ("num_parameters", "update", "compute", "reset", "process_dataloader", "zero_grad")
)
"""Names of methods of torch, Lightning and transformers that code replaces on objects."""

MEETINGS = (
    ("class", "Peers", ""),
    ("class", "StoreBarrier", ""),
    ("class", "StoreList", ""),
    ("class", "PerBatchVotes", ""),
    ("class", "ObjectBroadcast", ""),
    ("function", "join", "rendezvous"),
    ("class", "EndingBoard", ""),
    ("class", "BoardHolder", ""),
    # Gone:
    ("function", "agree", "collectives"),
    ("class", "Rendezvous", ""),
    ("class", "Meeting", ""),
    ("class", "Gathered", ""),
    ("class", "Board", ""),
    ("class", "RollCall", ""),
    ("function", "all_ranks_end", ""),
)
"""Definitions by which ranks meet or have met, with a part of the file's name where others have the
same name: one that is deleted or renamed is not counted. `exchanges` finds what has no name here.
"""
_OBJECTS = frozenset(
    ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    + ("send_object_list", "recv_object_list", "monitored_barrier")
)
_STORES = frozenset(
    ("default_store", "own_connection", "HashStore", "PrefixStore", "TCPStore", "FileStore")
    + ("compare_set", "multi_get", "multi_set", "num_keys", "delete_key")
)
_STORE_METHODS = frozenset(("set", "get", "add", "check", "wait", "append"))
"""Methods of stores whose names others have, too: they count on what is called a store."""
_A_STORE = re.compile(r"(^|_|\.)store$")
_INDEX = re.compile(r"(Manifest|Index|Inventory|Metadata)$")


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        what: its name.
        where: what was counted.
        number: how much it is; the length of ``where`` by default.
        unit: of the number.
    """

    what: str
    where: tuple[str, ...] = ()
    number: float | None = None
    unit: str = ""

    @property
    def value(self) -> float:
        """The number."""
        return len(self.where) if self.number is None else self.number


def mechanisms(source: Source) -> list[Figure]:
    """All figures that syntax gives, but for sizes."""
    found = [
        ("tensor subclasses", _named(source, source.subclasses(*TENSORS))),
        ("TorchFunctionMode subclasses", _named(source, source.subclasses(FUNCTION_MODE))),
        ("TorchDispatchMode subclasses", _named(source, source.subclasses(DISPATCH_MODE))),
        ("modes entered for longer than a block (`__enter__()`)", entered_by_hand(source)),
        ("files that read stack frames", _files(source, _reads_frames)),
        ("files that read bytecode", _files(source, _reads_bytecode)),
        ("places that set `__class__`", _places(source, _class_changes)),
        ("files that may replace attributes of others' objects", _files(source, _replaced)),
        ("Protocol classes", protocols(source)),
        ("named ways for ranks to meet", meetings(source)),
        ("files that use a store or object collectives", _files(source, _object_meetings)),
        ("definitions that do", exchanges(source)),
        ("classes that index a checkpoint", indexes(source)),
    ]
    return [Figure(what, tuple(where)) for what, where in found]


def _named(source: Source, names: Iterable[str]) -> list[str]:
    return [source.short(name) for name in names]


def protocols(source: Source) -> list[str]:
    """Classes of which Protocol is a base itself."""
    return [source.short(n) for n, bases in source.bases.items() if {*bases} & {*PROTOCOLS}]


def entered_by_hand(source: Source) -> list[str]:
    """Modes with a call ``x.__enter__()`` that stays open when the function has ended.

    It is found in the class of the mode itself (``self`` or ``super()``), or on what was made by
    ``x = Mode(...)`` or ``self.x = Mode(...)`` in the same file. A mode that a ``with`` surrounds a
    call of the user's with is not: the traced step shows that.
    """
    modes = {*source.subclasses(FUNCTION_MODE, DISPATCH_MODE)}
    found = set()
    for module in source:
        made = {
            ast.unparse(target): source.full_name(module, node.value.func)
            for node in module.nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
        }
        for mode in module.classes:
            name = f"{module.name}.{mode.name}"
            entered = {*_entered(mode)} & {"self", "super()"}
            found |= {name} if name in modes and entered else set()
        found |= {made[x] for x in _entered(module.tree) if made.get(x) in modes}
    return sorted(_named(source, found))


def _entered(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        function = call.func if isinstance(call, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "__enter__":
            yield ast.unparse(function.value)


def _attributes(module: Module, names: frozenset[str]) -> int:
    return sum(isinstance(n, ast.Attribute) and n.attr in names for n in module.nodes)


def _reads_frames(module: Module) -> int:
    # Not counted: what takes a traceback to print it (`traceback.format_exc`), which is for people.
    return _attributes(module, FRAMES) + ("inspect.stack" in module.text)


def _reads_bytecode(module: Module) -> int:
    # Not counted: names and lines of code (`co_name`, `co_filename`), which are for messages.
    return _attributes(module, BYTECODE)


def _targets(module: Module) -> Iterator[ast.expr]:
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            yield node.target


def _class_changes(module: Module) -> int:
    # Whose object it is, syntax does not tell: all are counted, also of tensors of the package.
    return sum(isinstance(t, ast.Attribute) and t.attr == "__class__" for t in _targets(module))


def _replaced(module: Module) -> int:
    """Attributes that are set on an object which is not ``self``.

    A heuristic: ``vars(x)["name"] = ...``, ``x.__dict__["name"] = ...``, ``vars(x).update(...)``,
    ``setattr(x, ...)``, and ``x.name = ...`` where the name is one of `METHODS`. It misses
    attributes that are set by other ways, and counts objects of the package that are set up so.
    """
    count = 0
    for target in _targets(module):
        if isinstance(target, ast.Subscript):
            count += _is_others_dict(target.value)
        elif isinstance(target, ast.Attribute):
            count += target.attr in METHODS and not _is_self(target.value)
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "setattr" and node.args:
            count += not _is_self(node.args[0])
        elif isinstance(function, ast.Attribute) and function.attr == "update":
            count += _is_others_dict(function.value)
    return count


def _is_others_dict(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return not _is_self(node.value)
    is_vars = isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args
    return bool(is_vars) and isinstance(node, ast.Call) and not _is_self(node.args[0])


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def meetings(source: Source) -> list[str]:
    """Those of `MEETINGS` that are defined somewhere."""
    return [
        f"{name} ({module.path})"
        for kind, name, part in MEETINGS
        for module in source
        if part in module.path
        for node in module.tree.body
        if isinstance(node, ast.ClassDef if kind == "class" else ast.FunctionDef)
        and node.name == name
    ]


def _object_meetings(module: Module) -> int:
    return sum(map(_is_exchange, module.nodes))


def exchanges(source: Source) -> list[str]:
    """Top-level classes and functions that use a store or an object collective themselves.

    Not found is what exchanges plain tensors, and what calls a store by another name.
    """
    return [
        f"{node.name} ({module.path})"
        for module in source
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        if any(map(_is_exchange, ast.walk(node)))
    ]


def _is_exchange(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name in _OBJECTS | _STORES:
        return True
    function = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _STORE_METHODS
        and _A_STORE.search(ast.unparse(function.value)) is not None
    )


def indexes(source: Source) -> list[str]:
    """Classes of ``checkpoint/`` by their names, and where torch's own index is made."""
    found = []
    for module in source:
        if not module.path.startswith("checkpoint/"):
            continue
        found += [f"{n.name} ({module.path})" for n in module.classes if _INDEX.search(n.name)]
        makes = any(
            isinstance(node, ast.Call)
            and source.full_name(module, node.func)
            == "torch.distributed.checkpoint.metadata.Metadata"
            for node in module.nodes
        )
        found += [f"torch's Metadata ({module.path})"] if makes else []
    return found


def _files(source: Source, count: Callable[[Module], int]) -> list[str]:
    """Files with a count above zero."""
    return [module.path for module in source if count(module)]


def _places(source: Source, count: Callable[[Module], int]) -> list[str]:
    """A file for each of what it has."""
    return [module.path for module in source for _ in range(count(module))]
