"""In a steady step the host waits for the device where the ledger says why, and nowhere else."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_megatron.layers.context_attention import blocks
from lightning_megatron.layers.context_attention.documents import Documents
from lightning_megatron.strategy import microbatch_logging
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.zero import grad_buckets, gradients
from tests._torch.device_branches import device_branches
from tests._torch.host_syncs import PACKAGE, HostSyncs
from tests.parity import reference
from tests.parity.jobs import ParityModule, quiet_trainer
from tests.parity.reference import Data
from tests.parity.test_documents import Packed, PackedModule

STEADY = 3
"""First step that is counted: what is done once has been done."""
MIXTURES = reference.LAYERS["mixture"]

HOST: Mapping[str, str] = {
    "comm/objects.py:__call__": "objects travel in memory of the host",
    "comm/peers.py:exchange": "votes are taken over gloo",
    "comm/point_to_point.py:_pack": "what describes a message is on the host",
    "comm/point_to_point.py:_read_header": "what describes a message is on the host",
    "comm/point_to_point.py:lend": "what describes a message is on the host",
    "precision/sharded.py:step": "torch's optimizers count steps on the host",
    "strategy/attributes.py:digest": "attributes of the module, here batches on the host",
    "topology/rng.py:_draw": "a draw of the host",
    "topology/rng.py:batch": "seeds are agreed on over gloo",
}
"""Places that read memory of the host, and why it is there."""
WAITS: Mapping[str, tuple[int, str]] = {
    "layers/experts/dispatch.py:_told tolist": (
        MIXTURES,
        "the rows for each rank and expert, which size what is exchanged: once a layer",
    ),
    "layers/context_attention/documents.py:__init__ tolist": (
        1,
        "the documents of the batch, which say which tiles are computed: once a batch",
    ),
    "strategy/microbatch_logging.py:_exchange tolist": (
        1,
        "stages but the last learn whether other keys are logged: once a step",
    ),
}
"""Places that wait for the device, the most of it in a step, and why."""


def beyond(found: Mapping[str, int]) -> dict[str, int]:
    """Entries of a step that the ledger does not allow."""
    return {
        entry: count
        for entry, count in found.items()
        if entry.partition(" ")[0] not in HOST and count > WAITS.get(entry, (0, ""))[0]
    }


class LastStep(L.Callback):
    """Has the steps from `STEADY` on counted."""

    def __init__(self, ledger: HostSyncs) -> None:
        self.ledger = ledger

    def on_train_batch_start(self, *args: Any) -> None:
        self.ledger.counts = args[3] >= STEADY

    def on_train_batch_end(self, *args: Any) -> None:
        self.ledger.counts = False


class Logging(ParityModule):
    """A user's step that logs a value of the device and one of the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=len(batch[0]))
        self.log("epoch", 3.0)
        return loss


def ledger_job(options: dict[str, Any], kind: str = "llama") -> dict[str, int]:
    """Entries of a step within `device_branches`.

    Args:
        options: of the strategy.
        kind: ``documents``, or the architecture.
    """
    L.seed_everything(1, verbose=False)
    ledger = HostSyncs()
    with device_branches(), ledger.watching():
        trainer = quiet_trainer(
            MegatronStrategy(**options),
            callbacks=[LastStep(ledger)],
            gradient_clip_val=reference.CLIP,
        )
        if kind == "documents":
            module: Any = PackedModule("llama", Packed(steps=STEADY + 1), by_token=True)
        else:
            module = Logging(kind, Data(steps=STEADY + 1))  # type: ignore[arg-type]
        trainer.fit(module.float() if kind == "mixture" else module)
    return dict(ledger.found)


CASES: Mapping[str, tuple[Any, ...]] = {
    "zero 0": ({"zero": 0},),
    "zero 1": ({"zero": 1},),
    "zero 2, microbatches": ({"zero": 2, "num_microbatches": 2},),
    "zero 3": ({"zero": 3},),
    "tp, sequence parallel": ({"tp": 2, "sequence_parallel": True},),
    "experts": ({"ep": 2}, "mixture"),
    "ring with documents": ({"cp": 2}, "documents"),
    "gathered with documents": ({"cp": ContextConfig(degree=2, kind="gather")}, "documents"),
    "pipeline": ({"pp": 2, "num_microbatches": 2},),
}


@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_waits_where_the_ledger_says(pool: WorkerPool, case: str) -> None:
    for rank, found in enumerate(pool.run(2, ledger_job, *CASES[case])):
        assert found, "nothing was seen, not even votes"
        assert not beyond(found), f"rank {rank}"


def test_the_ledger_is_up_to_date(pool: WorkerPool) -> None:
    """What waits, and nowhere happens, does not stay in the ledger."""
    cases = ("experts", "ring with documents", "pipeline")
    runs = [found for case in cases for found in pool.run(2, ledger_job, *CASES[case])]
    assert WAITS.keys() <= set().union(*runs)


# Planted faults: those of which a GPU would have suffered, and others of their kind ---------------


def planted(text: str, **names: Any) -> Callable[..., Any]:
    """A function that stands in the package, as the ledger sees it."""
    scope = {"torch": torch, **names}
    exec(compile(text, f"{PACKAGE}planted.py", "exec"), scope)
    return scope["planted"]  # type: ignore[no-any-return]


SYNCHRONOUS = planted(
    "def planted(numbers, dtype, device): return torch.tensor(numbers, dtype=dtype, device=device)"
)
UNPINNED = planted(
    "def planted(numbers, dtype, device): return torch.tensor(numbers, dtype=dtype).to(device)"
)
BRANCHES = planted(
    "def planted(norm, most): return most / norm if norm > most else torch.ones_like(norm)"
)
READS = planted("def planted(flags, complete): return flags.tolist()")
SCALAR = planted(
    "def planted(device, number, dtype): return torch.as_tensor(number, dtype=dtype, device=device)"
)


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Plant a fault."""
    owner, attribute, other = {
        "flags of a bucket": (grad_buckets, "from_host", SYNCHRONOUS),
        "flags of a bucket, unpinned": (grad_buckets, "from_host", UNPINNED),
        "flags of a bucket, read": (grad_buckets, "_holders", READS),
        "flags of a sum": (gradients, "from_host", UNPINNED),
        "documents of each call": (blocks, "documents_in", Documents),
        "logged numbers": (microbatch_logging, "scalar_on", SCALAR),
        "a branch on the norm": (gradients, "clip_coefficient", BRANCHES),
    }[name]
    with mock.patch.object(owner, attribute, other):
        yield


def faulty_job(name: str, *args: Any) -> dict[str, int]:
    """The entries of a step with a planted fault."""
    with fault(name):
        return ledger_job(*args)


@pytest.mark.parametrize(
    ("name", "world", "case"),
    [
        ("flags of a bucket", 2, ({"zero": 1},)),
        ("flags of a bucket, unpinned", 2, ({"zero": 0},)),
        ("flags of a bucket, read", 2, ({"zero": 1},)),
        ("flags of a sum", 2, CASES["tp, sequence parallel"]),
        ("documents of each call", 2, CASES["ring with documents"]),
        ("logged numbers", 1, ({"num_microbatches": 2},)),
        ("a branch on the norm", 1, ({},)),
    ],
)
def test_finds(pool: WorkerPool, name: str, world: int, case: tuple[Any, ...]) -> None:
    """The ledger finds each planted fault."""
    for found in pool.run(world, faulty_job, name, *case):
        assert beyond(found)
