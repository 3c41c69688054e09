"""Who writes what, by any number of planners."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.directory.coverage import run_coverage_fault
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.checkpoint.save import write_assignment as planning
from lightning_megatron.checkpoint.save.write_assignment import assign, deal
from lightning_megatron.errors import CheckpointError


def rows(rank, size, length=12):
    begin, end = (length * r // size for r in (rank, rank + 1))
    return ((begin, 0), (end - begin, 2))


@st.composite
def worlds(draw):
    """Offers of ranks that hold tensors whole, in rows, or in rows with replicas."""
    size, offers = draw(st.integers(1, 6)), []
    kinds = draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8))
    for rank in range(size):
        offer = {}
        for number, (pieces, pinned) in enumerate(kinds):
            held = rows(rank % pieces, pieces) if pieces <= size else ((0, 0), (12, 2))
            offer[f"t{number}"] = ("float32", (12, 2), pinned, [held])
        offers.append(offer)
    return offers


@given(worlds(), st.integers(1, 4))
def test_every_rectangle_is_written_once_by_a_rank_that_holds_it(offers, planners):
    dealt = [deal(offer, planners) for offer in offers]
    seen = set()
    for planner in range(planners):
        verdict = assign([some[planner] for some in dealt], planner, planners)
        assert not seen & verdict.tensors.keys()
        seen |= verdict.tensors.keys()
        for name, entry in verdict.tensors.items():
            assert run_coverage_fault(entry.shape, entry.runs) is None
            said = {(part, o) for run in entry.runs for part, o in run.rectangles()}
            written = {
                (rank, offers[rank][name][3][position][0])
                for rank, mine in enumerate(verdict.positions)
                for position in mine.get(name, ())
            }
            assert said == written
            assert len(written) == entry.count
            if offers[0][name][2]:
                assert all(part < offers_with(offers, name, o)[1] for part, o in written)
    assert seen == set().union(*offers)


def offers_with(offers, name, offsets):
    """The two lowest ranks that hold a rectangle."""
    ranks = [r for r, offer in enumerate(offers) if offer[name][3][0][0] == offsets]
    return [*ranks, len(offers)][:2]


def test_replicas_share_the_bytes_whatever_the_number_of_planners():
    size, names = 64, [f"layer.{number}.weight" for number in range(640)]
    offer = {name: ("float32", (8, 8), False, [((0, 0), (8, 8))]) for name in names}
    for planners in (1, 4):
        load = [0] * size
        for planner in range(planners):
            mine = deal(offer, planners)[planner]
            for rank, positions in enumerate(assign([mine] * size, planner, planners).positions):
                load[rank] += len(positions)
        assert max(load) <= 2 * len(names) / size


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("float32", (4,), False, [((0,), (2,))]), "w: only 2 of 4 elements"),
        (("float32", (4,), False, [((1,), (3,))]), "w: chunks overlap"),
        (("float32", (4,), False, [((3,), (2,))]), "w: chunk .* exceeds"),
        (("bfloat16", (4,), False, [((2,), (2,))]), "w: ranks differ in shape or dtype"),
        (("float32", (5,), False, [((2,), (2,))]), "w: ranks differ in shape or dtype"),
    ],
)
def test_what_ranks_hold_must_tile_every_tensor(other, message):
    with pytest.raises(CheckpointError, match=message):
        assign([{"w": ("float32", (4,), False, [((0,), (2,))])}, {"w": other}])


def planned_by_several_job(path):
    dist.init_process_group("gloo")
    rank, size, seen = dist.get_rank(), dist.get_world_size(), []
    whole_tensor = torch.arange(24.0).reshape(12, 2)
    (begin, _), (length, _) = rows(rank, size)
    part = whole_tensor[begin : begin + length].clone()
    cut = Chunk(tensor=part, full_shape=(12, 2), offsets=(begin, 0))
    chunks = {f"cut{i}": cut for i in range(5)} | {"same": whole(torch.ones(3))}
    planned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "OFFERS_EACH", 6)
        patch.setattr(
            planning, "assign", lambda o, *of: planned.append((len(o[0]), of)) or assign(o, *of)
        )
        manifest = save_directory(path, chunks, {"global_step": 1})
        seen.append(list(planned))
        if rank == 1:  # a hole in one tensor, which one planner sees
            del chunks["cut3"]
        try:
            save_directory(path, chunks, {"global_step": 2})
        except CheckpointError as error:
            seen.append(str(error))
    return seen, manifest.writers, manifest.tensors["model.cut0"].count


def test_several_ranks_plan_and_see_what_is_theirs_alone(pool, tmp_path):
    path = tmp_path / "a.ckpt"
    found = pool.run(4, planned_by_several_job, path)
    planned = [seen[0] for seen, _, _ in found]
    assert sum(count for each in planned for count, _ in each) == 6
    assert {of for each in planned for _, of in each} == {(rank, 4) for rank in range(4)}
    errors = {seen[1] for seen, _, _ in found}
    assert len(errors) == 1
    assert "cut3: only 18 of 24 elements are stored" in errors.pop()
    assert found[0][1:] == ([0, 1, 2, 3], 4)
    state = load_full_state_dict(path)  # the first one still stands
    assert all(torch.equal(state[f"cut{i}"].flatten(), torch.arange(24.0)) for i in range(5))
