"""Corpora and a tokenizer for the recipe `tokens`, from the source of Python's standard library.

Writes two corpora to blend (``corpus/code``: modules; ``corpus/docs``: their docstrings), files of
both that are kept for validation (``corpus/val``), and a tokenizer trained on the first two: byte
pairs, in ``tokenizer/``. A corpus is JSON Lines, one document a line, as most published ones are.

One module of twenty is for validation, and its docstrings with it. Every machine with the same
Python writes the same files.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
END = "<|end|>"


def modules() -> Iterator[str]:
    """Text of each module, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if NO_TEXT.isdisjoint(path.relative_to(root).parts):
            yield path.read_text("utf-8", errors="replace")


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module, of its classes and functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # parts of lib2to3 are Python 2
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 40:
                yield text


def write(path: Path, texts: list[str]) -> None:
    """Write documents as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


def train_tokenizer(texts: list[str], vocab_size: int, directory: Path) -> None:
    """Train byte pairs on texts, and write the files that `preprocess` reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--modules", type=int, help="read the first so many modules only")
    options = parser.parse_args()
    corpora: dict[str, list[str]] = {"code": [], "docs": [], "val": []}
    for number, source in enumerate(islice(modules(), options.modules)):
        found = [*docstrings(source)]
        if number % 20 == 0:
            corpora["val"] += [source, *found]
        else:
            corpora["code"].append(source)
            corpora["docs"] += found
    for name, texts in corpora.items():
        write(Path("corpus") / name / "text.jsonl", texts)
    train_tokenizer([*corpora["code"], *corpora["docs"]], options.vocab_size, Path("tokenizer"))


if __name__ == "__main__":
    main()
