"""`save_directory` and `load_directory`: on all ranks together, or in one process.

Saving is described in save_plan.py. Loading checks manifest, sizes and hashes first, then
names and shapes against the module and its optimizers, and reads values only then.
"""

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.checkpoint.chunks import (
    Chunk,
    own_chunks,
    parameter_names,
    whole,
    whole_chunks,
)
from lightning_megatron.checkpoint.directory.manifest import Manifest
from lightning_megatron.checkpoint.load.lazy_tensor import LazyCache, LazyTensor
from lightning_megatron.checkpoint.load.module_state import ModuleState, redirected
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX, CheckpointReader
from lightning_megatron.checkpoint.optimizer_state import OptimizerRestore, OptimizerSnapshot
from lightning_megatron.checkpoint.save.save_plan import (
    OPTIMIZER_PREFIX,
    SavePlanning,
    all_chunks,
    writing,
)
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, raise_if_any, summary
from lightning_megatron.zero.owned_rows import OwnedRows

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
        path: the directory to make; one that is there is replaced once the new one is complete.
            The first rank's value is used.
        model: the result of `model_chunks`, possibly edited. Other values than chunks are stored
            whole; those of the lowest rank that has them are used.
        state: Lightning's checkpoint dictionary without model and optimizers; the first rank's
            value is used.
        optimizers: the result of `capture_optimizer` for each optimizer.
        layout: degrees of parallelism, for the manifest.
        group: the ranks that save; all when None; without process groups, this process.

    Returns:
        The manifest, on every rank.

    Raises:
        ConfigError: a value of ``state`` cannot be stored (hyper-parameters are left out with a
            warning instead); nothing was written.
        CheckpointError: anything else failed on any rank; the target is unchanged.
    """
    peers = Peers(group)
    planned = SavePlanning(peers).plan(path, model, state, optimizers, layout)
    manifest = planned.write(writing(all_chunks(model, optimizers)), peers)
    assert manifest is not None
    return manifest


def stored_state(
    reader: CheckpointReader, device: torch.device | str = "cpu"
) -> OrderedDict[str, Any]:
    """Return the state_dict of a checkpoint, with lazy tensors.

    Args:
        reader: the open checkpoint.
        device: device of the tensors.
    """
    cache = LazyCache()

    def lazy(name: str) -> LazyTensor:
        entry = reader.entry(f"{MODEL_PREFIX}.{name}")
        assert entry is not None
        shape, dtype = entry.shape, entry.torch_dtype

        def fetch() -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            reader.read({f"{MODEL_PREFIX}.{name}": whole(tensor)})
            return tensor

        return LazyTensor(name, shape, dtype, torch.device(device), fetch, cache)

    tensors = {name: lazy(name) for name in reader.model_names()}
    aliases = {a: tensors[n] for a, n in reader.manifest.aliases.items() if n in tensors}
    return OrderedDict({**aliases, **tensors, **reader.extras})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Placement of a module on this rank, for loading."""

    canonical: Mapping[str, str] | None = None
    """Names by alias, for aliases of a parameter of another stage."""
    names: Mapping[Tensor, str] | None = None
    """Canonical names of the tensors that the optimizers update; None for the parameters."""
    beside: Mapping[Any, str] = field(default_factory=dict)
    """Names of tensors that only an optimizer knows, all of which this rank holds."""
    rows: Mapping[nn.Parameter, OwnedRows] | None = None
    """Rows of whole parameters that this rank owns; it reads only these."""
    bring_together: Callable[[], None] = lambda: None
    """Function that brings the rows that were read to the other ranks; collective."""


def load_directory(
    path: str | os.PathLike[str] | CheckpointReader,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    state: Mapping[str, Any] | None = None,
    layout: Layout = Layout(),
    strict: bool = True,
    exclude: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any layout into a module and its optimizers; collective.

    Hooks that change the loaded state_dict run as in ``Module.load_state_dict``, with whole tensors
    (module_state.py), and so does a ``load_state_dict`` that the module overrides.

    Args:
        path: the directory (the first rank's value is used), or a checkpoint that the ranks of
            ``group`` have opened.
        module: the module as this rank holds it, with memory (not on the meta device).
        optimizers: none, or as many as were saved. A parameter gets the optimizer state of the
            entry that it is loaded from; without an entry its state begins anew.
        state: the result of `stored_state`, possibly edited, the same on all ranks; that of the
            checkpoint when None.
        layout: placement of the module on this rank.
        strict: whether names that only the module or only the checkpoint has are an error;
            otherwise they are logged.
        exclude: patterns of names that ``state`` lacks on purpose.
        group: the ranks that load; all when None; without process groups, this process.

    Returns:
        Lightning's checkpoint dictionary, without model and optimizers.

    Raises:
        ConfigError: the checkpoint does not fit the module or its optimizers; nothing was changed.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    reader = path if isinstance(path, CheckpointReader) else CheckpointReader(path, group=group)
    given = stored_state(reader) if state is None else state
    loading = _Loading(reader, module, layout, given, exclude)

    def plan() -> _Report:
        loading.plan_model(strict)
        loading.plan_optimizers(optimizers)
        return loading.report

    reader.peers.run(reader.what, plan, lambda reports: _judge(reports, reader, module, strict))
    reader.fetch_files(loading.wanted, loading.stored)
    reader.peers.run(reader.what, loading.read, lambda _: None)
    loading.apply()
    layout.bring_together()
    reader.peers.run(
        reader.what, loading.finish, lambda reports: _judge_names(reports, reader, strict)
    )
    return reader.state


@dataclass(frozen=True, kw_only=True)
class _Report:
    """Comparison of one rank's module with the checkpoint."""

    problems: list[str]
    misfits: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: list[str]
    unplaced: list[str]
    anew: list[str]
    """Parameters without optimizer state in the checkpoint."""
    used: frozenset[str]
    """Names in the files that the module takes."""
    given: Mapping[str, str]
    """Names in the files, by name in the state."""
    names: Sequence[str]
    """All names of the state."""
    settled: bool
    """Whether no hook or override runs later that may accept missing names."""


class _Loading:
    """The work of one rank in `load_directory`."""

    def __init__(
        self,
        reader: CheckpointReader,
        module: nn.Module,
        layout: Layout,
        state: Mapping[str, Any],
        exclude: Sequence[str],
    ) -> None:
        self._reader = reader
        self._module = module
        self._state = state
        self._exclude = exclude
        self._layout = layout
        self._chunks = own_chunks(module, layout.canonical, layout.rows)
        names = parameter_names(module, layout.canonical)
        versions = reader.versions
        self._found = ModuleState(module, self._chunks, names, versions)
        self._names = names if layout.names is None else layout.names
        self._overrides = type(module).load_state_dict is not nn.Module.load_state_dict
        self.wanted: dict[str, Chunk] = {}
        self.stored: dict[str, str] = {}
        self._values: list[tuple[Chunk, Tensor]] = []
        self._restores: list[OptimizerRestore] = []
        self._optimizer_problems: list[str] = []
        self._anew: list[str] = []

    @property
    def report(self) -> _Report:
        """Findings so far."""
        found = self._found
        lazy = {k: v.source for k, v in self._state.items() if isinstance(v, LazyTensor)}
        taken = found.taken.values()
        return _Report(
            problems=found.problems or self._optimizer_problems,
            misfits=found.misfits,
            missing=[] if self._overrides else [n for n in found.missing if not self._leaves(n)],
            unplaced=[] if self._overrides else found.unplaced,
            anew=self._anew,
            used=frozenset(v.source for v in taken if isinstance(v, LazyTensor)),
            given=lazy,
            names=list(self._state),
            settled=not found.has_hooks and not self._overrides,
        )

    def plan_model(self, strict: bool) -> None:
        """Find the entry of every tensor of the module."""
        if self._overrides:
            self._load_by_override(strict)
            return
        self._found.find(self._state)
        self._note()

    def _note(self) -> None:
        found, self.wanted, self.stored, self._values = self._found, {}, {}, []
        for owner, part in found.parts.items():
            self._values.append((self._chunks[owner], part))
        for owner, value in found.taken.items():
            if owner in found.parts:
                continue
            chunk = self._chunks[owner]
            if isinstance(value, LazyTensor):
                changed = value.changed()
                if changed is None:
                    self.wanted[f"{MODEL_PREFIX}.{owner}"] = chunk
                    self.stored[f"{MODEL_PREFIX}.{owner}"] = f"{MODEL_PREFIX}.{value.source}"
                    continue
                value = changed
            self._values.append((chunk, chunk.cut(value)))

    def _load_by_override(self, strict: bool) -> None:
        """Run the module's own load_state_dict, which reads values as it goes."""
        chunks = own_chunks(self._module, self._layout.canonical)

        def take(module: nn.Module, state: dict[str, Any], prefix: str) -> Any:
            keys = self._found.find_below(module, state, prefix)
            raise_if_any([*self._found.problems, *misfit_problems(self._found.misfits, "")])
            self._note()
            self._read_model()
            self._found.finish()
            for owner, value in self._found.taken.items():
                if owner not in self._found.parts and owner in chunks:
                    chunks[owner].tensor.copy_(chunks[owner].cut(value))
            return keys

        with redirected(self._module, take):
            self._module.load_state_dict(self._state, strict=strict)

    def plan_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Allocate the state of the optimizers."""
        saved = self._reader.optimizers
        if not optimizers or self._found.problems or self._found.misfits:
            return
        if len(optimizers) != len(saved):
            kept = f"{len(saved)} optimizers" if saved else "only weights, no optimizer state"
            self._optimizer_problems.append(
                f"the checkpoint holds {kept}, the module has {len(optimizers)} optimizers; "
                "nearest valid: the same number, or loading the weights alone"
            )
            return
        for index, (optimizer, data) in enumerate(zip(optimizers, saved, strict=True)):
            try:
                restore = OptimizerRestore(
                    optimizer,
                    self._names,
                    {**whole_chunks(self._layout.beside), **self._chunks},
                    stored_names=self._stored_names(),
                    prefix=f"{OPTIMIZER_PREFIX}.{index}",
                    tensors=self._reader.manifest.tensors,
                    saved=data,
                )
            except ConfigError as error:
                self._optimizer_problems += error.problems
                continue
            self._anew += restore.anew
            self._restores.append(restore)
            self.wanted |= restore.chunks
            self.stored |= {name: name for name in restore.chunks}

    def _stored_names(self) -> dict[str, str]:
        """Return the names in the files from which parameters get their optimizer state."""
        taken = self._found.taken.items()
        nowhere = {name: "" for name in self._chunks if self._leaves(name)}
        return nowhere | {owner: v.source for owner, v in taken if isinstance(v, LazyTensor)}

    def _leaves(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)

    def read(self) -> None:
        """Read all tensors of this rank."""
        self._reader.read(self.wanted, self.stored)

    def _read_model(self) -> None:
        self.read()
        self._copy()

    def _copy(self) -> None:
        for chunk, value in self._values:
            chunk.tensor.copy_(value)

    def apply(self) -> None:
        """Copy the values that were not read in place, and restore the optimizers."""
        self._copy()
        for restore in self._restores:
            restore.apply()

    def finish(self) -> _Report:
        """Run the post-hooks of the modules."""
        if not self._overrides:
            self._found.finish()
        return self.report


def _judge(
    reports: Sequence[_Report], reader: CheckpointReader, module: nn.Module, strict: bool
) -> None:
    """Raise an error on the first rank if the checkpoint does not fit all ranks' modules."""
    problems = list(dict.fromkeys(p for report in reports for p in report.problems))
    misfits = {name: shapes for report in reports for name, shapes in report.misfits.items()}
    names = _differences(reports) if strict and all(r.settled for r in reports) else []
    if misfits or names:  # why an optimizer does not fit is plain then
        hint = _hyper_parameters(reader, module)
        problems = [p for p in problems if "optimizer" not in p]
        problems = [*misfit_problems(misfits, hint), *problems, *names]
    raise_if_any(problems)
    anew = list(dict.fromkeys(name for report in reports for name in report.anew))
    if anew:
        logger.warning(
            "%s has no optimizer state for %s: it begins anew", reader.directory, summary(anew)
        )


def misfit_problems(
    misfits: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], hint: str
) -> list[str]:
    """Return the faults of parameters with other shapes; one sentence for many.

    Args:
        misfits: shapes in the checkpoint and in the module, by name.
        hint: hyper-parameters that differ, as text.
    """
    texts = [
        f"parameter {name!r}: the checkpoint has shape {stored}, the module {ours}"
        for name, (stored, ours) in misfits.items()
    ]
    if len(texts) > 3:
        texts = [f"{len(texts)} parameters have other shapes; {texts[0]}"]
    remedy = "; nearest valid: the hyper-parameters of the saved module" + hint
    return [text + remedy for text in texts]


def _hyper_parameters(reader: CheckpointReader, module: nn.Module) -> str:
    """Return the hyper-parameters that differ, with both values, as text."""
    stored = _flat(reader.state.get("hyper_parameters", {}))
    ours = _flat(dict(getattr(module, "hparams", {})))
    differing = [
        f"{name}={stored[name]!r} instead of {ours[name]!r}"
        for name in stored
        if name in ours and repr(stored[name]) != repr(ours[name])
    ]
    return f": {summary(differing)}" if differing else ""


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def _judge_names(reports: Sequence[_Report], reader: CheckpointReader, strict: bool) -> None:
    """Raise an error for missing names after hooks that may accept some have run."""
    if not (differences := _differences(reports)):
        return
    if strict and not all(report.settled for report in reports):
        raise_if_any(differences)
    if not strict:
        logger.warning("%s: %s", reader.directory, "; ".join(differences))


def _differences(reports: Sequence[_Report]) -> list[str]:
    missing = list(dict.fromkeys(n for report in reports for n in report.missing))
    used = frozenset[str]().union(*(report.used for report in reports))
    common = frozenset.intersection(*(frozenset(report.unplaced) for report in reports))
    given = reports[0].given
    unexpected = [n for n in dict.fromkeys(reports[0].unplaced) if n in common]
    unexpected = [n for n in unexpected if given.get(n) not in used]
    if counts := _layer_counts(missing, unexpected, reports[0].names):
        return counts
    return [
        f"{len(some)} names of the {one} are not in the {other}: {summary(some)}"
        "; nearest valid: the module that was saved, or strict_loading=False"
        for one, other, some in (
            ("module", "checkpoint", missing),
            ("checkpoint", "module", unexpected),
        )
        if some
    ]


def _layer_counts(
    missing: Sequence[str], unexpected: Sequence[str], stored: Sequence[str]
) -> list[str]:
    """Return a fault about the number of layers, if nothing else differs."""
    lacking, differing = _numbered(missing), [*missing, *unexpected]
    if len(_numbered(differing)) != 1 or not all(_NUMBERED.match(name) for name in differing):
        return []
    (above, numbers), held = next(iter(_numbered(differing).items())), _numbered(stored)
    both = held.get(above, frozenset())
    if missing and unexpected or not both:
        return []
    theirs = len(both)
    ours = theirs + len(numbers) if lacking else theirs - len(numbers)
    if ours < 1 or (lacking and both & numbers) or (not lacking and not numbers <= both):
        return []
    kept = both - numbers
    if not lacking and any(n > min(numbers) for n in kept):
        return []
    return [
        f"{above}: the checkpoint has {theirs} layers, the module {ours}; nearest valid: {theirs} "
        "layers, or strict_loading=False"
    ]


_NUMBERED = re.compile(r"(.+?)\.(\d+)\.")


def _numbered(names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Return the numbers of the layers in lists, by the name of the list."""
    found: dict[str, frozenset[int]] = {}
    for name in names:
        if (match := _NUMBERED.match(name)) is not None:
            found[match[1]] = found.get(match[1], frozenset()) | {int(match[2])}
    return found
