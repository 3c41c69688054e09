"""The tests of pages can fail: each mistake that a page may have is found, with its line."""

import os
from pathlib import Path

import pytest

from lightning_megatron.testing import WorkerError, WorkerPool
from tests.docs.pages import Block, PageError, anchors, blocks, links
from tests.docs.test_pages import check, folder, run  # noqa: F401  a fixture

FENCE = "```"


def page(tmp_path: Path, text: str) -> list[Block]:
    path = tmp_path / "page.md"
    path.write_text(text.replace("'''", FENCE))
    return blocks(path, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'''python\nprint(1)\nraise KeyError('gone')\n'''", "page.md:3: KeyError: 'gone'"),
        ("'''python\nx = 1\n'''\n\n'''python\nassert x == 2\n'''", "page.md:6: AssertionError"),
        ("'''python\nx = (\n'''", "page.md:2: SyntaxError"),
        (
            "'''python\nfrom lightning_megatron import MegatronStrategy\n\n"
            "MegatronStrategy(tp=2, zeal=3)\n'''",
            "page.md:4: TypeError",
        ),
        (
            "<!-- test: run 2 -->\n'''python\nimport os\n1 / int(os.environ['RANK'])\n'''",
            "page.md:4",
        ),
        ("<!-- test: run -->\n'''console\n$ lightning-megatron ckpt ls gone\n'''", "exit code 2"),
        ("<!-- test: hidden\n\nassert False\n-->", "page.md:3: AssertionError"),
        (":::{note}\n'''python\nassert False\n'''\n:::", "page.md:3: AssertionError"),
        ("''''{note}\n'''python\nassert False\n'''\n''''".replace("''''", "````"), "page.md:3"),
        ("- item\n\n  '''python\n  assert False\n  '''", "page.md:4: AssertionError"),
    ],
)
def test_what_fails_names_its_line(
    text: str,
    message: str,
    tmp_path: Path,
    folder: Path,  # noqa: F811
    pool: WorkerPool,
) -> None:
    with pytest.raises(WorkerError) as error:
        run(page(tmp_path, text), folder, pool)
    assert message in str(error.value)


def test_what_runs(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    pool: WorkerPool,
) -> None:
    """One namespace with hidden set-up; programs after it; files; ranks that a Trainer finds."""
    text = """
<!-- test: hidden
import inspect
-->
'''python
class Own:
    value = 1
'''
<!-- test: run 2 file trains.py -->
'''python
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_megatron import MegatronStrategy

def train():
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=MegatronStrategy(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert trainer.world_size == 2
    open(f"rank{trainer.global_rank}", "w").close()

if __name__ == "__main__":
    train()
'''
<!-- test: run -->
'''console
$ lightning-megatron schedule --schedule 1f1b --pp 2 --microbatches 4 > nowhere
$ pip install what-is-not-there
'''
'''python
import os
import trains
assert Own().value == 1 and trains.train
assert "value = 1" in inspect.getsource(Own)
assert "trains.py" in os.listdir()
assert "rank0" not in os.listdir()
'''
"""
    found = page(tmp_path, text)
    assert check(found, folder) == []
    run(found, folder, pool)
    assert {"rank0", "rank1"} <= set(os.listdir())


OURS = "<!-- test: names -->\n'''python\nfrom lightning_megatron import MegatronStrategy\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- test: names -->\n'''python\nimport lightning_megatorn\n'''", "page.md:3: no module"),
        (
            "<!-- test: names -->\n'''python\nfrom lightning_megatron import Stratego\n'''",
            "page.md:3: `lightning_megatron` has no `Stratego`",
        ),
        (OURS + "\nMegatronStrategy(tp=size, zeal=3)\n'''", "page.md:5: MegatronStrategy: got an"),
        (OURS + "\nMegatronStrategy(..., zeal=3)\n'''", "page.md:5: MegatronStrategy: got an"),
        (OURS + "MegatronStrategy(tp=0)\n'''", "page.md:4: MegatronStrategy(tp=0): tp=0"),
        (
            "<!-- test: names -->\n'''python\nimport lightning as L\n\nL.Trainer(device=1)\n'''",
            "page.md:5: L.Trainer: got an unexpected keyword argument 'device'",
        ),
        ("<!-- test: names -->\n'''python\nx = (\n'''", "page.md:3: SyntaxError"),
        ("'''console\n$ lightning-megatron fits\n'''", "page.md:2: lightning-megatron fits"),
        ("'''console\n$ make cake\n'''", "page.md:2: no target `cake` in the Makefile"),
        ("'''console\n$ python examples/no.py\n'''", "page.md:2: no file `examples/no.py`"),
        ("'''console\nlightning-megatron fit\n'''", "no line begins with `$ `"),
        (
            "'''console\n$ ls\n$ A=1 torchrun --nproc-per-node 2 -m lightning_megatron fit \\\n"
            "    --config quickstart --trainer.strategy.pq 2 | tail\n'''",
            "page.md:3: lightning-megatron fit --config quickstart --trainer.strategy.pq 2",
        ),
        ("'''console\n$ lightning-megatron schedule --schedules x\n'''", "unrecognized arguments"),
        ("'''console\n$ lightning-megatron fit --config gone.yaml\n'''", "gone.yaml"),
        ("'''yaml\ntrainer:\n  strategy:\n    init_args:\n      zeal: 3\n'''", "page.md:2: "),
        ("'''yaml\ntrainer: [\n'''", "page.md:2: YAML"),
        ("'''yaml\n- a\n'''", "page.md:2: a configuration is a mapping"),
    ],
)
def test_what_is_not_run_is_looked_at(
    text: str,
    message: str,
    tmp_path: Path,
    folder: Path,  # noqa: F811
) -> None:
    [problem] = check(page(tmp_path, text), folder)
    assert message in problem
    assert problem.startswith("page.md:")


def test_what_is_right(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    text = """
<!-- test: names -->
'''python
import deepspeed
'''
<!-- test: file mine.py -->
'''python
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_megatron import MegatronStrategy, PipelineConfig, ShardingConfig

class Mine(BoringModel):
    pass

size = 2
MegatronStrategy(tp=size, pp=PipelineConfig(degree=2, schedule="zbv"), zero=ShardingConfig(stage=3))
'''
<!-- test: names -->
'''python
MegatronStrategy(...)
MegatronStrategy(tp=size)
'''
<!-- test: file mine.yaml -->
'''yaml
model: mine.Mine
'''
'''console
$ make test TORCH=2.13.0       # nothing is run
Epoch 1: 100%
$ lightning-megatron fit --config mine.yaml --model mine.Mine --trainer.strategy.pp 2 2>&1 | tee log
$ lightning-megatron fit --help
$ lightning-megatron ckpt show runs/that/do/not/exist.ckpt && echo done
$ srun python -m lightning_megatron fit --config quickstart
'''
'''yaml
trainer:
  strategy:
    class_path: MegatronStrategy
    init_args: {zero: 3}
'''
<!-- test: none -->
'''yaml
- scrape_configs
'''
'''text
whatever
'''
"""
    assert check(page(tmp_path, text), folder) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- test: runs 2 -->\n'''python\n'''", "marks of python are: run N, names, file NAME"),
        ("<!-- test: run -->\n'''python\n'''", "marks of python"),
        ("<!-- test: run 99 -->\n'''python\n'''", "marks of python"),
        ("<!-- test: run 2 3 -->\n'''python\n'''", "marks of python"),
        ("<!-- test: file -->\n'''python\n'''", "marks of python"),
        ("<!-- test: none -->\n'''python\n'''", "marks of python"),
        ("<!-- test: none -->\n'''text\n'''", "marks of text are: none"),
        ("<!-- test: file x -->\n'''console\n'''", "marks of console"),
        ("<!-- test: run 2 -->\n\nText.\n\n'''python\n'''", "has no block directly behind it"),
        ("<!-- test: names -->", "has no block behind it"),
        ("<!-- test: hidden -->\n'''python\n'''", "on lines of its own"),
        ("<!-- tests: names -->\n'''python\n'''", "a mark is `<!-- test: WORD -->`"),
        ("'''\nwhat\n'''", "write '''text"),
        ("'''sh\nwhat\n'''", "write '''bash"),
        ("'''{code-block} python\nwhat\n'''", "write '''python, console or yaml"),
        ("'''cobol\nwhat\n'''", "there are python, console, yaml"),
    ],
)
def test_marks_that_say_nothing(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PageError) as error:
        page(tmp_path, text)
    assert message.replace("'''", FENCE) in str(error.value)


def test_links_and_anchors(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# One `two`, three\n\n[a](b.md#c) ![p](p.png) [w](https://w)\n\n## Same\n\n## Same\n"
    )
    assert list(links(path)) == [(3, "b.md#c"), (3, "p.png")]
    assert anchors(path) == {"one-two-three", "same", "same-1"}
