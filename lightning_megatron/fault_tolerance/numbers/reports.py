"""What `NumberGuard` tells: an event on every rank, and a block on stderr of the first one."""

import lightning.pytorch as pl

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.numbers.diagnosis import BadNumber
from lightning_megatron.services import MegatronServices


def text_of(trainer: pl.Trainer, fault: BadNumber) -> str:
    """Say what was found, and in which step."""
    return f"step {trainer.global_step}: {fault.detail}"


def tell_fault(
    trainer: pl.Trainer, services: MegatronServices, fault: BadNumber, action: str, note: str
) -> None:
    """Report a fault and what follows it.

    Args:
        trainer: of the run.
        services: its strategy.
        fault: what was found.
        action: what follows.
        note: what a second run of the batch showed, if there was one.
    """
    services.events.write(
        "fault",
        what=fault.what,
        rank_of_fault=list(fault.ranks),
        section="backward",
        detail="; ".join(part for part in (fault.detail, note) if part),
        action=action,
    )
    if action == "skip":
        services.events.write("skip", batch=trainer.fit_loop.epoch_loop.batch_idx)
    if services.is_global_zero:
        lines = [text_of(trainer, fault), f"epoch {trainer.current_epoch}; action: {action}"]
        announce(f"bad numbers: {fault.what}", [*lines, note] if note else lines)


def tell_rollback(
    trainer: pl.Trainer, services: MegatronServices, count: str, updates: int, batches: int
) -> None:
    """Report that a run has gone back.

    Args:
        trainer: of the run.
        services: its strategy, which knows how many batches are to be skipped.
        count: how often it has, in words.
        updates: by how many it went back.
        batches: read since the state that it returned to.
    """
    ahead = services.recovery.batches_to_skip
    services.events.write(
        "rollback", updates_back=updates, batches_since=batches, batches_ahead=ahead
    )
    if services.is_global_zero:
        announce(
            f"rollback {count}",
            [
                f"step {trainer.global_step}: back by {updates} updates",
                f"{batches} batches since then and the next {ahead} are passed over",
            ],
        )
