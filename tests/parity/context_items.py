"""A network of items of users' own, some of which mix positions of a sequence."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import SplitContext, VocabParallelEmbedding
from tests.parallel.context_check import strangers
from tests.parallel.context_check.strangers import MIXING, WIDTH, Applies
from tests.parity.context_jobs import WholeLoss
from tests.parity.plain_modules import FromMemory, draw

VOCABULARY = 13


class Masked(nn.Module):
    """Zeroes what a whole mask of the trunk says."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.inner = SplitContext(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x) * self.cut(mask).unsqueeze(-1)


class Loss(WholeLoss):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)


def items_of(name: str) -> list[nn.Module]:
    """Items behind the embedding."""
    if name == "ordinary":
        return [strangers.Experts(), strangers.Pooled(), Masked(), strangers.Normed()]
    made, _ = MIXING[name]
    return [nn.Linear(WIDTH, WIDTH), made() if isinstance(made, type) else Applies(made)]


class Network(FromMemory):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.masked = name == "ordinary"
        embedding = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.net = PipelineSequential(embed=embedding, blocks=items_of(name), loss=Loss()).double()

    def batch(self, step: int) -> Any:
        return draw(7, high=VOCABULARY, step=step), draw(7, high=VOCABULARY, step=step + 9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        masks = {"mask": (tokens != 3).double()} if self.masked else {}
        total, counted = self.net(tokens, targets=targets, **masks)
        return total / counted.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)
