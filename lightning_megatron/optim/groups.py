"""Parameter groups with and without weight decay.

Decay pulls matrices towards zero; on the vectors of a model (norms, biases) it only hurts, so they
are left out, as in GPT-2 and Llama. A tensor-parallel or ZeRO shard has as many dims as the whole
parameter, so the rule means the same under every layout. Both groups are always there, empty or
not: the optimizer of a pipeline stage without vectors has the same shape as that of any other.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def decay_groups(
    module: nn.Module, weight_decay: float, *, no_decay: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` by whether they decay.

    Args:
        module: its parameters; a tied one counts once.
        weight_decay: of parameters with two dims or more.
        no_decay: patterns of names (as in a shell: ``"*embedding*"``) that never decay.

    Returns:
        Two groups for an optimizer: decayed, not decayed.

    Example:
        >>> [len(g["params"]) for g in decay_groups(nn.Linear(2, 2), 0.1)]
        [1, 1]
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        exempt = parameter.dim() < 2 or any(fnmatchcase(name, pattern) for pattern in no_decay)
        (others if exempt else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
