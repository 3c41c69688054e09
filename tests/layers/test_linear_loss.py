"""Head and loss in one, against the head and the loss one after the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from tests.layers.parity import (
    close,
    distribute,
    finished_gradient,
    local_part,
    make_topology,
    piece,
)

HIDDEN, VOCAB = 6, 16
OPTIONS = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.3},
    {"ignore_index": 3, "reduction": "sum"},
    {"reduction": "none", "z_loss": 0.1},
]


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB - 4, (2, 8), generator=generator)
    targets[0, :3] = -100
    return x, targets


def _compare(options, bias=False, topology=None, num_tokens=None, chunk_size=3):
    """Against `ColumnParallelLinear` and `VocabParallelCrossEntropy` in one process."""
    x, targets = _data()
    if options.get("ignore_index") == 3:
        targets = targets.masked_fill(targets == -100, 3)
    if num_tokens is not None:
        targets = targets.where(targets < num_tokens, -100)
    torch.manual_seed(0)
    head = LinearCrossEntropy(
        HIDDEN, VOCAB, bias, chunk_size=chunk_size, num_tokens=num_tokens, **options
    ).double()
    plain = nn.Linear(HIDDEN, VOCAB, bias).double()
    plain.load_state_dict(head.state_dict())
    whole = x.clone().requires_grad_()
    logits = plain(whole)[..., : num_tokens or VOCAB]
    expected = VocabParallelCrossEntropy(**options)(logits, targets)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(upstream)
    mine = x
    if topology is not None:
        distribute(head, topology)
        mine = piece(x, "residual", topology)
    mine = mine.clone().requires_grad_()
    found = head(mine, targets)
    close("loss", found, expected)
    found.backward(upstream)
    if topology is None:
        close("gradient of x", mine.grad, whole.grad)
        for name, parameter in head.named_parameters():
            close(name, parameter.grad, plain.get_parameter(name).grad)
        return
    close("gradient of x", mine.grad, piece(whole.grad, "residual", topology))
    for name, parameter in head.named_parameters():
        grad = finished_gradient(head, name, parameter, topology)
        expected_grad = plain.get_parameter(name).grad
        close(name, grad, local_part(head, name, expected_grad, parameter))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_equals_head_and_loss(options, chunk_size):
    _compare(options, bias=True, chunk_size=chunk_size)


def test_padding_is_never_predicted():
    _compare({"z_loss": 0.1}, bias=True, num_tokens=13)
    head = LinearCrossEntropy(HIDDEN, VOCAB, num_tokens=13)
    assert head(torch.randn(1, HIDDEN)).softmax(-1)[0, 13:].eq(0).all()


def _run_split(tp, sequence):
    topology = make_topology(tp, sequence)
    for options in OPTIONS:
        _compare(options, bias=True, topology=topology)
    _compare({}, topology=topology, num_tokens=7)  # of some ranks every column is padding
    return _logits_agree(topology)


def _logits_agree(topology):
    x, _ = _data()
    torch.manual_seed(0)
    head = distribute(LinearCrossEntropy(HIDDEN, VOCAB).double(), topology)
    torch.manual_seed(0)
    plain = distribute(ColumnParallelLinear(HIDDEN, VOCAB, False).double(), topology)
    mine = piece(x, "residual", topology)
    return torch.equal(head(mine), plain(mine))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_split_over_tp(pool, tp, sequence):
    assert all(pool.run(tp, _run_split, tp, sequence))


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def _largest(chunk_size):
    head = LinearCrossEntropy(8, 512, chunk_size=chunk_size)
    x, targets = torch.randn(256, 8, requires_grad=True), torch.randint(0, 512, (256,))
    with _Largest() as largest:
        head(x, targets).backward()
    return largest.numel


def test_no_tensor_is_larger_than_the_logits_of_a_chunk():
    assert _largest(256) == 256 * 512
    assert _largest(16) == 16 * 512


def test_low_precision_adds_up_in_float32():
    torch.manual_seed(0)
    head = LinearCrossEntropy(32, 64, chunk_size=16)
    x, targets = torch.randn(512, 32), torch.randint(0, 64, (512,))
    errors = []
    loss = F.cross_entropy(F.linear(x, head.weight), targets)
    (exact,) = torch.autograd.grad(loss, head.weight)
    for chunk_size in (512, 16):
        head.chunk_size = chunk_size
        with torch.autocast("cpu", torch.bfloat16):
            found = head(x, targets)
        assert found.dtype == torch.float32
        (grad,) = torch.autograd.grad(found, head.weight)
        errors.append(((grad - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.1 * errors[0] < 0.01


def test_evaluation_keeps_nothing():
    head = LinearCrossEntropy(HIDDEN, VOCAB)
    x, targets = _data()
    with torch.no_grad():
        assert not head(x.float(), targets).requires_grad


def test_target_outside():
    head = LinearCrossEntropy(HIDDEN, VOCAB, num_tokens=3)
    with pytest.raises(IndexError, match="out of bounds for 3"):
        head(torch.randn(1, HIDDEN), torch.tensor([3]))


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 0},
        {"num_tokens": 17},
        {"label_smoothing": 2.0},
        {"label_smoothing": 0.1, "num_tokens": 15},
    ],
    ids=str,
)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        LinearCrossEntropy(HIDDEN, VOCAB, **options)
