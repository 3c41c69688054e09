import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lightning_megatron.checkpoint.chunks import Chunk, model_chunks, parameter_names
from lightning_megatron.checkpoint.collective_io import Layout, load_directory, save_directory
from lightning_megatron.checkpoint.optimizer_state import capture_optimizer
from lightning_megatron.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step.ckpt"


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def train(module, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 3, dtype=next(module.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def save(path, module, *optimizers):
    chunks, names = model_chunks(module), parameter_names(module)
    save_directory(
        path, chunks, {}, optimizers=[capture_optimizer(o, names, chunks) for o in optimizers]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: AdamW(p, lr=0.1),
        lambda p: Adam(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: AdamW(p, lr=0.1, fused=True),
        lambda p: Adafactor(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    ],
    ids=["sgd", "adamw", "amsgrad", "fused", "adafactor", "adagrad", "nadam", "asgd", "rprop"],
)
def test_run_goes_on_bit_for_bit(path, make):
    module = net()
    optimizer = make(module.parameters())
    train(module, optimizer)
    save(path, module, optimizer)
    train(module, optimizer)
    other = net()
    resumed = make(other.parameters())
    load_directory(path, other, [resumed])
    train(other, resumed)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_options_of_the_checkpoint_win_but_for_how_a_step_is_computed(path):
    module = net()
    optimizer = AdamW(module.parameters(), lr=0.1, betas=(0.5, 0.6), foreach=True)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    train(module, optimizer)
    save(path, module, optimizer)
    lr = torch.tensor(0.9)
    resumed = AdamW(module.parameters(), lr=lr, fused=True)
    load_directory(path, module, [resumed])
    group = resumed.param_groups[0]
    assert group["lr"] is lr
    assert lr.item() == pytest.approx(0.1)
    assert (group["betas"], group["initial_lr"]) == ((0.5, 0.6), 0.3)
    assert (group["fused"], group["foreach"]) == (True, None)


def test_groups_are_found_by_names_not_positions(path):
    module = net()
    optimizer = SGD(
        [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters()}], lr=0.2
    )
    save(path, module, optimizer)
    swapped = SGD(
        [
            {"params": [module[1].bias]},
            {"params": module[0].parameters()},
            {"params": [module[1].weight]},
        ],
        lr=0.9,
    )
    load_directory(path, module, [swapped])
    assert [g["lr"] for g in swapped.param_groups] == [0.2, 0.1, 0.2]


def test_group_that_unites_different_options_is_refused(path):
    module = net()
    groups = [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[1].parameters()}]
    save(path, module, SGD(groups, lr=0.2))
    with pytest.raises(ConfigError, match=r"lr=0\.1 for '0\.weight' but 0\.2 for '1\.weight'"):
        load_directory(path, module, [SGD(module.parameters(), lr=0.3)])


def test_parameter_that_no_saved_optimizer_had_is_named(path):
    module = net()
    save(path, module, SGD(module[0].parameters(), lr=0.2))
    with pytest.raises(ConfigError, match=r"no options are stored for 1\.weight, 1\.bias"):
        load_directory(path, module, [SGD(module.parameters(), lr=0.3)])


def test_number_of_optimizers_must_agree(path):
    module = net()
    save(path, module, SGD(module[0].parameters()), SGD(module[1].parameters()))
    with pytest.raises(ConfigError, match=r"holds 2 optimizers, the module has 1"):
        load_directory(path, module, [SGD(module.parameters())])


def test_views_of_the_parameters_are_named_by_the_caller(path):
    module = net()
    views = {p.detach(): name for p, name in parameter_names(module).items()}
    optimizer = SGD(views, lr=0.1, momentum=0.9)
    for view in views:
        view.grad = torch.ones_like(view)
    optimizer.step()
    chunks = model_chunks(module)
    snapshot = capture_optimizer(optimizer, views, chunks)
    save_directory(path, chunks, {}, optimizers=[snapshot])
    resumed = SGD(views, lr=0.1, momentum=0.9)
    load_directory(path, module, [resumed], layout=Layout(names=views))
    assert all(torch.equal(s["momentum_buffer"], p.grad) for p, s in resumed.state.items())
    with pytest.raises(ConfigError, match="no parameter of the module"):
        capture_optimizer(optimizer, parameter_names(module), chunks)


class Counting(Optimizer):
    """Keeps a plain number and a list per parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].update(count=self.state[p].get("count", 0) + 1, seen=[1, 2])


def test_state_that_is_no_tensor_comes_back(path):
    module = net()
    optimizer = Counting(module.parameters())
    optimizer.step()
    save(path, module, optimizer)
    resumed = Counting(module.parameters())
    load_directory(path, module, [resumed])
    assert resumed.state[module[1].bias] == {"count": 1, "seen": [1, 2]}


def test_state_bound_to_the_layout_is_refused():
    module = nn.Linear(3, 4, bias=False)
    optimizer = Adafactor(module.parameters(), lr=0.1)
    module(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    half = Chunk(tensor=module.weight.detach(), full_shape=(8, 3), offsets=(4, 0))
    with pytest.raises(
        ConfigError, match=r"Adafactor state 'row_var' of 'weight' has shape \(4, 1\)"
    ):
        capture_optimizer(optimizer, parameter_names(module), {"weight": half})


@pytest.mark.parametrize(("saved", "resumed"), [("float32", "bfloat16"), ("float32", "float64")])
def test_moments_follow_the_precision_of_the_parameters(path, saved, resumed):
    module = net(getattr(torch, saved))
    optimizer = AdamW(module.parameters())
    train(module, optimizer)
    save(path, module, optimizer)
    other = net(getattr(torch, resumed))
    going_on = AdamW(other.parameters())
    load_directory(path, other, [going_on])
    state = going_on.state[other[0].weight]
    assert state["exp_avg"].dtype == getattr(torch, resumed)
    assert state["step"].dtype == torch.float32
    train(other, going_on)
