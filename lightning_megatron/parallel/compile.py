"""Blocks of a network through ``torch.compile``.

Between its products a transformer block is a chain of small operations (norms, rotary embedding,
activation, dropout, residuals), each of which reads and writes whole activations. Compiled, a chain
becomes one kernel that does so once, and what is cheap to compute again is not kept for the
backward. Compiling *block by block* makes one graph that serves all blocks of a kind, because
parameters are its inputs: the time to compile does not grow with depth, as it would for a whole
model, and ZeRO gathers between blocks as ever.

A block's own ``forward`` is replaced, on the instance: names of parameters stay, and hooks, those
of ZeRO among them, lie outside. A block that is recomputed runs its compiled forward twice; each
shape then has a graph of its own, so that the recomputation meets the same one.

Under tp the collectives of a block break its graph: what lies between them is compiled, which gains
less and takes several times as long to compile. Refused are schedules that split the backward
(`strategies.preflight`), as that of a compiled block is one piece, and selective recomputation,
which looks at operations that are not there any more: the compiler decides about them itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_megatron.parallel.memory import MemoryConfig, find_blocks
from lightning_megatron.parallel.wrapping import BlockForward


def compile_blocks(module: nn.Module, config: MemoryConfig) -> None:
    """Let the blocks inside ``module`` run compiled, if ``config`` says so."""
    if config.compile == "none":
        return
    for block in find_blocks(module, None):
        _Compiled(block, config)


class _Compiled(BlockForward):
    """A forward that is compiled when it runs first.

    Args:
        block: what to compile.
        config: how.
    """

    def __init__(self, block: nn.Module, config: MemoryConfig) -> None:
        super().__init__(block)
        self._config = config
        self._run: Callable[..., Any] | None = None

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            self._run = torch.compile(
                self._forward,
                backend=self._config.compile_backend,
                dynamic=None if self._config.recompute == "none" else False,
            )
        return self._run(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled code, which belongs to this block alone."""
        return {**self.__dict__, "_run": None}
