"""Blocks of pages that are written when the site is built, from the package itself.

A page has ```` ```{api} lightning_megatron.layers ```` and a closing fence, and nothing between
them; what stands there in the built page is Markdown that a function of `BLOCKS` returns.
"""

import re
from collections.abc import Callable

import api_reference
import option_lists
from sphinx.application import Sphinx

BLOCKS: dict[str, Callable[[str], str]] = {
    "api": api_reference.page,
    "options": option_lists.options_of,
    "commands": option_lists.commands,
    "other_commands": option_lists.other_commands,
}
"""What writes a block, by its name; it is given the rest of the line."""

_BLOCK = re.compile(r"^```\{(\w+)\}[ ]*(.*)\n```$", re.MULTILINE)


def expanded(text: str) -> str:
    """A page with its blocks written."""

    def written(block: re.Match[str]) -> str:
        name, argument = block.groups()
        return BLOCKS[name](argument.strip()) if name in BLOCKS else block[0]

    return _BLOCK.sub(written, text)


def _expand(app: Sphinx, name: str, content: list[str]) -> None:
    content[0] = expanded(content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _expand)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
