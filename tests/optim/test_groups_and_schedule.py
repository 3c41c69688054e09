import json

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.groups import decay_groups
from lightning_megatron.optim.schedule import WarmupCosine, warmup_cosine


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


def test_state_is_plain_numbers_and_resumes():
    def scheduler(total):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        return optimizer, warmup_cosine(
            optimizer, warmup_steps=2, total_steps=total, min_lr_ratio=0.1
        )

    optimizer, schedule = scheduler(10)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[10] == pytest.approx(0.2)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    other, resumed = scheduler(99)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert resumed.get_last_lr() == schedule.get_last_lr()
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.2)


def test_wrong_numbers():
    with pytest.raises(ConfigError) as error:
        WarmupCosine(-1, 0, 2.0)
    assert len(error.value.problems) == 3
