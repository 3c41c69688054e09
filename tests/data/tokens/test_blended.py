import json
import warnings
from typing import Any

import pytest

from lightning_megatron.data.reading.sampler import Division
from lightning_megatron.data.tokens.blended import BlendOrder, BlendSampler

SIZES = {"web": 30, "code": 20, "tiny": 1}
WEIGHTS = {"web": 0.5, "code": 0.4, "tiny": 0.1}


def order(
    weights: dict[str, float] = WEIGHTS,
    later: dict[int, dict[str, float]] | None = None,
    sizes: dict[str, int] = SIZES,
    seed: int = 0,
) -> BlendOrder:
    return BlendOrder(sizes, {0: weights, **(later or {})}, seed)


def named(blend: BlendOrder, rows: Any) -> list[tuple[str, int]]:
    """Source and row within it."""
    places = [(name, index) for name, size in blend.sizes.items() for index in range(size)]
    return [places[row] for row in rows]


def read(blend: BlendOrder, first: int, last: int) -> list[tuple[str, int]]:
    return named(blend, blend.rows(range(first, last)).tolist())


def test_every_pass_over_a_source_reads_each_row_once_in_another_order() -> None:
    found = read(order(), 0, 500)
    for name, size in SIZES.items():
        rows = [row for source, row in found if source == name]
        passes = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        assert len(passes) >= 6, name
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert size == 1 or len({*map(tuple, passes)}) == len(passes)
    assert order().epochs(500) == {
        name: sum(source == name for source, _ in found) / size for name, size in SIZES.items()
    }


def test_the_order_of_names_does_not_matter_and_the_seed_does() -> None:
    backwards = {name: SIZES[name] for name in reversed(SIZES)}
    assert read(order(sizes=backwards), 0, 99) == read(order(), 0, 99)
    assert read(order(seed=1), 0, 99) != read(order(), 0, 99)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_the_batches_that_one_process_reads(ranks: int) -> None:
    later = {30: {"web": 0.0, "code": 1.0}}
    alone = list(BlendSampler(order(later=later)))
    sampler = BlendSampler(order(later=later))
    parts = []
    for rank in range(ranks):
        division = Division(rank=rank, ranks=ranks, batch_size=8 // ranks, drop_last=True)
        part = sampler.divided(division)
        parts.append(list(part))
        assert len(parts[-1]) == len(part)
    together = [index for group in zip(*parts, strict=True) for index in group]
    assert together == alone[:48]


def test_an_epoch_goes_on_where_the_one_before_ended() -> None:
    sampler = BlendSampler(order())
    first = list(sampler)
    sampler.set_epoch(1)
    assert named(order(), first + list(sampler)) == read(order(), 0, 2 * sum(SIZES.values()))


def resumed(before: BlendOrder, position: int, now: BlendOrder) -> BlendOrder:
    now.load_state_dict(json.loads(json.dumps(before.state_dict())))
    now.go_on(position)
    return now


def test_resume_within_the_stages_of_a_run() -> None:
    later = {40: {"code": 1.0}, 80: {"web": 1.0, "tiny": 1.0}}
    whole, stages = read(order(later=later), 0, 200), order(later=later).stages
    for position in (0, 17, 40, 41, 80, 150):
        again = resumed(order(later=later), position, order(later=later))
        assert read(again, position, 200) == whole[position:]
        assert again.stages == stages


def test_other_weights_after_a_resume_are_those_of_a_stage() -> None:
    more = {"web": 1.0, "code": 9.0}
    whole = read(order(later={50: more}), 0, 200)
    changed = resumed(order(), 50, order(more))
    assert read(changed, 50, 200) == whole[50:]
    # And the same again, from a checkpoint that is later.
    again = resumed(changed, 70, order(more))
    assert read(again, 70, 200) == whole[70:]
    assert read(resumed(changed, 70, order({"web": 5.0, "code": 45})), 70, 200) == whole[70:]


def test_a_run_that_is_saved_before_it_reads_keeps_the_order_so_far() -> None:
    more = {"web": 1.0, "code": 9.0}
    waiting = order(more)
    waiting.load_state_dict(order().state_dict())
    again = resumed(waiting, 50, order(more))
    assert read(again, 50, 200) == read(resumed(order(), 50, order(more)), 50, 200)


def test_a_source_that_comes_or_goes_with_a_resume() -> None:
    sizes = {**SIZES, "chat": 7}
    more = {"web": 1.0, "chat": 1.0}
    after = read(resumed(order(), 50, order(more, sizes=sizes)), 50, 90)
    assert {name for name, _ in after} == {"web", "chat"}
    read_before = [row for name, row in read(order(), 0, 50) if name == "web"]
    following = [row for name, row in after if name == "web"]
    assert sorted([*read_before, *following][:30]) == list(range(30))
    with pytest.warns(UserWarning, match="it was trained on") as told:
        less = resumed(order(), 50, order({"web": 1.0}, sizes={"web": 30}))
    assert [row for _, row in read(less, 50, 55)] == following[:5]
    assert [str(one.message).partition(":")[0] for one in told] == ["code", "tiny"]


def test_a_source_that_comes_in_a_later_epoch_skips_no_rows() -> None:
    more = {**WEIGHTS, "chat": 1.0}
    sizes = {**SIZES, "chat": 7}
    expected = read(resumed(order(), 61, order(more, sizes=sizes)), 61, 170)
    now = order(more, sizes=sizes)
    now.load_state_dict(json.loads(json.dumps(order().state_dict())))
    sampler = BlendSampler(now)
    sampler.seek(1, 10)  # of epochs of 51 rows, which have 58 now
    found = named(now, sampler)
    assert found == expected[:48]
    later = order(more, sizes=sizes)
    later.load_state_dict(json.loads(json.dumps(now.state_dict())))
    again = BlendSampler(later)
    again.seek(2, 0)
    assert named(later, again) == expected[48:106]


def test_what_was_read_cannot_be_told_if_a_source_has_other_rows() -> None:
    sizes = {**SIZES, "web": 31}
    with pytest.warns(UserWarning, match="web: 30 rows when the checkpoint was saved, 31 now"):
        resumed(order(), 5, order(sizes=sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(order({"code": 1.0}), 5, order({"code": 1.0}, sizes=sizes))


def test_the_seed_of_the_run_is_kept() -> None:
    again = resumed(order(seed=3), 10, order(seed=4))
    assert read(again, 10, 60) == read(order(seed=3), 10, 60)
