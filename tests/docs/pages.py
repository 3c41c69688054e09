"""Pages of the documentation, and the code blocks in them with their marks.

A mark is a comment before a block, of which the built page shows nothing; CONTRIBUTING.md says what
there is. A mark that says nothing, or stands before the wrong block, is an error: else a block
that nobody tests would look like one that is tested.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

UNTESTED = {"text", "diff", "bash", "ini", "json", "toml", "promql", "dockerfile"}
"""Languages of blocks that nothing is done with."""

INSTEAD = {
    "": "text",
    "py": "python",
    "python3": "python",
    "pycon": "python",
    "sh": "bash",
    "shell": "console",
    "yml": "yaml",
    "{code-block}": "python, console or yaml",
    "{code}": "python, console or yaml",
}
"""Languages that writers try, and those to write."""

MARKS = {
    "python": ("run", "names", "file"),
    "console": ("run",),
    "yaml": ("none", "file"),
}
"""Words that a mark may begin with, by the language of the block behind it."""

_MARK = re.compile(r"<!--\s*test:(.*?)-->", re.DOTALL)
_CONTAINERS = re.compile(
    r"\{(note|tip|hint|important|warning|caution|attention|danger|error|seealso|admonition)\}"
)
_WORLDS = range(1, 9)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code."""

    page: str
    line: int
    """Line of the page on which its first line stands."""
    language: str
    text: str
    mark: str = ""
    """First word of the mark; empty without one."""
    ranks: int = 1
    """Of a program that is run on several."""
    name: str = ""
    """File name under which later blocks of the page find it."""

    def problem(self, line: int, text: object) -> str:
        """A message that names the place; ``line`` counts from 1 within the block."""
        return f"{self.page}:{self.line + line - 1}: {text}"

    @property
    def padded(self) -> str:
        """Its text, with each line where it is in the page."""
        return "\n" * (self.line - 1) + self.text


class PageError(AssertionError):
    """A mistake in how a page is written."""


def pages(root: Path = ROOT) -> list[Path]:
    found = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    return [path for path in found if path.exists()]


def blocks(path: Path, root: Path = ROOT) -> list[Block]:
    """Those of a page, in order; what `PageError` tells of is wrong in the page."""
    tokens = MarkdownIt("commonmark").parse(path.read_text())
    return list(_blocks(tokens, str(path.relative_to(root)), 0))


def _blocks(tokens: list[Token], page: str, above: int) -> Iterator[Block]:
    """Blocks below so many lines of the page."""
    mark = ""
    for token in tokens:
        line = above + (token.map[0] if token.map else 0) + 1
        place = f"{page}:{line}"
        if token.type == "html_block" and "<!--" in token.content:
            if mark:
                raise PageError(f"{place}: the mark `{mark}` has no block directly behind it")
            mark = _mark_of(token.content, place)
            if mark.startswith("hidden"):
                yield _hidden(mark, token.content, page, line)
                mark = ""
        elif token.type == "fence":
            language = token.info.split()[0] if token.info.strip() else ""
            if _CONTAINERS.fullmatch(language):
                inner = MarkdownIt("commonmark").parse(token.content)
                yield from _blocks(inner, page, line)
            else:
                yield _block(language, mark, token.content, page, line + 1)
            mark = ""
        elif mark and not token.type.endswith("_close"):
            raise PageError(f"{place}: the mark `{mark}` has no block directly behind it")
    if mark:
        raise PageError(f"{page}: the mark `{mark}` has no block behind it")


def _mark_of(comment: str, place: str) -> str:
    found = _MARK.search(comment)
    if found:
        return found[1].strip().partition("\n")[0].strip()
    if re.search(r"<!--\s*tests?\b", comment):
        raise PageError(f"{place}: a mark is `<!-- test: WORD -->`, not `{comment.strip()}`")
    return ""


def _hidden(mark: str, comment: str, page: str, line: int) -> Block:
    first, _, rest = comment.partition("\n")
    text = rest.rpartition("-->")[0]
    words = mark.split()[1:]
    if not text.strip() or (words and (len(words) != 2 or words[0] != "file")):
        raise PageError(
            f"{page}:{line}: `<!-- test: hidden`, or `<!-- test: hidden file NAME.py`, and the "
            "code on lines of its own until `-->`"
        )
    name = words[1] if words else ""
    kind, language = ("file" if name else ""), ("yaml" if name.endswith(".yaml") else "python")
    return Block(page=page, line=line + 1, language=language, text=text, mark=kind, name=name)


def _block(language: str, mark: str, text: str, page: str, line: int) -> Block:
    place = f"{page}:{line}"
    if language in INSTEAD:
        raise PageError(f"{place}: a block of `{language}`; write ```{INSTEAD[language]}")
    if language not in (*MARKS, *UNTESTED) and not language.startswith("{"):
        listed = ", ".join([*MARKS, *sorted(UNTESTED)])
        raise PageError(f"{place}: a block of `{language}`; there are {listed}")
    word, ranks, name = _parts(mark)
    known = MARKS.get(language, ())
    words = mark.split()
    fits = words == [*([word] if word else []), *ranks, *(["file", name] if name else [])]
    fits = fits and (not word or word in known) and (not name or "file" in known)
    fits = fits and (
        word not in ("run", "file") or bool(ranks) or mark == "run" and language == "console"
    )
    if not fits:
        shapes = {"run": "run N", "file": "file NAME"}
        listed = ", ".join(shapes.get(each, each) for each in known) or "none"
        raise PageError(f"{place}: the mark `{mark}`; marks of {language} are: {listed}")
    return Block(
        page=page,
        line=line,
        language=language,
        text=text,
        mark=word or ("file" if name else ""),
        ranks=int(ranks[0]) if ranks else 1,
        name=name,
    )


def _parts(mark: str) -> tuple[str, list[str], str]:
    """What is done with a block, on how many ranks, and the file that it is; all may be empty."""
    words = mark.split()
    name = words[-1] if words[-2:-1] == ["file"] else ""
    word, *rest = (words[:-2] if name else words) or [""]
    return word, [n for n in rest if word == "run" and n.isdigit() and int(n) in _WORLDS][:1], name


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Targets of links and images in a page, with their lines; those in the network left out."""
    for token in MarkdownIt("commonmark").parse(path.read_text()):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target and not re.match(r"[a-z]+:", str(target)):
                yield (token.map or [0])[0] + 1, str(target)


def generated(module: str) -> ModuleType:
    """A module of docs/_ext, which is no package."""
    folder = str(ROOT / "docs" / "_ext")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(module)


def anchors(path: Path) -> set[str]:
    """What links to headings of a page may end in, those that a build writes included."""
    text = generated("generated_blocks").expanded(path.read_text())
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [
        "".join(child.content for child in following.children or ())
        for token, following in zip(tokens, tokens[1:], strict=False)
        if token.type == "heading_open"
    ]
    found: set[str] = set()
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 1
        while slug in found:
            slug, number = f"{slug.removesuffix(f'-{number - 1}')}-{number}", number + 1
        found.add(slug)
    return found
