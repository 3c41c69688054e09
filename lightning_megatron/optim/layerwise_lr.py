"""Learning rates that depend on a layer's depth.

Layer-wise decay (Bao et al., BEiT, arXiv 2106.08254; Clark et al., ELECTRA, arXiv 2003.10555) gives
the layer next to the output the full rate and every layer below it ``decay`` times that of the one
above. Depth is counted in the whole network: a pipeline stage holds placeholders for the items of
other stages, so that all ranks count alike. All ranks have all groups, empty or not.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_megatron.errors import at_least, holds, lists_of_names, raise_if_any
from lightning_megatron.optim.param_groups import decay_groups


def layerwise_groups(
    module: nn.Module,
    layers: Sequence[nn.Module] | nn.ModuleList,
    *,
    lr: float,
    decay: float,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
    as_input: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Split the trainable parameters of ``module`` by depth, and by whether they decay.

    Args:
        module: whole module; a tied parameter counts once.
        layers: all layers from the input to the output, on every rank: the ``layers`` of a
            `PipelineSequential`. Other modules count as output if they come after the first layer
            in ``module.named_modules()``, else as input.
        lr: learning rate of the output.
        decay: factor from layer to layer, in (0, 1].
        weight_decay: weight decay of parameters with two dims or more.
        no_decay: patterns of names of parameters that never decay.
        as_input: patterns of names of parameters that count as input wherever they are, such as a
            head that is tied to the embedding (the last stage of a pipeline cannot see the tie).

    Returns:
        Two groups for each depth, the input's first: ``len(layers) + 2`` depths, with the rates
        ``lr * decay ** (len(layers) + 1)`` to ``lr``.

    Raises:
        ConfigError: a number is out of range, or a string stands for a list.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> [g["lr"] for g in layerwise_groups(net, list(net), lr=1.0, decay=0.5)][::2]
        [0.125, 0.25, 0.5, 1.0]
    """
    problems = at_least(0.0, lr=lr, weight_decay=weight_decay)
    if not holds(lambda decay: 0.0 < decay <= 1.0, decay):
        problems.append(f"decay={decay!r}: must lie in (0, 1]; nearest valid: decay=1.0")
    raise_if_any(problems + lists_of_names(no_decay=no_decay, as_input=as_input))
    depth_of = _depths(module, layers, as_input)
    plain = decay_groups(module, weight_decay, no_decay=no_decay)
    depths = len(layers) + 2
    return [
        {
            **group,
            "params": [p for p in group["params"] if depth_of[p] == depth],
            "lr": lr * decay ** (depths - 1 - depth),
        }
        for depth in range(depths)
        for group in plain
    ]


def _depths(
    module: nn.Module, layers: Sequence[nn.Module] | nn.ModuleList, as_input: Sequence[str]
) -> Mapping[nn.Parameter, int]:
    inside: dict[nn.Parameter, int] = {}
    for index, layer in enumerate(layers):
        for p in layer.parameters():
            inside.setdefault(p, index + 1)
    known = {id(layer) for layer in layers}
    passed, depth = False, dict[nn.Parameter, int]()
    for name, child in module.named_modules():
        passed = passed or id(child) in known
        for leaf, p in child.named_parameters(recurse=False):
            path = f"{name}.{leaf}" if name else leaf
            is_input = not passed or any(fnmatchcase(path, pattern) for pattern in as_input)
            depth.setdefault(p, inside.get(p, 0 if is_input else len(layers) + 1))
    return depth
