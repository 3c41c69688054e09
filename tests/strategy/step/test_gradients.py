"""Hooks find in ``.grad`` the gradients of the batches that are behind them, and no others."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.small import Small, loader, make_trainer


class Looking(Small):
    """Notes gradients around the backward of each batch, two of which make an update."""

    def __init__(self, per_token: bool) -> None:
        super().__init__()
        self.per_token = per_token
        self.seen: list[tuple[str, Tensor | None]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        count = len(batch[0])
        return {"loss": loss * count, "num_tokens": count} if self.per_token else loss

    def look(self, hook: str) -> None:
        gradient = next(self.parameters()).grad
        self.seen.append((hook, None if gradient is None else gradient.clone()))

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("before backward")

    def on_after_backward(self) -> None:
        self.look("after backward")


def seen(layout: Mapping[str, Any] | None, per_token: bool) -> list[tuple[str, Tensor | None]]:
    module = Looking(per_token)
    trainer = make_trainer(layout, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, loader())
    return module.seen


@pytest.mark.parametrize("per_token", [False, True])
def test_earlier_gradients_are_there_until_the_backward_adds_to_them(per_token: bool) -> None:
    found, plain = seen({"num_microbatches": 2}, per_token), seen(None, per_token=False)
    assert [hook for hook, _ in found] == [hook for hook, _ in plain]
    assert len(found) == 8
    for (_, ours), (_, expected) in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert [gradient is None for _, gradient in found] == [True, False, False, False] * 2
