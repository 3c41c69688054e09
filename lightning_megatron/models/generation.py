"""Text generation: one token after the other, chosen from the logits of the tokens before it.

The prompt goes through the network once, then every new token alone, with the keys and values of
all tokens before it from a cache (`layers.kv_cache`). Prompts of different lengths are padded on
the left, so that all of them end at the same position; no position attends to padding.

Under tp every rank runs its part of the network on the same tokens, the logits of the last position
are gathered, and all ranks use the first rank's choice. Under pp each token goes along the stages,
and the logits of its last position to all of them (`pipeline.relay`). Under cp, and with sequence
parallelism, every rank works on whole sequences, all of them on the same: a single new token cannot
be split. Under ep the ranks of all
experts write together, each its own prompts, as many tokens each. Generation is for looking at
a model while it trains and for checking an export; to serve a model, export it
(`checkpoint.offline.huggingface.export_model`).

Legend: b batch, s length of the prompt, v vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.layers.attention_call import window_mask
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import whole


def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    is_token: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue prompts.

    Under a strategy all ranks call it together; those of one tp, pp or cp group with the same
    arguments. With ZeRO 1 to 3 the call belongs in a step (``validation_step``), where the
    parameters are there. With pp it may stand in a step of an evaluation or in a hook.

    Args:
        model: `Transformer` or `LanguageModel`, or a module with their ``trunk`` and ``config``.
        tokens: prompts ``[b, s]``.
        max_new_tokens: largest number of tokens to add.
        temperature: divisor of the logits before a token is drawn; 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from.
        top_p: probability of the smallest set of likeliest tokens to draw from (Holtzman et al.,
            arXiv 1904.09751).
        stop_token: token that ends a prompt, which is then filled up with it.
        is_token: mask ``[b, s]``, False where a prompt is padded on the left; all True when None.
        generator: generator of the random numbers.

    Returns:
        The prompts with the new tokens, ``[b, s + n]``, where ``n`` is ``max_new_tokens`` or less
        if all are finished.

    Raises:
        ConfigError: an option is out of range, or the layout is one that cannot generate.

    Example:
        >>> from lightning_megatron.models import Transformer
        >>> model = Transformer(TransformerConfig.preset("tiny", num_layers=1))
        >>> generate(model, torch.zeros(1, 3, dtype=torch.long), 4).shape
        torch.Size([1, 7])
    """
    choice = _Choice(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    network = _Network(model)
    raise_if_any([*choice.problems(), *network.problems(tokens, max_new_tokens, is_token)])
    seen = torch.ones_like(tokens, dtype=torch.bool) if is_token is None else is_token
    finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    cache = KeyValueCache(tokens.shape[1] + max_new_tokens)
    fresh = tokens
    with torch.no_grad(), _evaluating(model, network.trunk), network.writing():
        for _ in range(max_new_tokens):
            logits_bv = network.next_logits(fresh, seen, cache)
            chosen = network.agree(choice.of(logits_bv))
            if stop_token is not None:
                chosen = chosen.masked_fill(finished, stop_token)
                finished = finished | (chosen == stop_token)
            fresh = chosen.unsqueeze(1)
            tokens = torch.cat((tokens, fresh), dim=1)
            seen = torch.cat((seen, torch.ones_like(fresh, dtype=torch.bool)), dim=1)
            if stop_token is not None and network.all_ranks(bool(finished.all())):
                break
    return tokens


class _Network:
    """Model as this rank holds it."""

    def __init__(self, model: nn.Module) -> None:
        trunk, config = getattr(model, "trunk", None), getattr(model, "config", None)
        if not isinstance(trunk, PipelineSequential) or not isinstance(config, TransformerConfig):
            raise ConfigError(
                f"model={type(model).__name__}: generate() takes a Transformer, a LanguageModel or "
                "a module with their trunk and config (after configure_model)"
            )
        self.trunk = trunk
        self.config = config
        layers = (m for m in trunk.modules() if isinstance(m, ParallelLayer))
        self._topology: Topology | None = next((m.topology for m in layers), None)
        if trunk.relay is not None:  # a stage may be without layers
            self._topology = trunk.relay.topology

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which no layer splits sequences, and stages send their last position alone."""
        topology = self._topology
        self.trunk.stand_aside()
        self.trunk.__dict__["relays"] = _last_position
        try:
            with nullcontext() if topology is None else topology.whole_sequences():
                yield
        finally:
            del self.trunk.__dict__["relays"]

    def problems(self, tokens: Tensor, max_new_tokens: int, is_token: Tensor | None) -> list[str]:
        """Reasons why the model cannot continue these prompts."""
        problems = []
        if max_new_tokens < 1:
            problems.append(
                f"max_new_tokens={max_new_tokens}: must be at least 1; "
                "nearest valid: max_new_tokens=1"
            )
        if tokens.dim() != 2 or not tokens.numel():
            problems.append(f"tokens of shape {tuple(tokens.shape)}: must be [batch, length]")
        elif is_token is not None:
            if is_token.shape != tokens.shape or is_token.dtype != torch.bool:
                problems.append("is_token: must be a bool tensor of the shape of tokens")
            elif not bool(is_token[:, -1].all()) or bool(
                (~is_token[:, 1:] & is_token[:, :-1]).any()
            ):
                problems.append("is_token: padding must be on the left, before every token")
        longest, length = self.config.max_seq_len, tokens.shape[-1] + max_new_tokens
        if self.config.positions == "learned" and length > longest:
            problems.append(
                f"{tokens.shape[-1]} tokens and max_new_tokens={max_new_tokens}: the model has "
                f"{longest} positions; nearest valid: max_new_tokens="
                f"{max(longest - tokens.shape[-1], 0)}"
            )
        if self._is_sharded():
            problems.append(
                "zero=3: outside of a step the parameters are sharded; nearest valid: a call "
                "in validation_step or predict_step, or load_transformer in one process"
            )
        return problems

    def _is_sharded(self) -> bool:
        """Whether parameters are sharded and no call of the trunk gathers them."""
        return any(
            isinstance(parameter, DTensor)
            for run in self.trunk.stage_items
            if not isinstance(run, FSDPModule)
            for item in run.items
            if not isinstance(item, FSDPModule)
            for parameter in item.parameters()
        )

    def next_logits(self, fresh: Tensor, seen: Tensor, cache: KeyValueCache) -> Tensor:
        """Compute the logits ``[b, v]`` after the last token.

        Args:
            fresh: new tokens ``[b, n]``.
            seen: mask ``[b, length]`` of all tokens so far, False for padding.
            cache: keys and values of the tokens before.
        """
        new, length = fresh.shape[1], seen.shape[1]
        window = self.config.sliding_window
        before = window_mask(length, window, fresh.device)[length - new :]
        mask = before & seen[:, None, None, :]
        if new == length:  # what is padding sees itself, as a softmax over nothing is no number
            mask = mask | torch.eye(length, dtype=torch.bool, device=fresh.device)
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, length - new :]
        experts = {}
        if self.config.experts is not None and new > 1:  # padding goes to no expert
            experts["token_mask"] = seen
        logits = self.trunk(fresh, positions=positions, mask=mask, cache=cache, **experts)[:, -1]
        found: Tensor = whole(logits)[:, : self.config.num_tokens]
        return found

    def agree(self, chosen: Tensor) -> Tensor:
        """Return the choice of the first pp, tp and cp rank."""
        topology = self._topology
        for axis in () if topology is None else (topology.pp, topology.tp, topology.cp):
            if axis.group is not None:
                chosen = chosen.contiguous()
                dist.broadcast(chosen, axis.ranks[0], group=axis.group)
        return chosen

    def all_ranks(self, value: bool) -> bool:
        """Whether ``value`` is true on all ranks over which ZeRO divides: they run in step."""
        topology = self._topology
        if topology is None:
            return value
        return Peers.over(topology.loss).vote(value, topology.device, all=True)


def _last_position(logits: Tensor) -> Tensor:
    return logits[:, -1:]


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Rule by which a token is chosen."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def problems(self) -> list[str]:
        """Problems of the options."""
        problems = []
        if self.temperature < 0:
            problems.append(
                f"temperature={self.temperature}: must not be negative; "
                "nearest valid: temperature=0.0"
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k={self.top_k}: must be at least 1; nearest valid: top_k=1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: must lie in (0, 1]; nearest valid: top_p=1.0")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            problems.append(
                "top_k, top_p with temperature=0: nothing is drawn; nearest valid: temperature=1.0"
            )
        return problems

    def of(self, logits_bv: Tensor) -> Tensor:
        """Choose one token for each row, ``[b]``."""
        if self.temperature == 0:
            return logits_bv.argmax(-1)
        scaled_bv = logits_bv.to(torch.promote_types(logits_bv.dtype, torch.float32))
        probabilities_bv = self._limited(scaled_bv / self.temperature).softmax(-1)
        return torch.multinomial(probabilities_bv, 1, generator=self.generator).squeeze(1)

    def _limited(self, logits_bv: Tensor) -> Tensor:
        if self.top_k is not None and self.top_k < logits_bv.shape[-1]:
            smallest = logits_bv.topk(self.top_k, dim=-1).values[:, -1:]
            logits_bv = logits_bv.masked_fill(logits_bv < smallest, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            sorted_bv, order = logits_bv.sort(dim=-1, descending=True)
            before = sorted_bv.softmax(-1).cumsum(-1) - sorted_bv.softmax(-1)
            dropped = torch.zeros_like(before, dtype=torch.bool)
            dropped.scatter_(-1, order, before >= self.top_p)
            logits_bv = logits_bv.masked_fill(dropped, -torch.inf)
        return logits_bv


@contextmanager
def _evaluating(model: nn.Module, trunk: PipelineSequential) -> Iterator[None]:
    """Context without dropout; afterwards every module is back in its mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for run in trunk.stage_items:
            run.training = trunk.training
