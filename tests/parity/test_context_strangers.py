"""Items of users' own under cp: the numbers of one process, or an error that names them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import SplitContext, VocabParallelEmbedding
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parallel.context_check import strangers
from tests.parallel.context_check.strangers import MIXING, WIDTH, Applies
from tests.parity.context_jobs import WholeLoss
from tests.parity.jobs import Outcome, merge_stages, quiet_trainer, whole_parameters
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


def weights_job(options: Mapping[str, Any]) -> Outcome:
    """Train the ordinary items."""
    strategy, module = MegatronStrategy(**options), Network("ordinary")
    quiet_trainer(strategy).fit(module)
    return Outcome([], [], whole_parameters(module, strategy.topology))


def refusals_job(options: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """What ends the training of each of the modules."""
    texts = []
    for name in names:
        try:
            quiet_trainer(MegatronStrategy(**options)).fit(Network(name))
            texts.append("")
        except ConfigError as error:
            texts.append(str(error))
    return texts


def mixing_job(options: Mapping[str, Any]) -> None:
    quiet_trainer(MegatronStrategy(**options)).fit(Network("cumsum"))


@pytest.mark.parametrize(
    ("options", "devices"),
    [({"cp": 2, "zero": 3}, 2), ({"cp": 2, "pp": 2, "num_microbatches": 2}, 4)],
    ids=str,
)
def test_ordinary_items_train_as_in_one_process(
    pool: WorkerPool, options: dict[str, Any], devices: int
) -> None:
    [plain] = pool.run(1, weights_job, {})
    found = merge_stages(pool.run(devices, weights_job, options))
    assert found.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        error = (found[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-3)
        assert error < 1e-10, f"{name}: {error:.1e}"


def test_items_that_mix_end_the_run_on_all_ranks(pool: WorkerPool) -> None:
    names = ("gate", "positions", "convolution", "loss beside")
    first, second = pool.run(2, refusals_job, {"cp": 2}, names)
    assert first == second
    for name, text in zip(names, first, strict=True):
        assert text.startswith("cp=2: net.blocks.1 ("), name
        assert f") does not act on each position by itself: {MIXING[name][1]}" in text


@pytest.mark.thorough  # ending the workers takes seconds
def test_items_of_any_stage_end_the_run(pool: WorkerPool) -> None:
    layout = {"cp": 2, "pp": 2, "num_microbatches": 2}
    with pytest.raises(WorkerError, match=r"cp=2: net\.blocks\.1 \(Applies\) does not act on each"):
        pool.run(4, mixing_job, layout)
