"""Runs that go on from what their nodes have kept."""

import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron import PipelineSequential
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry, read_entry
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.local import restore
from lightning_megatron.layers import MixtureOfExperts, RouterConfig
from lightning_megatron.testing import WorkerPool
from tests.checkpoint.damage import flip
from tests.checkpoint.local.local_training import checkpoints, disk, lose, train
from tests.checkpoint.older import make_format_3
from tests.strategy.resuming import WIDTH, Block, Noisy, differences

TP = {"tp": 2, "zero": 1}
RANKS = [1, pytest.param(2, marks=pytest.mark.thorough)]
"""Of each of two nodes."""


def begun_at(results: list[Any]) -> set[str]:
    """Which checkpoint each rank went on from."""
    return {"none" if path is None else Path(path).name for _, path in results}


def assert_goes_on(whole: list[Any], rest: list[Any], first: tuple[int, int], name: str) -> None:
    """Every step of the second run is to the bit that of the undisturbed one."""
    assert begun_at(rest) == {name}
    for (ours, _), (expected, _) in zip(rest, whole, strict=True):
        assert differences(expected, ours, first) == []


def on_nodes(*nodes: int, ranks: int) -> list[int]:
    """The node of each rank."""
    return [node for node in nodes for _ in range(ranks)]


Whole = Callable[[int], list[Any]]


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run that nothing happens to, by the ranks of each node."""

    def run(ranks: int) -> list[Any]:
        root = tmp_path_factory.mktemp("whole")
        nodes = on_nodes(0, 1, ranks=ranks)
        results = pool.run(2 * ranks, train, root, nodes, TP, ckpt_path=None)
        assert checkpoints(root, 0) == checkpoints(root, 1) == []  # deleted in the end
        return results

    return cache(run)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_lost_node(pool: WorkerPool, tmp_path: Path, whole: Whole, ranks: int) -> None:
    """Another node has its place, and its ranks are the first now."""
    pool.run(2 * ranks, train, tmp_path, on_nodes(0, 1, ranks=ranks), TP, crash=4)
    for node in (0, 1):
        names = [path.name for path in checkpoints(tmp_path, node)]
        assert names == ["step=00000003.ckpt", "step=00000004.ckpt"]
    lose(tmp_path, 1)
    rest = pool.run(2 * ranks, train, tmp_path, on_nodes(2, 0, ranks=ranks), TP, seed=8)
    assert_goes_on(whole(ranks), rest, (1, 2), "step=00000004.ckpt")
    assert checkpoints(tmp_path, 0) == checkpoints(tmp_path, 2) == []
    assert not list(disk(tmp_path, 0).iterdir())


@pytest.mark.thorough
def test_nodes_that_change_places(pool: WorkerPool, tmp_path: Path, whole: Whole) -> None:
    pool.run(4, train, tmp_path, [0, 0, 1, 1], TP, crash=4, replicas=0)
    rest = pool.run(4, train, tmp_path, [1, 0, 1, 0], TP, seed=8)
    assert_goes_on(whole(2), rest, (1, 2), "step=00000004.ckpt")


def test_a_node_less(pool: WorkerPool, tmp_path: Path) -> None:
    """The other has all files, and goes on with fewer ranks."""
    pool.run(2, train, tmp_path, [0, 1], {"zero": 3}, crash=4)
    lose(tmp_path, 0)
    [rest] = pool.run(1, train, tmp_path, [1], {}, seed=8)
    assert begun_at([rest]) == {"step=00000004.ckpt"}
    assert min(rest[0]) == (1, 2)


def test_what_is_damaged(pool: WorkerPool, tmp_path: Path, whole: Whole) -> None:
    """One copy is as good as another; where none is good, the checkpoint before is taken."""
    pool.run(2, train, tmp_path, [0, 1], TP, crash=4)
    newest = [checkpoints(tmp_path, node)[-1] for node in (0, 1)]
    flip(newest[0] / "__0_0.distcp", 900)
    (newest[1] / "__1_0.distcp").unlink()
    rest = pool.run(2, train, tmp_path, [0, 1], TP, crash=4, seed=8)
    assert begun_at(rest) == {"step=00000004.ckpt"}
    assert (newest[0] / "__0_0.distcp.corrupt").exists()
    for path in newest:
        flip(path / "__1_0.distcp", 900)
    rest = pool.run(2, train, tmp_path, [0, 1], TP, seed=8)
    assert_goes_on(whole(1), rest, (1, 0), "step=00000003.ckpt")


def test_what_an_earlier_version_has_left(pool: WorkerPool, tmp_path: Path, whole: Whole) -> None:
    """Its list of files beside the manifest is not needed, and its files are deleted as others."""
    pool.run(2, train, tmp_path, [0, 1], TP, crash=4)
    for path in (path for node in (0, 1) for path in checkpoints(tmp_path, node)):
        make_format_3(path)
        (path / "local.json").write_text("{}")
        (path / "node").write_text("0")
    (checkpoints(tmp_path, 1)[-1] / "manifest.0.json").unlink()
    rest = pool.run(2, train, tmp_path, [0, 1], TP, seed=8)
    assert_goes_on(whole(1), rest, (1, 2), "step=00000004.ckpt")
    assert checkpoints(tmp_path, 0) == checkpoints(tmp_path, 1) == []


class Mixed(nn.Module):
    """Adds the output of experts, among which a bias keeps the balance."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = MixtureOfExperts(WIDTH, 3, 4, router=RouterConfig(bias_update=0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x[:, None])[:, 0]  # type: ignore[no-any-return]


class NoisyExperts(Noisy):
    """Has experts between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(layers=[Block(), Mixed(), Block()])


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_a_lost_node(pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    """Of two ranks on a node, it has all experts, cut by ZeRO; and a copy of the other's files."""
    nodes, layout = on_nodes(0, 1, ranks=ranks), {"ep": 2, "zero": 2}
    options: dict[str, Any] = {"module": NoisyExperts}
    whole = pool.run(
        len(nodes), train, tmp_path / "whole", nodes, layout, ckpt_path=None, **options
    )
    pool.run(len(nodes), train, tmp_path, nodes, layout, crash=4, **options)
    lose(tmp_path, 1)
    others = on_nodes(2, 0, ranks=ranks)
    rest = pool.run(len(nodes), train, tmp_path, others, layout, seed=8, **options)
    assert_goes_on(whole, rest, (1, 2), "step=00000004.ckpt")


class Looking(Noisy):
    """Looks at the weights of the checkpoint before they are its own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sums = [float(value.sum()) for value in checkpoint["state_dict"].values()]


def test_two_nodes_of_which_none_has_all(pool: WorkerPool, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"pp": 2, "num_microbatches": 2}
    options: dict[str, Any] = {"shared_every": 2, "replicas": 0}
    pool.run(2, train, tmp_path, [0, 1], layout, crash=3, **options)
    kept = [{p.name for p in checkpoints(tmp_path, node)[-1].glob("*.distcp")} for node in (0, 1)]
    assert [len(names) for names in kept] == [1, 1]
    rest = pool.run(2, train, tmp_path, [1, 0], layout, crash=5, **options)
    assert begun_at(rest) == {"step=00000003.ckpt"}
    lose(tmp_path, 0)
    rest = pool.run(2, train, tmp_path, [1, 2], layout, **options)
    assert begun_at(rest) == {"step=4.ckpt"}


def test_the_manifest_of_a_node_is_damaged(pool: WorkerPool, tmp_path: Path) -> None:
    """Only that node has its shards: they count, by the manifest of the other."""
    layout: dict[str, Any] = {"pp": 2, "num_microbatches": 2}
    pool.run(2, train, tmp_path, [0, 1], layout, crash=3, replicas=0)
    damaged = checkpoints(tmp_path, 0)[-1] / "manifest.json"
    flip(damaged, 900)
    rest = pool.run(2, train, tmp_path, [0, 1], layout, crash=4, replicas=0)
    assert begun_at(rest) == {"step=00000003.ckpt"}
    assert read_manifest(damaged.parent).step == 3


def compared(*args: Any, **options: Any) -> list[str]:
    """Train, and return which files this rank has compared to know that the newest is whole."""
    names: list[str] = []
    verify, found = restore._NodeShare.verify, []

    def note(path: Path) -> FileEntry:
        names.append(path.name)
        return read_entry(path)

    def noted(share: Any) -> None:
        verify(share)
        found.extend(names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "read_entry", note)
        patch.setattr(restore._NodeShare, "verify", noted)
        train(*args, **options)
    return sorted(found)


def test_each_file_is_compared_once_where_it_is_needed(pool: WorkerPool, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"pp": 2, "num_microbatches": 2}
    pool.run(2, train, tmp_path, [0, 1], layout, crash=3)
    first, second = pool.run(2, compared, tmp_path, [0, 1], layout, crash=4)
    state = ["state.json", "state.safetensors"]
    assert first == [".metadata", "__0_0.distcp", "manifest.0.json", *state]
    assert second == ["__1_0.distcp", "manifest.1.json"]


@pytest.mark.thorough
@pytest.mark.parametrize("module", [Noisy, Looking])
def test_four_nodes_of_which_none_has_all(
    pool: WorkerPool, tmp_path: Path, module: type[LightningModule]
) -> None:
    layout, nodes = {"pp": 2, "num_microbatches": 2, "zero": 2}, [0, 1, 2, 3]
    options: dict[str, Any] = {"module": module, "shared_every": 2}
    pool.run(4, train, tmp_path, nodes, layout, crash=3, **options)
    kept = [{p.name for p in checkpoints(tmp_path, node)[-1].glob("*.distcp")} for node in nodes]
    assert len(set.union(*kept)) == 4
    assert {len(names) for names in kept} == {2}
    lose(tmp_path, 1)
    rest = pool.run(4, train, tmp_path, [3, 4, 0, 2], layout, crash=4, **options)
    assert begun_at(rest) == {"step=00000003.ckpt"}
    lose(tmp_path, 0)
    lose(tmp_path, 4)  # two neighbours: something is on neither of the others
    rest = pool.run(4, train, tmp_path, [3, 5, 6, 2], layout, **options)
    assert begun_at(rest) == {"step=4.ckpt"}


def test_the_newest_of_both_kinds(pool: WorkerPool, tmp_path: Path) -> None:
    def run(every: int, crash: int) -> set[str]:
        options = {"shared_every": 2, "every": every, "crash": crash}
        return begun_at(pool.run(1, train, tmp_path, [0], {}, **options))

    assert run(every=3, crash=4) == {"none"}
    assert run(every=1, crash=5) == {"step=4.ckpt"}  # the local one is of step 3
    assert run(every=1, crash=5) == {"step=00000005.ckpt"}
    for folder in ("shared", "node0"):
        shutil.rmtree(tmp_path / folder)
    assert run(every=1, crash=4) == {"none"}
    assert run(every=1, crash=4) == {"step=00000004.ckpt"}  # made after the shared one


class Spoil(pl.Callback):
    """Puts a file where a node's directory was, for two steps."""

    def __init__(self, root: Path) -> None:
        self.disk = disk(root, 1)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.local_rank == 0:
            return
        if trainer.global_step == 1 and self.disk.is_dir():
            self.disk.rename(self.disk.with_name("away"))
            self.disk.touch()
        elif trainer.global_step == 3 and not self.disk.is_dir():
            self.disk.unlink()
            self.disk.with_name("away").rename(self.disk)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def spoiled(root: Path) -> tuple[int, list[str]]:
    heard = Heard()
    logger = logging.getLogger("lightning_megatron.checkpoint")
    logger.addHandler(heard)
    train(root, [0, 1], {"tp": 2}, more=[Spoil(root)], crash=5)
    logger.removeHandler(heard)
    return len(checkpoints(root, 0)), heard.said


def test_a_save_that_fails_costs_a_warning(pool: WorkerPool, tmp_path: Path) -> None:
    """Of one node that cannot write; both keep what they had, and go on when it can again."""
    (kept, said), (_, said_elsewhere) = pool.run(2, spoiled, tmp_path)
    assert kept == 2
    assert said_elsewhere == []
    failed = [text for text in said if "training goes on" in text]
    assert len(failed) == len(said) == 2
    assert failed[0].startswith("saving the local checkpoint step=00000002.ckpt: rank 1: ")
    assert failed[0].endswith("(1 save failed in a row; this run has 1 local checkpoint)")
    assert [path.name for path in checkpoints(tmp_path, 1)] == [
        "step=00000004.ckpt",
        "step=00000005.ckpt",
    ]


@pytest.mark.parametrize("every", [None, 2])
def test_one_process_alone(pool: WorkerPool, tmp_path: Path, every: int | None) -> None:
    """It goes on from what its machine has, which another process has written."""
    options: dict[str, Any] = {"every": every, "mode": "async"}
    assert begun_at(pool.run(1, train, tmp_path, [0], {}, crash=4, **options)) == {"none"}
    [name] = begun_at(pool.run(1, train, tmp_path, [0], {}, **options))
    assert name.startswith("step=0000000")
    assert checkpoints(tmp_path, 0) == []
