"""Options of a router, and what is wrong with them; arithmetic only.

Scores of experts come from logits ``x W^T``, one for each token and expert. Each token goes to the
``top_k`` experts with the highest scores, ties to the lowest index.

===========================================  ==================================================
as in                                        options
===========================================  ==================================================
Mixtral, Qwen3-MoE                           the defaults: softmax, of the chosen ones
Qwen3-MoE with ``norm_topk_prob=False``      ``normalize=False``
Switch Transformer                           ``top_k=1``, ``normalize=False, balance="batch"``
DeepSeek-V3                                  ``score="sigmoid", groups=8, top_groups=4,
                                             scale=2.5, bias_update=0.001``,
                                             ``balance_weight=0.0001``
===========================================  ==================================================

Without anything that spreads tokens a few experts get them all: those learn, and score higher
still. Two things counter it. A *balance loss* is least when all experts are used equally:

    E / k * sum_e (share of the choices' tokens that went to e) * (mean score of e)

with the scores of a token divided by their sum; 1 if all are used equally, whatever E and k. A
*bias* of the choice is moved after each optimizer step and has no gradient, so it does not pull at
what the network learns.

Both are defined by whole sequences or whole optimizer steps, never by what a rank or a microbatch
happens to hold, so a layout does not change what is learned. The exception says so: ``"batch"``.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from lightning_megatron.errors import at_least, holds, switches, whole_numbers
from lightning_megatron.topology.degrees import nearest_divisors

Score = Literal["softmax", "sigmoid"]
"""Functions that make scores of logits."""
Balance = Literal["sequence", "batch", "none"]
"""Sets of tokens within which experts are to be used equally."""
Drop = Literal["probability", "position"]
"""Orders in which an expert fills its capacity."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router of a mixture of experts: how experts are chosen, weighed and kept in balance."""

    score: Score = "softmax"
    """``softmax`` over the experts (Mixtral, Qwen3), or ``sigmoid`` of each logit alone
    (DeepSeek-V3)."""
    normalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    groups: int = 1
    """Number of groups into which experts are divided, neighbours together; a token's experts come
    from `top_groups` of them."""
    top_groups: int = 1
    """Number of groups that a token may use: those whose two highest scores add up to most."""
    scale: float = 1.0
    """Factor of the weights."""
    bias_update: float = 0.0
    """Step by which, after each optimizer step, the bias of an expert with fewer tokens than the
    mean rises, and that of one with more falls (arXiv 2408.15664). The bias counts in the choice
    and not in the weights. 0: no bias."""
    balance: Balance = "sequence"
    """Set of tokens of the balance loss: each ``sequence`` (arXiv 2412.19437, section 2.1.2);
    ``batch``, the microbatches that all ranks compute at once (arXiv 2101.03961; Hugging Face's is
    ``top_k`` times this one), which depends on the number of microbatches; or ``none``."""
    balance_weight: float = 0.01
    """Factor of the balance loss."""
    z_loss: float = 0.0
    """Factor of the squared logarithm of the sum of exponentials of a token's logits (arXiv
    2202.08906), a mean over the tokens that are balanced together: of a sequence, or a batch."""
    noise: float = 0.0
    """Standard deviation of normal noise on the logits in training, of which everything else
    follows; numbers depend on the layout, like those of dropout."""
    capacity_factor: float | None = None
    """In training each expert takes at most ``ceil(capacity_factor * top_k * T / num_experts)`` of
    the ``T`` tokens of a sequence that count. What it drops has no output of this expert, and the
    token's other weights stay. None: nothing is dropped, as in evaluation."""
    drop: Drop = "probability"
    """Which choices an expert beyond its capacity drops: those of the lowest weight, which looks at
    later tokens, or the last in the sequence (``position``), which does not."""
    inject: bool = True
    """Whether auxiliary losses reach the gradient by themselves, under `MegatronStrategy` with the
    factor of the main loss, whatever the layout; under manual optimization each
    ``manual_backward`` adds their mean. Without the strategy their factor is 1: where batches are
    accumulated or the loss is scaled, set this to False. Then ``auxiliary_loss(module)`` returns
    their sum for ``training_step`` to add."""

    def problems(self, num_experts: int, top_k: int) -> list[str]:
        """Faults of the options, for a router of that many experts.

        >>> RouterConfig(groups=3).problems(8, 2)
        ['router: groups=3, num_experts=8: groups must divide the experts; nearest valid: groups=2 or 4']
        """  # noqa: E501 (the doctest shows the whole sentence)
        found = whole_numbers(1, num_experts=num_experts, top_k=top_k)
        found += [f"router: {problem}" for problem in self._own_problems()]
        if found:
            return found
        if top_k > num_experts:
            found.append(
                f"top_k={top_k}, num_experts={num_experts}: a token has at most all experts; "
                f"nearest valid: top_k={num_experts}"
            )
        if top_k == 1 < num_experts and self.normalize:
            found.append(
                "top_k=1, router.normalize=True: the weight of a single expert would be 1 whatever "
                "its score, so the router would not learn; nearest valid: normalize=False, or "
                "top_k=2"
            )
        return found + self._group_problems(num_experts, top_k)

    def _own_problems(self) -> list[str]:
        found = []
        for name, kind in (("score", Score), ("balance", Balance), ("drop", Drop)):
            value, valid = getattr(self, name), get_args(kind)
            if value not in valid:
                found.append(
                    f"{name}={value!r}: must be {', '.join(valid[:-1])} or {valid[-1]}; nearest "
                    f"valid: {name}={(get_close_matches(str(value), valid) or valid)[0]!r}"
                )
        found += whole_numbers(1, groups=self.groups, top_groups=self.top_groups)
        found += switches(normalize=self.normalize, inject=self.inject)
        found += at_least(
            0.0,
            bias_update=self.bias_update,
            balance_weight=self.balance_weight,
            z_loss=self.z_loss,
            noise=self.noise,
        )
        above = {"scale": self.scale, "capacity_factor": self.capacity_factor}
        for name, number in above.items():
            if number is not None and not holds(lambda value: 0 < value < math.inf, number):
                found.append(f"{name}={number!r}: must be above 0; nearest valid: {name}=1.0")
        return found

    def _group_problems(self, num_experts: int, top_k: int) -> list[str]:
        groups, used = self.groups, self.top_groups
        if num_experts % groups:
            valid = " or ".join(str(d) for d in nearest_divisors(num_experts, groups))
            return [
                f"router: groups={groups}, num_experts={num_experts}: groups must divide the "
                f"experts; nearest valid: groups={valid}"
            ]
        if used > groups:
            return [
                f"router: top_groups={used}, groups={groups}: a token uses at most all groups; "
                f"nearest valid: top_groups={groups}"
            ]
        size = num_experts // groups
        if used * size < top_k <= num_experts:
            return [
                f"router: top_groups={used}, groups={groups}, num_experts={num_experts}, "
                f"top_k={top_k}: {used} groups hold {used * size} experts, fewer than a token has; "
                f"nearest valid: top_groups={-(-top_k // size)}"
            ]
        return []
