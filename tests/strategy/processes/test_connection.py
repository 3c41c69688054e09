"""How the processes find each other, as the strategy's options say."""

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import ConfigError, ConnectionConfig
from lightning_megatron.errors import ConnectError
from lightning_megatron.launch import interfaces
from lightning_megatron.testing import WorkerPool
from tests.fault_tolerance.hangs.sockets import listening_addresses
from tests.strategy.small import Small, loader, make_trainer, samples


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_timeout_s": 0}, "init_timeout_s=0: must be positive; nearest valid"),
        ({"bind": "eth99"}, "bind='eth99': this machine has the network interfaces"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    assert text in ConnectionConfig(**options).problems()[0]


@pytest.mark.parametrize("bind", [None, interfaces.loopback(), interfaces.EVERY])
def test_good_options(bind: str | None) -> None:
    assert ConnectionConfig(bind=bind).problems() == []


def fit() -> Any:
    trainer = make_trainer({"zero": 1}, 2, max_steps=1)
    trainer.fit(Small(), loader(dp=2))
    strategy: Any = trainer.strategy
    again = make_trainer({"zero": 1}, 2, max_steps=1)
    again.fit(Small(), loader(dp=2))
    later: Any = again.strategy
    with pytest.raises(ConfigError, match=r"batch_share\(7\).*nearest valid: [68]"):
        strategy.batch_share(7)
    return {
        "share": strategy.batch_share(8),
        "attempt": strategy.attempt.number,
        "peers": len(strategy.attempt.peers),
        "same": later.attempt == strategy.attempt,
        "event": (strategy.events.run, strategy.events.attempt),
        "run": strategy.attempt.run_id,
        "listens": [address for address, _ in listening_addresses()],
    }


def test_ranks_know_their_attempt_and_listen_on_loopback(pool: WorkerPool) -> None:
    found = pool.run(2, fit)
    for one in found:
        assert one["share"] == 4
        assert one["peers"] == 2
        assert one["same"]
        assert one["event"] == (one["run"], one["attempt"])
        assert one["listens"]
        assert all(address.startswith("127.") for address in one["listens"])


def fit_on_every_interface() -> int:
    connection = ConnectionConfig(bind=interfaces.EVERY)
    trainer = make_trainer({"zero": 1, "connection": connection}, 2, max_steps=1)
    trainer.fit(Small(), loader(dp=2))
    return trainer.global_step


def test_gloo_takes_what_it_chooses_where_all_interfaces_are_allowed(pool: WorkerPool) -> None:
    assert pool.run(2, fit_on_every_interface) == [1, 1]


def fit_twice_with_other_options() -> str:
    trainer = make_trainer({"zero": 1}, 2, max_steps=1)
    trainer.fit(Small(), loader(dp=2))
    zero = 1 + int(os.environ["RANK"])
    again = make_trainer({"zero": zero}, 2, max_steps=1)
    with pytest.raises(ConfigError) as error:
        again.fit(Small(), loader(dp=2))
    return str(error.value)


def test_options_of_a_second_trainer_are_compared_as_well(pool: WorkerPool) -> None:
    """Where the ranks have met before, and the group is there."""
    [text] = set(pool.run(2, fit_twice_with_other_options))
    assert "different options: zero.stage=2 on rank 1 (" in text
    assert ", zero.stage=1 on rank 0 (" in text


def start_without_the_last_rank(seconds: float, folder: Path) -> str:
    """The two others begin at the same time, or one would name the other as well."""
    os.environ["WORLD_SIZE"] = "3"
    connection = ConnectionConfig(init_timeout_s=seconds)
    trainer = make_trainer({"zero": 1, "connection": connection}, 2, max_steps=1, num_nodes=1)
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    with pytest.raises(ConnectError) as error:
        trainer.fit(Small(), loader(dp=2))
    return str(error.value)


def test_a_rank_that_never_starts_is_named_by_all_others(pool: WorkerPool, tmp_path: Path) -> None:
    for text in pool.run(2, start_without_the_last_rank, 5.0, tmp_path):
        assert text.startswith("rank 2 of 3 has not connected within 5 s")


class Numbered(Dataset[Any]):
    def __init__(self) -> None:
        self.data = samples(32)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Sized(Small):
    """Notes which samples each step has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[int]] = []

    def train_dataloader(self) -> Any:
        share = self.trainer.strategy.batch_share(8)  # type: ignore[attr-defined]
        return DataLoader(Numbered(), batch_size=share, shuffle=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read.append(batch[2].tolist())


def train_on(ranks: int, folder: str, steps: int) -> list[list[int]]:
    saver = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver]}
    trainer = make_trainer(
        {"zero": 1, "microbatch_size": 1},
        ranks,
        max_steps=steps,
        default_root_dir=folder,
        **options,
    )
    pl.seed_everything(5)
    module = Sized()
    trainer.fit(module, ckpt_path="auto")
    return module.read


def test_a_run_on_fewer_ranks_reads_the_same_batches(pool: WorkerPool, tmp_path: Path) -> None:
    """As after the loss of a node, with ``torchrun --nnodes 1:2``: each sample once."""
    before = pool.run(4, train_on, 4, str(tmp_path / "elastic"), 2)
    after = pool.run(2, train_on, 2, str(tmp_path / "elastic"), 4)
    whole = pool.run(4, train_on, 4, str(tmp_path / "whole"), 4)
    steps = [
        [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)]
        for ranks in (before, after, whole)
    ]
    assert steps[0] + steps[1] == steps[2]
    assert sorted(sum(steps[2], [])) == list(range(32))
