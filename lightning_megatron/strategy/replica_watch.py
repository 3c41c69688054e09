"""Comparison of what ranks hold alike in every run: after steps 1, 2, 4, 8 ..., and at its end.

Whoever writes to weights on one rank only, or averages no gradients, trains several networks, and
no number shows it. So ranks compare their copies before the first step, and then each time the run
is twice as long: what goes wrong in every step is found after the first one, and a run of ``n``
steps pays for ``log2(n) + 3`` comparisons, each a reading of the weights and one small gather.
`ReplicaCheck` compares the state of optimizers as well, as often as one wants.
"""

from collections.abc import Callable

import torch

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ReplicaError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.replica_causes import Circumstances, describe
from lightning_megatron.fault_tolerance.replica_comparison import Difference, suspects
from lightning_megatron.strategy.run import Run
from lightning_megatron.zero.replicas import compare, shared_weights, trained_names


class ReplicaWatch:
    """Compares the copies of weights, and ends a run in which they differ.

    Args:
        run: the strategy.

    Attributes:
        answer: what is done about differences; None ends the run.
        comparisons: number of them since training began.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._on = False
        self.answer: Callable[[list[Difference]], None] | None = None
        self.comparisons = 0
        self._equal_at: int | None = None
        self._began = self._next = 0

    def begin(self, *, on: bool) -> None:
        """Training begins, at any step.

        Args:
            on: whether to compare at all.
        """
        self._on = on and self._run.world_size > 1
        self._began = self._next = self._run.trainer.global_step
        self._equal_at = None
        self.comparisons = 0

    def before_batch(self) -> None:
        """Compare if it is time to; collective."""
        step = self._run.trainer.global_step
        if self._on and step >= self._next:
            self._next = self._began + 2 ** (step - self._began).bit_length()
            self.compare(step)

    def end(self) -> None:
        """Training has ended; collective."""
        step = self._run.trainer.global_step
        if self._on and step != self._equal_at:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare what is held alike after a step; collective."""
        run = self._run
        run.parallel.data.come_to_rest()
        peers = Peers(run.host_group)
        # A rank that is in a collective of the user's shows here, as in the votes of a batch.
        peers.vote(True, torch.device("cpu"), all=True)
        self.comparisons += 1
        held = shared_weights(run.parallel.gradients)
        found = compare(held, peers)
        if found is None:
            self._on = False
        elif found:
            self._respond(step, found)
        self._equal_at = step

    def _respond(self, step: int, found: list[Difference]) -> None:
        """Have a callback answer, or end the run on all ranks by one error."""
        if self.answer is not None:
            self.answer(found)
            return
        raise ReplicaError(
            f"{self.report(step, found)}; nearest valid: what makes them equal, or "
            "zero=ShardingConfig(..., compare_copies=False), which compares nothing"
        )

    def report(self, step: int, found: list[Difference], *, healing: str | None = None) -> str:
        """Tell the log and the user of differences; collective.

        Args:
            step: after which they were found.
            found: see above.
            healing: words for what is done about them; None if the run ends.

        Returns:
            Who differs in what, since when, and why that may be; the same on every rank.
        """
        run = self._run
        text = f"step {step}: {self._describe(step, found)}"
        every = sorted({r for one in found for group in one.groups for r in group})
        run.events.write(
            "fault",
            what="replica",
            rank_of_fault=suspects(found) or every,
            section="other",
            detail=text,
            action="raise" if healing is None else "heal",
        )
        if run.is_global_zero:
            announce("replicas differ", [text, healing or "the run ends"])
        return text

    def _describe(self, step: int, found: list[Difference]) -> str:
        run = self._run
        own = trained_names(run.parallel.gradients, run.optimizers)
        names = set(own).union(*Peers(run.host_group).all_gather(own))
        circumstances = Circumstances(
            equal_at=self._equal_at,
            begun=step > self._began,
            by_hand=not run.module.automatic_optimization,
            trained=names,
        )
        return describe(found, circumstances)
