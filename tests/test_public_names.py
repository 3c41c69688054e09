"""Every name that a package offers is there, and documents import it from one place."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_layering import heavy_modules_after, package_files

PACKAGE = "lightning_megatron"
ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    ".".join(path.relative_to(ROOT).parent.parts)
    for path in (ROOT / PACKAGE).rglob("__init__.py")
    if "lazy_names(" in path.read_text()
)
"""Packages whose ``__init__`` offers names."""


def offered() -> dict[str, str]:
    """The place from which documents import each name: the top level where that offers it."""
    by_depth = sorted(PACKAGES, key=lambda package: package.count("."), reverse=True)
    return {name: package for package in by_depth for name in import_module(package).__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_can_be_imported(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        home = import_module(f".{module._HOMES[name]}", package)
        assert getattr(module, name) is getattr(home, name), name
        if hasattr(getattr(module, name), "__module__"):
            assert getattr(module, name).__module__ == home.__name__, name
    assert set(module._HOMES) == set(module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ColumnParalelLinear'"):
        _ = module.ColumnParalelLinear


def test_packages_of_the_table_of_contents() -> None:
    assert {f"{PACKAGE}.{name}" for name in ("layers", "models", "optim", "data", "precision")} <= {
        *PACKAGES
    }


def test_every_name_stands_in_its_packages_docstring() -> None:
    for package in PACKAGES[1:]:
        module = import_module(package)
        missing = [name for name in module.__all__ if f"`{name}`" not in module.__doc__]
        assert missing == [], package


def test_offering_names_loads_nothing_heavy() -> None:
    assert heavy_modules_after(f"import {', '.join(PACKAGES)}") == ""


def documents() -> dict[str, str]:
    texts = {"README.md": (ROOT / "README.md").read_text()}
    for pages in ("recipes/*.yaml", "docs/*.md", "examples/*.py"):
        texts |= {path.name: path.read_text() for path in ROOT.glob(pages)}
    for path, file in package_files().items():
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(n) for n in file.nodes if isinstance(n, nodes)]
        texts[f"{path}.py"] = "\n\n".join(text for text in found if text)
    return texts


def names_with_places(text: str) -> list[tuple[str, str]]:
    """Names of the package that ``text`` imports or spells out, each with where it has it from."""
    lists = re.findall(rf"from ({PACKAGE}[\w.]*) import (?:\(([^)]*)\)|(.*))", text)
    found = [
        (name, place)
        for place, wrapped, plain in lists
        for name in re.findall(r"\w+", wrapped or plain)
    ]
    dotted = re.findall(rf"(?<!from )\b({PACKAGE}(?:\.\w+)*)\.(\w+)", text)
    return [*found, *((name, place) for place, name in dotted)]


def test_documents_import_each_name_from_one_place() -> None:
    places = offered()
    deep = [
        f"{document}: {name} from {place}, offered by {places[name]}"
        for document, text in documents().items()
        for name, place in names_with_places(text)
        if places.get(name, place) != place
    ]
    assert deep == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from lightning_megatron import (\n    A,\n    b,\n)", ["A", "b"]),
        (">>> from lightning_megatron.layers.mlp import MLP", ["MLP"]),
        ("`lightning_megatron.layers.mlp.MLP(8)`", ["MLP"]),
    ],
)
def test_names_are_found_in_documents(text: str, found: list[str]) -> None:
    assert [name for name, _ in names_with_places(text)] == found


def test_names_that_a_newcomer_tries() -> None:
    from lightning_megatron import Fp8Precision, LanguageModel, TextDataModule, TransformerConfig
    from lightning_megatron.layers import ColumnParallelLinear, LinearCrossEntropy, whole
    from lightning_megatron.models import Transformer
    from lightning_megatron.optim import AdamW, Muon

    for found in (Fp8Precision, LanguageModel, Muon, TextDataModule, TransformerConfig, AdamW):
        assert isinstance(found, type)
    assert issubclass(LinearCrossEntropy, ColumnParallelLinear)
    assert Transformer.__module__ == "lightning_megatron.models.transformer"
    assert whole([1]) == [1]
