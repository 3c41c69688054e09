"""Recomputing activations in the backward instead of keeping them.

What autograd keeps of a block from its forward to its backward (for a transformer block of hidden
size ``h`` about ``34 s b h`` bytes in 16 bits, and ``5 s^2 b n`` for attention that is not fused)
is usually most of the memory of a training step. A block that is *recomputed* keeps its input
only, ``2 s b h``, and runs forward once more when its backward begins: a third more computation
if all blocks do it (Chen et al., arXiv 1604.06174). With ``every=n`` each n-th block does; with
``group=k`` runs of k blocks keep one input (`parallel.block_transforms`). If the
recomputation is *selective*, a block also keeps the results of chosen operations, and repeats only
the others (`parallel.activations.selective`).

Here a block's own ``forward`` is put under ``torch.utils.checkpoint``, on the instance. So

- names of parameters and the class of the block stay; hooks of the block, those of ZeRO among them,
  lie outside and run once: parameters that ZeRO 3 gathers for the block's backward serve the
  recomputation too, which needs no gathering of its own;
- collectives of tp are repeated, in the same order on every rank (in a graph those that the
  backward needs, see `comm.operators`);
- dropout draws the same masks again, those of tensors that tp shards included, as all of them
  follow from the default generator (`topology.rng`), and autocast and the default dtype are what
  they were;
- running statistics (batch norm) count every batch once;
- what was decided stays decided, as the experts of each token are (`layers.experts.decisions`);
- tensors that ``torch.func.functional_call`` lent a block for its forward are lent it again;
- the input part of a split backward recomputes, and the weight part uses the factors that it left.

Without gradients (evaluation, generation) blocks run as they are.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_megatron._torch.devices import random_numbers_kept
from lightning_megatron._torch.fsdp import class_name
from lightning_megatron._torch.graphs import compile_with_callers_only, tree_flatten
from lightning_megatron.layers.experts.decisions import Decisions, uncounted
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.activations.knapsack import BlockCosts
from lightning_megatron.parallel.activations.offload import Offloader
from lightning_megatron.parallel.activations.selective import (
    Recording,
    Replaying,
    SavedResults,
    kept_operations,
    traced_contexts,
)
from lightning_megatron.parallel.forward_wrapper import BlockForward, address, outermost
from lightning_megatron.whole.memory import as_within, scopes

_FULL = ActivationConfig(recompute="full")
_REPETITIONS = 3
"""Measurements of a run of a block, of which the shortest times count: the first takes memory anew,
and whatever else a machine does only ever adds to a time."""


def recompute(
    module: nn.Module,
    chosen: Collection[nn.Module],
    config: ActivationConfig = _FULL,
    offloader: Offloader | None = None,
    *,
    traced: bool = False,
) -> None:
    """Let ``chosen`` blocks inside ``module``, and no others, forget as ``config`` says.

    Args:
        module: whose blocks may forget already.
        chosen: some modules inside.
        config: which results they keep.
        offloader: where these results wait.
        traced: whether they will run inside of what is compiled.
    """
    kept = dict.fromkeys(chosen, config.kept)
    recompute_each(module, kept, offloader, traced=traced)


def recompute_each(
    module: nn.Module,
    chosen: Mapping[nn.Module, Sequence[str]],
    offloader: Offloader | None = None,
    *,
    traced: bool = False,
) -> None:
    """Let blocks inside ``module``, and no others, forget all but results of some operations.

    Args:
        module: whose blocks may forget already.
        chosen: some modules inside, and the operations.
        offloader: where the results wait.
        traced: whether they will run inside of what is compiled.
    """
    if traced:
        never_trace_alone(CheckpointedForward)
    for child in module.modules():
        held = outermost(child)
        if isinstance(held, CheckpointedForward):
            held.remove()
        if child in chosen:
            CheckpointedForward(child, chosen[child], offloader, traced=traced)


def measure(
    blocks: Iterable[nn.Module],
    now: Callable[[], float] | None,
    kept: Sequence[str] = (),
    *,
    compiled: bool = False,
) -> list[list[BlockCosts]]:
    """Have recomputed blocks measure themselves in their forwards from now on; with None, no more.

    Args:
        blocks: all of which are recomputed.
        now: the time in seconds.
        kept: operations whose results they would keep if they were recomputed selectively.
        compiled: whether the blocks are.

    Returns:
        Of every block what it has measured since it was told to, one entry for each of its runs.
    """
    if compiled:
        compile_with_callers_only(_Sizes.note)  # which graphs call
    found, places = [], itertools.count()
    for block in blocks:
        held = outermost(block)
        assert isinstance(held, CheckpointedForward)
        found.append(held.measured)
        held.now, held.selection, held.measured, held.places = now, kept, [], places
    return found


class CheckpointedForward(BlockForward):
    """A forward that runs again in the backward.

    Args:
        block: whose activations are forgotten.
        kept: operations whose results are not.
        offloader: where these results wait.
        traced: whether it is meant to become a part of a graph.
    """

    def __init__(
        self,
        block: nn.Module,
        kept: Sequence[str],
        offloader: Offloader | None = None,
        *,
        traced: bool = False,
    ) -> None:
        super().__init__(block)
        self.now: Callable[[], float] | None = None
        self.selection: Sequence[str] = ()
        self.measured: list[BlockCosts] = []
        self.places: Iterator[int] = itertools.count()
        self._counting = _counting([block])
        self._options = checkpoint_options([block], kept, offloader)
        self._traced_options = traced_options(kept)
        self._outside_is_news = traced and bool(kept)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            options = self._traced_options
            return checkpoint(self._forward, *args, use_reentrant=False, **options, **kwargs)
        if self._outside_is_news:
            _warn_of_break(self._block)
            self._outside_is_news = False
        if self.now is not None:
            self.measured.append(self._measure(self.now, args, kwargs))
        return checkpoint(self._forward, *args, use_reentrant=False, **self._options, **kwargs)

    def _measure(self, now: Callable[[], float], args: Any, kwargs: Any) -> BlockCosts:
        """Run more often for its own sake: plainly, noting results, and with these results."""
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        devices = {t.device for t in inputs}
        own = {address(t) for t in (*self._block.parameters(), *self._block.buffers())}
        held = _Sizes(inputs).bytes

        def run(context: AbstractContextManager[Any], pack: Callable[[Tensor], Any]) -> float:
            with (
                random_numbers_kept(*devices),
                _without_counting(self._counting),
                uncounted(),
                saved_tensors_hooks(pack, lambda packed: packed),
                context,
            ):
                start = now()
                self._forward(*args, **kwargs)
                return now() - start

        plain: list[float] = []
        noting: list[float] = []
        replaying: list[float] = []
        kept = noted = 0
        for _ in range(_REPETITIONS):
            sizes = _Sizes(inputs, without=own)
            plain.append(run(nullcontext(), sizes.note))
            kept = max(kept, sizes.bytes)
            if self.selection:
                notes = SavedResults(kept_operations(self.selection))
                noting.append(run(Recording(notes), lambda tensor: None))
                noted = notes.bytes
                replaying.append(run(Replaying(notes), lambda tensor: tensor))
        again = None
        if self.selection:
            again = max(min(noting) - min(plain), 0.0) + min(replaying)
        return BlockCosts(
            seconds=min(plain),
            kept=kept,
            input=held,
            selective_seconds=again,
            selective_kept=held + noted,
            place=next(self.places),
        )


class _Sizes:
    """Bytes of tensors, each storage once.

    Args:
        tensors: the first ones.
        without: addresses of those that do not count.
    """

    def __init__(self, tensors: Iterable[Tensor], without: Collection[int] = ()) -> None:
        self._sizes = {address(t): t.untyped_storage().nbytes() for t in tensors}
        self._without = without

    @property
    def bytes(self) -> int:
        """Bytes of all results that were noted."""
        return sum(self._sizes.values())

    def note(self, tensor: Tensor) -> Tensor:
        """One more; returned as it is."""
        if address(tensor) not in self._without:
            self._sizes[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


def checkpoint_options(
    blocks: Sequence[nn.Module], kept: Sequence[str] = (), offloader: Offloader | None = None
) -> dict[str, Any]:
    """Options of torch's ``checkpoint`` for some blocks.

    Args:
        blocks: which run in it.
        kept: operations whose results are not forgotten.
        offloader: where these results wait.
    """
    modules = [module for block in blocks for module in block.modules()]
    return {"context_fn": partial(_contexts, modules, _counting(blocks), kept, offloader)}


def traced_options(kept: Sequence[str] = ()) -> dict[str, Any]:
    """Options for a ``checkpoint`` that a compiler traces, which sees to the rest itself.

    Args:
        kept: operations whose results are not forgotten.
    """
    return {"context_fn": partial(traced_contexts, tuple(kept))} if kept else {}


def never_trace_alone(forward: type) -> None:
    """Have ``forward``'s calls traced with their callers or not at all.

    If there is something in a block that breaks the graph, ``checkpoint`` has to run as it is, with
    what it needs then; a compiler that begins with the call would have chosen otherwise before it
    meets the break.
    """
    compile_with_callers_only(forward.__call__)


def _warn_of_break(block: nn.Module) -> None:
    rank_zero_warn(
        f"activations.recompute='selective': a {class_name(block)} runs as it is, not compiled, as "
        "something in it breaks the graph (TORCH_LOGS=graph_breaks tells what; schedules that "
        "split the backward do, and under tp dropout on shards and products in FP8). "
        "recompute='full' compiles what lies between"
    )


def _counting(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules with running statistics."""
    return [m for b in blocks for m in b.modules() if getattr(m, "track_running_stats", False)]


def _contexts(
    modules: Sequence[nn.Module],
    counting: Sequence[nn.Module],
    kept: Sequence[str],
    offloader: Offloader | None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a block's forward and of its recomputation."""
    decisions = Decisions()
    if not kept:
        return decisions.noting(), _Again(modules, counting, decisions, None)
    notes = SavedResults(kept_operations(kept), offloader)
    return _recording(notes, decisions), _Again(modules, counting, decisions, notes)


@contextmanager
def _recording(notes: SavedResults, decisions: Decisions) -> Iterator[None]:
    with decisions.noting(), Recording(notes):
        yield


class _Again(AbstractContextManager[None]):
    """Around a recomputation; can be entered once per backward of the same forward."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        counting: Sequence[nn.Module],
        decisions: Decisions,
        notes: SavedResults | None,
    ) -> None:
        self._tensors = _tensors_of(modules)
        self._counting = counting
        self._decisions = decisions
        self._notes = notes
        # Precision plugins change it around forwards only.
        self._dtype = torch.get_default_dtype()
        self._scopes = scopes()

    @override
    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(as_within(self._scopes))
        self._entered.enter_context(_default_dtype(self._dtype))
        self._entered.enter_context(_lent(self._tensors))
        self._entered.enter_context(_without_counting(self._counting))
        self._entered.enter_context(self._decisions.replaying())
        if self._notes is not None:
            self._entered.enter_context(Replaying(self._notes))

    @override
    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tensors_of(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """The tensors that modules have, and where; without shards, in whose place ZeRO 3 gathers."""
    return [
        (held, name, tensor)
        for module in modules
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if not isinstance(tensor, DTensor)
    ]


@contextmanager
def _lent(tensors: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Context in which modules have the tensors that they had in the forward."""
    before = [
        (held, name, held.get(name)) for held, name, then in tensors if held.get(name) is not then
    ]
    if before:
        for held, name, then in tensors:
            held[name] = then
    try:
        yield
    finally:
        for held, name, own in before:
            held[name] = own


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
