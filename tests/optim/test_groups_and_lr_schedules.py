import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.optim import build
from lightning_megatron.optim.build import make_optimizer
from lightning_megatron.optim.layerwise_lr import layerwise_groups
from lightning_megatron.optim.lr_schedules import (
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupStableDecay,
)
from lightning_megatron.optim.param_groups import decay_groups


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    model[0].bias.requires_grad_(False)
    decayed, others = decay_groups(model, 0.1, no_decay=["2.*"])
    assert [p is model[0].weight for p in decayed["params"]] == [True]
    assert len(others["params"]) == 3
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_both_groups_exist_even_when_empty():
    assert [len(g["params"]) for g in decay_groups(nn.LayerNorm(3), 0.1)] == [0, 2]
    torch.optim.AdamW(decay_groups(nn.LayerNorm(3), 0.1))


def test_adamw_takes_one_launch_where_all_parameters_are_on_a_device(monkeypatch):
    def trained():
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = make_optimizer("adamw", model, lr=0.1, weight_decay=0.1, betas=(0.9, 0.99))
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.defaults["fused"], model.weight.detach()

    fused, expected = trained()
    assert not fused
    monkeypatch.setattr(build, "is_cuda", lambda device: True)
    fused, found = trained()
    assert fused
    torch.testing.assert_close(found, expected)


def test_a_resumed_schedule_is_where_it_was_and_ends_where_it_is_told_to():
    def make(total):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        return optimizer, LambdaLR(optimizer, WarmupCosine(2, total, 0.1))

    optimizer, schedule = make(10)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[10] == pytest.approx(0.2)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state["lr_lambdas"] == [{}]
    for total, rate in ((10, 0.2), (22, 1.1)):  # half of the fall to a tenth
        other, resumed = make(total)
        resumed.load_state_dict(state)
        assert resumed.get_last_lr() == schedule.get_last_lr()
        other.step()
        resumed.step()
        assert other.param_groups[0]["lr"] == pytest.approx(rate)


def test_checkpoints_that_hold_the_numbers_of_a_rule_are_read():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = LambdaLR(optimizer, WarmupCosine(2, 22, 0.1))
    numbers = {"warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1}
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 11, "lr_lambdas": [numbers]})
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(1.1)]


def test_wrong_numbers():
    with pytest.raises(ConfigError) as error:
        WarmupCosine(-1, 0, 2.0)
    assert len(error.value.problems) == 3


def test_the_plateau_is_gone_on_from_with_another_end():
    def make(rule):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        return optimizer, LambdaLR(optimizer, rule)

    optimizer, schedule = make(WarmupStableDecay(2, 4, 10, 0.1, "sqrt"))
    for _ in range(8):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(2.0 * (0.1 + 0.9 * (1 - 0.5**0.5)))]
    other, resumed = make(WarmupStableDecay(1, 1, 99))
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == [2.0]  # on the plateau again


def test_wrong_schedules():
    with pytest.raises(ConfigError, match="nearest valid: decay_steps=8"):
        WarmupStableDecay(2, 9, 10)
    with pytest.raises(ConfigError, match="shape='cubic'"):
        WarmupStableDecay(2, 1, 10, shape="cubic")
    with pytest.raises(ConfigError, match="warmup_steps=0: must be a number of at least 1"):
        WarmupInverseSqrt(0)


def test_depth_is_counted_in_the_whole_network():
    def rates(kept):
        torch.manual_seed(0)
        layers = [nn.Linear(2, 2) for _ in range(3)]
        trunk = PipelineSequential(
            embedding=nn.Embedding(4, 2), layers=layers, head=nn.Linear(2, 4, bias=False)
        )
        module = nn.ModuleDict({"trunk": trunk})
        if kept is not None:
            trunk.keep([range(2), range(2, 5)], [kept])
        groups = layerwise_groups(
            module, trunk.get_submodule("layers"), lr=1.0, decay=0.5, weight_decay=0.1
        )
        names = {p: name for name, p in module.named_parameters()}
        found = {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
        assert len(found) == len(names)
        return [(g["lr"], g["weight_decay"]) for g in groups], found

    groups, whole = rates(None)
    assert whole["trunk.embedding.weight"] == (1 / 16, 0.1)
    assert whole["trunk.layers.0.weight"] == (1 / 8, 0.1)
    assert whole["trunk.layers.2.bias"] == (1 / 2, 0.0)
    assert whole["trunk.head.weight"] == (1.0, 0.1)
    (first_groups, first), (second_groups, second) = rates(0), rates(1)
    assert first_groups == second_groups == groups
    assert {**first, **second} == whole
    assert not first.keys() & second.keys()
    with pytest.raises(ConfigError, match="decay=0.0: must lie in"):
        layerwise_groups(nn.Linear(1, 1), [], lr=1.0, decay=0.0)
