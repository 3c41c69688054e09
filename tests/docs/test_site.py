"""What a build writes into the pages; `make docs` builds them, and a warning ends it."""

import re

from lightning_megatron.cli import _COMMANDS
from tests.docs.pages import ROOT, anchors, generated

DOCS = ROOT / "docs"


def test_every_public_name_is_in_the_reference() -> None:
    public_names = generated("public_names")
    index = (DOCS / "api" / "index.md").read_text()
    shown = []
    for package in public_names.packages():
        page = package.rpartition(".")[2]
        assert re.search(rf"^{page}$", index, re.MULTILINE)
        assert f"```{{api}} {package}\n```" in (DOCS / "api" / f"{page}.md").read_text()
        shown += public_names.documented(package)
        written = generated("api_reference").page(package)
        for name in public_names.documented(package):
            assert f":: {name}\n" in written
    assert len(shown) == len(set(shown)) > 100
    assert "lightning_megatron.MegatronStrategy" in shown
    assert "lightning_megatron.layers.ColumnParallelLinear" in shown


def test_every_page_is_in_the_table_of_contents() -> None:
    lists = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = {line for text in lists for line in text.splitlines()}
    missing = {path.stem for path in DOCS.glob("*.md")} - {"index"} - listed
    assert not missing or "*" in listed


def test_every_command_has_a_section() -> None:
    assert anchors(DOCS / "cli.md") >= {"fit", "ckpt-verify", *_COMMANDS}


def test_options_have_a_default_and_a_meaning() -> None:
    written = generated("option_lists")
    text = written.options_of("lightning_megatron.PipelineConfig --pp.")
    assert '`--pp.schedule`, default `"1f1b"`\n: Order of forwards' in text
    assert "`--pp.degree`\n: Pipeline ranks" in text
    text = written.options_of("lightning_megatron.LanguageModel")
    assert "`warmup_steps`, default `20`\n: number of steps of linear warmup" in text
    assert "{py:obj}`~lightning_megatron.TransformerConfig`" in text
    text = written.command("ckpt")
    assert "### ckpt verify\n\nCompare checkpoints with their hashes" in text
    assert "`--schedule SCHEDULE`, default `1f1b`" in written.command("schedule")


def test_files_that_pages_of_the_project_name() -> None:
    for page, folder in (("docs/architecture.md", "lightning_megatron"), ("CONTRIBUTING.md", "")):
        text = (ROOT / page).read_text()
        named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.\w+)?)`", text)
        assert len(named) > 10
        places = (ROOT / folder, ROOT)
        ours = [n for n in named if not n.startswith("torch/")]
        missing = [n for n in ours if not any((place / n).exists() for place in places)]
        assert missing == [], page
