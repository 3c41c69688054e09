"""Every code block of README.md, CONTRIBUTING.md and docs/*.md does what the page says."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.testing import WorkerPool
from tests.docs.command_lines import problems_of_console, problems_of_yaml
from tests.docs.fragments import problems
from tests.docs.pages import ROOT, Block, anchors, blocks, links, pages
from tests.docs.programs import forget_modules_of, run_in_page, run_program

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}


def is_run(block: Block) -> bool:
    """Whether a block is executed; else it is looked at."""
    return block.mark == "run" or (block.language == "python" and not block.mark)


def is_program(block: Block) -> bool:
    """Whether a block is executed by itself, not in the namespace of its page."""
    return block.mark == "run" and (block.language == "python" or block.ranks > 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a clone as far as pages need it, beside which nothing is."""
    place = tmp_path / "clone"
    place.mkdir()
    for name in ("recipes", "examples", "docs"):
        if (ROOT / name).is_dir():
            (place / name).symlink_to(ROOT / name)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    yield place
    forget_modules_of(str(place))


def write_files(found: Sequence[Block], folder: Path) -> None:
    for block in found:
        if block.name:
            (folder / block.name).write_text(block.text)


def check(found: Sequence[Block], folder: Path) -> list[str]:
    """What is wrong with blocks that are not executed."""
    write_files(found, folder)
    known: dict[str, Any] = {}
    wrong: list[str] = []
    for block in found:
        if block.language == "python":
            wrong += problems(block, known)
        elif block.language == "console":
            wrong += problems_of_console(block)
        elif block.language == "yaml" and block.mark != "none":
            wrong += problems_of_yaml(block, folder)
    return wrong


def run(found: Sequence[Block], folder: Path, pool: WorkerPool) -> None:
    """Execute blocks: first those of one namespace, then the page's programs and what follows."""
    write_files(found, folder)
    lines = [""] * max((b.line + b.text.count("\n") for b in found), default=0)
    for block in found:
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = (
                block.text.splitlines()
            )
    source = folder.parent / f"{Path(found[0].page).stem}.py"
    source.write_text("\n".join(lines))
    todo = [block for block in found if is_run(block)]
    ends = [n for n, block in enumerate(todo, 1) if block.language == "python" and not block.mark]
    shared = [block for block in todo[: max(ends, default=0)] if not is_program(block)]
    if shared:  # in one call: between two the worker may be lent to others
        pool.run(1, run_in_page, shared, str(source))
    for block in todo:
        if is_program(block):
            pool.run(block.ranks, run_program, block, str(source))
        elif block not in shared:
            pool.run(1, run_in_page, [block], str(source))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_right(page: str, folder: Path) -> None:
    assert check(blocks(PAGES[page]), folder) == []


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, folder: Path, pool: WorkerPool) -> None:
    found = blocks(PAGES[page])
    if any(map(is_run, found)):
        run(found, folder, pool)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = PAGES[page]
    broken = []
    for line, target in links(path):
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        if not there.exists():
            broken.append(f"{page}:{line}: no file {target}")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            broken.append(f"{page}:{line}: no heading {target}")
    assert broken == []


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", os.path.join("docs", "index.md")} <= PAGES.keys()
