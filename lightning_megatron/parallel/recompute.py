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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_megatron._torch import tree_flatten
from lightning_megatron.parallel.memory import MemoryConfig
from lightning_megatron.parallel.offload import Offloader
from lightning_megatron.parallel.selective import Notes, Noting, Replaying, kept_operations
from lightning_megatron.parallel.wrapping import BlockForward, address

_FULL = MemoryConfig(recompute="full")


def recompute(
    module: nn.Module,
    chosen: Collection[nn.Module],
    config: MemoryConfig = _FULL,
    offloader: Offloader | None = None,
) -> None:
    """Let ``chosen`` blocks inside ``module``, and no others, forget as ``config`` says.

    Args:
        module: whose blocks may forget already.
        chosen: some modules inside.
        config: which results they keep.
        offloader: where these results wait.
    """
    wanted = set(chosen)
    for child in module.modules():
        held = child.__dict__.get("forward")
        if isinstance(held, _Forgetful):
            held.remove()
        if child in wanted:
            _Forgetful(child, config.kept, offloader)


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


class _Forgetful(BlockForward):
    """A forward that runs again in the backward.

    Args:
        block: whose activations are forgotten.
        kept: operations whose results are not.
        offloader: where these results wait.
    """

    def __init__(
        self, block: nn.Module, kept: Sequence[str], offloader: Offloader | None = None
    ) -> None:
        super().__init__(block)
        self.now: Callable[[], float] | None = None
        self.measured: list[tuple[float, int, int]] = []
        self._counting = counting = [
            m for m in block.modules() if getattr(m, "track_running_stats", False)
        ]
        # torch's default where nothing else is needed: it asks less of compilation.
        self._options: dict[str, Any] = (
            {"context_fn": partial(_contexts, counting, kept, offloader)}
            if counting or kept
            else {}
        )

    @override
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
        own = {address(p) for p in self._block.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if address(tensor) not in own:
                sizes[address(tensor)] = tensor.untyped_storage().nbytes()
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
        held = {address(t): t.untyped_storage().nbytes() for t in inputs}
        return seconds, sum({**sizes, **held}.values()), sum(held.values())


def _contexts(
    counting: Sequence[nn.Module], kept: Sequence[str], offloader: Offloader | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a block runs in first, and what it runs in again."""
    if not kept:
        return nullcontext(), _Again(counting, None)
    notes = Notes(kept_operations(kept), offloader)
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
