"""Optimizers and learning-rate schedules by name, for modules whose configuration names them.

A name stands for an optimizer with its usual parameter groups: vectors do not decay, and Muon
leaves embeddings and heads to AdamW. A module that needs other groups makes its optimizer itself.
"""

import difflib
import math
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron._torch.devices import is_cuda
from lightning_megatron.errors import raise_if_any
from lightning_megatron.optim.adafactor import Adafactor
from lightning_megatron.optim.adamw import AdamW
from lightning_megatron.optim.lion import Lion
from lightning_megatron.optim.lr_schedules import (
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupStableDecay,
)
from lightning_megatron.optim.muon import Muon
from lightning_megatron.optim.param_groups import decay_groups, muon_groups

OptimizerName = Literal[
    "adamw",
    "adamw-bfloat16",
    "adamw-int8",
    "muon",
    "muon-bfloat16",
    "muon-int8",
    "lion",
    "lion-bfloat16",
    "lion-int8",
    "adafactor",
]
ScheduleName = Literal["cosine", "stable-decay", "inverse-sqrt", "constant"]
FALL = 0.2
"""Share of the steps after the warmup in which ``stable-decay`` falls."""


def name_problems(optimizer: str, schedule: str) -> list[str]:
    """Problems of the names."""
    problems = []
    for what, given, names in (
        ("optimizer", optimizer, get_args(OptimizerName)),
        ("schedule", schedule, get_args(ScheduleName)),
    ):
        if given not in names:
            close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.0)
            problems.append(
                f"{what}={given!r}: must be one of {', '.join(names)}; nearest valid: {close[0]!r}"
            )
    return problems


def make_optimizer(
    name: OptimizerName,
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> Optimizer:
    """Return the optimizer with the given name.

    Args:
        name: name of the optimizer; a suffix is the number format of its state.
        module: module whose parameters are optimized.
        lr: peak learning rate; relative to the size of the weights for ``adafactor``.
        weight_decay: weight decay of matrices.
        betas: betas of ``adamw`` (also beside ``muon``) and ``lion``.

    Raises:
        ConfigError: the name is unknown, or a number is out of range.
    """
    raise_if_any(name_problems(name, "constant"))
    kind, _, suffix = name.partition("-")
    kept: Any = {"state_dtype": suffix} if suffix else {}
    if kind == "muon":
        groups: Any = muon_groups(module, weight_decay)
        return Muon(groups, lr=lr, weight_decay=weight_decay, betas=betas, **kept)
    groups = decay_groups(module, weight_decay)
    if kind == "lion":
        return Lion(groups, lr=lr, betas=betas, **kept)
    if kind == "adafactor":
        return Adafactor(groups, lr=lr)
    if suffix:
        return AdamW(groups, lr=lr, betas=betas, **kept)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_has_fused_step(module))


def _has_fused_step(module: nn.Module) -> bool:
    """Whether one launch steps all parameters; torch's default makes temporaries of their size."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    on_device = all(is_cuda(p.device) and p.is_floating_point() for p in parameters)
    return on_device and bool(parameters)


def make_lr_schedule(
    name: ScheduleName,
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    total_steps: float,
    min_lr_ratio: float,
) -> LambdaLR | None:
    """Return the learning-rate schedule with the given name; its unit is the optimizer step.

    Args:
        name: name of the part that follows the linear warmup.
        optimizer: optimizer whose groups' learning rates are the peaks.
        warmup_steps: number of steps of the warmup.
        total_steps: number of all steps; may be infinite.
        min_lr_ratio: learning rate at the end of ``cosine`` and ``stable-decay``, as a share of the
            peak.

    Returns:
        The schedule; None if the schedule needs an end and the run has none.

    Raises:
        ConfigError: the name is unknown, or a number is out of range.
    """
    raise_if_any(name_problems("adamw", name))
    if name == "inverse-sqrt":
        return LambdaLR(optimizer, WarmupInverseSqrt(max(warmup_steps, 1)))
    if name == "constant":
        return LambdaLR(optimizer, WarmupStableDecay(warmup_steps, 0, _LONG, 1.0))
    if not math.isfinite(total_steps) or total_steps < 1:
        return None
    total = int(total_steps)
    if name == "cosine":
        return LambdaLR(optimizer, WarmupCosine(warmup_steps, total, min_lr_ratio))
    fall = int(FALL * max(total - warmup_steps, 0))
    return LambdaLR(optimizer, WarmupStableDecay(warmup_steps, fall, total, min_lr_ratio))


_LONG = 2**62
