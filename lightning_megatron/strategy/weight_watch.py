"""The part of the strategy that watches what user's code does with weights in parts."""

from contextlib import AbstractContextManager, nullcontext

from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.parallel.whole_reductions import WholeReductions
from lightning_megatron.strategy import collectives
from lightning_megatron.strategy.observers import looks_at_weights
from lightning_megatron.strategy.run import Run


class WeightWatch:
    """Makes true what user's code finds out of weights in parts (`parallel.whole_reductions`).

    Args:
        run: with the weights.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reductions: WholeReductions | None = None
        self._sees_steps = False

    def begin(self, *, zero_3: bool) -> None:
        """Watch where weights are in parts, and user's code may look at them; collective."""
        run, topology = self._run, self._run.topology
        sharded = zero_3 and topology.loss.size > 1
        if not sharded and topology.tp.size * topology.ep.size * topology.pp.size == 1:
            return
        decisions = looks_at_weights(run.trainer, run.module)
        # On all ranks alike.
        somewhere, in_step = (
            collectives.agree(found, run.root_device, all=False) for found in decisions
        )
        if somewhere or in_step:
            self.start(steps=in_step)

    def start(self, *, steps: bool) -> None:
        """Look at what hooks do from now on, and at what steps do where ``steps``."""
        self._reductions = WholeReductions(self._run.parallel.gradients, self._run.module)
        self._sees_steps = steps
        self._run.precision.around_step = self._reductions.lifted
        self._reductions.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Undo `start`."""
        if self._reductions is not None:
            self._reductions.end()
            self._reductions, self._run.precision.around_step = None, nullcontext

    def follow(self, gradients: GradientSet) -> None:
        """Look at the parameters of another layout."""
        if self._reductions is not None:
            self._reductions.follow(gradients)

    def around_step(self) -> AbstractContextManager[None]:
        """Context of a step of the user's, which is seen if steps are."""
        return nullcontext() if self._sees_steps else self.lifted()

    def lifted(self) -> AbstractContextManager[None]:
        """Context in which the network runs, which knows its weights."""
        return nullcontext() if self._reductions is None else self._reductions.lifted()
