"""Filling in weight halves: which action a rank takes, and how much room it needs."""

import pytest

from lightning_megatron.schedules.actions import Action, Kind
from lightning_megatron.schedules.wgrad_placement import fill_weights, room_needed


def order(text: str) -> list[Action]:
    """Actions of one stage from ``F0 I0``, or of others from ``F3.0``."""
    actions = []
    for word in text.split():
        stage, _, microbatch = word[1:].rpartition(".")
        actions.append(Action(Kind(word[0]), int(stage or 0), int(microbatch)))
    return actions


def text(row: tuple[Action, ...]) -> str:
    return " ".join(f"{action.kind.value}{action.microbatch}" for action in row)


def test_weight_half_makes_room_for_a_forward() -> None:
    one = order("F0 I0 F1 I1 F2 I2")
    assert text(fill_weights([one], [0], limit=1).rows[0]) == "F0 I0 W0 F1 I1 W1 F2 I2 W2"
    assert text(fill_weights([one], [0], limit=2).rows[0]) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    assert text(fill_weights([one], [0], limit=3).rows[0]) == "F0 I0 F1 I1 F2 I2 W0 W1 W2"


def test_prompt_rank_does_it_as_soon_as_it_is_full() -> None:
    one = order("F0 F1 I0 I1 F2 I2")
    assert text(fill_weights([one], [0], limit=2).rows[0]) == "F0 F1 I0 I1 W0 F2 I2 W1 W2"
    prompt = fill_weights([one], [0], limit=2, prompt=True)
    assert text(prompt.rows[0]) == "F0 F1 I0 W0 I1 F2 W1 I2 W2"


def test_idle_time_is_filled() -> None:
    filled = fill_weights([order("F0 F1 I0 I1"), order("F1.0 I1.0 F1.1 I1.1")], [0, 1], limit=2)
    assert [text(row) for row in filled.rows] == ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"]
    assert filled.end == 7
    assert filled.peak_live == 2


def test_eager_rank_does_its_next_forward_while_it_waits() -> None:
    orders = [order("F0 I0 F1 I1"), order("F1.0 I1.0 F1.1 I1.1")]
    assert text(fill_weights(orders, [0, 1], limit=2).rows[0]) == "F0 I0 F1 W0 I1 W1"
    assert text(fill_weights(orders, [0, 1], limit=2, eager=True).rows[0]) == "F0 F1 I0 W0 I1 W1"
    assert text(fill_weights(orders, [0, 1], limit=1, eager=True).rows[0]) == "F0 I0 W0 F1 I1 W1"


def test_room_needed() -> None:
    assert room_needed(order("F0 F1 I0 F2 I1 I2")) == 2
    assert room_needed(order("F0 F1 F2 B0 B1 B2")) == 3
    assert room_needed([]) == 0


@pytest.mark.parametrize("orders", ["I0 F0", "F0 F1 I0 I1"])
def test_illegal_order(orders: str) -> None:
    rows = [order(orders), order("F1.1 I1.1 F1.0 I1.0")]
    with pytest.raises(AssertionError, match="not legal"):
        fill_weights(rows, [0, 1], limit=1)
