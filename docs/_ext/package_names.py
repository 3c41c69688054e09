"""Links from names in the text to the API reference.

Docstrings write `MegatronStrategy`, without the package: they link to the page where the name is
documented, and are plain code where it is none of the public ones. Types in signatures have the
name of their file (`lightning_megatron.parallel.plan.PipelineConfig`), which link as well.
"""

from functools import cache
from importlib import import_module
from typing import Any

from docutils import nodes
from public_names import PACKAGE, names, packages, public_objects
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


@cache
def _by_last_part() -> dict[str, str]:
    return {name.rpartition(".")[2]: name for name in public_objects()}


@cache
def _object(dotted: str) -> Any:
    """An object by the name of its module; None if there is none."""
    module, _, rest = dotted.rpartition(".")
    if not module:
        return None
    try:
        return getattr(import_module(module), rest, None)
    except ImportError:
        owner = _object(module)
        return None if owner is None else getattr(owner, rest, None)


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()")
    head, _, last = target.rpartition(".")
    public = target if target in public_objects() else _by_last_part().get(last)
    first = _by_last_part().get(target.partition(".")[0])
    if public and head and target != public:
        # By the name of its file, in a signature; or a mistake in a page, of which Sphinx tells.
        public = public if _object(target) is public_objects()[public] else None
    if first and "." in target:
        public = f"{first}.{target.partition('.')[2]}"
    if public and not (head in packages() and last in names(head) and target != public):
        found: nodes.Element | None = env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", public, node, content
        )
        if found is not None:
            return found
    if node["reftype"] == "obj" and not node.get("refexplicit"):
        return content  # a name in a docstring
    # A type of a signature that no page documents.
    return content if target.startswith(PACKAGE) and not public and _object(target) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
