"""Jobs of two processes, started by Lightning's launcher and by torchrun."""

import re
from typing import Any

import pytest

from tests.launched.jobs import Finished

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(1800)]

two_trainers_then_a_failure = pytest.mark.parametrize(
    "launched", ["two_trainers_then_a_failure"], indirect=True
)


@two_trainers_then_a_failure
def test_the_strategy_is_known_by_name_once_the_package_is_imported(
    launched: tuple[Finished, Any],
) -> None:
    """Without loading it: the import of the package stays light."""
    assert "by name: MegatronStrategy False\n" in launched[0].text


@two_trainers_then_a_failure
def test_the_subprocess_launcher_starts_one_process_per_device(
    launched: tuple[Finished, dict[str, Any]],
) -> None:
    """And a second Trainer of the script uses the same processes."""
    done, ranks = launched
    assert sorted(ranks) == ["done0.pt", "done1.pt"], done.text
    for held, names in ranks.values():
        assert held == 4  # half of the four layers
        assert len(names) == 8


def ends_with_its_traceback(done: Finished, place: str) -> None:
    """As a user meets it: one command, which ends with the failing rank's traceback."""
    assert not done.overdue, done.text
    assert done.code != 0
    assert "finished" not in done.text
    assert re.search(rf'in training_step\n.*self._maybe\("{place}"\)', done.text)


@two_trainers_then_a_failure
def test_a_failure_of_a_started_rank_ends_the_job(launched: tuple[Finished, Any]) -> None:
    ends_with_its_traceback(launched[0], "forward")


@pytest.mark.parametrize(
    "launched", ["failure_of_the_first_rank", "failure_under_torchrun"], indirect=True
)
def test_a_failure_of_the_first_rank_ends_a_busy_peer(launched: Finished) -> None:
    ends_with_its_traceback(launched, "forward")


@pytest.mark.parametrize("launched", ["missing_checkpoint"], indirect=True)
def test_a_mistake_is_told_once(launched: Finished) -> None:
    """By the processes that Lightning started, too, though each of them has failed."""
    assert launched.code == 2
    assert launched.text.count("lightning-megatron") == 1
    said = launched.text[launched.text.index("lightning-megatron: ") :]
    assert "there is no such checkpoint" in said
    assert len(said.splitlines()) <= 6
    assert "Traceback" not in launched.text
