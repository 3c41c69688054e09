"""Adopted models write what the unmodified ones write, under every layout."""

import functools
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import StaticCache

from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.launch import store_barrier
from lightning_megatron.testing import WorkerError
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble
from tests.adoption.sequence_cases import name_of_cache

WAYS: Mapping[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "use_cache": True},
    "without cache": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20, "use_cache": True},
    "static": {"do_sample": False, "cache_implementation": "static", "use_cache": True},
    "timed": {"do_sample": False, "max_time": 1.0},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "use_cache": True},
}


def prompts(share: int = 0) -> list[dict[str, Tensor]]:
    """Prompts of other lengths, padded on the left; those of data-parallel ranks differ."""
    rows, length = 4 - share, 7 - 2 * share
    tokens = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(5))
    found = []
    for number, row in enumerate(tokens):
        mask = torch.arange(length) >= number % 3
        found.append({"input_ids": row.masked_fill(~mask, 0), "attention_mask": mask.long()})
    return found


class Writing(L.LightningModule):
    """Writes in every place where a user may."""

    def __init__(self, model: torch.nn.Module, ways: tuple[str, ...], share: int) -> None:
        super().__init__()
        self.lm = model
        self._ways = ways
        self._share = share
        self.written: dict[str, list[list[int]]] = {}

    def write(self, place: str, batch: dict[str, Tensor]) -> None:
        for way in self._ways if place == "step" else self._ways[:1]:
            torch.manual_seed(11)
            length = 5 - 2 * self._share  # some have finished before others
            tokens = self.lm.generate(
                **batch, max_new_tokens=length, pad_token_id=0, eos_token_id=9, **WAYS[way]
            )
            self.written.setdefault(f"{place} {way}", []).extend(tokens.tolist())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        translates = self.lm.config.is_encoder_decoder
        given = {"decoder_input_ids": batch["input_ids"]} if translates else {}
        logits = self.lm(**batch, **given).logits
        self.write("step", batch)
        return logits

    def setup(self, stage: str) -> None:
        self._share = getattr(self.trainer.strategy, "data_parallel_rank", self._share)

    def on_predict_epoch_end(self) -> None:
        self.write("hook", next(iter(self.predict_dataloader())))

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(prompts(self._share), batch_size=4)


@functools.cache
def expected(family: str, ways: tuple[str, ...], share: int) -> Any:
    """What the unmodified model writes."""
    return written(family, None, ways, share=share)


def written(
    family: str,
    layout: dict[str, Any] | None,
    ways: tuple[str, ...],
    world: int = 1,
    share: int = 0,
) -> Any:
    """What the model writes on this rank, its predictions, and its share of the prompts."""
    model, strategy = FAMILIES[family].build(), "auto"
    if layout is not None:
        model, strategy = adopt(model), MegatronStrategy(**layout)
    module = Writing(model, ways, share)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with KeepDouble():
        predictions = trainer.predict(module)
        module.write("afterwards", next(iter(module.predict_dataloader())))
    return module.written, torch.cat(predictions), module._share


LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "tp4": (4, {"tp": 4}),
    "ep2 pp2": (4, {"ep": 2, "pp": 2}),
    "cp2": (2, {"cp": 2}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3}),
    "zero3": (2, {"zero": 3}),
    "zbv": (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}),
}


ALL = tuple(way for way in WAYS if way not in ("static", "timed"))
SOME = [
    ("llama", "tp2 sp", ("greedy", "sampled")),
    ("llama", "pp2 zero3", ("greedy",)),
    ("llama", "zero3", ("sampled", "without cache")),
    ("llama", "cp2", ("greedy", "without cache")),
    ("mistral", "zbv", ("greedy", "beams")),
    ("qwen3", "tp2", ALL),
    ("t5", "pp2", ("beams",)),
]
"""Every axis with every way."""
MORE = [
    *(("llama", layout) for layout in ("tp2 pp2 sp", "pp2 zero3", "zero3", "cp2 pp2")),
    *(("mistral", "zbv"), ("qwen3", "tp4"), ("t5", "tp2 pp2")),
    *(("llama", layout) for layout in ("tp2", "pp2", "cp2")),
    *((family, "pp2 zero3") for family in ("t5", "gemma3")),
    *((family, "ep2 pp2") for family in ("mixtral", "qwen3 moe")),
    *((name, "tp2 pp2") for name in ("gemma2", "gemma3", "gpt2", "phi3", "olmo2", "gpt_neox")),
]


@pytest.mark.parametrize(
    ("family", "layout", "ways"),
    [*SOME, *(pytest.param(*pair, ALL, marks=pytest.mark.thorough) for pair in MORE)],
)
def test_adopted_model_writes_as_the_unmodified_one(pool, family, layout, ways):
    world, options = LAYOUTS[layout]
    for found, own, share in pool.run(world, written, family, options, ways, world):
        texts, predictions, _ = expected(family, ways, share)
        assert found == texts
        assert torch.allclose(own, predictions, rtol=0, atol=1e-9)


class Alone(Writing):
    """Writes where not all ranks come by."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.write("step", batch)


class Training(Writing):
    """Writes in a step of the training."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.write("step", batch)
        return self.lm(**batch, labels=batch["input_ids"]).loss

    def train_dataloader(self) -> DataLoader:
        return self.predict_dataloader()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Given(Writing):
    """Gives a cache of a fixed size."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        cache = StaticCache(config=self.lm.config, max_cache_len=16)
        self.lm.generate(**batch, max_new_tokens=2, **{name_of_cache(): cache})


def refused(kind: type[Writing], layout: dict[str, Any], ways: tuple[str, ...]) -> None:
    """Write where it cannot be."""
    if kind is Alone:
        store_barrier.PATIENCE_S = 0.5  # for ranks that never come; others may be late
    module = kind(adopt(FAMILIES["llama"].build()), ways, 0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(**layout),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        (trainer.fit if kind is Training else trainer.predict)(module)
    finally:
        store_barrier.PATIENCE_S = 120.0


@pytest.mark.parametrize(
    ("kind", "layout", "way", "words"),
    [
        (Alone, {"tp": 2}, "greedy", r"on ranks 0 of 2 alone.*is_global_zero"),
        (Training, {"pp": 2}, "greedy", "stages work on different microbatches"),
        (Writing, {"pp": 2}, "static", "cache_implementation='static'.*'dynamic'"),
        (Given, {"pp": 2}, "", r"a given StaticCache.*a DynamicCache"),
        (Writing, {"tp": 2}, "timed", r"max_time=1\.0.*by its own clock"),
    ],
)
def test_what_cannot_be_written_is_said(pool, kind, layout, way, words):
    with pytest.raises(WorkerError, match=words):
        pool.run(2, refused, kind, layout, (way,), grace=1.0)  # peers only wait
