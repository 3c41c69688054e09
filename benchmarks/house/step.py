"""One training step under tp=2, pp=2, traced; and tables of torch functions that modules hold.

The profile function of Python sees every call of the main thread, from the end of one training
batch to the end of the next, so with reading the batch. A *file visited* is one of the package with
a call in it; a *stay* is a series of calls in the same file; a *return* is a stay in a file that
had been left before. A way through few files in one direction has no returns.

`benchmarks.house` starts this as a process in which ``lightning_megatron`` is that of the checkout
in question: ``python -m benchmarks.house.step`` prints JSON.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Mapping
from itertools import chain, groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool

FOLDER = f"{Path(lightning_megatron.__file__).parent}/"
STEPS = 4
"""Steps of a run; the last one is traced, when all that is made at first use is there."""
LEAST = 10
"""Functions of torch that make a table of a container."""


class Trace:
    """Calls of a stretch of the program, by `sys.setprofile`.

    Args:
        user: code of the user's step.
    """

    def __init__(self, user: CodeType) -> None:
        self._user = user
        self.calls = 0
        self.files: list[str] = []
        """File of every call in the package, in order."""
        self.before_user: int | None = None
        """How many of these came before the first call of the user's step."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self.calls += 1
        name = frame.f_code.co_filename
        if name.startswith(FOLDER):
            self.files.append(name.removeprefix(FOLDER))
        elif frame.f_code is self._user and self.before_user is None:
            self.before_user = len(self.files)

    def summary(self) -> dict[str, Any]:
        """Figures of the whole and of the way to the user's step."""
        ways = {"": self.files, " on the way to training_step": self.files[: self.before_user]}
        found: dict[str, Any] = {"calls of Python functions": self.calls}
        for suffix, files in ways.items():
            stays = sum(1 for _ in groupby(files))
            found |= {
                f"calls in the package{suffix}": len(files),
                f"files visited{suffix}": len({*files}),
                f"returns to a file left before{suffix}": stays - len({*files}),
            }
        return found


class Notes:
    """What hooks of the user's note; not an attribute of the module, which strategies look into."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget another run of this process."""
        self.above: list[str] = []
        self.modes: dict[str, set[str]] = {}

    def take(self, hook: str) -> None:
        """Note the modes that see this hook, and what is above the first step."""
        if hook == "training_step" and not self.above:
            self.above = frames_above()
        self.modes.setdefault(hook, set()).update(modes())


NOTES = Notes()


def frames_above() -> list[str]:
    """Functions of the package that are under way, the innermost last."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        # That of the worker would be there for any job.
        if name.startswith(FOLDER) and not name.startswith(f"{FOLDER}testing/"):
            found.append(f"{frame.f_code.co_name} ({name.removeprefix(FOLDER)})")
        frame = frame.f_back
    return found[::-1]


def modes() -> list[str]:
    """Classes of the modes of the package that torch asks now, whoever calls."""
    functions: Any = torch.overrides
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    stacks = (
        functions._get_current_function_mode_stack(),
        dispatch._get_current_dispatch_mode_stack(),
    )
    kinds = [type(mode) for stack in stacks for mode in stack]
    return [k.__name__ for k in kinds if k.__module__.startswith("lightning_megatron.")]


class Network(pl.LightningModule):
    """A user's module, which notes what is above it when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk: nn.Module | None = None

    @override
    def configure_model(self) -> None:
        NOTES.take("configure_model")
        if self.trunk is None:
            blocks = (
                nn.Sequential(ColumnParallelLinear(8, 16), nn.GELU(), RowParallelLinear(16, 8))
                for _ in range(4)
            )
            self.trunk = PipelineSequential(*blocks)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        NOTES.take("training_step")
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        NOTES.take("validation_step")
        self.log("validation loss", self.loss_of(batch), sync_dist=True)

    def loss_of(self, batch: Tensor) -> Tensor:
        """Mean square of what the trunk makes of ones."""
        assert self.trunk is not None
        loss: Tensor = self.trunk(batch).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LooksInHooks(Network):
    """One whose hooks may look at weights."""

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        NOTES.take("on_before_optimizer_step")

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        NOTES.take("on_train_batch_end")


class LooksInSteps(LooksInHooks):
    """One whose step mentions weights."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < 0:
            self.log("norm", next(self.parameters()).norm())
        return super().training_step(batch, batch_idx)


class Profile(pl.Callback):
    """Traces the last step."""

    def __init__(self, user: CodeType) -> None:
        self.trace = Trace(user)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS:
            sys.setprofile(None)
        elif trainer.global_step == STEPS - 1:
            sys.setprofile(self.trace)


def run(kind: str) -> tuple[dict[str, Any], list[str], dict[str, set[str]]]:
    """Train on this rank; what the trace found, frames above the user's step, modes by hook."""
    module = globals()[kind]()
    NOTES.begin()
    profile = Profile(type(module).training_step.__code__)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(tp=2, pp=2),
        accelerator="cpu",
        devices=4,
        max_steps=STEPS,
        callbacks=[profile],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(torch.ones(16 * STEPS, 8), batch_size=16)
    trainer.fit(module, data, data)
    return profile.trace.summary(), NOTES.above, NOTES.modes


def traced_step() -> dict[str, Any]:
    """All that this file finds by running."""
    with WorkerPool(4, timeout=300) as pool:
        runs = [pool.run(4, run, kind) for kind in ("Network", "LooksInHooks", "LooksInSteps")]
    plain = runs[0]
    seen: dict[str, set[str]] = {}
    for _, _, by_hook in chain(*runs):
        for hook, classes in by_hook.items():
            for name in classes:
                seen.setdefault(name, set()).add(hook)
    return {
        "first": plain[0][0],
        "last": plain[-1][0],
        "frames": max((above for _, above, _ in plain), key=len),
        "modes": {name: sorted(hooks) for name, hooks in sorted(seen.items())},
        "tables": tables(),
    }


def _is_torchs(member: Any) -> bool:
    """Whether something is a function, method or property of torch, or an operator."""
    owner = getattr(member, "__self__", None)
    if type(member).__name__ == "method-wrapper":  # ``Tensor.data.__get__``
        member = owner
    where = str(getattr(member, "__module__", None) or getattr(owner, "__module__", ""))
    of_tensor = getattr(member, "__objclass__", None)
    if of_tensor is not None and issubclass(Tensor, of_tensor) and of_tensor is not object:
        return True
    return callable(member) and not isinstance(member, type) and where.split(".")[0] == "torch"


def _names_torchs(member: Any) -> bool:
    if not isinstance(member, str) or member.startswith("__"):
        return False
    places: tuple[Any, ...] = (torch, Tensor, torch.nn.functional, torch.linalg)
    return hasattr(Tensor, f"__{member}__") or any(hasattr(place, member) for place in places)


def tables() -> dict[str, list[str]]:
    """Containers in modules of the package, by file, that list functions of torch.

    Looked at are dicts (their keys), sets, lists and tuples that are attributes of a module, once
    each, with `LEAST` functions of torch or, in nine tenths of their members, names of some.
    """
    found: dict[str, list[str]] = {}
    failed, seen = [], set[int]()
    for info in pkgutil.walk_packages(lightning_megatron.__path__, "lightning_megatron."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception as error:  # whatever a library raises that is not installed
            failed.append(f"{info.name} ({type(error).__name__})")
            continue
        path = str(module.__file__).removeprefix(FOLDER).removesuffix(".py")
        for name, content in vars(module).items():
            if name.startswith("__") or id(content) in seen or not _is_container(content):
                continue
            number = _functions_in(content)
            if number and _is_assigned(path, name):
                seen.add(id(content))
                found.setdefault(path, []).append(f"{name}: {number}")
    listed = [f"{name} ({path})" for path, names in found.items() for name in names]
    return {"tables": listed, "failed": failed}


def _is_container(content: Any) -> bool:
    return isinstance(content, Mapping | set | frozenset | list | tuple)


def _functions_in(content: Any) -> int:
    members = list(content)
    functions = sum(map(_is_torchs, members))
    if functions >= LEAST:
        return functions
    named = sum(map(_names_torchs, members))
    return named if named >= LEAST and named >= 0.9 * len(members) else 0


def _is_assigned(path: str, name: str) -> bool:
    """Whether a file makes a name, and does not import it."""
    text = Path(f"{FOLDER}{path}.py").read_text("utf-8")
    return any(line.startswith((f"{name} =", f"{name}:")) for line in text.splitlines())


if __name__ == "__main__":
    json.dump(importlib.import_module("benchmarks.house.step").traced_step(), sys.stdout)
