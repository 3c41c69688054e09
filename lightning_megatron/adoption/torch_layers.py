"""Layers of torch as parallel layers, in place: attention, transformer layers.

``nn.MultiheadAttention`` multiplies by one matrix ``[q; k; v]`` and calls one function of torch
with its weights. Split, each rank has its heads' rows of all three, and runs attention on its
heads; parameters keep their names and, as a whole, their shapes.

``nn.TransformerEncoderLayer`` hands its weights to one fused kernel in evaluation, and
``nn.TransformerEncoder`` leaves padded positions out there. Split, they take the way of training,
and padded positions get what the kernel returns for them: zeros before the last norm.

Legend: b batch, s query positions, t key positions, n heads of this rank, d head dim.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.adoption.classes import become, own_class
from lightning_megatron.adoption.column_input import entered, linear_of_gathered
from lightning_megatron.adoption.embedding import as_embedding, looks_up_plainly
from lightning_megatron.adoption.linear import LinearSplit, as_linear
from lightning_megatron.comm.functional import copy_to, gather_from, reduce_from, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees, divisibility_problem
from lightning_megatron.topology.mesh import Topology

M = TypeVar("M", bound=nn.Module)


class AdoptedMultiheadAttention(ParallelLayer, nn.MultiheadAttention):
    """Class in front of an ``nn.MultiheadAttention`` whose heads are split over tp.

    Arguments and results are those of torch, whole on every rank. Dropout draws other numbers on
    each rank, for its heads.
    """

    @override
    def shard_dims(self) -> dict[str, int]:
        rows = ("in_proj_weight", "in_proj_bias", *_SEPARATE)
        return {**dict.fromkeys(rows, 0), "bias_k": 2, "bias_v": 2}

    @override
    def segments(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("in_proj_weight", "in_proj_bias"), (self.embed_dim,) * 3)

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        problem = divisibility_problem("num_heads", self.num_heads, "tp", degrees.tp)
        return [problem] if problem else []

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill ``full`` as ``nn.MultiheadAttention`` does."""
        if name == "in_proj_bias":
            nn.init.zeros_(full)
        elif name in ("bias_k", "bias_v"):
            nn.init.xavier_normal_(full, generator=generator)
        else:
            nn.init.xavier_uniform_(full, generator=generator)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            found: tuple[Tensor, Tensor | None] = own_class(self).forward(
                self,
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
            return found
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched, first = query.dim() == 3, self.batch_first or query.dim() == 2
        q_bsnd, k_btnd, v_btnd = self._heads(query, key, value, topology.tp)
        by_rule = is_causal and key_padding_mask is None and not need_weights
        mask = None if by_rule else _merged(attn_mask, key_padding_mask, q_bsnd, topology.tp)
        if mask is not None and mask.shape[-1] < k_btnd.shape[1]:  # for the biases, see _heads
            mask = F.pad(mask, (0, k_btnd.shape[1] - mask.shape[-1]))
        x, weights = self._attend(q_bsnd, k_btnd, v_btnd, mask, by_rule, need_weights)
        x = x.flatten(2) if first else x.flatten(2).transpose(0, 1)
        out: Tensor = self.out_proj(x if batched else x.squeeze(0))
        if weights is None:
            return out, None
        if average_attn_weights:
            weights = reduce_from(weights.sum(1), topology.tp) / self.num_heads
        else:
            weights = gather_from(weights, topology.tp, 1)
        return out, weights if batched else weights.squeeze(0)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, tp: Axis) -> list[Tensor]:
        """Queries, keys and values of this rank's heads; the biases of keys are further ones."""
        fused, bias = self._parameters["in_proj_weight"], self._parameters["in_proj_bias"]
        if fused is not None and query is key and key is value:
            made = list(linear_of_gathered(entered(query, tp), fused, bias, None).chunk(3, -1))
        else:
            biases: Any = [None] * 3 if bias is None else bias.chunk(3)
            weights: Any = [self._parameters[name] for name in _SEPARATE]
            if fused is not None:
                weights = fused.chunk(3)
            given = zip((query, key, value), weights, biases, strict=True)
            made = [linear_of_gathered(entered(x, tp), w, b, None) for x, w, b in given]
        found = []
        for y in made:
            if y.dim() == 2:
                y = y.unsqueeze(0)
            elif not self.batch_first:
                y = y.transpose(0, 1)
            found.append(y.unflatten(2, (-1, self.head_dim)))  # type: ignore[no-untyped-call]
        for place, further in ((1, self.bias_k), (2, self.bias_v)):
            heads = found[place]
            if further is not None:
                row = further.view(1, 1, -1, self.head_dim).expand(heads.shape[0], -1, -1, -1)
                heads = torch.cat([heads, row], 1)
            if self.add_zero_attn:
                heads = F.pad(heads, (0, 0, 0, 0, 0, 1))
            found[place] = heads
        return found

    def _attend(
        self,
        q_bsnd: Tensor,
        k_btnd: Tensor,
        v_btnd: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[b, s, n, d]`` and, if needed, weights ``[b, n, s, t]`` of this rank's heads."""
        q, k, v = (x.transpose(1, 2) for x in (q_bsnd, k_btnd, v_btnd))
        p = self.dropout if self.training else 0.0
        with random_stream(self.topology, sharded=p > 0):
            if not need_weights:
                x = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal)
                return x.transpose(1, 2), None
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, p) if p > 0 else weights
        return (weights @ v).transpose(1, 2), weights


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of an ``nn.MultiheadAttention`` whose keys and values have sizes of their own."""


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q_bsnd: Tensor, tp: Axis
) -> Tensor | None:
    """Numbers to add to the scores ``[b, n, s, t]`` of this rank's heads."""
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask, q_bsnd.dtype)
        if mask.dim() == 3:  # one for each sample and head
            mask = split_to(mask.view(q_bsnd.shape[0], -1, *mask.shape[1:]), tp, 1)
        elif mask.requires_grad:
            mask = copy_to(mask, tp)
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q_bsnd.dtype)
        if padding.requires_grad:
            padding = copy_to(padding, tp)
        padding = padding.view(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers to add to scores; of a mask of bools, minus infinity where it is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


class AdoptedEncoderLayer(ParallelLayer, nn.TransformerEncoderLayer):
    """Class in front of an ``nn.TransformerEncoderLayer`` whose parts are split.

    The kernel that computes the layer as one in evaluation would take its weights for whole.
    """

    _kernel: int | None = None

    @override
    def distribute(self, topology: Topology) -> None:
        super().distribute(topology)
        self.__dict__.setdefault("_kernel", self.activation_relu_or_gelu)
        # What the layer asks for it: which activation the kernel is to compute; 0: none it knows.
        self.activation_relu_or_gelu = 0 if topology.tp.size > 1 else self._kernel or 0

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self.activation_relu_or_gelu = self.__dict__.pop("_kernel", self.activation_relu_or_gelu)


class AdoptedEncoder(nn.TransformerEncoder):
    """Class in front of an ``nn.TransformerEncoder`` whose layers are split, or are items.

    In evaluation it leaves out padded positions where torch would, without looking into its layers.
    """

    @override
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        nests, run = self.use_nested_tensor, own_class(self).forward
        if not nests or not any(map(_is_divided, self.layers)):
            whole: Tensor = run(self, src, mask, src_key_padding_mask, is_causal)
            return whole
        self.use_nested_tensor = False
        try:
            out: Tensor = run(self, src, mask, src_key_padding_mask, is_causal)
        finally:
            self.use_nested_tensor = nests
        norm = self.norm
        if isinstance(norm, RemoteItem) or not self._leaves_out(src, mask, src_key_padding_mask):
            return out
        assert src_key_padding_mask is not None
        padded = src_key_padding_mask.unsqueeze(-1)
        if src_key_padding_mask.dtype != torch.bool:
            padded = padded.isinf()
        zero = torch.zeros_like(out[:1, :1])
        # Not a call of the norm: hooks, and a pipeline, count those.
        return torch.where(
            padded, zero if norm is None else own_class(norm).forward(norm, zero), out
        )

    def _leaves_out(self, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
        """Whether torch leaves out padded positions."""
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if padding is None or mask is not None or self.training or learns:
            return False
        enabled = self.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()
        if not enabled or src.dim() != 3 or torch.is_autocast_enabled(src.device.type):
            return False
        seen = padding.logical_not() if padding.dtype == torch.bool else padding == 0
        places = torch.arange(seen.shape[1], device=seen.device)
        left_aligned = bool(((places < seen.sum(1, keepdim=True)) == seen).all())
        return left_aligned or not self.mask_check


def _is_divided(layer: nn.Module) -> bool:
    """Whether a layer is on another stage, or split over tp."""
    parts = (m for m in layer.modules() if isinstance(m, ParallelLayer | RemoteItem))
    return any(isinstance(m, RemoteItem) or m.tp_size > 1 for m in parts)


def guard_torch_layers(model: nn.Module, *, pipelined: bool) -> None:
    """Keep layers of torch from reading weights past the modules that hold them.

    Args:
        model: model whose layers have their styles.
        pipelined: whether parts of it may be on other stages.

    Raises:
        ConfigError: the output projection of an ``nn.MultiheadAttention`` is split, and it is not.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, ParallelLayer):
            if isinstance(module.out_proj, ParallelLayer):
                raise ConfigError(
                    f"tp_plan: {name}.out_proj is split, but {name} ({type(module).__name__}) does "
                    f"not call it; nearest valid: 'multihead_attention' for {name}"
                )
            continue
        splits = any(isinstance(m, ParallelLayer) for m in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer) and splits:
            become(module, AdoptedEncoderLayer)
        elif isinstance(module, nn.TransformerEncoder) and (splits or pipelined):
            become(module, AdoptedEncoder)


def _column_embedding(model: nn.Module, name: str) -> None:
    module = _of_class(model, name, nn.Embedding, "embedding_colwise")
    if not looks_up_plainly(module):
        raise ConfigError(
            f"tp_plan: {name} has max_norm, scale_grad_by_freq or sparse, for which style "
            "'embedding_colwise' has no rule; nearest valid: no style for it"
        )
    as_embedding(module, by_rows=False)


def _multihead_attention(model: nn.Module, name: str) -> None:
    module = _of_class(model, name, nn.MultiheadAttention, "multihead_attention")
    become(module, AdoptedMultiheadAttention)
    as_linear(module.out_proj, LinearSplit(placement="row"))


TORCH_STYLES: dict[str, Callable[[nn.Module, str], None]] = {
    "embedding_colwise": _column_embedding,
    "multihead_attention": _multihead_attention,
}
"""Styles of these layers (`adoption.styles`)."""


def _of_class(model: nn.Module, name: str, kind: type[M], style: str) -> M:
    module = model.get_submodule(name)
    if not isinstance(module, kind):
        raise ConfigError(
            f"tp_plan: {name} is a {type(module).__name__}, which style {style!r} cannot split; "
            f"nearest valid: an nn.{kind.__name__}, or no style for it"
        )
    forward = inspect.unwrap(own_class(module).forward)
    if forward is not kind.forward:
        raise ConfigError(
            f"tp_plan: {name} is a {type(module).__name__} with a forward of its own "
            f"({forward.__qualname__}), which style {style!r} would replace; nearest valid: a "
            f"plain nn.{kind.__name__}, or no style for it"
        )
    return module
