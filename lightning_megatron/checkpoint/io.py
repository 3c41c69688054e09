"""Saving and loading a checkpoint directory, on all ranks together or in one process alone.

Saving is described in prepared.py. Loading goes the other way: manifest, sizes, index and coverage
are checked, then names and shapes against the module and its optimizers, and only then values are
read.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.checkpoint.index import summary
from lightning_megatron.checkpoint.manifest import (
    Manifest,
)
from lightning_megatron.checkpoint.optimizer import OptimizerRestore, OptimizerSnapshot
from lightning_megatron.checkpoint.peers import Peers
from lightning_megatron.checkpoint.prepared import (
    OPTIMIZER_PREFIX,
    Preparation,
    all_chunks,
    writing,
)
from lightning_megatron.checkpoint.reader import MODEL_PREFIX, CheckpointReader
from lightning_megatron.checkpoint.state import Chunk, chunks_of, model_chunks, parameter_names
from lightning_megatron.errors import raise_if_any
from lightning_megatron.parallel.owned_rows import OwnedRows

logger = logging.getLogger(__name__)


def save_directory(
    path: str | os.PathLike[str],
    model: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    optimizers: Sequence[OptimizerSnapshot] = (),
    layout: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Write a checkpoint; collective.

    Args:
        path: the directory to make; whatever stands there is replaced once the new one is complete.
            The first rank's value counts.
        model: what `model_chunks` returned, possibly edited. Values that are not chunks are stored
            whole, as the lowest rank that has them sees them.
        state: Lightning's checkpoint dictionary without model and optimizers; the first rank's
            value counts.
        optimizers: what `capture_optimizer` returned for each optimizer.
        layout: degrees of parallelism, noted in the manifest.
        group: the ranks that save; all when None; without process groups, this process.

    Returns:
        The manifest, on every rank.

    Raises:
        ConfigError: a value of ``state`` (but for hyper-parameters, which are left out with a
            warning) has no plain form; nothing was written.
        CheckpointError: anything else failed on any rank; the target is what it was before.
    """
    peers = Peers(group)
    prepared = Preparation(peers).prepare(path, model, state, optimizers, layout)
    manifest = prepared.write(writing(all_chunks(model, optimizers)), peers)
    assert manifest is not None
    return manifest


def load_directory(
    path: str | os.PathLike[str] | CheckpointReader,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    canonical: Mapping[str, str] | None = None,
    names: Mapping[Tensor, str] | None = None,
    rows: Mapping[nn.Parameter, OwnedRows] | None = None,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Bring a module and its optimizers to the state of a checkpoint of any layout; collective.

    Args:
        path: the directory; the first rank's value counts. Or a checkpoint that the ranks of
            ``group`` have opened.
        module: as this rank holds it, with memory (not on the meta device).
        optimizers: none, or as many as were saved.
        canonical: for names that are aliases of a parameter of another stage, its name.
        names: canonical name of every tensor that the optimizers update; the module's parameters
            when None.
        rows: what this rank owns of whole parameters. Only that is read; the owner of the
            parameters then brings it into them.
        strict: whether names that only one side has are an error; else they are logged.
        group: the ranks that load; all when None; without process groups, this process.

    Returns:
        Lightning's checkpoint dictionary, without model and optimizers.

    Raises:
        ConfigError: the checkpoint does not fit the module or its optimizers; nothing was changed.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    reader = path if isinstance(path, CheckpointReader) else CheckpointReader(path, group=group)
    loading = _Loading(reader, module, canonical, rows)

    def plan() -> _Report:
        loading.plan_model()
        loading.plan_optimizers(optimizers, names or parameter_names(module, canonical))
        return loading.report

    reader.peers.run(reader.what, plan, lambda reports: _judge(reports, reader, strict))
    reader.peers.run(reader.what, loading.read, lambda _: None)
    loading.apply()
    return reader.state


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank found when it compared its module with the checkpoint."""

    problems: list[str]
    missing: list[str]
    used: list[str]


class _Loading:
    """One rank's part of `load_directory`."""

    def __init__(
        self,
        reader: CheckpointReader,
        module: nn.Module,
        canonical: Mapping[str, str] | None,
        rows: Mapping[nn.Parameter, OwnedRows] | None,
    ) -> None:
        self._reader = reader
        self._module = module
        self._canonical, self._rows = canonical, rows
        self._model: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        self._wanted: dict[str, Chunk] = {}
        self._stored: dict[str, str] = {}
        self._restores: list[OptimizerRestore] = []
        self.report = _Report(problems=[], missing=[], used=[])

    def plan_model(self) -> None:
        """Find every tensor of the module in the checkpoint."""
        self._model = model_chunks(self._module, self._canonical, self._rows)
        for name, value in self._model.items():
            if not isinstance(value, Chunk):
                (self.report.used if name in self._reader.extras else self.report.missing).append(
                    name
                )
                continue
            stored = self._reader.stored_name(name, value.aliases)
            if stored is None:
                self.report.missing.append(name)
                continue
            self.report.used.append(stored)
            if problem := self._misfit(name, value, stored):
                self.report.problems.append(problem)
            self._stored_names[name] = stored
            self._wanted[f"{MODEL_PREFIX}.{name}"] = value
            self._stored[f"{MODEL_PREFIX}.{name}"] = f"{MODEL_PREFIX}.{stored}"

    def _misfit(self, name: str, chunk: Chunk, stored: str) -> str | None:
        entry = self._reader.entry(f"{MODEL_PREFIX}.{stored}")
        assert entry is not None
        if tuple(entry.size) != chunk.full_shape:
            return (
                f"parameter {name!r}: the checkpoint has shape {tuple(entry.size)}, the module "
                f"{chunk.full_shape}; nearest valid: the hyper-parameters of the saved module"
            )
        if chunk.tensor.is_meta:
            return f"parameter {name!r} has no memory (meta device): materialise it before loading"
        return None

    def plan_optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> None:
        """Allocate the state of the optimizers."""
        saved = self._reader.optimizers
        if not optimizers or self.report.problems:
            return
        if len(optimizers) != len(saved):
            kept = f"{len(saved)} optimizers" if saved else "only weights, no optimizer state"
            self.report.problems.append(
                f"the checkpoint holds {kept}, the module has {len(optimizers)} optimizers; "
                "nearest valid: the same number, or loading the weights alone"
            )
            return
        for index, (optimizer, data) in enumerate(zip(optimizers, saved, strict=True)):
            restore = OptimizerRestore(
                optimizer,
                names,
                chunks_of(self._model),
                stored_names=self._stored_names,
                prefix=f"{OPTIMIZER_PREFIX}.{index}",
                metadata=self._reader.metadata,
                saved=data,
            )
            self._restores.append(restore)
            self._wanted |= restore.chunks
            self._stored |= {name: name for name in restore.chunks}

    def read(self) -> None:
        """Read all tensors of this rank."""
        self._reader.read(self._wanted, self._stored)

    def apply(self) -> None:
        """Hand over what was not read in place."""
        extras = {k: v for k, v in self._reader.extras.items() if k in self._model}
        if extras:
            self._module.load_state_dict(extras, strict=False)
        for restore in self._restores:
            restore.apply()


def _judge(reports: Sequence[_Report], reader: CheckpointReader, strict: bool) -> None:
    """Decide on the first rank whether the checkpoint fits all ranks' modules."""
    problems = list(dict.fromkeys(p for report in reports for p in report.problems))
    missing = list(dict.fromkeys(n for report in reports for n in report.missing))
    used = {n for report in reports for n in report.used}
    unexpected = [n for n in (*reader.model_names(), *reader.extras) if n not in used]
    differences = [
        f"{len(some)} names of the {one} are not in the {other}: {summary(some)}"
        for one, other, some in (
            ("module", "checkpoint", missing),
            ("checkpoint", "module", unexpected),
        )
        if some
    ]
    if strict:
        remedy = "; nearest valid: the module that was saved, or strict=False"
        problems += [difference + remedy for difference in differences]
    elif differences:
        logger.warning("%s: %s", reader.directory, "; ".join(differences))
    if len(problems) > 20:
        problems = [*problems[:20], f"and {len(problems) - 20} more of this kind"]
    raise_if_any(problems)
