"""The groups that are made for a run on GPUs: of every rank, and of ranks among thousands."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron._torch.groups import make_group
from lightning_megatron.module import LanguageModel
from lightning_megatron.parallel.apply import Transforms, parallelize
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.pipeline.links import Links
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.strategy.module_layout import host_group_along_pp
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.zero.data_parallel import ComputeTypes, ShardingConfig
from tests.topology.census import Census, faults, take

TIMEOUT = timedelta(seconds=777)


def set_up(
    degrees: Degrees, zero: Any = 0, *, tied: bool = False, schedule: str = "1f1b", ulysses: int = 0
) -> None:
    """What a rank does between `connect` and the first step, as far as it makes groups."""
    context = ContextConfig(degree=degrees.cp, **({"ulysses": ulysses} if ulysses else {}))
    topology = Topology(degrees, torch.device("cpu"), seed=1, timeout=TIMEOUT, context=context)
    make_group([range(degrees.world_size)], TIMEOUT, backend="gloo", name="host")
    host = host_group_along_pp(topology)
    ranks = None
    if degrees.pp > 1:
        ranks = tuple(make_schedule(schedule, degrees.pp, 2 * degrees.pp).stage_ranks)
    sizes: dict[str, Any] = {"vocab_size": 16 * degrees.tp, "hidden_size": 2 * degrees.tp}
    sizes |= {"num_heads": degrees.tp, "num_layers": 2 * max(degrees.pp, 2), "max_seq_len": 64}
    if degrees.ep > 1:
        sizes["experts"] = {"num_experts": degrees.ep, "top_k": 2}
    with torch.device("meta"):
        module = LanguageModel({**sizes, "tied_embeddings": tied})
        module.configure_model()
    transforms = Transforms(
        types=ComputeTypes(),
        pipeline=PipelineConfig(degree=degrees.pp, schedule=schedule),
        sharding=ShardingConfig(stage=zero),
        stage_ranks=ranks,
    )
    parallelize(module, topology, transforms)
    if ranks is not None:
        Links(topology, ranks, host)
    topology.close()


LAYOUTS: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "dp": (Degrees(dp_shard=4), {"zero": 1}),
    "hybrid": (Degrees(dp_replicate=2, dp_shard=2), {"zero": 2}),
    "zero 3": (Degrees(dp_replicate=2, dp_shard=2), {"zero": 3}),
    "tp": (Degrees(tp=2, dp_shard=2), {"zero": 1}),
    "tied": (Degrees(pp=4, dp_shard=2), {"zero": 1, "tied": True}),
    "tied, reversed": (Degrees(pp=3, dp_shard=2, origin=2), {"zero": 0, "tied": True}),
    "V": (Degrees(pp=3, tp=2), {"schedule": "dualpipev"}),
    "interleaved, tied": (Degrees(pp=3), {"schedule": "interleaved", "tied": True}),
    "cp": (Degrees(cp=2, dp_shard=2, pp=2), {"zero": 3}),
    "ulysses": (Degrees(cp=4, tp=2), {"ulysses": 2}),
    "ep": (Degrees(dp_shard=4, ep=2), {"zero": 1}),
    "ep, zero 3": (Degrees(dp_replicate=2, dp_shard=4, ep=4), {"zero": 3}),
    "all": (Degrees(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2), {"zero": 1}),
}


def busy(census: Census) -> int:
    """Communicators for tensors of the size of parameters or activations: not of sums and logs."""
    sums = ("batch", "pp", "tied")
    return sum(size > 1 and name not in sums for name, size in census.communicators)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_make_the_same_groups_with_the_timeout_of_the_run(layout: str) -> None:
    degrees, how = LAYOUTS[layout]
    world = degrees.world_size
    found = {rank: take(rank, world, lambda: set_up(degrees, **how)) for rank in range(world)}
    assert faults(found, TIMEOUT) == []
    for census in found.values():
        # One of one rank only where others of its round have a stream: all are split at once.
        assert {name for name, size in census.communicators if size == 1} <= {"stream", "tied"}
        most = 15 if layout == "all" else 12  # all axes at once: each ZeRO group twice
        assert busy(census) <= most, census.communicators


THOUSANDS: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "1,024": (Degrees(tp=8, pp=4, dp_shard=32), {"zero": 1, "tied": True}),
    "4,096": (Degrees(tp=8, pp=8, dp_replicate=4, dp_shard=16), {"zero": 3}),
    "4,096 with experts": (Degrees(tp=2, cp=2, pp=8, dp_shard=128, ep=64), {"zero": 1}),
}


@pytest.mark.parametrize("layout", THOUSANDS)
def test_set_up_of_thousands_of_ranks(layout: str) -> None:
    """As many groups, and splits of the world's communicator, as in a run of a few ranks."""
    degrees, how = THOUSANDS[layout]
    ranks = (0, degrees.world_size // 2 + 9, degrees.world_size - 1)
    found = {r: take(r, degrees.world_size, lambda: set_up(degrees, **how)) for r in ranks}
    assert faults(found, TIMEOUT) == []
    for census in found.values():
        assert census.splits <= 14
        assert busy(census) <= 12, census.communicators


def planted(fault: str) -> None:
    """Groups of 4 ranks along two axes, one of which is made in a wrong way."""
    rank = dist.get_rank()
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    if fault == "no timeout":
        dist.split_group(split_ranks=rows)
    else:
        make_group(rows, TIMEOUT, name="rows")
    if fault == "members only" and rank in (0, 2):
        dist.new_group([0, 2], timeout=TIMEOUT, use_local_synchronization=True)
    if fault == "a part left out":
        dist.split_group(split_ranks=[[0, 2]], timeout=TIMEOUT)
    if fault == "another timeout on one rank" and rank == 3:
        make_group(rows, timedelta(seconds=5), name="rows")
    elif fault == "a split for each part":
        for part in rows[rank // 2 :]:
            dist.new_group(part, timeout=TIMEOUT)
    else:
        make_group(rows, TIMEOUT, name="rows")
    if fault == "order" and rank == 1:
        make_group(rows, TIMEOUT, name="again")
        make_group(columns, TIMEOUT, name="columns")
    elif fault == "other ranks" and rank == 2:
        make_group([[0, 3], [1, 2]], TIMEOUT, name="columns")
        make_group(rows, TIMEOUT, name="again")
    else:
        make_group(columns, TIMEOUT, name="columns")
        make_group(rows, TIMEOUT, name="again")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", ""),
        ("no timeout", "group 0 .* has 0:10:00"),
        ("another timeout on one rank", "rank 3: group 1 .* has 0:00:05"),
        ("members only", "makes another group than rank 0 as 1"),
        ("a part left out", "differ in its name"),
        ("a split for each part", "splits the world"),
        ("order", "rank 1: makes another group than rank 0 as 2"),
        ("other ranks", "rank 2: makes another group than rank 0 as 2"),
    ],
)
def test_the_census_finds_faults(fault: str, found: str) -> None:
    census = {rank: take(rank, 4, lambda: planted(fault)) for rank in range(4)}
    said = "\n".join(faults(census, TIMEOUT))
    assert bool(said) == bool(fault)
    assert re.search(found, said), said
