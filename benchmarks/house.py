"""How the source is built, in figures: ``python -m benchmarks.house [ROOT ...]``.

Each root is a checkout; by default this one. Figures are counted in the source (nothing of it is
imported), but for the depth of the user's step, for which two steps run on two pipeline stages.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "lightning_megatron"
STRATEGY = "MegatronStrategy"
_UNTYPED = re.compile(r"\bstrategy: Any\b|: Any = (self\.)?_?trainer\.strategy\b")
_STEP = """
import traceback
import lightning.pytorch as pl
import torch
from lightning_megatron import MegatronStrategy, PipelineSequential

class Deep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = PipelineSequential(*(torch.nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        files = [frame.filename for frame in traceback.extract_stack()]
        count = sum("/lightning_megatron/" in name for name in files)
        print(f"frames {count}\\n", end="", flush=True)
        return self.trunk(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(
    strategy=MegatronStrategy(pp=2), accelerator="cpu", devices=2, max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Deep(), torch.utils.data.DataLoader(torch.zeros(32, 4), batch_size=8))
"""


class Class:
    """A class in the source.

    Args:
        node: its definition.

    Attributes:
        bases: last names of its bases.
        methods: names of what is defined in its body by ``def``.
        declared: names of attributes that its body or its methods declare or set.
    """

    def __init__(self, node: ast.ClassDef) -> None:
        self.name = node.name
        self.bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        self.methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        self.declared: set[str] = set()
        for child in node.body:
            if isinstance(child, ast.AnnAssign | ast.Assign):
                self.declared |= {t.id for t in _targets(child) if isinstance(t, ast.Name)}
        for child in ast.walk(node):
            if isinstance(child, ast.AnnAssign | ast.Assign | ast.AugAssign):
                self.declared |= {t.attr for t in _targets(child) if _is_of_self(t)}


def _targets(node: ast.AnnAssign | ast.Assign | ast.AugAssign) -> Iterator[ast.expr]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _is_of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"


def classes_of(sources: Iterator[str]) -> dict[str, Class]:
    """All classes by name."""
    found = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name] = Class(node)
    return found


def lineage(name: str, classes: dict[str, Class]) -> list[Class]:
    """A class and those that it inherits from, as far as they are in ``classes``."""
    if name not in classes:
        return []
    found = [classes[name]]
    for base in classes[name].bases:
        found += [one for one in lineage(base, classes) if one not in found]
    return found


def lightnings() -> list[Class]:
    """`ParallelStrategy` and its bases."""
    spec = find_spec("lightning")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "pytorch" / "strategies"
    files = (folder / name for name in ("parallel.py", "strategy.py"))
    return lineage("ParallelStrategy", classes_of(file.read_text() for file in files))


def imports_of(tree: ast.Module, package: str, modules: set[str]) -> set[str]:
    """Modules of the package that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, package
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module or "")
    return found & modules


def code_lines(text: str) -> int:
    """Lines with code: neither empty, nor comment, nor docstring."""
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    begins = True  # of a statement: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            begins |= token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING):
            lines |= set(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def frames(root: Path) -> int:
    """Most frames of the package above the user's step, on two pipeline stages."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "step.py"
        script.write_text(_STEP)
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    return max(map(int, re.findall(r"frames (\d+)", done.stdout)))


def figures(root: Path) -> dict[str, str]:
    """The table of a checkout: what is counted, and the figure."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    texts = {".".join(f.relative_to(root).with_suffix("").parts): f.read_text() for f in files}
    ours = lineage(STRATEGY, classes_of(iter(texts.values())))
    theirs = lightnings()
    hooks = set().union(*(one.methods for one in theirs)) - {"__init__"}
    inherited = hooks | set().union(*(one.declared for one in theirs))
    defined = Counter(name for one in ours for name in one.methods if name in hooks)
    declared = Counter(name for one in ours for name in one.declared)
    names = set().union(*(one.methods | one.declared for one in ours)) - inherited - {"__init__"}
    public = {name for name in names if not name.startswith("_")}
    modules = {name for name in texts if not name.endswith(("__init__", "__main__"))}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for other in imports_of(ast.parse(text), name, modules):
            importers[other].add(name)
    single = sum(len(importers[name]) == 1 for name in modules)
    strategy = {name for name in texts if ".strateg" in name}
    ignored = sum(
        "super()" in line and "type: ignore" in line
        for name in strategy
        for line in texts[name].splitlines()
    )
    untyped = sum(len(_UNTYPED.findall(texts[name])) for name in texts.keys() - strategy)
    repeated = sum(count > 1 for count in defined.values())
    return {
        "classes of ours in the strategy": str(len(ours)),
        "hooks of Lightning that it defines": str(len(defined)),
        "of these in several classes": f"{repeated} (at most {max(defined.values())} classes)",
        "names on the strategy beside Lightning's": f"{len(names)} ({len(public)} public)",
        "attributes declared in several of its classes": str(
            sum(count > 1 for count in declared.values())
        ),
        "`type: ignore` on a call of super()": str(ignored),
        "frames of the package above training_step": str(frames(root)),
        "`Any` where callbacks reach the strategy": str(untyped),
        "modules": str(len(modules)),
        "of these with a single importer": f"{100 * single / len(modules):.0f} %",
        "lines": f"{sum(len(text.splitlines()) for text in texts.values()):,}",
        "lines of code": f"{sum(map(code_lines, texts.values())):,}",
    }


def main() -> None:
    """Print a column for every checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--json", action="store_true", help="print figures by root as JSON")
    roots = [root.resolve() for root in parser.parse_args().roots]
    found = {root.name: figures(root) for root in roots}
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    rows = list(next(iter(found.values())))
    print(f"| | {' | '.join(found)} |\n|---|{'---:|' * len(found)}")
    for row in rows:
        print(f"| {row} | {' | '.join(column[row] for column in found.values())} |")


if __name__ == "__main__":
    main()
