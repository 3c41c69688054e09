"""Items that mix positions are refused by name when their trunk is first called under cp."""

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import (
    DecoderBlock,
    GatherContext,
    SplitContext,
    VocabParallelEmbedding,
)
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.parallel.context_check.check import ContextCheck
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_part import Place
from lightning_megatron.whole.context_tensor import context_tensor
from tests.parallel.context_check import strangers
from tests.parallel.context_check.strangers import MIXING, ORDINARY, WIDTH, Applies

TOKENS = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(0))


def check_of(*items: nn.Module) -> ContextCheck:
    context: Any = SimpleNamespace(is_active=True, cp=SimpleNamespace(size=2))
    trunk = PipelineSequential(*items)
    return ContextCheck(trunk, "trunk", [], context, torch.device("cpu"))


def embedding() -> nn.Module:
    return VocabParallelEmbedding(32, WIDTH)


def refusal(*items: nn.Module, args: Any = (TOKENS,), **kwargs: Any) -> str:
    """What the check says of items behind an embedding; empty if it finds nothing."""
    try:
        check_of(embedding(), *items)(args, kwargs)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("made", "call"), MIXING.values(), ids=MIXING)
def test_what_mixes_is_refused_with_its_call_and_line(
    made: Callable[[Tensor], Any] | type[nn.Module], call: str
) -> None:
    item = made() if isinstance(made, type) else Applies(made)
    text = refusal(nn.Linear(WIDTH, WIDTH), item)
    start = f"cp=2: trunk.2 ({type(item).__name__}) does not act on each position by itself: {call}"
    assert text.startswith(start)
    if call != "it":
        assert re.search(re.escape(strangers.__file__) + r":\d+\) mixes positions", text)
    for way in ("GatherContext() before it and SplitContext() after it", "ContextAttention"):
        assert way in text
    assert "outside of the PipelineSequential" in text


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_items_pass(make: Callable[[], nn.Module]) -> None:
    assert refusal(make()) == ""


def test_losses_left_for_the_step_are_refused() -> None:
    text = refusal(strangers.Left())
    assert text.startswith("cp=2: trunk.1 (Left) leaves a tensor in balance that depends on which")


class Masked(nn.Module):
    def __init__(self, cut: nn.Module) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.cut(mask).unsqueeze(-1)


def test_a_whole_keyword_that_meets_a_part_is_refused() -> None:
    mask = torch.ones(4, 12, dtype=torch.bool)
    text = refusal(Masked(nn.Identity()), mask=mask)
    assert text.startswith("cp=2: trunk.1 (Masked) does not run on a part of the sequence: Runtime")
    assert "test_check.py:" in text
    assert "nearest valid: SplitContext() on a tensor of the whole sequence" in text
    assert refusal(Masked(SplitContext()), mask=mask) == ""


def test_an_output_whose_sequence_nobody_finds_is_refused() -> None:
    assert "returns the sequence in dim 2" in refusal(Applies(lambda x: x.mT))
    assert "returns the sequence in dim 0" in refusal(Applies(lambda x: x.flatten(0, 1)))
    assert refusal(Applies(lambda x: x.mT), Turns()) == ""


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this device")


def test_what_cannot_be_tried_is_refused_unless_its_author_says_so() -> None:
    text = refusal(Fails())
    assert text.startswith("cp=2: trunk.1 (Fails) could not be tried on a short sequence")
    assert "RuntimeError: no kernel for this device" in text
    assert "exchanges_context = True in the class" in text


def test_what_cannot_be_compared_is_refused() -> None:
    text = refusal(Applies(lambda x: SimpleNamespace(x=x)))
    assert "could not be tried" in text
    assert "it returns a SimpleNamespace" in text


def test_evaluation_may_come_first() -> None:
    mask = torch.ones(4, 12)
    with torch.inference_mode():
        assert refusal(strangers.Block(), Masked(SplitContext()), mask=mask.clone()) == ""
        assert "torch.Tensor.flip" in refusal(Applies(lambda x: x.flip(1)))


def test_number_formats_of_the_run_do_not_matter() -> None:
    items = [embedding().bfloat16(), strangers.Experts().bfloat16(), strangers.Own().bfloat16()]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            check_of(*items)((TOKENS,), {})
            assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_stay_as_they_are() -> None:
    mask = torch.ones(4, 12)
    assert refusal(Masked(Applied(SplitContext())), mask=mask) == ""
    assert bool((mask == 1).all())


class Applied(nn.Module):
    def __init__(self, cut: nn.Module) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, mask: Tensor) -> Tensor:
        return self.cut(mask.zero_())


class Mean(nn.Module):
    exchanges_context = True

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_the_word_of_an_author_counts() -> None:
    assert refusal(Mean(), nn.Linear(WIDTH, WIDTH)) == ""
    assert "trunk.2 (Applies)" in refusal(Mean(), Applies(lambda x: x.cumsum(1)))


def test_before_the_split_and_between_join_and_split_sequences_are_whole() -> None:
    mean = Applies(lambda x: x + x.mean(1, keepdim=True))
    assert refusal(GatherContext(), mean, SplitContext(), nn.Linear(WIDTH, WIDTH)) == ""
    assert "trunk.3 (Applies)" in refusal(GatherContext(), SplitContext(), mean)
    frames = torch.randn(4, 12, WIDTH)
    check_of(mean, SplitContext(), nn.Linear(WIDTH, WIDTH))((frames,), {})
    with pytest.raises(ConfigError, match=r"trunk\.2 \(Applies\)"):
        check_of(nn.Identity(), SplitContext(), mean)((frames,), {})


def test_items_behind_an_embedding_of_a_transformer_are_on_parts() -> None:
    network = Transformer(TransformerConfig.preset("tiny", hidden_size=WIDTH))
    items = [*network.trunk.items()][:2]
    check_of(*items)((TOKENS,), {})
    with pytest.raises(ConfigError, match=r"trunk\.2 .* torch\.Tensor\.flip \("):
        check_of(*items, Applies(lambda x: x.flip(1)))((TOKENS,), {})


class CutsItself(nn.Module):
    exchanges_context = True

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cut = nn.Embedding(32, WIDTH), SplitContext()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(self.cut(tokens))


def test_modules_that_know_cp_may_split() -> None:
    check_of(CutsItself(), nn.Linear(WIDTH, WIDTH))((TOKENS,), {})
    with pytest.raises(ConfigError, match=r"trunk\.1 .* torch\.Tensor\.flip \("):
        check_of(CutsItself(), Applies(lambda x: x.flip(1)))((TOKENS,), {})


class Conditioned(nn.Module):
    """Scales by features of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return x * self.scale(style)[:, None]


def test_features_may_be_as_many_as_positions() -> None:
    assert refusal(Conditioned(), style=torch.randn(4, 12)) == ""


class TwoEnds(nn.Module):
    """Embeds what is to be read and what is to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(32, WIDTH)

    def forward(self, tokens: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), self.table(source)


class Decodes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.function = DecoderBlock(WIDTH, 2), function

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, memory = pair
        return self.block(x, self.function(memory)), memory


def test_two_sequences_travel_together() -> None:
    source = TOKENS[:, :7]
    check_of(TwoEnds(), Decodes(nn.Identity()))((TOKENS,), {"source": source})
    with pytest.raises(ConfigError, match=r"trunk\.1 \(Decodes\) .* torch\.Tensor\.flip"):
        check_of(TwoEnds(), Decodes(lambda x: x.flip(1)))((TOKENS,), {"source": source})


def test_a_trunk_may_get_the_parts_of_another() -> None:
    axis: Any = SimpleNamespace(rank=0, size=2)
    place = Place(ContextLayout(12, 2), axis, 0, 12)
    given = context_tensor(torch.randn(4, 6, WIDTH), place)
    check_of(nn.Linear(WIDTH, WIDTH))((given,), {})
    with pytest.raises(ConfigError, match=r"trunk\.0 .* torch\.Tensor\.flip"):
        check_of(Applies(lambda x: x.flip(1)))((given,), {})


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cut = nn.Conv2d(3, WIDTH, 4, 4), SplitContext()

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(self.patches(images).flatten(2).mT)


def test_sequences_may_be_made_of_images() -> None:
    images = torch.randn(4, 3, 16, 12)
    check_of(Patches(), nn.Linear(WIDTH, WIDTH))((images,), {})
    with pytest.raises(ConfigError, match=r"trunk\.1 .* torch\.Tensor\.flip \("):
        check_of(Patches(), Applies(lambda x: x.flip(1)))((images,), {})


def test_nothing_is_disturbed_and_each_kind_of_call_is_tried_once() -> None:
    seen: list[int] = []
    item = Applies(lambda x: seen.append(x.shape[1]) or x)
    item.register_forward_hook(lambda *_: seen.append(0))
    check = check_of(embedding(), item, *[strangers.Block() for _ in range(2)])
    before = torch.get_rng_state(), random.getstate()
    check((TOKENS,), {})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert seen == [40, 24]
    check((TOKENS[:2],), {})
    assert seen == [40, 24]
    check._trunk.eval()
    check((TOKENS,), {})
    assert seen == [40, 24, 40, 24]


def test_large_weights_take_no_memory() -> None:
    with torch.device("meta"):
        wide = nn.Sequential(nn.Linear(WIDTH, 1 << 14), nn.GELU(), nn.Linear(1 << 14, 1 << 14))
        end = nn.Linear(1 << 14, WIDTH)
    assert refusal(wide, end) == ""
    text = refusal(wide, Rolls(), end)
    assert "trunk.2 (Rolls)" in text


class Rolls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)
