"""The number format of what ZeRO sends as one: there can be only one.

A unit's gradients are laid end to end and reduced together, so all that is trained in it has one
format. What is frozen has none: a network in bfloat16 takes adapters in float32.
"""

from collections.abc import Collection

import torch
from torch import nn

from lightning_megatron.errors import ConfigError


def one_format(unit: nn.Module, elsewhere: Collection[nn.Parameter]) -> torch.dtype | None:
    """Format of the trained parameters of ``unit``, None if all are frozen.

    Args:
        unit: what is gathered and reduced as one.
        elsewhere: parameters in it that are not.

    Raises:
        ConfigError: there are several.
    """
    formats: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and parameter not in elsewhere:
            formats.setdefault(parameter.dtype, name)
    if len(formats) > 1:
        found = ", ".join(f"{name} in {str(held_in)[6:]}" for held_in, name in formats.items())
        raise ConfigError(
            f"parameters in several formats in one unit of ZeRO: {found}; their gradients travel "
            "together; nearest valid: one format for all that is trained (precision='bf16-true' "
            "makes it one), or zero=0 with precision='32-true'"
        )
    return next(iter(formats), None)
