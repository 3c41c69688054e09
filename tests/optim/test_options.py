"""Bad arguments of optimizers, schedules, rules and precisions: all told at once, with remedies."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import (
    ActivationConfig,
    CompileConfig,
    ConfigError,
    Fp8Precision,
    Fp16Precision,
    GradientMonitor,
    ShardingConfig,
)
from lightning_megatron.errors import raise_if_any
from lightning_megatron.optim.adafactor import Adafactor
from lightning_megatron.optim.adamw import AdamW
from lightning_megatron.optim.build import make_lr_schedule, make_optimizer
from lightning_megatron.optim.clip import PercentileClip, UnitClip, ZScoreClip
from lightning_megatron.optim.layerwise_lr import layerwise_groups
from lightning_megatron.optim.lion import Lion
from lightning_megatron.optim.lr_schedules import WarmupStableDecay
from lightning_megatron.optim.muon import Muon
from lightning_megatron.optim.param_groups import decay_groups, muon_groups

NET = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
NAN = math.nan


def params() -> Any:
    return list(NET.parameters())


def make(kind: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(*arguments, **options)


def problems_of(config: Any, compiled: CompileConfig | None = None) -> Callable[[], None]:
    problems = config.problems(NET)
    return lambda: raise_if_any(
        problems + (compiled.problems(config, NET) if compiled is not None else [])
    )


NUMBERS = {"lr": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.9)}
CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a scale that never grows": (
        make(Fp16Precision, math.inf, "2", NAN, 1.5),
        ("initial_scale=inf", "growth_factor='2'", "backoff_factor=nan", "growth_interval=1"),
    ),
    "characters as patterns": (
        make(Fp8Precision, keep_first=0.5, history="x", include="*.head", exclude="*.mlp"),
        ("keep_first=0.5", "history=1", "include=['*.head']", "exclude=['*.mlp']"),
    ),
    "no numbers": (
        make(AdamW, params(), "1", (NAN, None), state_dtype="int4"),
        ("lr='1'", "betas[0]=nan", "betas[1]=0.99", "state_dtype='int4'"),
    ),
    "lion": (make(Lion, params(), -1.0, (1.0, -1.0)), ("lr=0.0", "betas[0]=0.99", "betas[1]=0.0")),
    "muon": (
        make(Muon, params(), -1.0, scale="max", ns_steps=2.5, ns_dtype=torch.int8),
        ("lr=0.0", "ns_steps=2", "'spectral'", "ns_dtype=torch.bfloat16"),
    ),
    "adafactor": (make(Adafactor, params(), 1.0, 1.0, d=0.5), ("beta2_decay=1.0", "d=1.0")),
    "plateau": (
        make(WarmupStableDecay, -1, 5, 0, 2.0),
        ("warmup_steps=0", "total_steps=1", "nearest valid: min_lr_ratio=1.0"),
    ),
    "percentile": (make(PercentileClip, NAN, 0), ("percentile=0.0", "window=1")),
    "score": (make(ZScoreClip, -1.0, 1.0, 0.5), ("z=0.0", "beta=0.99", "warmup=1")),
    "unit": (
        make(UnitClip, ratio=0.0, eps=-1.0, exclude="*head*"),
        ("ratio=0.01", "eps=0.001", "exclude=['*head*']"),
    ),
    "groups": (make(decay_groups, NET, -1.0, no_decay="*"), ("weight_decay=0.0", "no_decay=['*']")),
    "groups of muon": (make(muon_groups, NET, -1.0, adamw="*head*"), ("adamw=['*head*']",)),
    "groups by depth": (
        make(layerwise_groups, NET, list(NET), lr=-1.0, decay=2.0, as_input="*head*"),
        ("lr=0.0", "decay=1.0", "as_input=['*head*']"),
    ),
    "an optimizer by name": (make(make_optimizer, "adan", NET, **NUMBERS), ("'adamw'",)),
    "a schedule by name": (
        make(make_lr_schedule, "cos", None, warmup_steps=0, total_steps=1.0, min_lr_ratio=0.0),
        ("'cosine'",),
    ),
    "watching": (
        make(GradientMonitor, 1.0, "stop", 0),
        ("every=1", "'keep'", "clip=PercentileClip()"),
    ),
    "no such mode, and more": (
        problems_of(ActivationConfig(recompute="ful", every=0, group=0, offload_min_bytes=-1)),
        ("'full'", "every=1", "group=1", "offload_min_bytes=0"),
    ),
    "everything for adaptive": (
        problems_of(
            ActivationConfig(
                recompute="adaptive",
                every=2,
                group=2,
                keep=["mat"],
                limit_gib="1",  # type: ignore[arg-type]
                limit_fraction=1.5,
                distribute_inputs=True,
                offload=True,
            ),
            CompileConfig(scope="model", backend="x"),
        ),
        (
            "activations.keep=['mat']",
            "'inductor'",
            "blocks inside of one graph are not measured",
            "it chooses the blocks itself",
            "limit_gib='1', limit_fraction=1.5: one number",
            "limit_fraction=1.0",
            "distribute_inputs=False",
            "does not count towards the limit",
            "compile.scope='model', activations.recompute='adaptive'",
            "group=1",
            "group=1, or group without them",
        ),
    ),
    "a string of blocks": (
        problems_of(ActivationConfig(recompute="full", blocks="Linear")),  # type: ignore[arg-type]
        ("blocks=['Linear']",),
    ),
    "a string of units": (
        problems_of(ShardingConfig(stage=3, wrap="Linear")),
        ("wrap=['Linear']",),
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", CASES)
def test_one_error_tells_of_everything(case: str) -> None:
    call, words = CASES[case]
    with pytest.raises(ConfigError) as caught:
        call()
    told = caught.value.problems
    assert all(any(word in problem for problem in told) for word in words), told
    assert all("nearest valid" in problem for problem in told)
    assert len(told) >= len(words)
