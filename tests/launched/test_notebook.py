"""Cells in a Jupyter kernel: in its own process, and in forks of it."""

from typing import Any

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(1800)]

a_notebook = pytest.mark.parametrize("launched", ["notebook"], indirect=True)


@a_notebook
def test_one_device_needs_no_other_process(launched: Any) -> None:
    cell = launched["one device"]
    assert (cell.text, cell.error) == ("None []\n", "")


@a_notebook
def test_forked_ranks_bring_back_what_one_process_would_have(launched: Any) -> None:
    """Whole weights from tp=2, progress, metrics and callbacks; also though OpenMP has threads."""
    cell = launched["forked"]
    assert cell.error == "", cell.traceback
    assert cell.text.splitlines() == ["True 4 1 finished", "True", "best/step=4.ckpt []"]


@a_notebook
def test_a_kernel_fits_again_and_a_trainer_goes_on(launched: Any) -> None:
    cell = launched["again"]
    assert cell.error == "", cell.traceback
    assert cell.text.splitlines() == ["True 4", "5 2 True []"]


@a_notebook
def test_the_exception_of_a_rank_is_that_of_the_cell(launched: Any) -> None:
    cell = launched["a rank fails"]
    assert cell.error == "ZeroDivisionError: of the second rank"
    assert "in the process of rank 1" in cell.traceback
    assert "in training_step" in cell.traceback


@a_notebook
def test_a_notebook_is_no_script(launched: Any) -> None:
    assert "nearest valid: start='fork', or devices=1" in launched["script"].error


@a_notebook
def test_an_interrupt_of_the_kernel_saves_and_leaves_no_process(launched: Any) -> None:
    assert launched["interrupted"].error == "SystemExit: 130"
    assert launched["what is left"].text == "['preempted'] []\n"
