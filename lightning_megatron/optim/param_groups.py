"""Parameter groups: with and without weight decay, for Muon, by depth.

Weight decay pulls matrices towards zero. It only hurts the vectors of a model (norms, biases), so
they do not decay, as in GPT-2 and Llama. A tensor-parallel or ZeRO shard has as many dims as the
whole parameter, so the rule means the same under every layout. Both groups are always there, empty
or not: the optimizer of a pipeline stage without vectors has the same groups as any other.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_megatron.errors import at_least, lists_of_names, raise_if_any


def decay_groups(
    module: nn.Module, weight_decay: float, *, no_decay: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` by whether they decay.

    Args:
        module: module with the parameters; a tied one counts once.
        weight_decay: weight decay of parameters with two dims or more.
        no_decay: patterns of names (as in a shell: ``"*embedding*"``) of parameters that never
            decay.

    Returns:
        Two groups for an optimizer: decayed, not decayed.

    Raises:
        ConfigError: the decay is negative, or a string stands for a list.

    Example:
        >>> [len(g["params"]) for g in decay_groups(nn.Linear(2, 2), 0.1)]
        [1, 1]
    """
    raise_if_any(at_least(0.0, weight_decay=weight_decay) + lists_of_names(no_decay=no_decay))
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


def muon_groups(
    module: nn.Module,
    weight_decay: float,
    *,
    adamw: Sequence[str] = ("*embed*", "*head*"),
    no_decay: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` into those of Muon and those of AdamW.

    Args:
        module: module with the parameters; a tied one counts once, by its first name.
        weight_decay: weight decay of all matrices.
        adamw: patterns of names of matrices that AdamW updates: embeddings and heads, whose rows
            stand for tokens. Parameters of modules called ``...Embedding`` are always among them.
        no_decay: patterns of names of parameters that never decay.

    Returns:
        Three groups: matrices for Muon, among them the stacks of experts; for AdamW those that
        decay, and the rest. Each may be empty.

    Raises:
        ConfigError: the decay is negative, or a string stands for a list.

    Example:
        >>> [len(g["params"]) for g in muon_groups(nn.Linear(2, 2), 0.1)]
        [1, 0, 1]
    """
    problems = at_least(0.0, weight_decay=weight_decay)
    raise_if_any(problems + lists_of_names(adamw=adamw, no_decay=no_decay))
    stacks = {
        id(parameter)
        for child in module.modules()
        if isinstance(names := getattr(child, "stacked", None), frozenset)
        for name, parameter in child.named_parameters(recurse=False)
        if name in names
    }
    embeddings = {
        id(parameter)
        for child in module.modules()
        if type(child).__name__.endswith("Embedding")
        for parameter in child.parameters(recurse=False)
    }
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    decayed, others = decay_groups(module, weight_decay, no_decay=no_decay)
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in decayed["params"]:
        apart = any(fnmatchcase(name_of[id(parameter)], pattern) for pattern in adamw)
        is_matrix = parameter.dim() == 2 or id(parameter) in stacks
        is_muon = is_matrix and not apart and id(parameter) not in embeddings
        (matrices if is_muon else rest).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay, "muon": True, "stacks": bool(stacks)},
        {"params": rest, "weight_decay": weight_decay, "muon": False},
        {**others, "muon": False},
    ]
