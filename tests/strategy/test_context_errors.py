"""A cp rank that is lost in the middle of a ring ends the others, which say who it was."""

import os
import signal
import sys
import traceback
from typing import Any

import pytest

from lightning_megatron import ContextConfig, MegatronStrategy
from lightning_megatron.layers.context_attention import ring
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parallel.activations.test_context import Attentive
from tests.parity.jobs import quiet_trainer
from tests.parity.reference import Data
from tests.strategy.test_errors import PATIENCE_S


def lost_job(lost: int, exchanges: int) -> None:
    """One rank is killed between two messages; all others end as a script does."""
    if int(os.environ["RANK"]) == lost:
        exchange, done = ring.exchange, []

        def last(*args: Any) -> Any:
            done.append(None)
            if len(done) == exchanges:
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(*args)

        ring.exchange = last
    try:
        strategy = MegatronStrategy(cp=ContextConfig(degree=4, kind="ring"))
        quiet_trainer(strategy).fit(Attentive(Data(steps=4, lengths=(13,))))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize("exchanges", [18, pytest.param(23, marks=pytest.mark.thorough)])
def test_ranks_of_a_ring_end_with_the_one_that_is_killed(pool: WorkerPool, exchanges: int) -> None:
    """In a backward, and in a forward: a step makes 6 calls there, and 14 in its backward."""
    with pytest.raises(WorkerError) as failure:
        pool.run(4, lost_job, 2, exchanges, grace=PATIENCE_S)
    failures = {found.rank: found for found in failure.value.failures}
    assert sorted(failures) == [0, 1, 2, 3]
    assert failures[2].summary == "the process ended with exit code -9"
    for rank in (0, 1, 3):
        assert failures[rank].summary == "the process ended with exit code 1"
        assert "(root cause: rank 2 (" in failures[rank].output
