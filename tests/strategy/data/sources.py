"""Training data of the packages that users bring, each sample of which draws random numbers."""

import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SAMPLES, SHARDS = 24, 6


def sample(number: int) -> tuple[torch.Tensor, int]:
    noise = [torch.rand(()).item(), random.random(), random.gauss(0, 1), numpy.random.rand()]
    return torch.tensor(noise, dtype=torch.float64) + number, number


def drawn(row: dict[str, Any]) -> dict[str, Any]:
    x, number = sample(row["number"])
    return {"x": x.tolist(), "number": number}


def drawn_rows(rows: dict[str, Any]) -> dict[str, Any]:
    drawn_each = [drawn({"number": number}) for number in rows["number"]]
    return {key: [one[key] for one in drawn_each] for key in ("x", "number")}


def collate(rows: list[Any]) -> list[torch.Tensor]:
    pairs = [(row["x"], row["number"]) if isinstance(row, dict) else row for row in rows]
    xs = [torch.as_tensor(x, dtype=torch.float64) for x, _ in pairs]
    return [torch.stack(xs), torch.tensor([number for _, number in pairs])]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Stream(IterableDataset[Any]):
    """Samples in turn for ranks; of each rank's the workers read unequal parts."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.next = rank, ranks, 0

    def _mine(self) -> list[int]:
        mine = list(range(self.rank, SAMPLES, self.ranks))
        worker = get_worker_info()
        if worker is None:
            return mine
        cut = len(mine) * 2 // 3  # two workers
        return mine[:cut] if worker.id == 0 else mine[cut:]

    def __iter__(self) -> Any:
        for number in self._mine():
            yield sample(number)


class StatefulStream(Stream):
    def __iter__(self) -> Any:
        mine = self._mine()
        while self.next < len(mine):
            self.next += 1
            yield sample(mine[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def torchdata_loader(dataset: Any, size: int, workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return StatefulDataLoader(
            dataset, batch_size=size, num_workers=workers, collate_fn=collate, **options
        )


def torch_loader(dataset: Any, size: int, workers: int, **options: Any) -> Any:
    return DataLoader(dataset, size, num_workers=workers, collate_fn=collate, **options)


def rows() -> Any:
    import datasets

    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({"number": list(range(SAMPLES))})


def streamed(rank: int, ranks: int, buffer: int = 0) -> Any:
    from datasets.distributed import split_dataset_by_node

    stream = rows().to_iterable_dataset(num_shards=SHARDS)
    if buffer:
        stream = stream.shuffle(seed=3, buffer_size=buffer)
    return split_dataset_by_node(stream.map(drawn), rank, ranks)


def write_chunks(directory: str) -> None:
    """The numbers in litdata's format, in six chunks."""
    from litdata.streaming.cache import Cache

    cache = Cache(directory, chunk_size=SAMPLES // SHARDS)
    for number in range(SAMPLES):
        cache[number] = number
    cache.done()
    cache.merge()


def chunks(directory: str, size: int, workers: int) -> Any:
    import litdata

    logging.getLogger("litdata").setLevel(logging.ERROR)
    path = Path(directory) / "chunks"
    dataset = litdata.StreamingDataset(str(path), shuffle=True, drop_last=True, transform=sample)
    return litdata.StreamingDataLoader(
        dataset, batch_size=size, num_workers=workers, collate_fn=collate
    )


def make(name: str, directory: str, rank: int, ranks: int, size: int, workers: int) -> Any:
    """A training loader by its name."""
    kind, _, what = name.partition(": ")
    loader = torchdata_loader if kind == "torchdata" else torch_loader
    match what:
        case "map":
            return loader(Numbers(), size, workers, shuffle=True)
        case "stream":
            return loader(Stream(rank, ranks), size, workers)
        case "stream with a state":
            return loader(StatefulStream(rank, ranks), size, workers)
        case "rows":
            return loader(rows().with_transform(drawn_rows), size, workers, shuffle=True)
        case "streamed rows":
            return loader(streamed(rank, ranks), size, workers)
        case "shuffled streamed rows":
            return loader(streamed(rank, ranks, buffer=5), size, workers)
        case "litdata":
            return chunks(directory, size, workers)
    raise AssertionError(name)
