"""Comparison of weights and optimizer state between ranks that must hold equal bits.

Every `every` steps all copies are compared bit by bit (`fault_tolerance.replica_comparison`): with
``zero=0`` between all data-parallel ranks, with ``zero`` 1 to 3 between the copies of the shards
(``dp_replicate``), and always between tensor-parallel ranks and pipeline stages that share a
tensor. Experts are compared between the ranks with the same ones. A tensor of one rank only cannot
be compared; a warning says so if that is every tensor.

The cost is one reading of weights and state, a part of an optimizer step, and one small exchange of
objects. Buffers are not compared: those of batch norms that are not synchronised differ.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import raise_if_any
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.numbers.diagnosis import in_words
from lightning_megatron.fault_tolerance.replica_comparison import (
    Difference,
    Holders,
    SharedTensor,
    condense,
    differences,
    fingerprints,
    suspects,
    unequal,
)
from lightning_megatron.services import MegatronServices, services_of
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.gradients import ParameterRole, local

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
        RuntimeError: in training, on every rank, copies differ and are not healed.
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
            services_of(trainer, self, _NEEDS)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = trainer.global_step
        services = services_of(trainer, self, _NEEDS)
        if not any(Peers(services.host_group).all_gather(len(_shared_tensors(services)))):
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
        self.found = self._compare(trainer)
        if self.found:
            self._handle_differences(trainer)
        return self.found

    def _compare(self, trainer: pl.Trainer) -> list[Difference]:
        services = services_of(trainer, self, _NEEDS)
        services.parallel.data.come_to_rest()
        held = _shared_tensors(services)
        prints = fingerprints([one.tensor for one in held])
        doubtful = unequal(Peers(services.host_group).all_gather(condense(held, prints)))
        if not doubtful:
            return []
        mine = {
            (one.holders, one.name): value
            for one, value in zip(held, prints, strict=True)
            if one.holders in doubtful
        }
        return differences(Peers(services.host_group).all_gather(mine))

    def _handle_differences(self, trainer: pl.Trainer) -> None:
        services = services_of(trainer, self, _NEEDS)
        wrong = suspects(self.found)
        unclear = [one for one in self.found if not one.wrong]
        heals = self._action == "heal" and not unclear
        text = _describe(self.found, wrong, unclear)
        ranks = wrong or sorted({r for one in unclear for group in one.groups for r in group})
        services.events.write(
            "fault",
            what="replica",
            rank_of_fault=ranks,
            section="other",
            detail=text,
            action=self._action if heals else "raise",
        )
        if services.is_global_zero:
            action = f"healing {in_words(wrong)}" if heals else "the run ends"
            announce("replicas differ", [f"step {trainer.global_step}: {text}", action])
        if not heals:
            raise RuntimeError(f"step {trainer.global_step}: {text}")
        _heal(self.found, _shared_tensors(services), services)
        again = self._compare(trainer)
        if again:
            raise RuntimeError(
                f"step {trainer.global_step}: {text}; after healing still: "
                f"{_describe(again, suspects(again), [])}"
            )
        self.healed += len(wrong)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"checks": self.checks, "healed": self.healed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.checks = state_dict["checks"]
        self.healed = state_dict["healed"]


@own_weights
def _shared_tensors(services: MegatronServices) -> list[SharedTensor]:
    """Parameters and optimizer state of this rank that other ranks hold, too."""
    found = []
    for role in services.gradients.roles:
        # Below ZeRO 3 all data-parallel ranks hold a parameter, and each owns a part of it.
        whole = role.rows is not None
        shown = _holders(role, services.topology, divided=role.is_divided and not whole)
        if shown is not None:
            held = local(role.parameter.detach())
            found.append(SharedTensor(name=role.name, tensor=held, holders=shown))
        holders = _holders(role, services.topology, divided=role.is_divided)
        if holders is None:
            continue
        if role.rows is not None and role.rows.is_copy:
            name = f"{role.name}: main copy of the optimizer"
            found.append(SharedTensor(name=name, tensor=role.rows.values, holders=holders))
        for index, optimizer in enumerate(services.optimizers):
            for key, value in optimizer.state.get(role.parameter, {}).items():
                if isinstance(value, Tensor):
                    name = f"{role.name}: {key} of optimizer {index}"
                    found.append(SharedTensor(name=name, tensor=local(value), holders=holders))
    return found


def _holders(role: ParameterRole, topology: Topology, *, divided: bool) -> Holders | None:
    """Ranks that hold the same part of a parameter; None if only this one does.

    Args:
        role: role of the parameter.
        topology: the layout.
        divided: whether data-parallel ranks have different parts.
    """
    axes = role.axes(topology)
    along = [axes.copies]
    if not divided:
        along.append(axes.shard)
    if role.shard is None or role.shard.dim is None:
        along.append(axes.layer)
    if role.outside or role.tied_ranks:
        along.append(topology.pp)
    names = tuple(axis.name for axis in along if axis.size > 1)
    if not names:
        return None
    first = _first_along(names, topology.degrees, topology.rank)
    if role.tied_ranks and not role.outside:
        return (*names, *map(str, role.tied_ranks)), first
    return names, first


@cache
def _first_along(axes: Sequence[str], degrees: Degrees, rank: int) -> int:
    """Lowest of the ranks that are reached from ``rank`` along axes."""
    ranks = {rank}
    for axis in axes:
        ranks = {r for group in groups_along(axis, degrees) if ranks & set(group) for r in group}
    return min(ranks)


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


def _describe(
    found: Sequence[Difference], wrong: Sequence[int], unclear: Sequence[Difference]
) -> str:
    names = [one.name for one in found]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if not unclear:
        return f"{in_words(wrong)} differ from the majority in {len(names)} tensors: {shown}"
    groups = " and ".join(in_words(group) for group in unclear[0].groups)
    return (
        f"{groups} differ in {len(names)} tensors ({shown}), and no majority shows which are "
        "right; nearest valid: resume from an earlier checkpoint, and test the machines of both"
    )
