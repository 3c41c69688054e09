import shlex

import pytest

from lightning_megatron.cli.end_summary import Outcome, other_layout, report, with_options


def outcome(tp: int | None, pp: int | None, max_pp: int = 4) -> Outcome:
    return Outcome(
        log_dir="runs/a", checkpoint="runs/a/last.ckpt", step=50, tp=tp, pp=pp, max_pp=max_pp
    )


@pytest.mark.parametrize(
    ("tp", "pp", "max_pp", "expected"),
    [
        (2, 2, 4, ("1", "4")),
        (2, 2, 3, ("4", "1")),
        (1, 4, 4, ("4", "1")),
        (4, 1, 4, ("1", "4")),
        (4, 1, 2, None),
        (1, 1, 4, None),
        (None, None, 4, None),
    ],
)
def test_other_layout_uses_as_many_ranks(
    tp: int | None, pp: int | None, max_pp: int, expected: tuple[str, str] | None
) -> None:
    found = tuple(other_layout(outcome(tp, pp, max_pp)).values())
    assert found == (expected or ())


def test_options_replace_earlier_ones() -> None:
    args = ["fit", "--a", "1", "--b=2", "--c", "3", "--ckpt_path=old"]
    assert with_options(args, {"--a": "9", "--ckpt_path": "new"}) == [
        *["fit", "--b=2", "--c", "3", "--a", "9", "--ckpt_path", "new"]
    ]


def test_report_holds_places_and_a_command_that_goes_on() -> None:
    args = ["fit", "--config", "a b.yaml", "--trainer.strategy.tp=2"]
    text = report(args, outcome(2, 2))
    assert "runs/a\n" in text
    assert "runs/a/last.ckpt" in text
    assert shlex.split(text.splitlines()[-1]) == [
        *["lightning-megatron", "fit", "--config", "a b.yaml"],
        *["--trainer.strategy.tp", "1", "--trainer.strategy.pp", "4"],
        *["--trainer.max_steps", "100", "--ckpt_path", "runs/a/last.ckpt"],
    ]
    assert "another layout" in text


def test_report_without_checkpoint_has_no_command() -> None:
    text = report(["fit"], Outcome(log_dir=None, checkpoint=None, step=3, tp=2, pp=2))
    assert text == "Trained to step 3."
