"""Who reads which samples, in what order, and with which random augmentation."""

import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_megatron import ConfigError, ShardingConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import (
    GLOBAL_BATCH,
    WIDTH,
    Small,
    dp_of,
    loader,
    make_trainer,
    run,
    samples,
)


class Numbered(Dataset[Any]):
    """Every sample carries its number and what the random generators said."""

    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.full((WIDTH,), index / self.count, dtype=torch.float64)
        drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
        return x, -x, index, torch.tensor(drawn, dtype=torch.float64)


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Reader(pl.Callback):
    """Keeps what the training loader gave this rank."""

    def __init__(self) -> None:
        self.indices: list[list[int]] = []
        self.drawn: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        self.indices.append(batch[2].tolist())
        self.drawn.append(batch[3].flatten().tolist())


def readings(
    layout: Mapping[str, Any] | None, devices: int, order: str = "given", **options: Any
) -> tuple[list[list[int]], list[list[float]], str]:
    """Indices and random draws of every batch, and the kind of the sampler."""
    seed, epochs = options.pop("seed", None), options.pop("epochs", 2)
    if seed is not None:
        pl.seed_everything(seed, workers=options.pop("workers", False), verbose=False)
    else:  # as in processes that have just started
        random.seed(os.getpid())
        numpy.random.seed(os.getpid())
        torch.manual_seed(os.getpid())
    data, reader = Numbered(), Reader()
    if order == "shuffled":
        options["shuffle"] = True
    elif order == "backwards":
        options["sampler"] = Backwards(len(data))
    elif order == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0] * 32, 32)
    dp = dp_of(devices, layout or {})
    trainer = make_trainer(layout, devices, max_epochs=epochs, callbacks=[reader])
    trainer.fit(Small(), loader(data, dp=dp, **options))
    return reader.indices, reader.drawn, type(trainer.train_dataloader.sampler).__name__


def global_batches(by_rank: list[Any]) -> list[list[int]]:
    """The samples of every step, over all ranks, each once."""
    return [sorted(set().union(*step)) for step in zip(*(r[0] for r in by_rank), strict=True)]


@pytest.mark.parametrize(
    ("devices", "layout", "order"),
    [
        (2, {"tp": 2}, "given"),
        (2, {"pp": 2}, "backwards"),
        (2, {}, "given"),
        (2, {}, "backwards"),
        pytest.param(4, {"pp": 2}, "given", marks=pytest.mark.thorough),
    ],
)
def test_trap_03_a_loader_that_does_not_shuffle_keeps_its_order(
    pool: WorkerPool, devices: int, layout: dict[str, Any], order: str
) -> None:
    """Also where Lightning's own sampler would shuffle: under data parallelism."""
    [plain] = pool.run(1, readings, None, 1, order)
    ranks = pool.run(devices, readings, layout, devices, order)
    assert global_batches(ranks) == [sorted(batch) for batch in plain[0]]
    size = GLOBAL_BATCH // dp_of(devices, layout)
    assert all(len(batch) == size for rank in ranks for batch in rank[0])


def test_trap_04_the_sampler_follows_the_batch_coordinate(pool: WorkerPool) -> None:
    hybrid = ShardingConfig(stage=1, dp_replicate=2)
    for layout in ({"tp": 2}, {"pp": 2}, {"pp": 2, "zero": hybrid}):
        ranks = pool.run(4, readings, layout, 4, epochs=1)
        # tp peers are neighbours, pipeline stages are world / pp apart.
        peers = [(0, 1), (2, 3)] if "tp" in layout else [(0, 2), (1, 3)]
        for one, other in peers:
            assert ranks[one][0] == ranks[other][0]
        strangers = peers[0][0], peers[1][0]
        assert not set(ranks[strangers[0]][0][0]) & set(ranks[strangers[1]][0][0])
        assert ranks[0][2] == "ResumableSampler"


def test_a_shuffled_order_depends_on_seed_and_epoch_alone(pool: WorkerPool) -> None:
    [one] = pool.run(1, readings, {}, 1, "shuffled", seed=5)
    expected = [sorted(batch) for batch in one[0]]
    assert expected[:4] != expected[4:]
    for devices, layout in ((2, {"tp": 2}), (2, {"zero": 0}), (4, {"pp": 2})):
        ranks = pool.run(devices, readings, layout, devices, "shuffled", seed=5)
        assert global_batches(ranks) == expected
    [other] = pool.run(1, readings, {}, 1, "shuffled", seed=6)
    assert [sorted(batch) for batch in other[0]] != expected


def test_a_random_sampler_of_the_user_draws_alike_on_all_ranks(pool: WorkerPool) -> None:
    ranks = pool.run(4, readings, {"tp": 2}, 4, "weighted")
    assert ranks[0][0] == ranks[1][0]
    assert ranks[2][0] == ranks[3][0]
    assert ranks[0][0] != ranks[2][0]


@pytest.mark.parametrize(
    ("axis", "seeding", "workers"),
    [
        ("tp", "none", 0),
        ("pp", "none", 2),
        pytest.param("tp", "seed", 0, marks=pytest.mark.thorough),
        pytest.param("pp", "seed", 0, marks=pytest.mark.thorough),
        ("tp", "seed and workers", 2),
    ],
)
def test_trap_05_ranks_that_read_the_same_samples_augment_them_alike(
    pool: WorkerPool, axis: str, seeding: str, workers: int
) -> None:
    """And the others differently, in torch's generator at least."""
    options: dict[str, Any] = {"num_workers": workers, "epochs": 1}
    if workers:
        options["multiprocessing_context"] = "fork"
    if seeding != "none":
        options |= {"seed": 3, "workers": seeding == "seed and workers"}
    ranks = pool.run(4, readings, {axis: 2}, 4, **options)
    peers = [(0, 1), (2, 3)] if axis == "tp" else [(0, 2), (1, 3)]
    for one, other in peers:
        assert ranks[one][0] == ranks[other][0]
        assert ranks[one][1] == ranks[other][1]
    first = ranks[peers[0][0]][1][0][0::3]
    second = ranks[peers[1][0]][1][0][0::3]
    assert first != second
    assert len(set(first)) == len(first)


class Counting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def _count(self, where: str) -> None:
        self.seen[where] = self.seen.get(where, 0) + 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._count("train")

    def on_validation_batch_start(self, *args: Any) -> None:
        self._count("sanity" if self.trainer.sanity_checking else "val")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def limited(
    layout: Mapping[str, Any] | None, devices: int, options: dict[str, Any]
) -> tuple[dict[str, int], int, float]:
    module, dp = Counting(), dp_of(devices, layout or {})
    trainer = make_trainer(layout, devices, **{"max_epochs": 2, **options})
    trainer.fit(module, loader(dp=dp, shuffle=False), loader(samples(24, 1), dp=dp))
    return module.seen, trainer.global_step, float(trainer.callback_metrics["val"])


FRACTIONS = {"limit_train_batches": 0.5, "limit_val_batches": 0.4, "num_sanity_val_steps": 0}
COUNTED = {"max_steps": 5, "max_epochs": -1, "val_check_interval": 2, "num_sanity_val_steps": -1}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(
            *("pp=2", {"limit_train_batches": 3, "limit_val_batches": 1}),
            marks=pytest.mark.thorough,
        ),
        ("pp=2", FRACTIONS),
        ("dp=2", FRACTIONS),
        ("dp=2", {"overfit_batches": 2}),
        ("pp=2", {"fast_dev_run": 2}),
        ("pp=2", COUNTED),
        ("dp=2", COUNTED),
    ],
    ids=str,
)
def test_limits_count_batches_as_in_one_process(
    pool: WorkerPool, layout: str, options: dict[str, Any]
) -> None:
    [plain] = run(pool, None, limited, options)
    for seen, steps, value in run(pool, layout, limited, options):
        assert (seen, steps) == plain[:2]
        assert value == pytest.approx(plain[2], rel=1e-9)


def stream(layout: Mapping[str, Any], devices: int) -> int:
    """A loader that the user shards is left alone."""
    reader = Reader()
    trainer = make_trainer(layout, devices, callbacks=[reader], use_distributed_sampler=False)
    trainer.fit(Small(), DataLoader(Numbered(), batch_size=8))
    return len(reader.indices)


def test_use_distributed_sampler_false_is_respected(pool: WorkerPool) -> None:
    assert pool.run(2, stream, {}, 2) == [4, 4]


def _before_a_run(devices: int) -> list[Any]:
    found: list[Any] = []
    for layout in ({"tp": 2}, {"pp": 2}, {"zero": 1}):
        trainer = make_trainer(layout, devices)
        found.append(trainer.distributed_sampler_kwargs)
    trainer.strategy.connect(Small())
    trainer.fit_loop._data_source.instance = loader(shuffle=True)
    trainer.fit_loop.setup_data()
    sampler = trainer.train_dataloader.sampler
    with pytest.raises(ConfigError, match="no Trainer has put.*nearest valid: trainer.save"):
        trainer.save_checkpoint("nowhere.ckpt")
    with pytest.raises(ConfigError, match="tp=3"):
        _ = make_trainer({"tp": 3}, devices).distributed_sampler_kwargs
    return [*found, (sampler.num_replicas, sampler.rank)]


def test_before_a_run_a_rank_knows_its_share(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(2, _before_a_run, 2)):
        whole = {"num_replicas": 1, "rank": 0}
        assert found == [whole, whole, {"num_replicas": 2, "rank": rank}, (2, rank)]


class Saves(Reader):
    """Saves after three batches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        super().on_train_batch_start(trainer, pl_module, batch["short"])

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


class Of(Small):
    """Trains on one of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["long"], batch_idx)


def test_a_short_loader_goes_on_where_batch_sampler_drops_the_last(tmp_path: Path) -> None:
    def read(**resume: Any) -> list[list[int]]:
        reader, short = Saves(tmp_path / "saved"), Numbered(10)
        batches = BatchSampler(SequentialSampler(short), 4, drop_last=True)
        loaders = {
            "long": DataLoader(Numbered(24), batch_size=4),
            "short": DataLoader(short, batch_sampler=batches),
        }
        make_trainer({}, callbacks=[reader]).fit(
            Of(), CombinedLoader(loaders, "max_size_cycle"), **resume
        )
        return reader.indices

    whole = read()
    assert read(ckpt_path=tmp_path / "saved") == whole[3:]


class Chain(DataLoader[Any]):
    """Reads other loaders in turn, and asks for none of its own batches."""

    def __init__(self, *parts: DataLoader[Any]) -> None:
        super().__init__(parts[0].dataset, batch_size=parts[0].batch_size)
        self.parts = parts

    def __iter__(self) -> Any:
        return (batch for part in self.parts for batch in part)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


class SavesAt(Reader):
    """Saves after two batches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def chained(layout: dict[str, Any], devices: int, path: Path, **resume: Any) -> Any:
    """What is read of a loader that reads by itself, and what is said of it."""
    reader, data = SavesAt(path), Numbered(16)
    given = Chain(DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, devices, callbacks=[reader]).fit(Small(), given, **resume)
    return reader.indices, [str(one.message) for one in caught if "Chain" in str(one.message)]


def test_a_loader_that_reads_by_itself_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole, said = chained({}, 1, path)
    expected = [list(range(i, i + 4)) for i in range(0, 16, 4)]
    assert whole == [*expected, list(range(8)), list(range(8, 16))]
    assert len(said) == 1
    assert "Chain of Numbered is left as it is" in said[0]
    rest, said = chained({}, 1, path, ckpt_path=path)
    assert rest == whole[2:]
    assert "2 batches are read and discarded" in said[-1]


def test_a_loader_that_reads_by_itself_and_is_not_divided_is_named(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (_, said), _ = pool.run(2, chained, {}, 2, tmp_path / "saved.ckpt")
    assert len(said) == 1
    assert "Chain of Numbered: the first batch is the same on the data-parallel ranks" in said[0]
