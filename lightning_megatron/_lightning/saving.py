"""Making a module from a checkpoint; the versions of modules in a state_dict."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.saving import _load_state


def module_from(
    module_class: type[LightningModule],
    checkpoint: dict[str, Any],
    *,
    strict: bool | None,
    **hyper_parameters: Any,
) -> LightningModule:
    """Make a module from a checkpoint in memory, as ``load_from_checkpoint`` does from a file.

    Private: `lightning.pytorch.core.saving._load_state`. It knows how hyper-parameters are stored.
    Since 2.6.5 it refuses checkpoints that name a class which is not imported yet. Unnecessary when
    ``load_from_checkpoint`` takes a checkpoint in memory.

    Args:
        module_class: the class of the module.
        checkpoint: with ``state_dict`` and hyper-parameters.
        strict: whether names that only one side has are an error; the module's choice when None.
        hyper_parameters: arguments that override the stored ones.
    """
    module = _load_state(module_class, checkpoint, strict=strict, **hyper_parameters)
    assert isinstance(module, LightningModule)
    return module


def with_versions(
    state: "OrderedDict[str, Any]", versions: Mapping[str, int | str]
) -> "OrderedDict[str, Any]":
    """Give a state_dict the versions of modules, as ``Module.state_dict`` does.

    Private: ``_metadata``, which ``Module.load_state_dict`` reads.
    """
    metadata = {name: {"version": version} for name, version in versions.items()}
    state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return state


def versions_in(state: Any) -> dict[str, int | str]:
    """Return the versions of the modules of a state_dict; empty if it has none."""
    metadata = getattr(state, "_metadata", None) or {}
    return {name: one.get("version", 1) for name, one in metadata.items()}
