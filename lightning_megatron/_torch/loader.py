"""The workers of a DataLoader."""

# Who dies with which of a DataLoader's workers is not to be changed in public (2.11-2.13).
from torch._C import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

LoaderIterator = _MultiProcessingDataLoaderIter
"""How a DataLoader talks to its workers; nobody else's business until one of them dies."""


def watch_no_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Take a loader's workers from torch's handler of SIGCHLD.

    It raises in the main thread, wherever that is, when one of them dies.
    """
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
