"""The loaders that a Trainer has prepared, and what reads from them.

``trainer.train_dataloader`` is the user's loader or collection; the prepared ones, in their order,
and the fetcher that may have read ahead, have no public name.
"""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

Stateful = _Stateful
"""Protocol of an object whose state Lightning saves and loads, as it has ``state_dict`` and
``load_state_dict``. Private: `lightning.fabric.utilities.types._Stateful`. Needed to know which
loaders Lightning moves itself."""


def training_loader(trainer: Trainer) -> CombinedLoader | None:
    """The training loaders as they were prepared; None before that.

    Private: `_FitLoop._combined_loader`. Needed to save and restore the position of each.
    """
    return trainer.fit_loop._combined_loader


def training_fetcher(trainer: Trainer) -> _DataFetcher | None:
    """The object that reads from the training loaders, maybe ahead; None before there is one.

    Private: `_FitLoop._data_fetcher`. Needed to begin reading anew once the loaders have moved.
    """
    return trainer.fit_loop._data_fetcher


def read_anew(trainer: Trainer) -> None:
    """Make new iterators of the training loaders, which have been moved, for the next batch.

    Private: ``setup`` and iteration of `_DataFetcher`. Lightning has made iterators before the
    strategy knows where they are to begin.
    """
    loader, fetcher = training_loader(trainer), training_fetcher(trainer)
    assert loader is not None
    assert fetcher is not None
    fetcher.setup(loader)
    iter(fetcher)


def discard_batches(trainer: Trainer, count: int) -> None:
    """Read batches of training that nobody sees.

    Changed: ``fetched`` of `_DataFetcher`, to which Lightning adds the batches that were read
    before an interruption.
    """
    fetcher = training_fetcher(trainer)
    assert fetcher is not None
    for _ in range(count):
        next(fetcher)
    fetcher.fetched = 0


def repeats_short_loaders(loader: CombinedLoader) -> bool:
    """Whether a loader that has ended is read again while longer ones go on.

    Private: `CombinedLoader._mode`, which the constructor takes as ``mode``.
    """
    return loader._mode == "max_size_cycle"


def makes_training_loader(trainer: Trainer) -> bool:
    """Whether the training loader is yet to be prepared, for the first time or again.

    Private: `_FitLoop._should_reload_train_dl` and `_FitLoop._combined_loader`. Needed because
    ``Strategy.process_dataloader`` is not told what a loader is for.
    """
    loop = trainer.fit_loop
    return loop._combined_loader is None or bool(loop._should_reload_train_dl)


def training_source(trainer: Trainer) -> Any:
    """Source of the training data: a loader, a module that makes one, or None.

    Private: `_FitLoop._data_source`. Needed to check sizes before any process group forms.
    """
    loop: Any = trainer.fit_loop
    return loop._data_source.instance if loop is not None else None


def evaluation_source(trainer: Trainer) -> Any:
    """Source of the data that is validated or tested on: loaders, or a module that makes them.

    Private: `Trainer._evaluation_loop` and `_EvaluationLoop._data_source`. Needed because
    ``Trainer.datamodule`` stays that of an earlier run when loaders are given.
    """
    return trainer._evaluation_loop._data_source.instance


def forget_loader_states(trainer: Trainer) -> None:
    """Forget the states that loaders were to be given when the next fit begins.

    Private: `_FitLoop._combined_loader_states_to_load`. Needed where the progress of a fit that
    ended in another process is loaded, which no fit goes on from.
    """
    trainer.fit_loop._combined_loader_states_to_load.clear()


def replace_predicted_batches(loader: DataLoader[Any], replaced: Callable[[Any], Any]) -> None:
    """Have predictions read other batches than those of the user's batch sampler.

    Changed: `_IndexBatchSamplerWrapper._batch_sampler`. Lightning has put the wrapper, which notes
    the indices for whoever writes predictions, around a batch sampler that it cannot divide.
    """
    wrapper = loader.batch_sampler
    if isinstance(wrapper, _IndexBatchSamplerWrapper):
        wrapper._batch_sampler = replaced(wrapper._batch_sampler)
