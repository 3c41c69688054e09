"""Training of adopted models under a layout, and of the unmodified ones in one process.

Models of transformers compute norms and losses in float32 whatever their weights are. `KeepDouble`
keeps float64 there, on both sides of a comparison, so that layouts can be told from one process to
1e-9.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, gather
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.strategy.preflight.checks import examine
from tests.adoption.families import FAMILIES

_CASTS = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.type}
_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward}


class KeepDouble(TorchFunctionMode):
    """Has a float64 tensor stay so where float32 is asked for.

    It sees every call that torch lets be overridden, thousands in a step: nearly all pass at once.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:  # blocks are recomputed in it
                return _run_backward(*args, **kwargs)
        if func in _CASTS or kwargs.get("dtype") is torch.float32:
            return _as_double(func, args, kwargs)
        return func(*args, **kwargs)


def _as_double(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call with float64 in place of float32 where the first argument is of float64."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.dtype is torch.float64:
        if func is torch.Tensor.float:
            return first
        if func in _CASTS:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
    return func(*args, **kwargs)


def _run_backward(
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **named: Any,
) -> None:
    """Do what ``torch.autograd.backward`` does without another call of the mode."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = named.get("gradient", named.get("grad_tensors", gradients))
    if gradients is None or isinstance(gradients, Tensor):
        gradients = (gradients,) * len(tensors)
    seeds = [
        torch.ones_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)
    ]
    torch.autograd.Variable._execution_engine.run_backward(
        tensors,
        tuple(seeds),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _tokens(seed: int, rows: int = 12, length: int = 12) -> Tensor:
    """Rows for three steps with batches of four."""
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def _causal() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in _tokens(0)]


def _padded() -> list[dict[str, Tensor]]:
    rows = []
    for number, row in enumerate(_tokens(0)):
        mask = torch.arange(len(row)) < len(row) - number % 5
        labels = row.masked_fill(~mask, -100)
        rows.append({"input_ids": row, "labels": labels, "attention_mask": mask.long()})
    return rows


def _right() -> list[dict[str, Tensor]]:
    """Rows padded at their end, with as many labels each."""
    return [{**row, "labels": _last_six(row)} for row in _padded()]


def _left() -> list[dict[str, Tensor]]:
    """Rows padded at their beginning, with as many labels each."""
    rows = [{**row, "attention_mask": row["attention_mask"].flip(0)} for row in _padded()]
    return [{**row, "labels": _last_six(row)} for row in rows]


def _last_six(row: dict[str, Tensor]) -> Tensor:
    """Labels of the last six tokens that are no padding."""
    mask = row["attention_mask"]
    is_last = (mask * (mask.flip(0).cumsum(0).flip(0) <= 6)).bool()
    return row["input_ids"].masked_fill(~is_last, -100)


def _uneven() -> list[dict[str, Tensor]]:
    """Rows of different lengths with as many labels."""
    rows = _padded()
    for row in rows:
        row["labels"] = row["input_ids"].masked_fill(torch.arange(12) >= 8, -100)
    return rows


def _masked() -> list[dict[str, Tensor]]:
    """Padded rows with as many labels each: a mean over samples is then one over tokens."""
    rows = _padded()
    for number, row in enumerate(rows):
        asked = (torch.arange(12) + number) % 3 == 0
        row["labels"] = row["input_ids"].masked_fill(~asked | (torch.arange(12) > 5), -100)
        row["token_type_ids"] = (torch.arange(12) > 5).long()
    return rows


def _hidden() -> list[dict[str, Tensor]]:
    rows = _masked()
    for row in rows:
        del row["token_type_ids"]
    return rows


def _sentences() -> list[dict[str, Tensor]]:
    rows = _masked()
    return [{**row, "next_sentence_label": torch.tensor(i % 2)} for i, row in enumerate(rows)]


def _hidden_pixels() -> list[dict[str, Tensor]]:
    hidden = [torch.tensor([True, False, True, False]), torch.tensor([False, False, True, True])]
    return [
        {"pixel_values": row["pixel_values"], "bool_masked_pos": hidden[i % 2]}
        for i, row in enumerate(_images())
    ]


def _classes() -> list[dict[str, Tensor]]:
    rows = _padded()
    return [{**row, "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)]


def _images() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(0)
    pixels = torch.randn(12, 3, 8, 8, generator=made, dtype=torch.float64)
    return [{"pixel_values": p, "labels": torch.tensor(i % 3)} for i, p in enumerate(pixels)]


def _translation() -> list[dict[str, Tensor]]:
    targets = _tokens(1, length=7)
    targets[::2, 5:] = targets[1::2, :2] = -100
    return [
        {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": labels}
        for row, labels in zip(_padded(), targets, strict=True)
    ]


def _sided() -> list[dict[str, Tensor]]:
    """Rows that are padded on the left or on the right, with eight labels each."""
    rows = []
    for number, batch in enumerate(_causal()):
        tokens, place = batch["input_ids"], torch.arange(12)
        seen = place >= 3 if number % 2 else place < 12 - 3
        counted = place >= 4 if number % 2 else seen
        labels = tokens.masked_fill(~counted, -100)
        rows.append({"input_ids": tokens, "attention_mask": seen.long(), "labels": labels})
    return rows


def _packed() -> list[dict[str, Tensor]]:
    """Rows of several documents, which positions tell apart."""
    rows = []
    for number, batch in enumerate(_causal()):
        cut = 3 + number % 4
        positions = torch.cat([torch.arange(cut), torch.arange(12 - cut)])
        rows.append({**batch, "position_ids": positions})
    return rows


BATCHES: dict[str, Callable[[], list[dict[str, Tensor]]]] = {
    "causal": _causal,
    "padded": _padded,
    "right": _right,
    "left": _left,
    "masked": _masked,
    "classes": _classes,
    "hidden": _hidden,
    "hidden pixels": _hidden_pixels,
    "sentences": _sentences,
    "images": _images,
    "translation": _translation,
    "uneven": _uneven,
    "sided": _sided,
    "packed": _packed,
}


class Training(L.LightningModule):
    """Plain step of a model of transformers.

    Args:
        model: the model.
        batch: kind of the batches.
        copies: number of data-parallel ranks, which share batches of four.
    """

    def __init__(self, model: torch.nn.Module, batch: str, copies: int = 1) -> None:
        super().__init__()
        self.lm = model
        self._batch = batch
        self._copies = copies

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.lm(**batch)
        self.log("loss", out.loss)
        return out.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learns = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(learns, lr=1e-3, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(BATCHES[self._batch](), batch_size=4 // self._copies)


def fit(module: L.LightningModule, strategy: Any, devices: int, **options: Any) -> L.Trainer:
    """Train a module for one epoch."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        **options,
    )
    trainer.fit(module)
    return trainer


@functools.cache
def reference(
    family: str, batch: str | None = None, attention: str | None = None, **changes: Any
) -> dict[str, Tensor]:
    """Weights of the unmodified model after training by plain Lightning in this process."""
    kind = FAMILIES[family]
    module = Training(kind.build(attention, **changes), batch or kind.batch)
    with KeepDouble():
        fit(module, "auto", 1)
    return module.state_dict()


def job(
    family: str,
    layout: dict[str, Any],
    world: int,
    batch: str | None = None,
    attention: str | None = None,
    **changes: Any,
) -> Any:
    """Train the adopted model on this rank of a layout; returns whole weights on rank 0."""
    kind = FAMILIES[family]
    others = math.prod(_degree(layout.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    model = adopt(kind.build(attention, **changes))
    module = Training(model, batch or kind.batch, world // others)
    with KeepDouble():
        trainer = fit(module, MegatronStrategy(**layout), world)
    weights = gather(module)
    return weights if trainer.global_rank == 0 else None


def problems(family: str, layout: dict[str, Any], world: int) -> str:
    """What a run of the adopted model would be refused for, before its processes connect."""
    kind = FAMILIES[family]
    return problems_of(Training(adopt(kind.build()), kind.batch), layout, world)


def problems_of(module: L.LightningModule, layout: dict[str, Any], world: int) -> str:
    """What a run of a module would be refused for."""
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    found = examine(trainer, module, MegatronStrategy(**layout).options, world)
    return "\n".join(found.problems)


def _degree(option: Any) -> int:
    return int(getattr(option, "degree", option))


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a weight; the names must be the same."""
    assert found.keys() == expected.keys()
    return max(float((found[k] - v).abs().max()) for k, v in expected.items())
