"""Saved under one layout, loaded under any other, bit for bit."""

import pytest
import torch

from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.topology.degrees import Degrees
from tests.checkpoint import parallel_jobs as jobs

LAYOUTS = {
    "one": None,
    "tp2": Degrees(tp=2),
    "replicate2": Degrees(dp_replicate=2),
    "tp2_shard2": Degrees(tp=2, dp_shard=2),
    "tp4": Degrees(tp=4),
    "shard4": Degrees(dp_shard=4),
    "replicate2_shard2": Degrees(dp_replicate=2, dp_shard=2),
    "replicate2_tp2": Degrees(dp_replicate=2, tp=2),
    "hybrid8": Degrees(dp_replicate=2, dp_shard=2, tp=2),
}


def run(pool, name, job, *args):
    """Run a job in a layout; in this process, without process groups, for one."""
    degrees = LAYOUTS[name]
    if degrees is None:
        return [job(args[0], None, *args[1:])]
    return pool.run(degrees.world_size, job, args[0], degrees, *args[1:])


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
        assert actual[name].dtype == value.dtype, name


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Gives path, gathered tensors, and those after two more steps in one process."""
    done = {}

    def save(name, kind):
        if (name, kind) not in done:
            path = tmp_path_factory.mktemp("saved") / "step.ckpt"
            gathered = run(pool, name, jobs.save_job, path, kind)[0]
            later = jobs.load_job(path, None, kind)[3]
            done[name, kind] = path, gathered, later
        return done[name, kind]

    return save


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        pytest.param("tp2_shard2", "tp4", "adamw", marks=pytest.mark.thorough),
        ("tp2_shard2", "shard4", "adamw"),
        pytest.param("tp2_shard2", "replicate2_shard2", "adamw", marks=pytest.mark.thorough),
        ("tp2_shard2", "one", "adamw"),
        ("replicate2", "tp2", "amsgrad"),
        pytest.param("replicate2_shard2", "replicate2_tp2", "amsgrad", marks=pytest.mark.thorough),
        pytest.param("hybrid8", "tp2_shard2", "amsgrad", marks=pytest.mark.thorough),
        pytest.param("hybrid8", "replicate2_tp2", "amsgrad", marks=pytest.mark.thorough),
        ("one", "tp2_shard2", "sgd"),
    ],
)
def test_weights_and_optimizer_state_are_bit_exact(pool, saved, source, target, kind):
    path, expected, later = saved(source, kind)
    assert any(key.startswith("0/") for key in expected)
    for loaded, options, state, after in run(pool, target, jobs.load_job, path, kind):
        assert_same(loaded, expected)
        assert options[0] == (0.125, 0.1 if kind != "sgd" else 0)
        assert state == {"global_step": 2, "loops": {"seen": (1, 2)}}
        for name, value in later.items():  # and training goes on the same
            torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)


def test_full_state_dict_needs_no_process_group(saved):
    path, expected, _ = saved("tp2_shard2", "adamw")
    state = load_full_state_dict(path)
    assert state["head.weight"] is state["embed.weight"]
    assert "head.weight" not in load_full_state_dict(path, aliases=False)
    model = jobs.build(seed=9)
    model.load_state_dict(state)  # strict
    parameters = dict(model.named_parameters())
    assert_same(parameters, {name: expected[name] for name in parameters})


def test_replicas_share_the_writing(pool, tmp_path):
    sizes = pool.run(4, jobs.write_replicated_job, tmp_path)[0]
    assert len(sizes) == 4  # eight tensors of 64 KB: two for each rank, every one written once
    assert all(128 * 1024 <= size < 140 * 1024 for size in sizes)
