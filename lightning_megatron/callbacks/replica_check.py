"""Comparison of weights and optimizer state between ranks that must hold equal bits, more often.

The strategy compares weights in every run after steps 1, 2, 4, 8 and so on
(``ShardingConfig(compare_copies=)``). With this callback all copies are compared bit by bit every
`every` steps (`zero.replicas`), and those of optimizer state, too: with ``zero=0`` between all
data-parallel ranks, with ``zero`` 1 to 3 between the copies of the shards (``dp_replicate``), and
always between tensor-parallel ranks and pipeline stages that share a tensor. It also answers the
differences that the strategy finds. Experts are compared between the ranks with the same ones. A
tensor of one rank only cannot be compared; a warning says so if that is every tensor.

The cost is one reading of weights and state, a part of an optimizer step, and one small exchange of
objects. Buffers are not compared: those of batch norms that are not synchronised differ.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ReplicaError, raise_if_any
from lightning_megatron.fault_tolerance.numbers.diagnosis import in_words
from lightning_megatron.fault_tolerance.replica_comparison import (
    Difference,
    SharedTensor,
    suspects,
)
from lightning_megatron.services import MegatronServices, services_of
from lightning_megatron.zero.replicas import compare, shared_state, shared_weights

_NEEDS = "it needs to know the copies"


class ReplicaCheck(pl.Callback):
    """Compares the copies of weights and optimizer state, and names the rank that differs.

    Works under `MegatronStrategy`. Of three or more copies the majority is right. Two copies that
    differ have no majority: the run ends, whatever ``action`` is. Resume it from a checkpoint of an
    earlier step; verification compares a checkpoint with what was written, not with what should
    have been. Until the check finds a wrong copy, at most ``every`` steps, its gradients are part
    of the updates of all ranks.

    Args:
        every: optimizer steps between two checks.
        action: response to a difference: ``"raise"`` ends the run on all ranks; ``"heal"`` sends
            the tensors of a right rank to the wrong ones.

    Attributes:
        checks: number of checks so far.
        healed: number of ranks healed so far, each time counted.
        found: differences of the latest check.

    Raises:
        ConfigError: an option is not valid, or the strategy is another.
        ReplicaError: in training, on every rank, copies differ and are not healed.
    """

    def __init__(self, every: int = 100, action: Literal["raise", "heal"] = "raise") -> None:
        problems = []
        if every < 1:
            problems.append(f"every={every}: must be at least 1; nearest valid: every=1")
        if action not in ("raise", "heal"):
            problems.append(
                f"action={action!r}: must be 'raise' or 'heal'; nearest valid: action='raise'"
            )
        raise_if_any(problems)
        self._every = every
        self._action = action
        self._last = -1
        self.checks = 0
        self.healed = 0
        self.found: list[Difference] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            replicas = services_of(trainer, self, _NEEDS).replicas
            replicas.answer = partial(self._answer, trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = trainer.global_step
        services = services_of(trainer, self, _NEEDS)
        if not any(Peers(services.host_group).all_gather(len(_held(services)))):
            rank_zero_warn(
                "ReplicaCheck: no two ranks have the same parameters under this layout, so "
                "nothing is compared"
            )

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step % self._every == 0 and step != self._last:
            self._last = step
            self.check(trainer)
            pl_module.log("ft/replicas_healed_total", float(self.healed), batch_size=1)

    def check(self, trainer: pl.Trainer) -> list[Difference]:
        """Compare now, and apply ``action`` to differences; collective.

        Returns:
            The differences.
        """
        self.checks += 1
        self._answer(trainer, self._compare(trainer) or [])
        return self.found

    def _compare(self, trainer: pl.Trainer) -> list[Difference] | None:
        services = services_of(trainer, self, _NEEDS)
        services.parallel.data.come_to_rest()
        return compare(_held(services), Peers(services.host_group))

    def _answer(self, trainer: pl.Trainer, found: list[Difference]) -> None:
        """Heal differences or end the run; those of weights the strategy may have found."""
        self.found = found
        if found:
            self._handle_differences(trainer)

    def _handle_differences(self, trainer: pl.Trainer) -> None:
        services = services_of(trainer, self, _NEEDS)
        wrong = suspects(self.found)
        unclear = [one for one in self.found if not one.wrong]
        heals = self._action == "heal" and not unclear
        step, action = trainer.global_step, f"healing {in_words(wrong)}" if heals else None
        text = services.replicas.report(step, self.found, healing=action)
        if not heals:
            raise ReplicaError(text)
        _heal(self.found, _held(services), services)
        again = self._compare(trainer)
        if again:
            still = ", ".join(one.name for one in again)
            raise ReplicaError(f"{text}; after healing still different: {still}")
        self.healed += len(wrong)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"checks": self.checks, "healed": self.healed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.checks = state_dict["checks"]
        self.healed = state_dict["healed"]


def _held(services: MegatronServices) -> list[SharedTensor]:
    """Parameters and optimizer state of this rank that other ranks hold, too."""
    gradients, optimizers = services.gradients, services.optimizers
    return [*shared_weights(gradients), *shared_state(gradients, optimizers)]


def _heal(
    found: Sequence[Difference], held: Sequence[SharedTensor], services: MegatronServices
) -> None:
    """Send the tensors of a right rank to the wrong ones, through host memory."""
    mine = {(one.holders, one.name): one.tensor for one in held}
    rank, group = services.global_rank, services.host_group
    for one in found:
        source, tensor = one.groups[0][0], mine.get((one.holders, one.name))
        if tensor is None:
            continue
        for wrong in one.wrong:
            if rank == source:
                dist.send(_bytes(tensor.cpu()), dst=wrong, group=group)
            elif rank == wrong:
                received = torch.empty(tensor.shape, dtype=tensor.dtype)
                raw = _bytes(received)
                dist.recv(raw, src=source, group=group)
                with torch.no_grad():
                    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
