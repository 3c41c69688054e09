"""Position in the training data from which a resumed run reads on, whatever its layout.

Lightning restores how many batches of the epoch are done, but iterates the loader from its start,
and creates the iterator before it tells the sampler which epoch it is. Here every training loader
that is prepared goes to where the checkpoint was saved, before anything is read from it:

* a map-style dataset: its sampler skips; the position is counted in samples of the whole job, so it
  means the same under another data-parallel degree or batch size;
* an iterable dataset with ``state_dict`` that is read in the process itself: to the state that it
  had before the first batch that was not trained on, on each rank that reads samples of its own;
* a loader with ``state_dict``: through Lightning, which calls its ``load_state_dict``, but with the
  state that it had on the rank, not on rank zero;
* anything else is read from its start and discarded up to that point, which a warning announces.

A batch is done when its gradients have been used. A checkpoint that is saved while gradients are
accumulated, or amid a step that fails, holds the position *before* the accumulation: its batches
are read again, and each contributes to one optimizer step.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_megatron._lightning import (
    Stateful,
    batch_progress,
    begin_next_epoch,
    count_batches_anew,
    discard_batches,
    epoch_counts,
    hide_resuming_warning,
    read_anew,
    repeats_short_loaders,
    shift_batch_counts,
    take_batches_back,
    take_epoch_back,
    training_fetcher,
    training_loader,
    validates_first,
)
from lightning_megatron.data.batch_sizes import BatchSizes
from lightning_megatron.data.lengths import TokenBudget
from lightning_megatron.data.sampler import ResumableSampler
from lightning_megatron.strategy.data.global_batch import ScheduledBatches, scheduled
from lightning_megatron.strategy.data.seeding import SeededBatches, seed_samples
from lightning_megatron.strategy.data.sharding import DrawnOrder, Share, share_of
from lightning_megatron.topology.mesh import Topology


@dataclass(kw_only=True)
class _Reading:
    """Knowledge about one loader."""

    share: Share
    batches: SeededBatches | None
    before: int = 0
    """Items of the epoch that had been consumed when the run was resumed."""
    first: int = 0
    """Number of the first batch after that."""
    epoch: int = -1
    """Time of that."""
    schedule: ScheduledBatches | None = None
    """Batches of changing sizes, which know their position themselves."""

    def batches_after(self, consumed: int) -> int:
        """Number of batches in the rest of an epoch."""
        left, size = self.share.items - consumed, self.share.per_batch
        return left // size if self.share.loader.drop_last else -(-left // size)

    def consumed(self, epoch: int, batches: int, *, cycles: bool) -> int:
        """Items that the ranks have used when so many batches of the epoch are done.

        Args:
            epoch: the present one.
            batches: done in it.
            cycles: whether reading begins again at the end, for as long as the epoch lasts.
        """
        if self.schedule is not None:
            return self.schedule.position(epoch, batches)[0]
        before, done = (self.before, batches - self.first) if epoch == self.epoch else (0, batches)
        first_pass = self.batches_after(before)
        if cycles and done > first_pass:
            before, done = 0, (done - first_pass) % self.batches_after(0)
        return min(before + done * self.share.per_batch, self.share.items)

    def seek(self, epoch: int, consumed: int) -> None:
        """Go on reading there."""
        assert self.share.order is not None
        self.before = consumed
        self.epoch = epoch
        self.first = self.batches_after(0) - self.batches_after(consumed)
        self.share.order.seek(epoch, consumed)


class DataPosition:
    """Position in the training data: noted for a checkpoint, and found again."""

    def __init__(self) -> None:
        self._readings: WeakKeyDictionary[Any, _Reading] = WeakKeyDictionary()
        self.schedule: ScheduledBatches | None = None
        self._saved: dict[str, Any] | None = None
        self._awaits: dict[str, Any] | None = None
        """Position for when the validation at an epoch's end is over with which the run goes on."""
        self._moved = 0
        """Number of training loaders that are where they were when the checkpoint was saved."""
        self._discard: list[Any] = []
        self._used: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """State of each stateful loader after the last batch that a step used."""
        self._seed: int | None = None
        self._order_seed: int | None = None

    # Saving --------------------------------------------------------------------------------------

    def save(
        self, checkpoint: dict[str, Any], trainer: Trainer, topology: Topology, group: Any
    ) -> dict[str, Any]:
        """Position for a checkpoint, beside Lightning's own progress; collective.

        Args:
            checkpoint: Lightning's; its progress is taken back to the last optimizer step.
            trainer: that trains.
            topology: who reads what.
            group: all processes, for objects on the host.
        """
        progress = checkpoint.get("loops", {}).get("fit_loop")
        combined = training_loader(trainer)
        if progress is None or combined is None:
            return {}
        read = batch_progress(progress)["current"]["ready"]
        epoch, batch = rewind(progress, trainer)
        rewound = batch_progress(progress)["current"]["ready"] != read
        cycles = repeats_short_loaders(combined)
        return {
            "seed": self._seed,
            "order_seed": self._order_seed,
            "epoch": epoch,
            "batch": batch,
            "loaders": [
                self._save_loader(loader, epoch, batch, cycles) for loader in combined.flattened
            ],
            "states": _states_of_ranks(
                [self._state(loader, batch, rewound) for loader in combined.flattened],
                topology,
                group,
            ),
        }

    def _save_loader(self, loader: Any, epoch: int, batch: int, cycles: bool) -> dict[str, Any]:
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        if reading is None or reading.share.order is None:
            return {}
        share, order = reading.share, reading.share.order
        return {
            "order": _order_state(order, epoch),
            "consumed": reading.consumed(epoch, batch, cycles=cycles) * share.sets,
            "items": share.items * share.sets,
            "total": None if (s := reading.schedule) is None else s.position(epoch, batch)[1],
        }

    def _state(self, loader: Any, batch: int, rewound: bool) -> Any:
        """State of a loader or its dataset, which each data-parallel rank has for itself."""
        if isinstance(loader, Stateful):
            return self._used.get(loader) if rewound else loader.state_dict()
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        batches = _stateful_batches(reading)
        return None if batches is None else batches.state_before(batch)

    def after_step(self, trainer: Trainer) -> None:
        """Note where loaders are that cannot be asked later where they were."""
        combined = training_loader(trainer)
        if trainer.accumulate_grad_batches == 1 or combined is None:
            return
        for loader in combined.flattened:
            if isinstance(loader, Stateful):
                self._used[loader] = deepcopy(loader.state_dict())

    # Loading -------------------------------------------------------------------------------------

    def load(
        self,
        saved: Mapping[str, Any],
        checkpoint: dict[str, Any],
        trainer: Trainer,
        topology: Topology,
    ) -> None:
        """Move the training loaders to where the checkpoint was saved, now or once they exist."""
        if "loaders" not in saved or "fit_loop" not in checkpoint.get("loops", {}):
            return
        self._saved = dict(saved)
        states = saved["states"]
        mine = states[topology.batch.rank] if len(states) == topology.batch.size else None
        self._saved["states"] = mine
        if mine is None and states[0] is not None:
            rank_zero_warn(
                f"{len(states)} ranks read data of their own when the checkpoint was saved, now "
                f"{topology.batch.size} do: the states of their iterable datasets or loaders "
                "cannot be divided, and reading starts anew"
            )
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        if "combined_loader" in state and mine is not None:
            loaders = state["combined_loader"]
            state["combined_loader"] = [s for s in mine if s is not None][: len(loaders)]
        self._seed = saved["seed"]
        self._order_seed = saved["order_seed"]
        self._moved = 0
        self._discard = []
        combined, fetcher = training_loader(trainer), training_fetcher(trainer)
        if combined is not None and fetcher is not None:
            # `trainer.estimated_stepping_batches` in configure_optimizers has prepared the loader,
            # and a batch may have been fetched from its start.
            for loader in combined.flattened:
                self._resume(loader)
            read_anew(trainer)

    def prepare(
        self,
        dataloader: DataLoader[Any],
        trainer: Trainer,
        topology: Topology,
        seed: int,
        *,
        divide: bool,
        sizes: BatchSizes | None = None,
    ) -> DataLoader[Any]:
        """A training loader's share of this rank, at the restored position if there is one.

        Args:
            dataloader: the user's.
            trainer: that trains.
            topology: who reads what.
            seed: of orders; that of a resumed run is kept.
            divide: see `share_of`.
            sizes: of global batches, where they change.
        """
        if self._seed is None:
            self._seed = topology.seed
            self._order_seed = seed
        assert self._order_seed is not None
        share = share_of(dataloader, topology, self._order_seed, divide=divide)
        schedule = None
        if sizes is not None:
            share, schedule = scheduled(share, topology, sizes, self._order_seed)
        self.schedule = schedule
        history = trainer.accumulate_grad_batches + 2
        batches = seed_samples(share.loader, topology, self._seed, history)
        self._readings[share.loader] = _Reading(share=share, batches=batches, schedule=schedule)
        self._resume(share.loader)
        return share.loader

    def _resume(self, loader: Any) -> None:
        """Move the next of the training loaders; they come in the order they were saved in."""
        saved, index = self._saved, self._moved
        if saved is None or index >= len(saved["loaders"]):
            return
        self._moved += 1
        if isinstance(loader, Stateful):  # Lightning does it
            return
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        position, state = saved["loaders"][index], saved["states"] and saved["states"][index]
        if reading is not None and reading.share.order is not None and position:
            self._seek(reading, position, saved["epoch"])
        elif (batches := _stateful_batches(reading)) is not None and state is not None:
            batches.go_to(saved["batch"], state)
        elif saved["batch"]:
            self._discard.append(loader)
        if reading is not None and reading.batches is not None:
            reading.batches.sampler.set_epoch(saved["epoch"])

    def _seek(self, reading: _Reading, position: Mapping[str, Any], epoch: int) -> None:
        order, share = reading.share.order, reading.share
        items = share.items * share.sets
        if items != position["items"]:
            rank_zero_warn(
                f"The checkpoint was saved {position['consumed']} of {position['items']} samples "
                f"into an epoch, which now has {items}: those that were read cannot be told from "
                "the others; the same dataset continues exactly"
            )
        if isinstance(order, DrawnOrder):
            order.load_state_dict(position["order"])
        elif isinstance(order, TokenBudget) and position["order"] is not None:
            order.check(position["order"])
        consumed = min(position["consumed"], items) // share.sets
        if reading.schedule is not None:
            total = position.get("total")
            total = epoch * items + consumed if total is None else total
            assert self._saved is not None
            reading.schedule.seek(epoch, consumed, self._saved["batch"], total)
            return
        reading.seek(epoch, consumed)

    def start(self, trainer: Trainer) -> None:
        """Finish what `load` began, when training is about to start."""
        self.after_step(trainer)
        saved, self._saved = self._saved, None
        if saved is not None and validates_first(trainer):
            self._awaits = saved
        combined, fetcher = training_loader(trainer), training_fetcher(trainer)
        if saved is None or combined is None or fetcher is None:
            return
        discard, self._discard = self._discard, []
        if saved["epoch"] and not saved["batch"]:
            _begin_epoch(saved["states"], trainer)
        if not discard:
            self._count_batches(saved, combined.flattened, trainer)
            hide_resuming_warning()
        elif len(combined.flattened) > 1:
            rank_zero_warn(
                "A training loader among several is iterable and has no state_dict: it is read "
                "from its start again"
            )
        else:
            rank_zero_warn(
                f"The training data has no position to return to: {saved['batch']} batches are "
                "read and discarded; a dataset with state_dict and load_state_dict that is read "
                "with num_workers=0, or a loader with them, needs no time for it"
            )
            discard_batches(trainer, saved["batch"])

    def after_epoch(self, trainer: Trainer) -> None:
        """Move the loaders anew, which Lightning is going to iterate anew.

        So it does after every epoch; but the one that is over was validation only, as the run was
        interrupted before that, and the loaders stand at the beginning of the next one.
        """
        saved, self._awaits = self._awaits, None
        combined = training_loader(trainer)
        if saved is None or saved["batch"] or combined is None:
            return
        self._saved = saved
        self._moved = 0
        for loader in combined.flattened:
            self._resume(loader)
            known = isinstance(loader, DataLoader)
            batches = _stateful_batches(self._readings.get(loader)) if known else None
            if batches is not None:  # the first batch may have been fetched
                batches.go_to(0, batches.state_before(0))
        self._saved = None
        self._discard = []

    def _count_batches(self, saved: dict[str, Any], loaders: list[Any], trainer: Trainer) -> None:
        """Have the epoch end with its last sample, if batches have another size than before."""
        readings = [self._readings[one] for one in loaders if isinstance(one, DataLoader)]
        readings = [reading for reading in readings if reading.epoch == saved["epoch"]]
        if not readings:
            return
        longest = max(readings, key=lambda reading: reading.batches_after(0))
        if saved["batch"]:
            shift_batch_counts(trainer, longest.first - saved["batch"])


def _begin_epoch(states: list[Any] | None, trainer: Trainer) -> None:
    """Finish what Lightning leaves open when a run goes on with the first batch of an epoch."""
    combined, fetcher = training_loader(trainer), training_fetcher(trainer)
    assert combined is not None
    assert fetcher is not None
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    ended = loop.batch_progress.is_last_batch and not validates_first(trainer)
    epochs: Any = fit.epoch_progress.total
    if ended and trainer.max_steps != -1 and epochs.processed == epochs.started:
        # With max_steps it takes the epoch that is over for one to go on with.
        begin_next_epoch(trainer)
    elif trainer.num_training_batches == float("inf") and ended:
        # It would go on counting from the epoch before, as it knows no last batch.
        count_batches_anew(trainer)
    again = False
    for loader, state in zip(combined.flattened, states or [], strict=False):
        if isinstance(loader, Stateful) and state is not None:
            # It stands at the end of an epoch, and may think that the rest of it is to be read.
            loader.load_state_dict(state)
            rest: Any = iter(loader)  # type: ignore[call-overload]
            if next(rest, None) is not None:
                loader.load_state_dict(state)
            again = True
    if again:
        read_anew(trainer)


def _order_state(order: ResumableSampler | TokenBudget | DrawnOrder, epoch: int) -> Any:
    """State of a user's sampler as an epoch began, or what tells batches from others."""
    if isinstance(order, DrawnOrder):
        return order.state_before(epoch)
    return order.state_dict() if isinstance(order, TokenBudget) else None


def _stateful_batches(reading: _Reading | None) -> SeededBatches | None:
    """The batches of a dataset whose position is its own state, if it is one."""
    batches = None if reading is None else reading.batches
    return batches if batches is not None and batches.is_stateful else None


def rewind(progress: dict[str, Any], trainer: Trainer) -> tuple[int, int]:
    """Take the progress of the fit loop back to the last optimizer step.

    Returns:
        The epoch, and the number of its first batch that no step has used.
    """
    epochs, batches = epoch_counts(progress), batch_progress(progress)
    now, every = batches["current"], trainer.accumulate_grad_batches
    done = now["processed"]
    whole = done >= trainer.num_training_batches or batches["is_last_batch"]
    if done and done == now["ready"] and whole:
        return max(epochs["started"], epochs["processed"]), 0
    if done:
        take_epoch_back(progress)
    used = done - done % every
    if used < done or now["ready"] > done:
        take_batches_back(progress, used)
    return epochs["processed"], used


def _states_of_ranks(mine: list[Any], topology: Topology, group: Any) -> list[Any]:
    """The states of every data-parallel rank, on the first rank; a list of one where equal."""
    if all(state is None for state in mine):  # on every rank, as they have the same kinds of loader
        return [None] * topology.batch.size
    if topology.world_size == 1:
        return [mine]
    first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * topology.world_size if first else None
    dist.gather_object((topology.batch.rank, mine), gathered, group=group)
    by_rank = dict(reversed(gathered or []))
    return [by_rank[rank] for rank in sorted(by_rank)]
