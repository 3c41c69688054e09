"""The projects, and a virtual environment for each.

An environment has the project's own packages and, by a path, those of the interpreter that runs the
tests: torch and Lightning are installed once, and pip must not replace them (`HELD`), unless the
project names another version.
"""

import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.projects.quickstarts.quickstart import PARTS

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "projects"
HELD = ("jsonargparse", "lightning", "pytorch-lightning", "torch", "torchmetrics")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A package built on Lightning, and how its quick start is compared."""

    packages: tuple[str, ...] = ()
    """What pip installs, with versions; nothing where the suite's own packages suffice."""
    plain: bool = True
    """Whether one process of plain Lightning gives the same numbers. If not, DDP gives nearly the
    same: the quick start draws random numbers, or each rank looks at its own batch as a whole."""
    parts: tuple[str, ...] = PARTS
    """What its quick start does of them."""
    tolerance: float = 1e-4
    """Of numbers, relative to the largest in their tensor."""

    def interpreter(self) -> Path:
        """Of the project's environment, which is made if it is not there."""
        if not self.packages:
            return Path(sys.executable)
        name = re.sub(r"\W+", "-", self.packages[0])
        folder = ENVIRONMENTS / name
        python, done = folder / "bin" / "python", folder / "installed"
        if not done.exists():
            venv.create(folder, with_pip=True, clear=True)
            [site] = folder.glob("lib/python*/site-packages")
            (site / "suite.pth").write_text(sysconfig.get_path("purelib") + "\n")
            held = folder / "held.txt"
            own = {re.split(r"[=<\[]", package)[0] for package in self.packages}
            names = [name for name in HELD if name not in own]
            held.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in names))
            install = [python, "-m", "pip", "install", "--quiet", "-c", held, *self.packages]
            subprocess.run(install, check=True)
            done.touch()
        return python


PROJECTS = {
    "clip": Project(plain=False),
    "esm": Project(),
    # It wants an older huggingface-hub than the newest transformers do.
    "litgpt": Project(packages=("litgpt==0.5.11", "transformers<5"), tolerance=1e-3),
    # Its Trainer's `fit` has no `weights_only`, without which plain Lightning does not resume.
    "rl4co": Project(packages=("rl4co==0.7.0",), plain=False, parts=PARTS[:-1], tolerance=0.3),
    "chemprop": Project(packages=("chemprop==2.3.1",)),
    "darts": Project(packages=("darts==0.48.1",)),
    "finetuning_scheduler": Project(packages=("finetuning-scheduler==2.14.1",)),
    "gluonts": Project(packages=("gluonts[torch]==0.17.0",), plain=False, tolerance=0.3),
    "nanogpt": Project(),
    "neuralforecast": Project(packages=("neuralforecast==3.3.0",)),
    "pytorch_forecasting": Project(packages=("pytorch-forecasting==1.8.0",)),
    "pytorch_tabular": Project(packages=("pytorch-tabular==1.2.0", "torchmetrics==1.8.2")),
    "scvi_tools": Project(packages=("scvi-tools==1.4.2",), plain=False, tolerance=0.3),
    "torch_geometric": Project(packages=("torch-geometric==2.8.1",)),
    "wav2vec2": Project(),
}
"""By the module of the quick start."""
