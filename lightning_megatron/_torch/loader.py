"""The workers of a DataLoader."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Who dies with which of a DataLoader's workers is not to be changed in public (2.11-2.13).
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override


class LoaderIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator over the batches of workers, with public names (2.11-2.13).

    How a DataLoader talks to its workers is nobody else's business until one of them dies. torch
    notices that by a handler of SIGCHLD, which raises in the main thread wherever that is; the
    workers of this iterator are taken from it.

    Args:
        loader: with workers.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        _remove_worker_pids(id(self))
        self._worker_pids_set = False

    @property
    def workers(self) -> list[Any]:
        """The processes, by their numbers."""
        return list(self._workers)

    @property
    def results(self) -> Any:
        """The queue of the workers; None where a thread reads it, to pin memory."""
        return None if self._pin_memory else self._worker_result_queue

    @property
    def expected_worker(self) -> int | None:
        """Number of the worker that has to deliver the next batch; None if none has."""
        worker: int | None = self._task_info.get(self._rcvd_idx, (None,))[0]
        return worker

    def read(self, timeout: float) -> tuple[bool, Any]:
        """Wait for any batch; whether one came, and the batch. torch calls it until one comes."""
        found: tuple[bool, Any] = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]
        return found

    def begin_epoch(self, loader: DataLoader[Any], *, first: bool) -> None:
        """Read the loader's indices from their start, with the same workers."""
        self._reset(loader, first)

    def before_shutdown(self) -> None:
        """Called before the workers are ended in order."""

    def kill(self) -> None:
        """End what is left of the workers, and close the queues, whatever state they are in."""
        self._shutdown = True  # torch's own way waits for locks that the dead may hold
        if self._pin_memory:
            self._pin_memory_thread_done_event.set()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(timeout=5)
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()

    def close_results(self) -> None:
        """Close the queue of results, once nobody else uses it."""
        if not self._pin_memory:
            results: Any = self._worker_result_queue
            for end in (results._reader, results._writer):
                with suppress(OSError):
                    end.close()

    @override
    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        return self.read(timeout)

    @override
    def _shutdown_workers(self) -> None:
        self.before_shutdown()
        super()._shutdown_workers()


class StandInIterator:
    """Result of ``iter(loader)`` where `replace_iterator` makes the iterator."""

    def begin_epoch(self, *, first: bool) -> None:
        """Begin another epoch with workers that persist."""
        raise NotImplementedError

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        # The name by which `DataLoader.__iter__` asks for it.
        del loader
        self.begin_epoch(first=first_iter)


def has_plain_iterators(loader: DataLoader[Any]) -> bool:
    """Whether a loader makes torch's own iterators, and not some that know more, like torchdata's.

    Private: `DataLoader._get_iterator` (2.11-2.13).
    """
    return type(loader)._get_iterator is DataLoader._get_iterator


def replace_iterator(loader: DataLoader[Any], make: Callable[[], StandInIterator]) -> None:
    """Have a loader's iterators be made by a function; changes `_get_iterator` of this loader."""
    vars(loader)["_get_iterator"] = make


def copy_with_indices(loader: DataLoader[Any], indices: Any) -> DataLoader[Any]:
    """A copy of a loader that has not been read, with torch's own iterators and other indices.

    No constructor runs, so that a subclass may take other arguments than DataLoader does.

    Args:
        loader: with the dataset; whose ``batch_sampler``, or ``sampler``, cannot be set in public.
        indices: of batches where the loader has a ``batch_sampler``, else of samples.
    """
    view = copy.copy(loader)
    vars(view).pop("_get_iterator", None)
    vars(view).update(_iterator=None)  # persistent workers are the original's
    vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = indices
    return view


def end_queue(queue: Any) -> None:
    """Have a reader of a queue of processes see its end, even in the midst of a message."""
    with suppress(OSError):
        queue._writer.close()
