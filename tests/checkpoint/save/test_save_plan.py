"""Saves in two halves, without other processes."""

import os

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint.chunks import model_chunks, whole
from lightning_megatron.checkpoint.save.dcp_writer import offer, write_shards
from lightning_megatron.checkpoint.save.save_plan import SavePlanning, all_chunks
from lightning_megatron.checkpoint.save.write_assignment import plan_in_turn
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError


def test_files_that_the_first_rank_does_not_see_are_an_error_and_nothing_is_published(tmp_path):
    chunks, alone = model_chunks(nn.Linear(2, 2)), Peers(alone=True)
    planned = SavePlanning(alone).plan(tmp_path / "a.ckpt", chunks, {})
    elsewhere = tmp_path / "disk of another machine"
    elsewhere.mkdir()

    def write(directory, plan, stop):
        return write_shards(elsewhere, plan, all_chunks(chunks, ()), stop)

    with pytest.raises(CheckpointError, match=r"not visible to the first: __0_0\.distcp; .* share"):
        planned.write(write, alone)
    assert os.listdir(tmp_path) == [elsewhere.name]
    assert os.listdir(elsewhere) == ["__0_0.distcp"]


def test_tensors_that_ranks_may_differ_in_are_the_lowest_ranks_however_busy_it_is():
    mean = whole(torch.zeros(3), identical=False)
    busy = {"large": whole(torch.zeros(1000)), "mean": mean, "same": whole(torch.zeros(3))}
    idle = {"mean": mean, "same": whole(torch.zeros(3))}
    first, second = plan_in_turn([offer(busy), offer(idle)])
    assert first.names == {"large", "mean"}
    assert second.names == {"same"}
