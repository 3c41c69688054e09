"""Recomputing activations in the backward instead of keeping them.

What autograd keeps of a block from its forward to its backward (for a transformer block of hidden
size ``h`` about ``34 s b h`` bytes in 16 bits, and ``5 s^2 b n`` for attention that is not fused)
is usually most of the memory of a training step. A block that is *recomputed* keeps its input
only, ``2 s b h``, and runs forward once more when its backward begins: a third more computation
if all blocks do it (Chen et al., arXiv 1604.06174). With ``every=n`` each n-th block does. If the
recomputation is *selective*, a block also keeps the results of chosen operations, and repeats only
the others (`parallel.selective`).

Here a block's own ``forward`` is put under ``torch.utils.checkpoint``, on the instance. So

- names of parameters and the class of the block stay; hooks of the block, those of ZeRO among them,
  lie outside and run once: parameters that ZeRO 3 gathers for the block's backward serve the
  recomputation too, which needs no gathering of its own;
- collectives of tp are repeated, in the same order on every rank;
- dropout draws the same masks again, those of tensors that tp shards included, as all of them
  follow from the default generator (`topology.rng`), and autocast is what it was;
- running statistics (batch norm) count every batch once;
- the input part of a split backward recomputes, and the weight part uses the factors that it left.

Without gradients (evaluation, generation) blocks run as they are.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_megatron._torch import tree_flatten
from lightning_megatron.parallel.plan import class_name
from lightning_megatron.parallel.selective import (
    OPERATIONS,
    Notes,
    Noting,
    Operation,
    Replaying,
    kept_operations,
)
from lightning_megatron.pipeline.sequential import PipelineSequential, RemoteItem

Mode = Literal["none", "full", "selective", "adaptive"]
Compile = Literal["none", "block"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is done to train with less memory."""

    recompute: Mode = "none"
    """Activations that are computed again in the backward: none, all inside a block (full), or all
    but the results of the operations in ``keep`` (selective); or all inside of as few blocks as
    ``activation_gib`` allows, by their sizes and times in the second batch (adaptive)."""
    activation_gib: float | None = None
    """For adaptive: most that the activations of a rank's blocks may take. What is outside of
    blocks, parameters, gradients and optimizer state come on top."""
    keep: list[Operation] | None = None
    """For selective: ``attention`` (fused, without dropout) and ``matmul``, the products of linear
    layers. None: both, so that norms, activation functions, dropout and rotary embeddings are
    computed again. ``["matmul"]`` also recomputes attention."""
    blocks: list[str] | None = None
    """Modules to recompute, by class name or by a pattern of their names (``"*.mlp"``), outermost.
    None: the composite modules in the lists of the network (every ``nn.ModuleList`` and
    ``nn.Sequential``, ``layers=[...]`` of a PipelineSequential)."""
    every: int = 1
    """Recompute each n-th block, beginning with the first."""
    compile: Compile = "none"
    """Whether the blocks of the network run through ``torch.compile`` (`parallel.compile`), which
    saves time and the memory of what it fuses."""
    compile_backend: str = "inductor"
    """What makes code of their graphs, as ``torch.compile`` names it."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Operations whose results blocks keep."""
        if self.recompute != "selective":
            return ()
        return OPERATIONS if self.keep is None else tuple(self.keep)

    def problems(self, module: nn.Module | None) -> list[str]:
        """Faults of the options, and if ``module`` is given, of applying them to it."""
        if self.recompute not in get_args(Mode):
            close = difflib.get_close_matches(str(self.recompute), get_args(Mode), n=1, cutoff=0.0)
            return [
                f"memory.recompute={self.recompute!r}: no such mode; valid: "
                f"{', '.join(get_args(Mode))}; nearest valid: {close[0]!r}"
            ]
        problems = []
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            problems.append(
                f"memory.every={self.every!r}: must be a whole number of at least 1; "
                "nearest valid: every=1"
            )
        problems += self._keep_problems() + self._compile_problems(module)
        problems += self._limit_problems()
        if self.recompute == "none":
            if (self.blocks, self.every) != (None, 1):
                problems.append(
                    f"memory.recompute='none', blocks={self.blocks}, every={self.every}: they "
                    "say which blocks to recompute, and none is; nearest valid: recompute='full'"
                )
            return problems
        if module is None or any(isinstance(child, RemoteItem) for child in module.modules()):
            return problems  # an earlier run, whose problems were told, has left some stages here
        return problems + self._block_problems(module)

    def _compile_problems(self, module: nn.Module | None) -> list[str]:
        if self.compile == "none":
            return []
        if self.compile not in get_args(Compile):
            return [
                f"memory.compile={self.compile!r}: must be none or block; nearest valid: 'block'"
            ]
        problems = []
        if self.compile_backend not in torch.compiler.list_backends(exclude_tags=()):
            problems.append(
                f"memory.compile_backend={self.compile_backend!r}: torch has no such backend; "
                "nearest valid: 'inductor'"
            )
        if self.recompute == "selective" or self.blocks is not None:
            problems.append(
                f"memory.compile='block', recompute={self.recompute!r}, blocks={self.blocks}: "
                "parts of a compiled block cannot be recomputed (the compiler does so where it is "
                "cheap); nearest valid: compile='none', or recompute='none' or 'full' with "
                "blocks=None"
            )
        if module is not None and not find_blocks(module, None):
            problems.append(
                "memory.compile='block': the module has no lists of composite modules, so there "
                "is nothing to compile; nearest valid: compile='none'"
            )
        return problems

    def _limit_problems(self) -> list[str]:
        limit, adaptive = self.activation_gib, self.recompute == "adaptive"
        if adaptive and self.compile != "none":
            return [
                f"memory.recompute='adaptive', compile={self.compile!r}: compiled blocks are not "
                "measured; nearest valid: compile='none', or recompute='full'"
            ]
        if adaptive and self.every != 1:
            return [
                f"memory.recompute='adaptive', every={self.every}: it chooses the blocks itself; "
                "nearest valid: every=1, or recompute='full'"
            ]
        if (limit is not None) != adaptive or (limit is not None and not limit > 0):
            return [
                f"memory.recompute={self.recompute!r}, activation_gib={limit}: a number above 0 "
                "is what adaptive recomputation, and only that, has to keep to; nearest valid: "
                + ("activation_gib=1.0" if adaptive else "activation_gib=None")
            ]
        return []

    def _keep_problems(self) -> list[str]:
        if self.keep is None:
            return []
        if self.recompute != "selective":
            return [
                f"memory.recompute={self.recompute!r}, keep={self.keep}: only selective "
                "recomputation keeps results; nearest valid: recompute='selective'"
            ]
        wrong = [name for name in self.keep if name not in OPERATIONS]
        if wrong or not self.keep:
            return [
                f"memory.keep={self.keep}: must name some of {', '.join(OPERATIONS)}; nearest "
                "valid: keep=['attention', 'matmul'], or recompute='full' to keep nothing"
            ]
        return []

    def _block_problems(self, module: nn.Module) -> list[str]:
        classes = sorted({class_name(child) for child in module.modules()})
        problems = []
        for name in self.blocks or ():
            if not find_blocks(module, [name]):
                close = difflib.get_close_matches(str(name), classes, n=1, cutoff=0.0)
                problems.append(
                    f"memory.blocks={name!r}: the module holds nothing of this class or name, so "
                    f"nothing would be recomputed; nearest valid: {close[0]!r}, or blocks=None"
                )
        if not problems and not find_blocks(module, self.blocks):
            problems.append(
                f"memory.recompute={self.recompute!r}, blocks={self.blocks}: the module has no "
                "lists of composite modules, so there is nothing to recompute; nearest valid: "
                "blocks=[<class names>], or recompute='none'"
            )
        return problems


_FULL = MemoryConfig(recompute="full")


def find_blocks(module: nn.Module, wanted: Sequence[str] | None) -> list[nn.Module]:
    """The modules that can be recomputed one by one, outermost only, in their order.

    Args:
        module: where to look.
        wanted: class names, and patterns of names; None for the members of lists, and of a
            PipelineSequential that holds no list, that are made of other modules: a single layer
            keeps little but its input.
    """
    return list(dict.fromkeys(_find(module, wanted, "")))


def _find(module: nn.Module, wanted: Sequence[str] | None, prefix: str) -> Iterator[nn.Module]:
    children = dict(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if isinstance(module, PipelineSequential):
        is_list = not any(isinstance(child, nn.ModuleList) for child in children.values())
    for name, child in children.items():
        path = prefix + name
        if wanted is not None:
            kind = class_name(child)
            chosen = any(kind == entry or fnmatchcase(path, entry) for entry in wanted)
        else:
            container = isinstance(child, nn.ModuleList | nn.ModuleDict | PipelineSequential)
            composite = isinstance(child, RemoteItem) or any(True for _ in child.children())
            chosen = is_list and not container and composite
        if chosen:
            yield child
        else:
            yield from _find(child, wanted, f"{path}.")


def blocks_to_recompute(module: nn.Module, config: MemoryConfig) -> list[nn.Module]:
    """The blocks that ``config`` chooses of a whole module, that of all pipeline stages."""
    if config.recompute == "none":
        return []
    return find_blocks(module, config.blocks)[:: config.every]


def recompute(
    module: nn.Module, chosen: Collection[nn.Module], config: MemoryConfig = _FULL
) -> None:
    """Let ``chosen`` blocks inside ``module``, and no others, forget as ``config`` says."""
    wanted = set(chosen)
    for child in module.modules():
        held = child.__dict__.get("forward")
        if isinstance(held, _Forgetful):
            held.remove()
        if child in wanted:
            # On the instance, so that its class, and what looks at it, stay as they are.
            object.__setattr__(child, "forward", _Forgetful(child, config.kept))


def measure(
    blocks: Iterable[nn.Module], now: Callable[[], float] | None
) -> list[tuple[float, int, int]]:
    """Have recomputed blocks measure themselves in their forwards from now on; with None, no more.

    Returns:
        Of every block what it has measured so far: seconds of a forward (the least), bytes that
        autograd keeps of it, bytes of its inputs (the most).
    """
    found = []
    for block in blocks:
        held = block.__dict__["forward"]
        seconds, kept, size = zip(*(held.measured or [(0.0, 0, 0)]), strict=True)
        found.append((min(seconds), max(kept), max(size)))
        held.now, held.measured = now, []
    return found


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


class _Forgetful:
    """Stands in for the ``forward`` of a block.

    A class, not a closure: a deep copy of the block then runs its own weights.

    Args:
        block: whose activations are forgotten.
        kept: operations whose results are not.
    """

    def __init__(self, block: nn.Module, kept: Sequence[str]) -> None:
        self._block, self._forward = block, block.forward
        self._own: Callable[..., Any] | None = block.__dict__.get("forward")
        self.__signature__ = inspect.signature(block.forward)
        self.now: Callable[[], float] | None = None
        self.measured: list[tuple[float, int, int]] = []
        self._counting = counting = [
            m for m in block.modules() if getattr(m, "track_running_stats", False)
        ]
        # torch's default where nothing else is needed: it asks less of compilation.
        self._options: dict[str, Any] = (
            {"context_fn": partial(_contexts, counting, kept)} if counting or kept else {}
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self.now is not None:
            self.measured.append(self._measure(self.now, args, kwargs))
        return checkpoint(self._forward, *args, use_reentrant=False, **self._options, **kwargs)

    def _measure(self, now: Callable[[], float], args: Any, kwargs: Any) -> tuple[float, int, int]:
        """Run once more for its own sake: seconds, bytes that autograd keeps, bytes of inputs."""
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        devices = {t.device.index or 0 for t in inputs if t.device.type == "cuda"}
        own = {_address(p) for p in self._block.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if _address(tensor) not in own:
                sizes[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.random.fork_rng(devices=list(devices)),
            _without_counting(self._counting),
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            start = now()
            result = self._forward(*args, **kwargs)
            seconds = now() - start
        del result
        held = {_address(t): t.untyped_storage().nbytes() for t in inputs}
        return seconds, sum({**sizes, **held}.values()), sum(held.values())

    def remove(self) -> None:
        """Give the block its own forward back."""
        if self._own is None:
            del self._block.__dict__["forward"]
        else:
            object.__setattr__(self._block, "forward", self._own)


def _contexts(
    counting: Sequence[nn.Module], kept: Sequence[str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a block runs in first, and what it runs in again."""
    if not kept:
        return nullcontext(), _Again(counting, None)
    notes = Notes(kept_operations(kept))
    return Noting(notes), _Again(counting, notes)


class _Again(AbstractContextManager[None]):
    """Around a recomputation; can be entered once per backward of the same forward."""

    def __init__(self, counting: Sequence[nn.Module], notes: Notes | None) -> None:
        self._counting, self._notes = counting, notes

    @override
    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(_without_counting(self._counting))
        if self._notes is not None:
            self._entered.enter_context(Replaying(self._notes))

    @override
    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextmanager
def _without_counting(counting: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, running statistics change in copies only.

    Copies, because autograd would notice a change of the tensors themselves.
    """
    kept = [(m, name, value) for m in counting for name, value in m._buffers.items()]
    for m, name, value in kept:
        m._buffers[name] = None if value is None else value.clone()
    try:
        yield
    finally:
        for m, name, value in kept:
            m._buffers[name] = value
