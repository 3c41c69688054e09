"""What README.md and the recipes claim, executed."""

import re

import pytest

from tests.launched.jobs import Quickstart

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("launched", ["readme_example"], indirect=True)
def test_python_example_trains(launched: str) -> None:
    accuracy = re.search(r"^accuracy ([\d.]+)$", launched, re.MULTILINE)
    assert accuracy is not None, launched
    assert float(accuracy[1]) == 1.0


@pytest.mark.parametrize("launched", ["quickstart"], indirect=True)
def test_quickstart_trains_and_its_last_line_resumes_under_another_layout(
    launched: Quickstart,
) -> None:
    assert "Trained to step 4." in launched.printed
    assert launched.events
    assert launched.command[:1] == ["lightning-megatron"]
    assert "--trainer.strategy.pp" in launched.command
    assert "Trained to step 8." in launched.resumed
