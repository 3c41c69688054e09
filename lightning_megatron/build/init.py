"""Initial values that do not depend on the layout.

``configure_model`` runs under the meta device, so the parameters of a model have a shape but no
values; after partitioning, each rank gives values to what it kept. For those values to be
bit-identical under every layout, they must not depend on how many numbers were drawn before, nor on
how much of a parameter this rank holds. Hence:

* a parameter of a `ParallelLayer` is drawn in full, in float32, from a generator seeded with (seed,
  name of the parameter), and sliced as its `TensorShard` says; of a stack of experts a rank draws
  only those that it holds, each from (seed, name of the parameter, index of the expert);
* a plain module with direct parameters or buffers on meta is given memory and its
  ``reset_parameters`` (or ``_reset_parameters``) is called, with PyTorch's default generator seeded
  with (seed, name of the module), children before parents (as the constructors do it);
* tensors that are real already stay as they are, also under their module's ``reset_parameters``;
* so do values that ``configure_model`` itself has written (`build.written_values`);
* those that are in files (`build.stored_tensor`) are read.

Names are those of the unpartitioned model. A tied parameter is drawn under its first ("canonical")
name. The values depend on the kind of device they are drawn on.

The largest transient cost is one parameter in full, in float32, or one matrix of a stack.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron._torch.devices import random_numbers_kept
from lightning_megatron._torch.dtensor import copy_hooks
from lightning_megatron.build.init_tape import RESETS
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.build.written_values import WrittenValues, draw
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.rng import derive_seed
from lightning_megatron.topology.tensor_shard import TensorShard

_REGISTERS = frozenset({"_parameters", "_buffers", "_modules"})


def materialize(
    module: nn.Module,
    prefix: str = "",
    *,
    seed: int,
    device: torch.device | str,
    canonical: Mapping[str, str] | None = None,
    written: WrittenValues | None = None,
    leave: Collection[Tensor] = (),
) -> None:
    """Initialise, on ``device``, every parameter and buffer of ``module`` that is on meta.

    Parameters are replaced by new ones (a meta tensor cannot become real in place); ties within
    ``module`` survive. Call this before sharding over the data-parallel axis.

    Args:
        module: model or a part of it.
        prefix: name of ``module`` in the model; empty for the model itself.
        seed: seed of the run.
        device: device of the values.
        canonical: first name by full name, of tied parameters whose first name lies outside of
            ``module``.
        written: values that ``configure_model`` wrote.
        leave: parameters in files that are divided further before they are read.

    Raises:
        ConfigError: a module has no way to initialise itself (see `uninitialisable`), or leaves a
            parameter of its own without a value.
    """
    without_rule = uninitialisable(module, prefix)
    if without_rule:
        raise ConfigError(
            f"{', '.join(without_rule)}: a module with parameters or other tensors of its own on "
            "the meta device needs a reset_parameters() that fills all of them; add one, or "
            "build the module with real values in __init__"
        )
    device = torch.device(device)
    made: dict[int, Tensor] = {}
    names = _first_names(module, prefix, canonical or {})
    for name, child in _children_first(module, prefix):
        _fill_stored(child, made, device, leave)
        if written is not None:
            _fill_written(child, name, made, written, seed, device)
        if not _direct_meta(child):
            continue
        if isinstance(child, ParallelLayer):
            _fill_parallel(child, names, made, seed, device)
        else:
            _fill_plain(child, name, made, seed, device)


def uninitialisable(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the modules that own tensors on meta without a rule to fill them.

    Such tensors are parameters, buffers and plain attributes.
    """
    return [
        name or type(child).__name__
        for name, child in module.named_modules(prefix=prefix)
        if not isinstance(child, ParallelLayer)
        and _reset_of(child) is None
        and (_direct_meta(child) or _plain_meta(child))
    ]


def _first_names(module: nn.Module, prefix: str, canonical: Mapping[str, str]) -> dict[int, str]:
    """Canonical name of every parameter, by id."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(prefix=prefix, remove_duplicate=False):
        names.setdefault(id(parameter), canonical.get(name, name))
    return names


def _children_first(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()

    def visit(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(part) in seen:
            return
        seen.add(id(part))
        for child_name, child in part.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)
        yield name, part

    return visit(prefix, module)


def _direct_meta(module: nn.Module) -> list[str]:
    """Local names of the module's own parameters and buffers that are on meta."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, tensor in own if tensor.is_meta]


def _plain_meta(module: nn.Module) -> bool:
    """Whether plain attributes of the module are tensors on meta."""
    return any(
        isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, nn.Parameter)
        for name, value in vars(module).items()
        if name not in _REGISTERS
        for leaf in (value.values() if isinstance(value, dict) else _listed(value))
    )


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for method in RESETS:
        reset = getattr(module, method, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


def _fill_stored(
    module: nn.Module, made: dict[int, Tensor], device: torch.device, leave: Collection[Tensor]
) -> None:
    for own in (module._parameters, module._buffers):
        for local, old in own.items():
            left = old in leave
            if not isinstance(old, StoredTensor) or (left and old.device == device):
                continue
            if id(old) not in made:
                made[id(old)] = _like(old, old.to(device) if left else old.read(device))
            own[local] = made[id(old)]  # type: ignore[assignment]  # of the same kind


def _fill_written(
    module: nn.Module,
    name: str,
    made: dict[int, Tensor],
    written: WrittenValues,
    seed: int,
    device: torch.device,
) -> None:
    shards = module.tensor_shards if isinstance(module, ParallelLayer) else {}
    for local in _direct_meta(module):
        full_name = f"{name}.{local}" if name else local
        if full_name not in written:
            continue
        old = getattr(module, local)
        if id(old) not in made:
            full = written.value(full_name, seed, device)
            shard = shards.get(local) or TensorShard(full_shape=tuple(full.shape))
            made[id(old)] = _like(old, _slice(full, shard, old).to(old.dtype))
        _set(module, local, made[id(old)])


def _fill_parallel(
    layer: ParallelLayer,
    names: Mapping[int, str],
    made: dict[int, Tensor],
    seed: int,
    device: torch.device,
) -> None:
    for name in _direct_meta(layer):
        old = getattr(layer, name)
        if id(old) not in made:
            shard = layer.tensor_shards.get(name) or TensorShard(full_shape=tuple(old.shape))
            key = names.get(id(old), name)
            # The matrices of a stack that this rank holds are drawn; of any other parameter, all.
            stacked = name in layer.stacked
            shape = tuple(old.shape) if stacked else shard.full_shape
            first = shard.offset if stacked else 0
            drawn = draw(layer, name, key, shape, seed, device, first=first, dtype=old.dtype)
            values = drawn if stacked else _slice(drawn, shard, old).to(old.dtype)
            made[id(old)] = _like(old, values)
        _set(layer, name, made[id(old)])


def _fill_plain(
    module: nn.Module, name: str, made: dict[int, Tensor], seed: int, device: torch.device
) -> None:
    fresh: list[str] = []
    for local in _direct_meta(module):
        old = getattr(module, local)
        if id(old) not in made:
            made[id(old)] = _like(old, _blank(old, device))
            fresh.append(local)
        _set(module, local, made[id(old)])
    own = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    kept = {local: t.detach().clone() for local, t in own.items() if local not in fresh}
    reset = _reset_of(module)
    assert reset is not None
    with random_numbers_kept(device), torch.no_grad():
        torch.manual_seed(derive_seed(seed, "init", name))
        reset()
        for local, value in kept.items():
            getattr(module, local).copy_(value)
    _check_filled(module, name, fresh)


def _check_filled(module: nn.Module, name: str, fresh: list[str]) -> None:
    """Raise an error for tensors that ``reset_parameters`` left out: they still hold NaN."""
    left = [
        local
        for local in fresh
        if (tensor := getattr(module, local)).is_floating_point() and bool(tensor.isnan().any())
    ]
    if left:
        raise ConfigError(
            f"{name or type(module).__name__}: reset_parameters() leaves {', '.join(left)} without "
            "values; fill all parameters and buffers of the module there"
        )


def _blank(old: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(old, device=device)
    return new.fill_(float("nan")) if new.is_floating_point() else new.zero_()


def _slice(full: Tensor, shard: TensorShard, local: Tensor) -> Tensor:
    if shard.dim is None:
        return full
    return shard.part_of(full, local.shape[shard.dim])


def _like(old: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` as a parameter if ``old`` is one, else as a buffer."""
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(values.detach(), requires_grad=old.requires_grad)
        copy_hooks(old, made)
        return made
    return values.detach()


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer, keeping whether a buffer is persistent."""
    own = module._parameters if name in module._parameters else module._buffers
    own[name] = tensor  # type: ignore[assignment]
