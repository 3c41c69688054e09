"""What a rank writes into its page is what others read of it."""

from pathlib import Path

import pytest

from lightning_megatron.fault_tolerance.hangs.heartbeat import EXIT, Page, page_file


@pytest.mark.parametrize("older", [0, 40, 5000])
def test_the_newest_groups_are_told_however_many_there_were(tmp_path: Path, older: int) -> None:
    page = Page(page_file(tmp_path, 0))
    groups = {f"#{number}": [7, 7] for number in range(older)} | {"0": [4, 3], "1": [9, 9]}
    page.sample(groups)
    told = page.read().collectives
    assert {name: told[name] for name in ("0", "1")} == {"0": [4, 3], "1": [9, 9]}
    assert told.keys() <= groups.keys()
    assert (told == groups) == (older < 5000)
    page.close()


def test_a_rank_is_held_until_it_is_ended(tmp_path: Path) -> None:
    seen, told = Page(page_file(tmp_path, 0)), Page(page_file(tmp_path, 0))
    assert not seen.held
    told.hold()
    told.give(3, EXIT)
    assert seen.held
    assert seen.order == (3, EXIT)
