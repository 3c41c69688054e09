"""Lengths of split sequences, which go from stage to stage beside the activation.

Under context parallelism a layer asks which sequence its part comes from (`topology.context`). The
answer is known where the sequence was split: on the first stage as a rule. So each message of a
forward tells the next stage the lengths that have been noted so far, as numbers in its description,
which is sent only where it changes (`comm.point_to_point`): sequences of equal length cost nothing.
Gradients carry none, as the stage that they go to knows its sequences.

What is noted belongs to one microbatch on one stage, and stays for its backward, which may compute
the forward again: by then the rank has seen other microbatches, perhaps of other lengths.
"""

from typing import Any

from lightning_megatron.topology.context import Context
from lightning_megatron.topology.mesh import Topology


class SequenceLengths:
    """Lengths of the sequences of this rank's microbatches.

    Args:
        topology: layout of the run. Without a split of sequences nothing is noted or sent.
        stages: number of stages of this rank.
    """

    def __init__(self, topology: Topology, stages: int = 1) -> None:
        self._context: Context | None = topology.context if topology.cp.size > 1 else None
        self._stages = stages

    def forward(self, microbatch: int, position: int = 0) -> None:
        """Begin a forward, of whose sequences nothing is known.

        Args:
            microbatch: index of the microbatch.
            position: index of the stage among those of this rank.
        """
        if self._context is not None:
            self._context.begin(microbatch * self._stages + position, forget=True)

    def backward(self, microbatch: int, position: int = 0) -> None:
        """Begin a backward, which may compute the forward again."""
        if self._context is not None:
            self._context.begin(microbatch * self._stages + position, forget=False)

    def load(self, output: Any) -> Any:
        """Return a message to the next stage: the output with the lengths."""
        return output if self._context is None else (self._context.noted(), output)

    def unload(self, message: Any) -> Any:
        """Note the lengths of a message; return the output of the stage before."""
        if self._context is None:
            return message
        lengths, output = message
        for length in lengths:
            self._context.split(length)
        return output
