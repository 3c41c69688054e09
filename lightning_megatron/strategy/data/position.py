"""Position in the training data from which a resumed run reads on, whatever its layout.

Lightning restores how many batches of the epoch are done, but iterates the loader from its start,
and creates the iterator before it tells the sampler which epoch it is. Here every training loader
that is prepared goes to where the checkpoint was saved, before anything is read from it:

* a map-style dataset: its sampler skips; the position is counted in samples of the whole job, so it
  means the same under another data-parallel degree or batch size;
* an iterable dataset with ``state_dict`` that is read in the process itself: to the state that it
  had before the first batch that was not trained on, on each rank that reads samples of its own;
* a loader with ``state_dict`` that orders samples itself: to the state that it had on the rank
  before the first batch that was not trained on; under another data-parallel degree its batches
  are discarded;
* anything else, and a loader that is left as it is, is read from its start and discarded up to
  that point, which a warning announces.

A batch is done when its gradients have been used. A checkpoint that is saved while gradients are
accumulated, or amid a step that fails, holds the position *before* the accumulation: its batches
are read again, and each contributes to one optimizer step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_megatron._lightning.loaders import (
    Stateful,
    discard_batches,
    read_anew,
    repeats_short_loaders,
    training_fetcher,
    training_loader,
)
from lightning_megatron._lightning.loops import (
    batch_progress,
    shift_batch_counts,
    validates_first,
)
from lightning_megatron._lightning.warnings import hide_resuming_warning
from lightning_megatron.comm.peers import Peers
from lightning_megatron.data.reading.batch_sizes import BatchSizes
from lightning_megatron.data.reading.global_batch import ScheduledBatches, scheduled
from lightning_megatron.data.reading.iterable_datasets import (
    is_stream_of_datasets,
    is_torchdata,
    load_at_start,
    load_loader,
    name_of,
)
from lightning_megatron.data.reading.lengths import TokenBudget
from lightning_megatron.data.reading.loader_states import LoaderStates
from lightning_megatron.data.reading.sampler import ResumableSampler
from lightning_megatron.data.reading.seeding import SeededBatches, seed_samples
from lightning_megatron.data.reading.sharding import DrawnOrder, Share, share_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.strategy.data.batch_shares import BatchShares
from lightning_megatron.strategy.data.progress import begin_epoch, is_over, rewind
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
    samples: int = 0
    """Samples in a batch of all ranks together, where the user's loader knows its position."""

    def batches_after(self, consumed: int) -> int:
        """Number of batches in the rest of an epoch."""
        left, size = self.share.items - consumed, self.share.per_batch
        loader: Any = self.share.loader
        # Of a loader that was given `batch_sampler=`, its own option says nothing.
        drops = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        return left // size if drops else -(-left // size)

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


_OTHER_RANKS = (
    "The state of {} cannot be divided: {} ranks read data of their own when it was saved, now "
    "{} do. As many samples as were trained on are read and discarded; the run goes on "
    "exactly only if the stream gives its samples to the ranks in turn, one by one, and is read "
    "with num_workers=0. A map-style dataset goes on exactly"
)
_BUFFER = (
    "{} goes on where its state says, which holds no shuffle buffer: if the stream of `datasets` "
    "has one (.shuffle), the samples that were in it are left out; a dataset that is shuffled "
    "before it is made a stream goes on exactly"
)
_LEFT_ALONE = (
    "{} is left as it is: it reads by an __iter__ or a sampler of its own. A run that is resumed "
    "amid an epoch reads and discards the batches before, which are the same ones only if the "
    "loader gives them in the same order again; a loader with state_dict and load_state_dict goes "
    "on exactly, and so does a DataLoader without an __iter__ of its own under "
    "use_distributed_sampler=True"
)
_DISCARDS = "{} has no position to return to: {} batches are read and discarded; {}"


class DataPosition:
    """Position in the training data: noted for a checkpoint, and found again.

    Args:
        shares: parts of the ranks; with equal ones if None.
    """

    def __init__(self, shares: BatchShares | None = None) -> None:
        self._shares = shares or BatchShares()
        self._readings: WeakKeyDictionary[Any, _Reading] = WeakKeyDictionary()
        self.schedule: ScheduledBatches | None = None
        self._saved: dict[str, Any] | None = None
        self._awaits: dict[str, Any] | None = None
        """Position for when the validation at an epoch's end is over with which the run goes on."""
        self._moved = 0
        """Number of training loaders that are where they were when the checkpoint was saved."""
        self._discard: list[int] = []
        """Numbers of batches of loaders that have no position to return to."""
        self._loaded: dict[Any, Any] = {}
        """States that loaders were given."""
        self._followed: WeakKeyDictionary[Any, LoaderStates] = WeakKeyDictionary()
        """Loaders that know their position themselves."""
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
        over = is_over(progress, trainer)
        done = batch_progress(progress)["current"]["processed"] if over else 0
        epoch, batch = rewind(progress, trainer)
        cycles = repeats_short_loaders(combined)
        return {
            "seed": self._seed,
            "order_seed": self._order_seed,
            "shares": self._shares.planned,
            "epoch": epoch,
            "batch": batch,
            "loaders": [
                self._save_loader(loader, epoch, batch, cycles) for loader in combined.flattened
            ],
            "states": _states_of_ranks(
                [self._state(loader, batch, done) for loader in combined.flattened],
                topology,
                group,
            ),
        }

    def _save_loader(self, loader: Any, epoch: int, batch: int, cycles: bool) -> dict[str, Any]:
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        if reading is None:
            return {}
        share, order = reading.share, reading.share.order
        if order is None or not share.is_known:
            return {"samples": reading.samples}
        return {
            "order": _order_state(order, epoch),
            "consumed": reading.consumed(epoch, batch, cycles=cycles) * share.sets,
            "items": share.items * share.sets,
            "total": None if (s := reading.schedule) is None else s.position(epoch, batch)[1],
        }

    def _state(self, loader: Any, batch: int, over: int) -> Any:
        """State of a loader or its dataset, which each data-parallel rank has for itself.

        Args:
            loader: in its pass.
            batch: number of the first batch that no step has used.
            over: number of batches of the epoch, if that is over.
        """
        states = self._followed.get(loader) if isinstance(loader, Stateful) else None
        if states is not None:
            ended = 0 < over <= states.read  # and no other pass has begun
            return states.last if ended else states.before(batch)
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        batches = _stateful_batches(reading)
        return None if batches is None else batches.state_before(batch)

    def left_to_the_user(self, trainer: Trainer) -> list[str]:
        """Names of the training loaders whose samples the user divides among ranks himself."""
        combined, names = training_loader(trainer), []
        for loader in combined.flattened if combined is not None else ():
            reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
            if reading is None or not reading.share.is_known:
                names.append(name_of(loader))
        return names

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
        # Lightning has the states of rank zero.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        self._seed = saved["seed"]
        self._order_seed = saved["order_seed"]
        self._shares.restore(saved.get("shares"))
        self._moved = 0
        self._discard = []
        self._loaded = {}
        combined, fetcher = training_loader(trainer), training_fetcher(trainer)
        if combined is not None and fetcher is not None:
            # `trainer.estimated_stepping_batches` in configure_optimizers has prepared the loader,
            # and a batch may have been fetched from its start.
            for loader in combined.flattened:
                self._resume(loader, topology)
            read_anew(trainer)

    def follow(self, loader: object, trainer: Trainer, topology: Topology) -> None:
        """Note the states of a loader that knows its position, and move it to the restored one."""
        if isinstance(loader, Stateful):
            self._followed[loader] = LoaderStates(loader, trainer.accumulate_grad_batches + 3)
        self._resume(loader, topology)

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
        share = self._shares.share_of(dataloader, topology, self._order_seed) or share_of(
            dataloader, topology, self._order_seed, divide=divide
        )
        schedule = None
        if sizes is not None:
            share, schedule = scheduled(share, topology, sizes, self._order_seed)
        self.schedule = schedule
        history = trainer.accumulate_grad_batches + 2
        batches = None
        if share.untouched:
            rank_zero_warn(_LEFT_ALONE.format(name_of(share.loader)))
        else:
            batches = seed_samples(share.loader, topology, self._seed, history)
        samples = topology.batch.size * (share.loader.batch_size or 1)
        self._readings[share.loader] = _Reading(
            share=share, batches=batches, samples=samples, schedule=schedule
        )
        if share.order is None:
            self.follow(share.loader, trainer, topology)
        else:
            self._resume(share.loader, topology)
        return share.loader

    def _resume(self, loader: Any, topology: Topology) -> None:
        """Move the next of the training loaders; they come in the order they were saved in."""
        saved, index = self._saved, self._moved
        if saved is None or index >= len(saved["loaders"]):
            return
        self._moved += 1
        reading = self._readings.get(loader) if isinstance(loader, DataLoader) else None
        position, states = saved["loaders"][index], saved["states"]
        same = len(states) == topology.batch.size
        state = states[topology.batch.rank if same else 0]
        state = None if state is None else state[index]
        if state is not None and not same:
            rank_zero_warn(_OTHER_RANKS.format(name_of(loader), len(states), topology.batch.size))
            state = None
        if state is not None and saved["batch"] and is_stream_of_datasets(loader):
            rank_zero_warn(_BUFFER.format(name_of(loader)))
        followed = self._followed.get(loader) if isinstance(loader, Stateful) else None
        if reading is not None and reading.batches is not None:
            reading.batches.sampler.set_epoch(saved["epoch"])
        if reading is not None and reading.share.order is not None and "order" in position:
            self._seek(reading, position, saved["epoch"])
        elif followed is not None and state is not None:
            load_loader(loader, state)
            followed.go_to(saved["batch"], state)
            if reading is not None and reading.batches is not None and not is_torchdata(loader):
                reading.batches.go_to(saved["batch"])  # torchdata counts those that it has read
            self._loaded[loader] = state
        elif (batches := _stateful_batches(reading)) is not None and state is not None:
            batches.go_to(saved["batch"], state)
        elif saved["batch"]:
            self._discard.append(_batches_until(saved["batch"], position, reading))

    def _seek(self, reading: _Reading, position: Mapping[str, Any], epoch: int) -> None:
        order, share = reading.share.order, reading.share
        items = share.items * share.sets
        budget = isinstance(order, TokenBudget)
        alike = budget == _is_of_budget(position["order"])
        if position["consumed"] and not alike:
            raise ConfigError(
                "TokenBudget: the checkpoint was saved amid an epoch "
                f"{'without' if budget else 'with'} it, whose position counts "
                f"{'samples and not batches' if budget else 'batches and not samples'}; nearest "
                "valid: the loader as before, or load the weights alone"
            )
        if items != position["items"]:
            rank_zero_warn(
                f"The checkpoint was saved {position['consumed']} of {position['items']} samples "
                f"into an epoch, which now has {items}: those that were read cannot be told from "
                "the others; the same dataset continues exactly"
            )
        if isinstance(order, DrawnOrder) and alike:
            order.load_state_dict(position["order"])
        elif isinstance(order, TokenBudget) and alike:
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
        saved, self._saved = self._saved, None
        if saved is not None and validates_first(trainer):
            self._awaits = saved
        combined, fetcher = training_loader(trainer), training_fetcher(trainer)
        if saved is None or combined is None or fetcher is None:
            return
        discard, self._discard = self._discard, []
        if saved["epoch"] and not saved["batch"]:
            begin_epoch(trainer)
            for loader, state in self._loaded.items():
                load_at_start(loader, state)
            if self._loaded:
                read_anew(trainer)
        if not discard:
            self._count_batches(saved, combined.flattened, trainer)
            hide_resuming_warning()
        elif len(combined.flattened) > 1:
            rank_zero_warn(
                "A training loader among several is iterable and has no state to return to: it is "
                "read from its start again"
            )
        else:
            [loader], [count] = combined.flattened, discard
            rank_zero_warn(_DISCARDS.format(name_of(loader), count, _remedy(loader)))
            discard_batches(trainer, count)
            if count != saved["batch"]:
                shift_batch_counts(trainer, count - saved["batch"])

    def after_epoch(self, trainer: Trainer, topology: Topology) -> None:
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
            self._resume(loader, topology)
            if loader in self._loaded:
                load_at_start(loader, self._loaded[loader])
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


def _remedy(loader: Any) -> str:
    """What would make a position of a loader known."""
    dataset = getattr(loader, "dataset", None)
    workers: int = getattr(loader, "num_workers", 0)
    if isinstance(dataset, Stateful) and workers:
        return (
            "its dataset has a state_dict, but it is the copies in the workers that are read: "
            "torchdata's StatefulDataLoader in place of DataLoader needs no time for it, nor does "
            "num_workers=0"
        )
    return (
        "a dataset with state_dict and load_state_dict that is read with num_workers=0 or by "
        "torchdata's StatefulDataLoader, or a loader with them, needs no time for it"
    )


def _batches_until(batch: int, position: Mapping[str, Any], reading: _Reading | None) -> int:
    """Number of batches with as many samples as were read, of ranks and sizes as they are now."""
    samples = position.get("samples", 0)
    return batch * samples // reading.samples if samples and reading is not None else batch


def _order_state(order: ResumableSampler | TokenBudget | DrawnOrder, epoch: int) -> Any:
    """State of a user's sampler as an epoch began, or what tells batches from others."""
    if isinstance(order, DrawnOrder):
        return order.state_before(epoch)
    return order.state_dict() if isinstance(order, TokenBudget) else None


def _is_of_budget(state: Any) -> bool:
    """Whether the state of an order is that of a `TokenBudget`."""
    return isinstance(state, Mapping) and state.keys() == {"digest", "epoch", "consumed"}


def _stateful_batches(reading: _Reading | None) -> SeededBatches | None:
    """The batches of a dataset whose position is its own state, if it is one."""
    batches = None if reading is None else reading.batches
    return batches if batches is not None and batches.is_stateful else None


def _states_of_ranks(mine: list[Any], topology: Topology, group: Any) -> list[Any]:
    """The states of every data-parallel rank, on the first rank; a list of one where equal."""
    if all(state is None for state in mine):  # on every rank, as they have the same kinds of loader
        return [None] * topology.batch.size
    if topology.world_size == 1:
        return [mine]
    gathered = Peers(group).gather((topology.batch.rank, mine)) or []
    by_rank = dict(reversed(gathered))
    return [by_rank[rank] for rank in sorted(by_rank)]
