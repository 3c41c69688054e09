"""Counts what runs."""

from typing import Any

from lightning_megatron._torch.graphs import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts how often an operator runs."""

    supports_higher_order_operators = True  # those of compiled graphs

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func, self.count = func, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.func
        return func(*args, **(kwargs or {}))
