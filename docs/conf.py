"""Sphinx configuration; `make docs` builds the pages into build/docs."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

import lightning_megatron  # noqa: E402

project = "lightning_megatron"
author = "the lightning_megatron authors"
release = version = lightning_megatron.__version__
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "docstrings",
    "generated_blocks",
    "package_names",
]
exclude_patterns = ["_ext", "README.md"]
nitpicky = True
suppress_warnings = ["ref.python"]  # fields of several classes that have the same name
# No inventory of torch or Lightning is at hand: a build needs no network.
nitpick_ignore_regex = [(r"py:.*", r"(?!lightning_megatron\.).*")]

# Docstrings have names in single backticks: a link where the name is public, else code.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False  # those of Lightning's hooks and of torch's modules
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "lightning_megatron"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
