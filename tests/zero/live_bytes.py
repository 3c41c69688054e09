"""Bytes that are alive while something runs: an instrument for tests of memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_megatron._torch.graphs import TorchDispatchMode, tree_flatten


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operators return, until nobody holds it.

    On CPUs a backward runs in the thread that calls it, and is counted as well. What an operator
    allocates and frees inside is not seen.

    Args:
        besides: tensors that were there before, and do not count.

    Attributes:
        most: the most bytes that were alive after an operator.
    """

    def __init__(self, besides: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._besides = [StorageWeakRef(tensor.untyped_storage()) for tensor in besides]
        self._known = {reference.cdata for reference in self._besides}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if type(leaf) is Tensor or type(leaf) is torch.nn.Parameter:
                self._note(leaf)
        self.most = max(self.most, self.now)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._known:
            self._alive.setdefault(reference.cdata, (reference, storage.nbytes()))

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        gone = [key for key, (reference, _) in self._alive.items() if reference.expired()]
        for key in gone:
            del self._alive[key]
        return sum(size for _, size in self._alive.values())
