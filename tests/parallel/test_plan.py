"""Which item goes where: what the options mean, and how operations are counted."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy, PipelineConfig, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.flops import (
    block_forward_flops,
    forward_flops,
    head_forward_flops,
)
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.parallel.item_flops import LOSS_OPERATIONS, count_item_flops
from lightning_megatron.parallel.plan import ModulePlan
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from tests.strategy.small import Small, loader, make_trainer

WIDTH, LENGTH = 8, 16


class Net(nn.Module):
    """A trunk and, as a LightningModule has it, an example of its input."""

    def __init__(self, *items: nn.Module, example: Any = None, **named: Any) -> None:
        super().__init__()
        self.trunk = PipelineSequential(*items, **named)
        self.example_input_array = example


class Looks(nn.Module):
    """Depends on values, which meta tensors do not have."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.any()) else x


class Tells(Looks):
    """The same, but says what it costs."""

    def flops(self, sequence_length: int) -> int:
        return 1000 * sequence_length


def plan(module: nn.Module, stages: int | Sequence[int] = 2, **options: Any) -> ModulePlan:
    """The plan for so many ranks, or for the ranks of all stages."""
    ranks = tuple(range(stages)) if isinstance(stages, int) else tuple(stages)
    pp = max(ranks) + 1
    return ModulePlan(module, Degrees(pp=pp), PipelineConfig(degree=pp, **options), ranks)


def sizes(found: ModulePlan) -> list[int]:
    return [len(stage) for stage in found.stages]


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


@pytest.mark.parametrize("preset", ["tiny", "gpt2-124m", "qwen2.5-7b"])
def test_operations_of_a_transformer_are_those_of_the_formula(preset: str) -> None:
    config = TransformerConfig.preset(preset, num_layers=2)
    with torch.device("meta"):
        trunk = Transformer(config).trunk
    counted = count_item_flops(trunk, LENGTH)
    residual, logits = LENGTH * config.hidden_size, LENGTH * config.vocab_size
    block = block_forward_flops(config, LENGTH) + residual
    head = head_forward_flops(config, LENGTH) + (1 + LOSS_OPERATIONS) * logits
    assert list(counted.flops) == [residual, block, block, residual, head]
    assert not counted.estimated


def test_mixtures_count_the_experts_that_a_token_uses() -> None:
    mixtures = MixtureConfig(num_experts=8, top_k=2, mlp_size=48, shared_size=32, first_dense=1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_heads=4, vocab_size=32, experts=mixtures
    )
    with torch.device("meta"):
        counted = count_item_flops(Transformer(config).trunk, LENGTH)
    outputs = LENGTH * (4 * config.hidden_size + (1 + LOSS_OPERATIONS) * config.vocab_size)
    assert sum(counted.flops) == forward_flops(config, LENGTH) + outputs
    assert not counted.estimated


def test_real_and_meta_weights_count_alike() -> None:
    config = TransformerConfig.preset("tiny", num_layers=2, dropout=0.1, attention_dropout=0.1)
    real = Transformer(config)
    before = {name: value.clone() for name, value in real.state_dict().items()}
    random = torch.get_rng_state()
    counted = count_item_flops(real.trunk, LENGTH)
    with torch.device("meta"):
        assert count_item_flops(Transformer(config).trunk, LENGTH) == counted
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in real.state_dict().items())
    assert all(m.training for m in real.modules())
    assert real(torch.zeros(1, 4, dtype=torch.long)).device.type == "cpu"  # rotary tables are whole


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # GemmBackend count 2 for each multiplication and addition, outputs 1 for each element.
        ([nn.Linear(8, 4)], 2 * 16 * 8 * 4 + 16 * 4),
        ([ColumnParallelLinear(8, 4)], 2 * 16 * 8 * 4 + 16 * 4),
        ([nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))], 4 * 16 * 32 + 16 * 8),
        ([nn.Embedding(10, 8)], 16 * 8),
        ([nn.LayerNorm(8)], 16 * 8),
        ([nn.Conv1d(4, 6, 3, padding=1)], 2 * 16 * 4 * 6 * 3 + 16 * 6),
        # Router, three products of two of the experts, and the MLP of all tokens.
        (
            [MixtureOfExperts(8, 12, 5, 2, shared_size=20)],
            2 * 16 * (8 * 5 + 3 * 2 * 8 * 12 + 3 * 8 * 20) + 16 * 8,
        ),
        ([CausalSelfAttention(8, 2)], 2 * 16 * 4 * 64 + 4 * 16 * 16 * 8 + 16 * 8),
        (
            [nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)],
            2 * 16 * (4 * 64 + 2 * 8 * 32) + 4 * 16 * 16 * 8 + 16 * 8,
        ),
        (
            [nn.TransformerEncoderLayer(8, 2, 32)],
            2 * 16 * (4 * 64 + 2 * 8 * 32) + 4 * 16 * 16 * 8 + 16 * 8,
        ),
    ],
    ids=lambda value: type(value[0]).__name__ if isinstance(value, list) else None,
)
def test_operations_by_hand(items: list[nn.Module], expected: int) -> None:
    counted = count_item_flops(PipelineSequential(*items, nn.Identity()), LENGTH)
    assert counted.flops[0] == expected
    assert not counted.estimated


def test_images_through_the_example() -> None:
    trunk = PipelineSequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 5))
    counted = count_item_flops(trunk, None, torch.zeros(2, 3, 8, 8))
    conv, flat = 2 * 2 * 64 * 3 * 4 * 9 + 2 * 4 * 64, 2 * 4 * 64
    assert list(counted.flops) == [conv, flat, 2 * 2 * 256 * 5 + (1 + LOSS_OPERATIONS) * 10]


def test_an_asked_length_goes_before_the_example() -> None:
    trunk = PipelineSequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    example = torch.zeros(2, 4, dtype=torch.long)
    assert count_item_flops(trunk, None, example).flops[0] == 2 * 4 * 8
    assert count_item_flops(trunk, 16, example).flops[0] == 16 * 8


def test_lower_precision_and_dicts() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x, "half": x[..., :4]}

    class Joined(nn.Linear):
        def forward(self, both: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(both["x"]) * F.pad(both["half"], (0, 4))

    trunk = PipelineSequential(nn.Linear(8, 8).to(torch.bfloat16), Named(), Joined(8, 8))
    counted = count_item_flops(trunk, LENGTH, torch.zeros(1, LENGTH, 8))
    assert not counted.estimated
    assert counted.flops[1] == LENGTH * 12


def test_items_that_cannot_be_run() -> None:
    trunk = PipelineSequential(nn.Linear(8, 8), Looks(), Tells(), nn.Linear(8, 8), Looks())
    counted = count_item_flops(trunk, LENGTH)
    dense = 2 * LENGTH * (64 + 8)
    plain = 2 * LENGTH * 64 + LENGTH * 8
    assert list(counted.flops) == [plain, dense, 1000 * LENGTH, plain, dense]
    assert counted.estimated == ("1", "4")


def test_after_an_item_that_cannot_be_run_the_input_is_guessed() -> None:
    trunk = PipelineSequential(Looks(4), nn.Linear(8, 8))
    assert count_item_flops(trunk, LENGTH).flops[1] == 2 * LENGTH * 64 + 6 * LENGTH * 8


def test_partition_by_operations_differs_from_that_by_parameters() -> None:
    # The table of the embedding holds as many parameters as the head and takes no products.
    config = TransformerConfig(vocab_size=4096, hidden_size=64, num_layers=8, num_heads=4)
    with torch.device("meta"):
        module = Transformer(config)
    assert sizes(plan(module)) == sizes(plan(module, partition="parameters")) == [5, 6]
    short = plan(module, partition="flops", sequence_length=128)
    assert short.problems() == []
    long = plan(module, partition="flops", sequence_length=8192)  # attention outweighs the head
    assert sizes(short) == [7, 4]
    assert sizes(long) == [5, 6]


def test_every_way_to_say_the_same() -> None:
    module = Net(embedding=nn.Embedding(4, WIDTH), layers=linears(5), head=nn.Linear(WIDTH, 4))
    for partition in ([2, 3, 1, 1], "Et|t*3|t|L", "E,t|ttt|t|L"):
        found = plan(module, (0, 1, 1, 0), partition=partition)
        assert found.problems() == []
        assert sizes(found) == [2, 3, 1, 1]
        assert found.stages_of_rank(1) == (1, 2)


def test_stages_of_a_v_are_even_not_ranks() -> None:
    assert sizes(plan(Net(*linears(8)), (0, 1, 1, 0), partition="parameters")) == [2, 2, 2, 2]


def test_a_length_is_needed() -> None:
    (problem,) = plan(Net(*linears(4)), partition="flops").problems()
    assert "sequence_length=None" in problem
    assert "nearest valid: sequence_length=" in problem
    told = Net(*linears(4), example=torch.zeros(1, 4, WIDTH))
    assert plan(told, partition="flops").problems() == []


def test_wrong_operations_of_an_item() -> None:
    class Negative(nn.Linear):
        def flops(self, sequence_length: int) -> float:
            return -1.0

    module = Net(Negative(8, 8), nn.Linear(8, 8))
    (problem,) = plan(module, partition="flops", sequence_length=4).problems()
    assert "costs[0]=-1.0" in problem


@pytest.mark.parametrize(
    ("module", "partition", "says"),
    [
        (Net(*linears(4)), "t|t|tt", "3 stages, pp*stages_per_rank is 2"),
        (Net(*linears(4)), "ttt||t", "3 stages, pp*stages_per_rank is 2"),
        (Net(embedding=nn.Embedding(4, 4), layers=linears(3)), "tt|t", "has no E"),
        (Net(*linears(4)), [1, 1, 2], "3 stages are listed, pp*stages_per_rank is 2"),
        (Net(*linears(1)), "t|t", "pp*stages_per_rank=2, items=1"),
    ],
)
def test_partitions_that_do_not_fit(module: nn.Module, partition: Any, says: str) -> None:
    found = plan(module, partition=partition)
    (problem,) = found.problems()
    assert says in problem
    assert "; nearest valid: " in problem
    with pytest.raises(ConfigError):
        _ = found.stages


@pytest.mark.parametrize(
    ("options", "pp", "says"),
    [
        ({"partition": "flop"}, 2, ("'flop'", "'parameters', 'flops'", "partition='flops'")),
        ({"partition": "time"}, 2, ("'time'", "'parameters', 'flops'", "a layout string")),
        ({"partition": "Et3|tL"}, 2, ("character 3", "partition='Et|tL'")),
        ({"partition": "Et|t|tL"}, 1, ("pp=1", "partition=None, or pp=3")),
        ({"partition": [1, 2]}, 1, ("pp=1", "partition=None, or pp=2")),
        ({"sequence_length": 0}, 2, ("sequence_length=0", "sequence_length=1")),
    ],
)
def test_what_is_wrong_whatever_the_module(
    options: dict[str, Any], pp: int, says: tuple[str, ...]
) -> None:
    (problem,) = PipelineConfig(degree=pp, **options).problems()
    for fragment in says:
        assert fragment in problem
    assert "; nearest valid: " in problem


@pytest.mark.parametrize("partition", [None, "parameters", "flops"])
def test_a_way_to_balance_is_no_fault_without_a_pipeline(partition: str | None) -> None:
    config = PipelineConfig(degree=1, partition=partition)
    assert config.problems() == []
    module = Net(Looks(), Looks())
    alone = ModulePlan(module, Degrees(pp=1), config)
    assert alone.problems() == []
    assert alone.estimated_items == ()


class Uneven(Small):
    """Items that differ, one of which cannot be run without values."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        self.net = PipelineSequential(layers=[wide, nn.Linear(4, 4), nn.Linear(4, 4), Looks(4)])


def held_items() -> tuple[list[list[int]], list[str]]:
    """Items of this rank in three runs of one step, and what was warned of."""
    rank = int(os.environ["RANK"])
    configs = [
        PipelineConfig(degree=2, partition="flops", sequence_length=1),
        PipelineConfig(degree=2, schedule="interleaved", partition="t|t|t|t", stages_per_rank=2),
        PipelineConfig(degree=2, partition="flops", sequence_length=1),
    ]
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for config, make in zip(configs, (Small, Small, Uneven), strict=True):
            module = make()
            layout = {"pp": config, "gather_at_end": False}
            make_trainer(layout, 2, max_steps=1).fit(module, loader())
            items = enumerate(module.net.items())
            found.append([i for i, item in items if not isinstance(item, RemoteItem)])
    texts = [str(w.message) for w in caught if "could not be counted" in str(w.message)]
    assert rank == 0 or not texts
    return found, texts


def test_ranks_hold_what_the_plan_says(pool: WorkerPool) -> None:
    (second, texts), (first, _) = pool.run(2, held_items)  # rank 0 holds the last stage
    assert first == [[0, 1], [0, 2], [0]]
    assert second == [[2, 3], [1, 3], [1, 2, 3]]
    (text,) = texts
    assert "layers.3." in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("flops", "flops"),
        ("parameters", "parameters"),
        ("[1, 2, 3]", [1, 2, 3]),
        ("Et*3|(tt|)*29,m|L", "Et*3|(tt|)*29,m|L"),
        ("(t|)*3L", "(t|)*3L"),
    ],
)
def test_the_command_line(given: str, expected: Any, tmp_path: Path) -> None:
    prefix = "--trainer.strategy"
    args = [f"{prefix}=lightning_megatron.MegatronStrategy", f"{prefix}.pp.degree=2"]
    args += [f"{prefix}.pp.partition={given}", f"{prefix}.pp.sequence_length=64"]
    parsed = parser().parse_args(args)
    file = tmp_path / "config.yaml"
    file.write_text(parser().dump(parsed))
    for again in (parsed, parser().parse_path(str(file))):
        config = PipelineConfig(**vars(again.trainer.strategy.init_args.pp))
        assert config == PipelineConfig(degree=2, partition=expected, sequence_length=64)
        assert MegatronStrategy(pp=config).options.pp == config


def parser() -> LightningArgumentParser:
    made = LightningArgumentParser(exit_on_error=False)
    made.add_lightning_class_args(pl.Trainer, "trainer")
    return made
