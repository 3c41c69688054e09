"""`lightning-megatron init`: a recipe of this package, as files of one's own.

A recipe is a YAML file. With it come the files that it needs: modules of Python that it names
(`class_path: denoiser.Denoiser` is in `denoiser.py`) or that a command at its head runs, and files
of its own name with another suffix, such as the batch script of a Slurm job.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from lightning_megatron.errors import EXIT_CODE, ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes."""

_MODULE = re.compile(r"^\s*(?:- )?class_path: (\w+)\.\w+\s*$|^#\s+python (\w+)\.py\b", re.MULTILINE)


def init(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `init`.

    Returns:
        The exit code: 0; 2 if there is no such recipe, or a file would be overwritten.
    """
    options = _parser().parse_args(list(args))
    if options.recipe is None:
        print(_list())
        return 0
    try:
        written = _write(files_of(options.recipe), options.folder, options.force)
    except (ConfigError, OSError) as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return EXIT_CODE
    for path in written:
        print(f"wrote {path}")
    print("\nRun it in that folder:" if options.folder != Path() else "\nRun it:")
    for command in commands_of(options.recipe):
        print(f"  {command}")
    return 0


def recipe_names() -> list[str]:
    """Return the names of all recipes, the first to try in front."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return sorted(names, key=lambda name: name != "quickstart")


def files_of(recipe: str) -> list[Path]:
    """Return the recipe's YAML file, and behind it the files that it needs.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    names = recipe_names()
    name = recipe.removesuffix(".yaml")
    if name not in names:
        close = get_close_matches(name, names, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"no recipe {name!r}; {hint}")
    main = RECIPES / f"{name}.yaml"
    found = _MODULE.findall(main.read_text("utf-8"))
    modules = {RECIPES / f"{named or run}.py" for named, run in found}
    others = {path for path in RECIPES.glob(f"{name}.*") if path.suffix not in (".yaml", ".py")}
    return [main, *sorted(path for path in modules | others if path.is_file())]


def commands_of(recipe: str) -> list[str]:
    """Return the commands in the comment at the head of a recipe."""
    return [line[4:].strip() for line in _head(recipe) if line.startswith(" " * 5)]


def _head(recipe: str) -> list[str]:
    """Comment at the head of a recipe, without its marks."""
    text = (RECIPES / f"{recipe.removesuffix('.yaml')}.yaml").read_text("utf-8")
    return [line[1:] for line in takewhile(lambda line: line[:1] == "#", text.splitlines())]


def _write(files: Sequence[Path], folder: Path, force: bool) -> list[Path]:
    targets = [folder / path.name for path in files]
    there = [str(target) for target in targets if target.exists()]
    if there and not force:
        verb = "exists" if len(there) == 1 else "exist"
        raise ConfigError(
            f"{', '.join(there)} {verb}; nearest valid: another folder (--folder), or --force, "
            "which overwrites"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in zip(files, targets, strict=True):
        target.write_bytes(source.read_bytes())
    return targets


def _list() -> str:
    names = recipe_names()
    width = max(map(len, names)) + 2
    lines = [f"  {name:<{width}}{_title(name)}" for name in names]
    return "\n".join(
        ["recipes:", *lines, "", "`lightning-megatron init NAME` writes one into this folder."]
    )


def _title(name: str) -> str:
    """First sentence of the recipe's comment."""
    return re.split(r"[.:](?: |$)", " ".join(line.strip() for line in _head(name)))[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron init",
        description="Write a recipe, and the files that it needs, to run and to change.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="NAME", help="which; without it the recipes are listed"
    )
    parser.add_argument(
        "-f", "--folder", type=Path, default=Path(), metavar="FOLDER", help="default: this one"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    return parser
