"""Plans by the classes of modules, which hold whatever model has such modules, and under what name.

Models of one family differ in what stands around their blocks: classification heads, poolers,
an encoder alone. Their blocks are of the same classes.
"""

from collections.abc import Iterator, Mapping

from torch import nn

Table = Mapping[str, Mapping[str, str]]
"""Styles of children by their local names, by the end of the name of the class that holds them; the
module itself is ``""``."""


def styles_of(model: nn.Module, table: Table) -> dict[str, str]:
    """Return the style of each module of a model of which the table says one."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for ending, children in table.items():
            if type(module).__name__.endswith(ending):
                for child, style in children.items():
                    if not child or _has(module, child):
                        found[".".join(filter(None, (name, child)))] = style
    return found


def named(model: nn.Module, ending: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose class name ends so, with their names."""
    return (
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith(ending)
    )


def _has(module: nn.Module, child: str) -> bool:
    return isinstance(getattr(module, child, None), nn.Module)
