"""What is wrong with a choice of recipe, backend and gathering; see `precision.fp8`."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from lightning_megatron.precision.fp8_products import lack_of_units
from lightning_megatron.precision.fp8_te import missing as te_missing
from lightning_megatron.precision.fp8_torchao import missing as torchao_missing
from lightning_megatron.precision.recipe import BACKEND_RECIPES, BACKENDS, IN_BLOCKS, RECIPES


def option_problems(recipe: str, backend: str) -> list[str]:
    """Names that do not exist or do not go together, and packages that are missing."""
    problems = []
    if recipe not in RECIPES:
        problems.append(
            f"recipe={recipe!r}: must be one of {', '.join(RECIPES)}; nearest valid: "
            "recipe='tensorwise'"
        )
    if backend not in BACKENDS:
        problems.append(
            f"backend={backend!r}: must be one of {', '.join(BACKENDS)}; nearest valid: "
            "backend='torch'"
        )
    known = BACKEND_RECIPES.get(backend, RECIPES)
    if recipe in RECIPES and recipe not in known:
        problems.append(
            f"recipe={recipe!r}, backend={backend!r}: it runs {', '.join(known)}; nearest valid: "
            "backend='torch', which runs every recipe"
        )
    lack = {"te": te_missing, "torchao": torchao_missing}.get(backend, lambda: None)()
    if lack is not None:
        problems.append(f"backend={backend!r}: {lack}; nearest valid: backend='torch'")
    return problems


def gather_problems(gather: str, recipe: str, backend: str) -> list[str]:
    """Whether weights can be gathered in that format."""
    if gather not in ("bf16", "fp8"):
        return [f"gather={gather!r}: must be 'bf16' or 'fp8'; nearest valid: gather='bf16'"]
    if gather == "fp8" and (recipe != "tensorwise" or backend not in ("auto", "torch")):
        return [
            f"gather='fp8', recipe={recipe!r}, backend={backend!r}: only a scale for the whole "
            "tensor can be applied before gathering; nearest valid: recipe='tensorwise', "
            "backend='torch', or gather='bf16'"
        ]
    return []


def device_problems(recipe: str, backend: str, device: torch.device) -> list[str]:
    """Whether the device of this process can do what was chosen."""
    lack = lack_of_units(device)
    if lack is None or (backend == "torch" and recipe in IN_BLOCKS):
        return []
    return [
        f"recipe={recipe!r}, backend={backend!r}: {lack}; nearest valid: precision="
        "'bf16-mixed', or, for the numbers without the speed, recipe='blockwise', backend='torch'"
    ]


def offload_problems(gather: str, offload: bool, device: torch.device) -> list[str]:
    """Whether weights whose shards are in host memory can be gathered in that format."""
    if gather != "fp8" or not offload or device.type == "cpu":
        return []
    # FSDP2 brings shards to the device first, and does not find there how to send them.
    return [
        "gather='fp8', zero.offload_parameters=True: weights are rounded where their shards "
        "are, which must be the GPU; nearest valid: gather='bf16', or offload_parameters=False"
    ]


def unmatched(names: Sequence[str], **patterns: Sequence[str]) -> list[str]:
    """Patterns by which no layer is chosen, among those that mean another.

    Args:
        names: of the layers of the whole network, whatever part of it this rank has.
        patterns: the options.
    """
    return [
        f"{option}={pattern!r}: no layer of the module has such a name; nearest valid: "
        + repr(next(iter(difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)), "*"))
        for option, chosen in patterns.items()
        for pattern in chosen
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
