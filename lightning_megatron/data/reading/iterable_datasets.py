"""What is special about the streams and loaders of torchdata, ``datasets`` and litdata.

A position in a stream is known to whoever reads it: to the stream in this process, to its copies in
the workers, or to the loader. Each of the three packages keeps it in its ``state_dict``, with
exceptions that would change a resumed run without a word:

* ``datasets``: a stream that was given a state begins *every* later epoch there; a state of another
  epoch than the stream's own is ignored; and a shuffle buffer is no part of the state. Here the
  stream begins a later epoch at its start and is told its epoch; who resumes it is told of buffers.
* torchdata: workers are handed batches by number, and which number a worker gets depends on when
  another one has ended, so that random numbers cannot follow from the batch. `SeededStream` counts
  the samples of its own worker, and its count travels in torchdata's state of the worker.
* litdata: a loader that was given a state begins the next epoch there, too, as Lightning does not
  ask for a batch more than there is; and its state names the epoch of a stream that may be read in
  workers only. Here it is told both. It divides itself by all processes, whose number is that of
  the data-parallel ranks without tp, cp and pp; with them the first batch is refused.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_megatron._lightning.loaders import Stateful
from lightning_megatron.data.reading.augmentation import SampleSeeds, draws_random_numbers
from lightning_megatron.topology.rng import HostRandomness, seed_generators


def _is_a(thing: object, module: str, name: str) -> bool:
    """Whether ``thing`` is of a class of a package; packages that nobody has imported stay so."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def is_torchdata(loader: object) -> bool:
    """Whether a loader is torchdata's `StatefulDataLoader`."""
    return _is_a(loader, "torchdata.stateful_dataloader", "StatefulDataLoader")


def is_hugging_face(dataset: object) -> bool:
    """Whether a dataset is a stream of Hugging Face's ``datasets``."""
    return _is_a(dataset, "datasets", "IterableDataset")


def is_litdata(dataset: object) -> bool:
    """Whether a dataset is of litdata's, whose position its loader keeps."""
    return any(kind.__module__.partition(".")[0] == "litdata" for kind in type(dataset).__mro__)


def keeps_position(dataset: object) -> bool:
    """Whether a dataset has a state that says what comes next."""
    return isinstance(dataset, Stateful) and not is_litdata(dataset)


def begin_anew(dataset: Any) -> None:
    """Have a stream of ``datasets`` forget the state that it was given."""
    if is_hugging_face(dataset):
        dataset.load_state_dict({})


def go_to(dataset: Any, state: Any) -> None:
    """Bring a stream to where it was."""
    if is_hugging_face(dataset) and state:
        dataset.set_epoch(state["epoch"])
    dataset.load_state_dict(state)


def state_at(dataset: Any, *, begun: bool) -> Any:
    """State of a stream; at the start of an epoch ``datasets`` still has that of the one before."""
    if is_hugging_face(dataset) and not begun:
        return {}
    return copy.deepcopy(dataset.state_dict())


class SeededStream(IterableDataset[Any]):
    """A stream as workers of a `StatefulDataLoader` read it: counted, seeded, put in its place.

    Its attributes are those of the user's stream, also for ``worker_init_fn``.

    Args:
        stream: the user's.
        seed: of the random numbers.
        rank: among those that read different samples.
    """

    _OWN = frozenset(
        {
            "stream",
            "draws_random_numbers",
            "_seed",
            "_rank",
            "_random",
            "_epoch",
            "_ran",
            "_items",
            "_ended",
        }
    )

    def __init__(self, stream: Any, seed: int, rank: int, *, in_process: bool) -> None:
        self.stream = stream
        random = draws_random_numbers(stream)
        self.draws_random_numbers = random and in_process  # else it seeds itself
        self._random = random and not in_process
        self._seed, self._rank = seed, rank
        self._epoch = self._items = 0
        self._ran = self._ended = False

    def __getattr__(self, name: str) -> Any:
        if name in SeededStream._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SeededStream._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.stream, name, value)

    def begin(self, epoch: int) -> None:
        """Begin the next pass at the start of an epoch."""
        self._epoch, self._items = epoch, 0
        self._ran = self._ended = False
        begin_anew(self.stream)

    def __iter__(self) -> Iterator[Any]:
        if self._ran:  # in a worker that stays for the next epoch
            self.begin(self._epoch + 1)
        self._ran = True
        if self._ended:  # a stream at its end may have a state that begins anew
            return
        rest = iter(self.stream)
        for _ in range(0 if keeps_position(self.stream) else self._items):
            next(rest, None)
        worker = get_worker_info()
        names = ("stream", self._rank, 0 if worker is None else worker.id)
        seeds = SampleSeeds.of_epoch(self._seed, self._epoch, *names)
        while True:
            if self._random:
                seed_generators(seeds(self._items))
            try:
                item = next(rest)
            except StopIteration:
                self._ended = True
                return
            self._items += 1
            yield item

    def __len__(self) -> int:
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Number of samples read in this pass, and the state of the stream if it has one."""
        keeps = keeps_position(self.stream)
        state = state_at(self.stream, begun=self._items > 0) if keeps else None
        return {"items": self._items, "ended": self._ended, "stream": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there; of a stream without a state so many samples are read and discarded."""
        self._items, self._ended = state["items"], state["ended"]
        if state["stream"] is not None:
            go_to(self.stream, state["stream"])


def is_stream_of_datasets(loader: Any) -> bool:
    """Whether a loader reads a stream of Hugging Face's ``datasets``."""
    dataset = getattr(loader, "dataset", None)
    return is_hugging_face(getattr(dataset, "stream", dataset))


def wrap_stream(loader: DataLoader[Any], seed: int, rank: int) -> SeededStream | None:
    """Put a `SeededStream` into a loader of torchdata's; None for any other loader."""
    if not is_torchdata(loader):
        return None
    if loader.persistent_workers:
        rank_zero_warn(
            f"{name_of(loader)}: persistent_workers=True counts as False: workers that stay keep "
            "a place in the stream that a run resumed between two epochs could not find again"
        )
        vars(loader)["persistent_workers"] = False
    dataset = loader.dataset
    if isinstance(dataset, SeededStream):
        dataset = dataset.stream
    wrapped = SeededStream(dataset, seed, rank, in_process=loader.num_workers == 0)
    vars(loader)["dataset"] = wrapped
    return wrapped


def load_loader(loader: Any, state: Any) -> None:
    """Give a loader a state of its own, which stays what it is."""
    loader.load_state_dict(copy.deepcopy(state))
    dataset: Any = getattr(loader, "dataset", None)
    if is_litdata(dataset) and "current_epoch" in state["dataset"]:
        # Else asking for the state before the first batch would change it.
        dataset.current_epoch = state["dataset"]["current_epoch"]


def load_at_start(loader: Any, state: Any) -> None:
    """Give a loader a state that it had between two epochs, so that it begins the next one."""
    kept = HostRandomness.capture()
    load_loader(loader, state)
    # It stands at the end of an epoch, and may think that the rest of it is to be read.
    if next(iter(loader), None) is not None:
        load_loader(loader, state)
    kept.restore()


def forget_state(loader: Any) -> None:
    """Have litdata's loader begin an epoch at its start, after one that a state was loaded for.

    It does so by itself only if somebody asked for one batch more than there was.
    """
    if hasattr(loader, "restore") and is_litdata(getattr(loader, "dataset", None)):
        loader.restore = False


def name_of(loader: Any) -> str:
    """Name of a loader for messages: its class, and that of its dataset."""
    dataset = getattr(loader, "dataset", None)
    dataset = getattr(dataset, "stream", dataset)
    whose = "" if dataset is None else f" of {type(dataset).__name__}"
    return f"{type(loader).__name__}{whose}"
