"""The architecture as a test: who may import whom, and what stands in one place only.

A file of the package may import files of *lower layers*, and files of its own package on the same
layer as long as no circle comes of it. Imports inside functions and under ``TYPE_CHECKING`` count
like any other, as they couple files just as much. Imports of other libraries are free, but for
torch in the pure modules, and private names of torch and Lightning. Module names in strings are
looked at in calls of ``import_module`` only, and not in the package's own ``__init__``, which is on
top of everything and imports lazily. The ``__init__`` of a package may name any file below it, as
it imports lazily too.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests._lightning.private_names import Bases, private_uses

PACKAGE = "lightning_megatron"
ROOT = Path(__file__).parents[1] / PACKAGE

LAYERS = {
    # 0: facts of the outside world
    "errors": 0,
    "lazy_names": 0,
    "_torch": 0,
    "_lightning": 0,
    "env": 0,
    # 1: who is where, what happened, when what is computed
    "topology": 1,
    "schedules": 1,  # plans, nothing but arithmetic
    "run_log": 1,  # events, and what a rank is doing: everybody writes them
    "launch": 1,  # how processes find each other
    # 2: bytes on wires, mechanisms
    "comm": 2,
    "fault_tolerance": 2,  # without Lightning: what notices faults and survives them
    "testing": 2,  # starts processes; knows no layer and no strategy
    # 3: tensors that stand for a whole; samples, their order and where they are read
    "whole": 3,
    "data": 3,  # loaded by DataLoader workers and by preprocessing, which has no torch
    # 4: modules that also run alone
    "layers": 4,
    "optim": 4,
    # 5: networks; weights that are made late
    "models": 5,
    "build": 5,
    # 6: networks of other libraries; data parallelism
    "adoption": 6,
    "zero": 6,
    # 7: transforms on any model
    "parallel": 7,
    "pipeline": 7,
    # 8: what is kept; number formats, which clip what zero/ has spread
    "precision": 8,
    "checkpoint": 8,
    # 9: what a run measures and then sets; the strategy as callbacks see it
    "tuning": 9,
    "services": 9,
    "callback_group": 9,
    # 10: callbacks that measure, on which others build
    "monitoring": 10,
    # 11: the Lightning face; callbacks and the strategy never import each other
    "module": 11,
    "callbacks": 11,
    "strategy": 11,
    # 12 and 13: the command line, the public names
    "cli": 12,
    "pytorch_lightning": 12,  # imported by users for what it does
    "__init__": 13,
    "__main__": 13,
    "recipes": 14,  # copied by users, so they import the public names
}
"""Layer of a package, or of a file of the top level."""

PURE = (
    "fault_tolerance/announce",
    "fault_tolerance/hangs/evidence",
    "fault_tolerance/hangs/report",
    "fault_tolerance/hangs/heartbeat",
    "fault_tolerance/hangs/json_lines",
    "fault_tolerance/hangs/section_limits",
    "fault_tolerance/hangs/node_board",
    "fault_tolerance/hangs/node_monitor",
    "fault_tolerance/hangs/node_watch",
    "fault_tolerance/hangs/flight_recorder",
    "run_log/sections",
    "fault_tolerance/hangs/stack_dump",
    "fault_tolerance/hangs/diagnosis",
    "errors",
    "topology/degrees",
    "topology/coordinates",
    "topology/context_layout",
    "topology/expert_layout",
    "schedules/actions",
    "schedules/__init__",
    "schedules/breadth_first",
    "schedules/dual_pipe",
    "schedules/one_f_one_b",
    "schedules/custom",
    "schedules/v_shaped",
    "schedules/wgrad_placement",
    "schedules/zero_bubble",
    "schedules/schedule",
    "schedules/simulate",
    "schedules/live_activations",
    "schedules/search",
    "schedules/draw",
    "schedules/partition",
    "schedules/layout_string",
    "schedules/repartition",
    "data/tokens/manifest",
    "layers/context_choice",
    "layers/experts/config",
    "models/config",
    "models/flops",
    "run_log/events",
    "monitoring/goodput",
    "monitoring/report/page",
)
"""Arithmetic: files that import no torch, so that planning is quick and needs no installation."""

READS_ENVIRONMENT = {"env", "testing/worker"}  # worker: the variables of its runs
USES_PRIVATE_TORCH = "_torch"
USES_PRIVATE_LIGHTNING = "_lightning"
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
PRIVATE_TENSOR_ATTRIBUTES = {"_local_tensor", "_get_fsdp_state", "_fsdp_param_group", "_spec"}
"""Private names of torch that are reached through objects."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the package: its path below it without suffix, and its syntax tree."""

    path: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """Directory below the package, empty for its top level."""
        return self.path.rpartition("/")[0]

    @property
    def top(self) -> str:
        """First directory below the package, empty for its top level."""
        return self.package.partition("/")[0]

    @property
    def layer(self) -> int:
        """Layer by the most specific entry of the table."""
        name = self.path
        while name not in LAYERS:
            name, slash, _ = name.rpartition("/")
            if not slash:
                raise KeyError(self.path)
        return LAYERS[name]

    def offers(self, path: str) -> bool:
        """Whether this is the ``__init__`` above ``path``, which it names for type checkers."""
        return self.path == f"{self.package}/__init__" and path.startswith(f"{self.package}/")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, kept: to walk takes longer than to look at them."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """Dotted names that are imported, as specific as possible, with line numbers."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, int]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call):
                for argument in node.args[:1]:
                    if (
                        isinstance(argument, ast.Constant)
                        and isinstance(argument.value, str)
                        and "import_module" in ast.dump(node.func)
                    ):
                        yield argument.value, node.lineno

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = [PACKAGE, *self.path.split("/")][: -node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])


def source(path: str, text: str) -> SourceFile:
    return SourceFile(path, ast.parse(text))


@cache
def package_files() -> dict[str, SourceFile]:
    """Files of the package by their paths; they are read by the first test that looks at them."""
    paths = sorted(ROOT.rglob("*.py"))
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in paths]
    return {n: source(n, p.read_text("utf-8")) for n, p in zip(names, paths, strict=True)}


def imported_files(file: SourceFile, files: dict[str, SourceFile]) -> Iterator[tuple[str, int]]:
    """Files of the package that ``file`` imports: for ``a.b.Name`` that is ``a/b``."""
    for name, line in file.imports:
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        while parts:
            path = "/".join(parts[1:])
            found = next((p for p in (path, f"{path}/__init__".lstrip("/")) if p in files), None)
            if found is not None:
                yield found, line
                break
            parts.pop()
        else:
            yield "__init__", line  # also where the top level has no such file yet


def upward_imports(file: SourceFile, files: dict[str, SourceFile]) -> list[str]:
    faults = []
    for path, line in imported_files(file, files):
        other = files.get(path) or source(path, "")
        if file.offers(path):
            continue
        sibling = other.layer == file.layer and other.top == file.top
        if other.layer >= file.layer and not sibling:
            faults.append(
                f"{file.path}.py:{line} (layer {file.layer}) imports {path} (layer {other.layer})"
            )
    return faults


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_torch_names(file: SourceFile) -> list[str]:
    faults = []
    bound = set()
    for node in file.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                if full.split(".")[0] != "torch":
                    continue
                bound.add(alias.asname or (alias.name if module else "torch"))
                if any(map(is_private, full.split("."))):
                    faults.append(f"{file.path}.py:{node.lineno} imports {full}")
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            start: ast.expr = node
            while isinstance(start, ast.Attribute):
                start = start.value
            from_torch = isinstance(start, ast.Name) and start.id in bound
            if from_torch or node.attr in PRIVATE_TENSOR_ATTRIBUTES:
                faults.append(f"{file.path}.py:{node.lineno} uses {ast.unparse(node)}")
    return faults


def private_lightning_names(file: SourceFile) -> list[str]:
    return [f"{file.path}.py:{line} {what}" for line, what in private_uses(file.nodes)]


def private_names_of_bases(*looked_at: str, files: dict[str, SourceFile]) -> list[str]:
    bases = Bases(PACKAGE, {path: file.nodes for path, file in files.items()})
    return [
        f"{path}.py:{line} {what}"
        for path in looked_at
        for line, what in bases.inherited_uses(path)
    ]


def environment_reads(file: SourceFile) -> list[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    faults = [
        f"{file.path}.py:{line} imports {name}"
        for name, line in file.imports
        if name.startswith("os.") and name[3:] in names
    ]
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names:
            used = ast.unparse(node)
            if used == f"os.{node.attr}":
                faults.append(f"{file.path}.py:{node.lineno} uses {used}")
    return faults


def questions_about_devices(file: SourceFile) -> list[str]:
    """Uses of ``torch.cuda``, and looks at the type of a device (`_torch.devices` answers)."""
    faults = [
        f"{file.path}.py:{line} imports {name}"
        for name, line in file.imports
        if name.startswith("torch.cuda")
    ]
    for node in file.nodes:
        found = isinstance(node, ast.Attribute) and (
            node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) == "torch.cuda"
        )
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = [side.value for side in sides if isinstance(side, ast.Constant)]
            kinds = [side for side in sides if isinstance(side, ast.Attribute)]
            found = any(k.attr == "type" for k in kinds) and bool({"cpu", "cuda"} & {*names})
        if found:
            faults.append(f"{file.path}.py:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return faults


def torch_imports(file: SourceFile) -> list[str]:
    return [
        f"{file.path}.py:{line} imports {name}"
        for name, line in file.imports
        if name.split(".")[0] in ("torch", "lightning")
    ]


def test_every_file_has_a_layer() -> None:
    missing = []
    for file in package_files().values():
        try:
            file.layer  # noqa: B018 (looks it up)
        except KeyError:
            missing.append(file.path)
    assert not missing, "give them a layer in LAYERS"


def test_every_directory_is_a_package() -> None:
    # setuptools leaves a directory without __init__.py out of the wheel.
    directories = {path.parent for path in ROOT.rglob("*.py")}
    assert [d for d in directories if not (d / "__init__.py").exists()] == []


def test_imports_point_down() -> None:
    files = package_files()
    assert [fault for file in files.values() for fault in upward_imports(file, files)] == []


def test_the_strategy_knows_no_callback() -> None:
    files = package_files()
    known = {
        p: [o for o, _ in imported_files(f, files)] for p, f in files.items() if f.top == "strategy"
    }
    assert [
        (p, o) for p, found in known.items() for o in found if o.startswith("monitoring/")
    ] == []


def test_no_import_circles() -> None:
    files = package_files()
    graph = {
        path: {other for other, _ in imported_files(file, files)} - {path}
        for path, file in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_private_torch_names_stand_in_one_package() -> None:
    files = [file for file in package_files().values() if file.package != USES_PRIVATE_TORCH]
    assert [fault for file in files for fault in private_torch_names(file)] == []


def test_private_lightning_names_stand_in_one_package() -> None:
    files = [file for file in package_files().values() if file.package != USES_PRIVATE_LIGHTNING]
    assert [fault for file in files for fault in private_lightning_names(file)] == []


def test_private_names_of_bases_stand_in_two_packages() -> None:
    aside = (USES_PRIVATE_TORCH, USES_PRIVATE_LIGHTNING)
    files = package_files()
    looked_at = [path for path, file in files.items() if file.package not in aside]
    assert private_names_of_bases(*looked_at, files=files) == []


def test_environment_is_read_in_one_file() -> None:
    files = [file for file in package_files().values() if file.path not in READS_ENVIRONMENT]
    assert [fault for file in files for fault in environment_reads(file)] == []


def test_one_file_knows_types_of_devices() -> None:
    """Others ask `_torch.devices`, so that tests can take the host for a device."""
    files = [f for f in package_files().values() if f.package != USES_PRIVATE_TORCH]
    assert [fault for file in files for fault in questions_about_devices(file)] == []


def test_file_names_say_what_they_hold() -> None:
    assert [path for path in package_files() if VAGUE_NAMES & set(path.split("/"))] == []


def test_pure_files_do_not_name_torch() -> None:
    assert [fault for path in PURE for fault in torch_imports(package_files()[path])] == []


def test_pure_files_load_no_torch() -> None:
    modules = ", ".join(f"{PACKAGE}.{path.replace('/', '.')}" for path in PURE)
    assert heavy_modules_after(f"import {modules}") == ""


def test_package_loads_neither_torch_nor_lightning() -> None:
    assert heavy_modules_after(f"import {PACKAGE}") == ""


def test_package_import_is_quick() -> None:
    code = (
        "import time; start = time.process_time(); "
        f"import {PACKAGE}; print(time.process_time() - start)"
    )
    assert any(float(run_python(code)) < 0.2 for _ in range(3))  # seconds of the processor


def heavy_modules_after(statement: str) -> str:
    heavy = "('torch', 'lightning', 'pytorch_lightning', 'numpy', 'transformers')"
    return run_python(f"import sys; {statement}; print(*[m for m in {heavy} if m in sys.modules])")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestTheRulesThemselves:
    """The checks above find what they are for."""

    files = {
        path: source(path, "")
        for path in (
            "__init__",
            "errors",
            "topology/__init__",
            "topology/mesh",
            "layers/linear",
            "layers/base",
            "parallel/apply",
            "strategy/megatron",
            "monitoring/throughput",
            "layers/sequential",
            "pipeline/runner",
            "models/transformer",
        )
    }

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("layers/linear", "from lightning_megatron.parallel.apply import apply"),
            ("layers/linear", "import lightning_megatron.parallel.apply as a"),
            ("layers/linear", "from lightning_megatron.parallel import apply"),
            ("layers/linear", "from ..parallel import apply"),
            ("layers/linear", "from ..parallel.apply import x"),
            ("layers/linear", "def f():\n    from lightning_megatron.parallel.apply import apply"),
            (
                "layers/linear",
                "if TYPE_CHECKING:\n    from lightning_megatron.parallel.apply import apply",
            ),
            ("layers/linear", "importlib.import_module('lightning_megatron.parallel.apply')"),
            ("layers/linear", "from lightning_megatron import MegatronStrategy"),
            ("layers/linear", "import lightning_megatron"),
            ("strategy/megatron", "from lightning_megatron.callbacks.preemption import P"),
            ("models/transformer", "from lightning_megatron.pipeline.runner import Runner"),
            ("layers/sequential", "from lightning_megatron.pipeline.runner import Runner"),
            ("errors", "from lightning_megatron.topology.mesh import Topology"),
        ],
    )
    def test_upward(self, path: str, text: str) -> None:
        assert len(upward_imports(source(path, text), self.files)) == 1

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("layers/linear", "from lightning_megatron.errors import ConfigError"),
            ("layers/linear", "from lightning_megatron.layers.base import ParallelLayer"),
            ("layers/linear", "from .base import ParallelLayer"),
            ("layers/linear", "from lightning_megatron import errors"),
            ("layers/linear", "from lightning_megatron.topology import mesh\nimport torch"),
            ("models/transformer", "from lightning_megatron.layers.sequential import X"),
            ("pipeline/runner", "from lightning_megatron.layers.sequential import X"),
            ("__init__", "from lightning_megatron.strategy.megatron import MegatronStrategy"),
            ("monitoring/__init__", "from lightning_megatron.monitoring.throughput import T"),
        ],
    )
    def test_downward(self, path: str, text: str) -> None:
        assert upward_imports(source(path, text), self.files) == []

    def test_file_without_layer(self) -> None:
        with pytest.raises(KeyError, match="unknown/file"):
            source("unknown/file", "").layer  # noqa: B018 (looks it up)

    @pytest.mark.parametrize(
        "text",
        [
            "import torch._dynamo",
            "from torch._C import x",
            "from torch.utils import _pytree",
            "from torch.utils._pytree import tree_map",
            "from torch.distributed.fsdp._fully_shard import FSDPState as State",
            "import torch\ntorch._foreach_mul_(a, b)",
            "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
            "from torch import nn\nnn.Module._call_impl",
            "from torch import Tensor\nTensor._make_subclass",
            "def f(parameter):\n    return parameter._local_tensor",
        ],
    )
    def test_private_torch(self, text: str) -> None:
        assert len(private_torch_names(source("layers/linear", text))) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "import torch\ntorch.__version__",
            "import torch\nclass A(torch.nn.Module):\n    def f(self): return self._mine",
            "from lightning_megatron._torch import tree_map",
            "import mine\nmine._private",
        ],
    )
    def test_public_torch(self, text: str) -> None:
        assert private_torch_names(source("layers/linear", text)) == []

    @pytest.mark.parametrize(
        "text",
        [
            "import torch\ntorch.cuda.synchronize()",
            "import torch.cuda",
            "from torch.cuda import Stream",
            "def f(x):\n    return x.device.type == 'cpu'",
            "def f(device):\n    return 'cuda' != device.type",
            "def f(x):\n    return x.is_cuda",
        ],
    )
    def test_question_about_devices(self, text: str) -> None:
        assert len(questions_about_devices(source("layers/linear", text))) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "def f(x):\n    return x.device.type == 'meta'",
            "def f(x):\n    return x.device.type in x.table",
            "import torch\ntorch.get_device_module('cpu')",
        ],
    )
    def test_no_question_about_devices(self, text: str) -> None:
        assert questions_about_devices(source("layers/linear", text)) == []

    @pytest.mark.parametrize(
        "text",
        [
            "from lightning.pytorch.trainer.call import _call_strategy_hook",
            "from lightning.pytorch.utilities import _pytree",
            "import lightning.pytorch.utilities._pytree",
            "from lightning.pytorch.trainer import call\ncall._call_strategy_hook",
            "def f(trainer):\n    return trainer._signal_connector",
            "def f(trainer):\n    trainer.fit_loop._restarting = False",
            "def f(module):\n    return getattr(module, '_trainer', None)",
            "def f(callback):\n    vars(callback)['_summary'] = None",
            "def f(callback):\n    vars(callback).pop('_summary', None)",
            "def f(metric):\n    return metric._update_count",
        ],
    )
    def test_private_lightning(self, text: str) -> None:
        assert len(private_lightning_names(source("strategy/megatron", text))) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "from lightning.pytorch import Trainer",
            "def f(trainer):\n    return trainer.fit_loop.restarting",
            "class A:\n    def f(self): return self._trainer",
            "def f(tensor):\n    return tensor._version",
            "from lightning_megatron._lightning import trainer_of",
        ],
    )
    def test_public_lightning(self, text: str) -> None:
        assert private_lightning_names(source("strategy/megatron", text)) == []

    @pytest.mark.parametrize(
        ("bases", "body", "faults"),
        [
            ("Strategy", "def f(self): return self._launcher", 1),
            ("Strategy", "def f(self): self._launcher = None", 1),
            ("Strategy", "def _configure_launcher(self): pass", 1),
            ("Strategy", "def _configure_launcher(self): super()._configure_launcher()", 2),
            ("Strategy", "_launcher = None", 1),
            ("Strategy", "def f(self): return self._mine", 0),
            ("Strategy", "def f(self): return self.launcher", 0),
            ("Mixin, Strategy", "def f(self): return self._launcher", 1),
            ("Ours", "def f(self): return self._launcher", 1),
            ("pl.Callback", "def f(self): return self._launcher", 0),
            ("Mixin", "def f(self): return self._launcher", 0),
            ("Iterator", "def f(self): return self._workers", 1),
            ("nn.Module", "def f(self): return self._modules", 0),
        ],
    )
    def test_private_names_of_bases(self, bases: str, body: str, faults: int) -> None:
        ours = "from lightning.pytorch.strategies import Strategy\nclass Ours(Strategy): ..."
        torchs = "from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as T\n"
        text = (
            "import lightning.pytorch as pl\nfrom torch import nn\n"
            "from lightning.pytorch.strategies import Strategy\n"
            "from lightning_megatron.strategy.base import Ours\n"
            "from lightning_megatron._torch import Iterator\n"
            f"class Mixin: ...\nclass A({bases}):\n    {body}\n"
        )
        files = {
            path: source(path, content)
            for path, content in (
                ("strategy/base", ours),
                ("strategy/megatron", text),
                ("_torch/__init__", "from lightning_megatron._torch.loader import Iterator"),
                ("_torch/loader", f"{torchs}class Iterator(T): ..."),
            )
        }
        assert len(private_names_of_bases("strategy/megatron", files=files)) == faults

    @pytest.mark.parametrize(
        "text",
        ["import os\nos.environ['RANK']", "import os\nos.getenv('X')", "from os import environ"],
    )
    def test_environment(self, text: str) -> None:
        assert len(environment_reads(source("layers/linear", text))) == 1
        assert environment_reads(source("layers/linear", "import os\nos.path.join('a')")) == []

    @pytest.mark.parametrize("text", ["import torch", "from torch.nn import Linear"])
    def test_torch(self, text: str) -> None:
        assert len(torch_imports(source("errors", text))) == 1
        assert torch_imports(source("errors", "import torchmetrics")) == []
