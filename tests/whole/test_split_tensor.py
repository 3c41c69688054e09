"""What a column-parallel layer returns gives, under every function, what the whole tensor gives."""

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import CompileConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.compile import compile_parts
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.split_tensor import SplitTensor
from lightning_megatron.whole.splits import own_part, split_of, whole
from tests.layers.parity import close, distribute, make_topology

B, S, H, V = 2, 8, 8, 16
Y = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(7))
MASK = torch.rand(B, S, V, generator=torch.Generator().manual_seed(8)) < 0.3


class Given(nn.Module):
    """Whole tensors that a step has beside the logits; all of them learn."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {
            "per_class": (V,),
            "like": (B, S, V),
            "per_place": (B, S, 1),
            "scalar": (),
            "into": (3, V),
            "from_place": (4, S),
            "of_head": (2,),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))


Function = Callable[[Any, Any], Any]

PARTS: dict[str, Function] = {
    "relu": lambda x, w: torch.relu(x),
    "arithmetic": lambda x, w: (2 * x - 1) / 3 + x**2 - (1 - x),
    "temperature that learns": lambda x, w: x / w.scalar,
    "numbers per class": lambda x, w: x * w.per_class + w.per_class,
    "numbers per place": lambda x, w: w.per_place - x,
    "a tensor of the whole size": lambda x, w: x + w.like,
    "more dims": lambda x, w: x[0] * w.like,
    "silu and gate": lambda x, w: F.silu(x) * torch.sigmoid(x),
    "minus the maximum": lambda x, w: x - x.detach().max(-1, keepdim=True).values,
    "where": lambda x, w: torch.where(MASK, x, w.scalar),
    "masked_fill": lambda x, w: x.masked_fill(MASK, -3.0),
    "clamp": lambda x, w: x.clamp(-0.5, 0.5),
    "lerp": lambda x, w: torch.lerp(x, w.like, 0.3),
    "in place": lambda x, w: x.clone().mul_(2).add_(w.per_class),
    "assigned to": lambda x, w: _assigned(x, (slice(None), slice(1, 3)), w.scalar),
    "numbers assigned": lambda x, w: _assigned(x, (..., slice(3, 9)), -5.0),
    "mask assigned": lambda x, w: _assigned(x, MASK, -5.0),
    "formats": lambda x, w: x.float().double(),
    "detach": lambda x, w: x.detach(),
    "deep copy": lambda x, w: copy.deepcopy(x.detach()),
    "rows": lambda x, w: x[:, 2:4],
    "one row": lambda x, w: x[:, -1],
    "rows by index": lambda x, w: x[torch.tensor([0, 1, 1]), torch.tensor([5, 0, 2])],
    "rows by mask": lambda x, w: x[Y > 7],
    "new dim": lambda x, w: x[:, None, ..., None],
    "flatten": lambda x, w: x.flatten(0, 1),
    "view by the whole size": lambda x, w: x.view(-1, V),
    "view by its size": lambda x, w: x.reshape(-1, x.size(-1)),
    "heads": lambda x, w: x.view(B, S, -1, 4).transpose(1, 2),
    "heads by their number": lambda x, w: x.view(B, S, 4, 4).transpose(1, 2),
    "heads and back": lambda x, w: x.view(B, S, -1, 4).mT.mT.flatten(2) * 2,
    "unflatten": lambda x, w: x.unflatten(-1, (4, 4)),
    "permute": lambda x, w: x.permute(2, 0, 1),
    "squeeze": lambda x, w: x[:1, :1].squeeze(),
    "expand": lambda x, w: x[:1].expand(3, -1, V),
    "chunk of the batch": lambda x, w: x.chunk(2, 0)[1],
    "unbind": lambda x, w: x.unbind(1)[2],
    "cat of the batch": lambda x, w: torch.cat([x, 2 * x]),
    "stack": lambda x, w: torch.stack([x, x + 1], -1),
    "stack in front": lambda x, w: torch.stack([x, x + 1], 1),
    "one place": lambda x, w: x.select(1, 3),
    "places by index": lambda x, w: x.index_select(1, torch.tensor([3, 0])),
    "repeated places": lambda x, w: x.repeat_interleave(torch.tensor([2] * S), 1),
    "iteration": lambda x, w: list(x)[1],
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: F.log_softmax(x, dim=2),
    "softmax along the sequence": lambda x, w: x.softmax(1),
    "relu in place": lambda x, w: F.relu(x * 1, inplace=True),
    "std over the batch": lambda x, w: x.std(0, True),
    "linalg norm over the batch": lambda x, w: torch.linalg.vector_norm(x, dim=0),
    "picked along the sequence": lambda x, w: x.gather(1, MASK[:, :3].long()),
    "mean over the sequence": lambda x, w: x.mean(1),
    "mean over the sequence, kept": lambda x, w: x.mean((0, 1), keepdim=True),
    "maxima over the sequence": lambda x, w: x.max(1).values,
    "sorted along the sequence": lambda x, w: x.sort(1).values,
    "repeated": lambda x, w: x.repeat_interleave(2, -1),
    "times weights, by rows": lambda x, w: w.from_place @ x,
    "weights of the sequence": lambda x, w: F.linear(x.mT, w.from_place),
    "norm of every head": lambda x, w: F.rms_norm(x.view(B, S, -1, 2), (2,), w.of_head),
    "attention by hand": lambda x, w: _attention(x, w),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[_heads(x)] * 3, is_causal=True),
    "numbers like it": lambda x, w: x + _drawn(torch.randn_like, x) + torch.ones_like(x),
    "comparison": lambda x, w: (x == x.max(-1, keepdim=True).values).double(),
    "one hot": lambda x, w: F.one_hot(Y, x.shape[-1]) - x,
}
"""Each rank computes its part of the result."""

WHOLES: dict[str, Function] = {
    "argmax": lambda x, w: x.argmax(-1),
    "argmax, kept": lambda x, w: torch.argmax(x, 2, keepdim=True),
    "argmax of equal numbers": lambda x, w: torch.round(x).argmax(-1),
    "argmin": lambda x, w: x.argmin(dim=-1),
    "accuracy": lambda x, w: (x.argmax(-1) == Y).double().mean(),
    "max": lambda x, w: x.max(-1).values,
    "indices of max": lambda x, w: x.detach().max(-1)[1],
    "max of all": lambda x, w: x.max(),
    "amax": lambda x, w: x.amax((-1, 0)),
    "amax of equal numbers": lambda x, w: torch.relu(x - 3).amax(-1),
    "amin without gradient": lambda x, w: x.detach().amin(-1, keepdim=True),
    "topk": lambda x, w: x.topk(5).values,
    "indices of topk": lambda x, w: x.topk(3, -1).indices,
    "sort": lambda x, w: x.sort(-1, descending=True).values,
    "cumsum": lambda x, w: x.cumsum(-1),
    "sum": lambda x, w: x.sum(-1),
    "sum of all": lambda x, w: x.sum(),
    "mean": lambda x, w: x.mean((0, 2), keepdim=True),
    "mean of all": lambda x, w: torch.mean(x**2),
    "std": lambda x, w: x.std(-1),
    "std of all": lambda x, w: x.std(),
    "norm": lambda x, w: x.norm(dim=-1),
    "norm of all, kept": lambda x, w: x.norm(2.0, keepdim=True),
    "linalg norm": lambda x, w: torch.linalg.vector_norm(x, 3),
    "any": lambda x, w: (x > 0.9).any(-1),
    "logsumexp": lambda x, w: x.logsumexp(-1),
    "entropy": lambda x, w: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "cross entropy": lambda x, w: F.cross_entropy(x.flatten(0, 1), Y.flatten()),
    "cross entropy, ignored": lambda x, w: F.cross_entropy(
        x.view(-1, V), Y.flatten(), ignore_index=3, label_smoothing=0.1, reduction="sum"
    ),
    "cross entropy of images": lambda x, w: F.cross_entropy(x.mT, Y, reduction="none"),
    "cross entropy of weights": lambda x, w: F.cross_entropy(x.mT, Y, weight=w.per_class.detach()),
    "cross entropy of probabilities": lambda x, w: nn.CrossEntropyLoss()(
        x.view(-1, V), w.like.view(-1, V)
    ),
    "nll": lambda x, w: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), Y.flatten()),
    "nll of a softmax": lambda x, w: -x.softmax(-1).log().gather(-1, Y[..., None]).mean(),
    "our loss": lambda x, w: VocabParallelCrossEntropy(z_loss=0.1)(x, Y),
    "our loss, other order": lambda x, w: VocabParallelCrossEntropy()(x.mT.contiguous().mT, Y),
    "one class": lambda x, w: x[..., 3],
    "some classes": lambda x, w: x[..., 2:11],
    "classes by index": lambda x, w: x[:, :, torch.tensor([1, 15])],
    "numbers by mask": lambda x, w: x[MASK],
    "take_along_dim": lambda x, w: torch.take_along_dim(x, Y[..., None], -1),
    "halves": lambda x, w: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "flatten all": lambda x, w: x.flatten(),
    "merged": lambda x, w: x.flatten(1),
    "cat of classes": lambda x, w: torch.cat([x, w.per_place], -1),
    "layer norm": lambda x, w: F.layer_norm(x, (V,), w.per_class),
    "times weights": lambda x, w: x @ w.into.mT,
    "linear": lambda x, w: F.linear(x, w.into),
    "squares": lambda x, w: x @ x.mT,
    "einsum": lambda x, w: torch.einsum("bsv,tv->bst", x, w.into),
    "pooling": lambda x, w: F.max_pool1d(x, 3),
    "padding": lambda x, w: F.pad(x, (1, 2)),
    "lists": lambda x, w: torch.tensor(x.tolist()),
    "numpy": lambda x, w: torch.from_numpy(x.detach().numpy().copy()),
    "item": lambda x, w: torch.tensor(x[0, 0, 9].item()),
    "drawn": lambda x, w: _drawn(lambda p: torch.multinomial(p, 2), x[0].softmax(-1)),
    "added to a whole": lambda x, w: torch.zeros(B, S, V).double().add_(x),
    "moved to a whole": lambda x, w: _assigned(torch.zeros(B, S, V).double(), ..., x),
    "shape": lambda x, w: torch.tensor([*x.shape, x.numel(), len(x), x.size(-1), x.dim()]),
    "bytes": lambda x, w: torch.tensor(x.nbytes),
    "beside nothing": lambda x, w: torch.tensor(operator.eq(x, None)),
}
"""All ranks have the same, whole result."""


def _assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x * 1
    x[index] = value
    return x


def _drawn(draw: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return draw(x)


def _heads(x: Tensor) -> Tensor:
    return x.view(B, S, -1, 4).transpose(1, 2)


def _attention(x: Tensor, w: Given) -> Tensor:
    q = _heads(x)
    scores = (q @ q.mT / 2).masked_fill(torch.ones(S, S).triu(1).bool(), -1e9)
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(B, S, -1)


def _gradients(result: Any, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of a sum that weighs all results differently, by the parameters and the input."""
    found = {}
    if isinstance(result, Tensor) and result.requires_grad:
        result = whole(result)
        weights = torch.linspace(0.5, 2.0, result.numel(), dtype=result.dtype).view(result.shape)
        (result * weights).sum().backward()
    for name, value in [("x", x), *module.named_parameters()]:
        if value.grad is not None:
            found[name] = value.grad.clone()
        value.grad = None
    return found


def _build(topology: Topology | None) -> tuple[nn.ModuleDict, Tensor]:
    torch.manual_seed(0)
    module = nn.ModuleDict({"head": ColumnParallelLinear(H, V), "given": Given()}).double()
    shape = (B, S, H)
    x = torch.randn(shape, dtype=torch.float64)
    if topology is None:
        return module, x.requires_grad_()
    distribute(module["head"], topology)
    if topology.sequence_parallel:
        x = x.chunk(topology.tp.size, 1)[topology.tp.rank].clone()
    return module, x.requires_grad_()


def _compare(name: str, function: Function, topology: Topology, split: bool) -> None:
    plain, x = _build(None)
    expected = function(plain["head"](x), plain["given"])
    gradients = _gradients(expected, plain, x)
    module, x = _build(topology)
    logits = module["head"](x)
    assert isinstance(logits, SplitTensor)
    found = function(logits, module["given"])
    assert (split_of(found) is not None) == split, f"{name}: {type(found)}"
    assert found.shape == expected.shape, f"{name}: {found.shape}, {expected.shape}"
    if split:
        assert own_size(found) * topology.tp.size == found.numel(), name
    close(name, whole(found), expected)
    own = _gradients(found, module, x)
    assert own.keys() == gradients.keys(), name
    for key, value in gradients.items():
        if key.startswith("head."):
            value = value.chunk(topology.tp.size)[topology.tp.rank]
        elif key == "x" and topology.sequence_parallel:
            value = value.chunk(topology.tp.size, 1)[topology.tp.rank]
        close(f"{name}: gradient of {key}", own[key], value)


def own_size(x: Tensor) -> int:
    return own_part(x).numel()


def _run(tp: int, sequence_parallel: bool) -> dict[str, str]:
    topology = make_topology(tp, sequence_parallel)
    failures = {}
    for cases in (PARTS, WHOLES):
        for name, function in cases.items():
            try:
                _compare(name, function, topology, cases is PARTS)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:600]
    return failures


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [(2, True), *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((2, False), (4, True)))],
)
def test_every_function_gives_what_it_gives_of_the_whole(
    pool: WorkerPool, tp: int, sequence_parallel: bool
) -> None:
    for failures in pool.run(tp, _run, tp, sequence_parallel):
        assert failures == {}


ERRORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "pickle": (lambda x: torch.save(x.detach(), io.BytesIO()), "cannot be pickled.*whole"),
    "cumsum_": (
        lambda x: x.clone().cumsum_(-1),
        "cumsum_: changes in place, .*gather_output=True",
    ),
    "data": (lambda x: setattr(x.detach(), "data", torch.zeros(1)), "x.data = y: changes"),
    "classes assigned": (
        lambda x: _assigned(x, (..., slice(0, 2)), torch.zeros(B, S, 2)),
        r"x\[\.\.\.\] = y: changes",
    ),
    "out": (lambda x: torch.cumsum(x, -1, out=x.detach()), "cumsum: changes"),
    "class outside": (lambda x: x.gather(-1, Y[..., None] + 8), "out of bounds for dimension 2"),
    "target outside": (lambda x: F.cross_entropy(x.mT, Y + 8), "Target .* is out of bounds for 16"),
}


def _others(tp: int) -> None:
    topology = make_topology(tp)
    module, x = _build(topology)
    logits = module["head"](x)
    for name, (function, message) in ERRORS.items():
        with pytest.raises((ConfigError, IndexError), match=message):
            print(name, function(logits))
    assert f"shape=(2, 8, 16), part {topology.tp.rank} of 2 along dim 2" in repr(logits)
    assert split_of(copy.deepcopy(logits.detach())) == split_of(logits)
    _check_gradients(module, x)
    _check_dropout(logits, topology)
    _check_row(topology)
    _check_hooks_of_modules(module, x)
    _check_compiled_head(topology)


def _check_gradients(module: nn.ModuleDict, x: Tensor) -> None:
    """Gradients of a split tensor are split, in hooks, attributes and results."""
    upstream = torch.randn(B, S, V, dtype=torch.float64)
    logits = module["head"](x)
    seen: list[Tensor] = []
    logits.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    logits.retain_grad()
    logits.backward(upstream)
    close("in the hook", whole(seen[0]), upstream)
    close("kept", whole(logits.grad), 2 * upstream)
    logits = module["head"](x)
    (found,) = torch.autograd.grad((logits**2).sum(), logits)
    close("of a sum", whole(found), whole(2 * logits))
    (found,) = torch.autograd.grad(logits**2, logits, upstream)
    close("of all", whole(found), whole(2 * logits) * upstream)


def _check_dropout(logits: Tensor, topology: Topology) -> None:
    torch.manual_seed(1)
    dropped = F.dropout(torch.ones_like(logits))
    one, *others = whole(dropped).chunk(topology.tp.size, -1)
    assert not any(torch.equal(one, other) for other in others)
    assert torch.equal(F.dropout(logits, training=False).detach(), logits.detach())


def _check_row(topology: Topology) -> None:
    """A row-parallel layer takes what is split, a part, and what is whole."""
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(H, V).double(), RowParallelLinear(V, H).double()
    x = torch.randn(B, S, H, dtype=torch.float64)
    expected = down(up(x))
    distribute(nn.ModuleList([up, down]), topology)
    y = up(x)
    for given in (y, own_part(y), whole(y), y.mT.contiguous().mT):
        close("row", down(given), expected)
    close("column of a split input", whole(up(up_to(y))), whole(up(whole(up_to(y)))))


def up_to(y: Tensor) -> Tensor:
    return torch.cat([y, -y])[:B].unflatten(-1, (H, 2)).mean(-1)


def _check_hooks_of_modules(module: nn.ModuleDict, x: Tensor) -> None:
    softmax, seen = nn.Softmax(-1), []
    for part in (module["head"], softmax):
        part.register_full_backward_hook(lambda _, into, out: seen.append((into, out)))
    close("softmax", whole(softmax(module["head"](x))), whole(module["head"](x)).softmax(-1))
    softmax(module["head"](x)).sum().backward()
    assert len(seen) == 2


def _check_compiled_head(topology: Topology) -> None:
    """Plain in the graph, split outside of it."""
    trunk = PipelineSequential(norm=nn.Linear(H, H), head=ColumnParallelLinear(H, V)).double()
    x = torch.randn(B, S, H, dtype=torch.float64)
    expected = trunk(x).argmax(-1)
    distribute(trunk.head, topology)
    network = nn.ModuleDict({"trunk": trunk})
    compile_parts(network, CompileConfig(scope="model", backend="eager"), ActivationConfig())
    logits = trunk(x)
    assert isinstance(logits, SplitTensor)
    assert torch.equal(logits.argmax(-1), expected)


def test_what_is_refused_and_what_is_split_too(pool: WorkerPool) -> None:
    pool.run(2, _others, 2)
