"""What the wheel and the sdist hold, held against the files; nothing is built here."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_layering import PACKAGE, package_files

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COME_WITH_TORCH = {"jinja2", "markupsafe"}
"""Packages that torch requires itself; the extra `monitor` names the first of them."""


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not in a clone")
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_data_files_of_the_package_are_in_the_wheel() -> None:
    globs = PROJECT["tool"]["setuptools"]["package-data"][PACKAGE]
    packed = {path for glob in globs for path in (ROOT / PACKAGE).glob(glob)}
    wanted = {
        ROOT / name
        for name in tracked_files()
        if name.startswith(f"{PACKAGE}/") and not name.endswith(".py")
    }
    assert wanted
    assert wanted - packed == set()
    assert all((path.parent / "__init__.py").exists() for path in wanted)  # in a package


def test_everything_else_is_in_the_sdist() -> None:
    """Which begins with the package, its tests named `test_*.py`, README and LICENSE."""
    told = (ROOT / "MANIFEST.in").read_text().splitlines()
    grafted = tuple(f"{line.split()[1]}/" for line in told if line.startswith("graft "))
    included = {name for line in told if line.startswith("include ") for name in line.split()[1:]}
    excluded = {name for line in told if line.startswith("exclude ") for name in line.split()[1:]}
    known = included | excluded | {"README.md", "LICENSE", "pyproject.toml", "MANIFEST.in"}
    left_out = [
        name
        for name in tracked_files()
        if not name.startswith((f"{PACKAGE}/", *grafted, ".")) and name not in known
    ]
    assert left_out == ["recipes"]  # a link into the package, which is grafted
    assert all((ROOT / name).exists() for name in {*included, *grafted})


def pins(lock: Path) -> dict[str, set[str]]:
    """Versions of each package in a lock; several where Pythons have different ones."""
    found: dict[str, set[str]] = {}
    for line in lock.read_text().splitlines():
        if not line.startswith(("#", " ")):
            name, version = re.fullmatch(r"([a-z0-9.-]+)==([\w.]+)( ; .*)?", line).groups()[:2]
            found.setdefault(name, set()).add(version)
    return found


def test_every_admitted_torch_has_a_lock_of_all_that_is_declared() -> None:
    (torch,) = (Requirement(r) for r in PROJECT["project"]["dependencies"] if "torch>" in r)
    minors = {f"2.{minor}" for minor in range(50) if f"2.{minor}.9" in torch.specifier}
    locks = {file.stem.removeprefix("torch-"): pins(file) for file in ROOT.glob("locks/*")}
    assert {name for name in locks if name.count(".") == 1} == minors
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [Requirement(r) for r in PROJECT["project"]["dependencies"]]
    declared += [Requirement(r) for name in extras if name != "gpu" for r in extras[name]]
    for minor, versions in locks.items():
        assert all(version.startswith(minor) for version in versions["torch"])
        assert len(versions["torch"] | versions["litdata"]) == 2
        for each in declared:
            name = each.name.lower().replace("_", "-")
            if name != PROJECT["project"]["name"]:
                assert all(version in each.specifier for version in versions[name]), name


def requirements(*extras: str) -> set[str]:
    """Names of the packages that are declared."""
    project = PROJECT["project"]
    declared = project["dependencies"] + [
        requirement for extra in extras for requirement in project["optional-dependencies"][extra]
    ]
    return {re.split(r"[\[<>=!~;]", name)[0].lower().replace("_", "-") for name in declared}


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """First parts of the names that are imported, but for those that may be missing."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_what_is_imported_is_declared() -> None:
    extras = [name for name in PROJECT["project"]["optional-dependencies"] if name != "dev"]
    declared = requirements(*extras)
    owners = packages_distributions()
    undeclared = {
        f"{path}: {name}"
        for path, file in package_files().items()
        for name in imports(file.nodes) - sys.stdlib_module_names - {PACKAGE}
        if not {owner.lower().replace("_", "-") for owner in owners.get(name, [name])} & declared
    }
    # Rich is imported where Lightning has found that it is there.
    assert {name for name in undeclared if name.partition(": ")[2] not in COME_WITH_TORCH} == {
        "strategy/model_summary: rich"
    }


def test_what_is_imported_at_once_needs_no_extra() -> None:
    declared = requirements()
    owners = packages_distributions()
    undeclared = {
        f"{path}: {name}"
        for path, file in package_files().items()
        for node in file.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imports([node]) - sys.stdlib_module_names - {PACKAGE}
        if not {owner.lower().replace("_", "-") for owner in owners.get(name, [name])} & declared
    }
    assert {name for name in undeclared if name.partition(": ")[2] not in COME_WITH_TORCH} == set()
