"""torch's iterator over the batches of workers is what `_torch.loader` takes it for."""

import signal
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from typing_extensions import override

from lightning_megatron._torch.loader import (
    LoaderIterator,
    StandInIterator,
    copy_with_indices,
    end_queue,
    replace_iterator,
)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **{"batch_size": 2, "num_workers": 2, **options})


class Noting(LoaderIterator):
    reads = shutdowns = 0
    expected: list[int | None]

    @override
    def read(self, timeout: float) -> tuple[bool, Any]:
        self.reads += 1
        self.expected = [*getattr(self, "expected", []), self.expected_worker]
        return super().read(timeout)

    @override
    def before_shutdown(self) -> None:
        self.shutdowns += 1


def test_loader_iterator() -> None:
    iterator = Noting(loader())
    assert len({worker.pid for worker in iterator.workers}) == 2
    assert iterator.results is not None
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert iterator.reads >= 3
    assert iterator.expected[0] == 0
    assert {0, 1} >= {worker for worker in iterator.expected if worker is not None}
    assert iterator.shutdowns  # torch ends its workers after the last batch


def test_the_death_of_a_worker_raises_nothing() -> None:
    iterator = LoaderIterator(loader())
    iterator.workers[1].kill()
    iterator.workers[1].join()
    signal.raise_signal(signal.SIGCHLD)  # torch's handler looks at the workers that it knows
    iterator.kill()
    iterator.close_results()
    assert all(worker.exitcode is not None for worker in iterator.workers)


def test_begin_epoch() -> None:
    given = loader(persistent_workers=True)
    iterator = LoaderIterator(given)
    pids = [worker.pid for worker in iterator.workers]
    first = [batch.tolist() for batch in iterator]
    iterator.begin_epoch(given, first=False)
    assert [batch.tolist() for batch in iterator] == first
    assert [worker.pid for worker in iterator.workers] == pids
    iterator.kill()


def test_end_queue() -> None:
    iterator = LoaderIterator(loader(batch_size=6))
    assert list(iterator)
    end_queue(iterator.results)
    assert iterator.results._writer.closed


class StandIn(StandInIterator):
    def __init__(self) -> None:
        self.begun: list[bool] = []

    def __next__(self) -> Any:
        raise StopIteration

    @override
    def begin_epoch(self, *, first: bool) -> None:
        self.begun.append(first)


def test_replace_iterator() -> None:
    made: list[StandIn] = []

    def make() -> StandIn:
        made.append(StandIn())
        return made[-1]

    given = loader(persistent_workers=True)
    replace_iterator(given, make)
    assert iter(given) is made[0]
    assert made[0].begun == []
    assert iter(given) is made[0]
    assert made[0].begun == [False]
    assert given._get_iterator() is made[1]


def test_copy_with_indices() -> None:
    given = loader(num_workers=0)
    replace_iterator(given, StandIn)
    view = copy_with_indices(given, [[5], [0, 1]])
    assert [batch.tolist() for batch in view] == [[5], [0, 1]]
    assert [batch.tolist() for batch in copy_with_indices(view, [[2]])] == [[2]]
    alone = copy_with_indices(loader(num_workers=0, batch_size=None), SequentialSampler(range(2)))
    assert [sample.item() for sample in alone] == [0, 1]
    assert given.batch_sampler is not view.batch_sampler
