"""Weights of a pipeline's stages, which in hooks are those of one process on every rank.

Each rank of a pipeline has the weights of its own stages. In a hook, code of the user's walks over
all of them all the same, and takes numbers of them::

    total = sum(p.grad.norm() ** 2 for p in self.parameters())     # that of all stages
    self.net.head.weight.data.clamp_(-1, 1)                        # done by the stage that has it
    clip_grad_norm_(self.parameters(), 1.0)

`StageWeights` gives a `RemoteItem` a `StageTensor` in the place of each weight that it stands for:
shape, format and device are the weight's, and it has no values. All ranks run the same code, so a
function of tensors of one stage is run by the ranks that have them, and elsewhere on the meta
device, for the shapes of what it returns. Three things bring values to all ranks, which is
collective over pp: a number (a result without dims), whatever reads values (``item``, ``tolist``),
and a function of tensors of several stages, or one that writes into a tensor of everybody's.

`whole.stage_functions` sorts functions by what they need. The file is long as what stands for a
weight asks `StageWeights` for everything, and values reach other ranks by its methods.

Within a step this rank's weights are plain, and those of other stages are refused: code there runs
where its stage is. Of what is inside of layers' own functions see `whole.memory`.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    asks_classes,
    tree_flatten,
    tree_map,
)
from lightning_megatron._torch.wrappers import stand_in
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import default_state
from lightning_megatron.whole.divided_gradient import gradient_format
from lightning_megatron.whole.memory import runs_layer
from lightning_megatron.whole.splits import place_of, whole
from lightning_megatron.whole.stage_functions import (
    FORMATS,
    GRADIENT,
    OF_LEARNING,
    READS,
    device_of_result,
    draws,
    moved,
    stays,
    tells_no_values,
    writes,
)
from lightning_megatron.whole.torch_functions import (
    TORCH_FUNCTIONS,
    Args,
    Kwargs,
    by_place,
    kind_of,
    name_of,
)
from lightning_megatron.whole.weights import PartDTensor, PartWeight, locked, whole_weight

_REMEDY = (
    "nearest valid: the same in a hook, such as on_before_optimizer_step or on_train_batch_end, "
    "where it is of all stages; weight_decay of the optimizer for a penalty; "
    "lightning_megatron.gather(module) for whole weights"
)


@dataclass(frozen=True, kw_only=True)
class StageWeight:
    """A weight of some stage, as every rank knows it."""

    name: str
    """Canonical name."""
    owner: int
    """First pipeline rank that has it."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    dtype: torch.dtype
    """Number format in steps."""
    at_rest: torch.dtype
    """Number format in hooks around epochs, and after the run."""
    requires_grad: bool
    """Whether it is trained."""
    group: tuple[int, int] | None = None
    """Optimizer that steps on it, and parameter group there."""


@dataclass(frozen=True, kw_only=True)
class StageBuffer:
    """A buffer of an item, as every rank knows it."""

    name: str
    """Name within the item."""
    owner: int
    """Pipeline rank that has it."""
    shape: tuple[int, ...]
    """Shape."""
    dtype: torch.dtype
    """Number format."""


def _inside(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, which is made where there is none, and its name."""
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        if module._modules.get(part) is None:
            module._modules[part] = nn.Module()
        found = module._modules[part]
        assert found is not None
        module = found
    return module, leaf


class StageTensor(Tensor):
    """Weight of another stage, or what a stage has computed of one.

    Attributes:
        stages: of the run.
        owner: pipeline rank that has the values.
        own: the value, on ranks that have it; else None.
        twin: tensor on the meta device in its place.
        weight_name: of the weight; empty for what was computed.
        origin: number of the functions and weights that it comes from, by which ranks compare
            what they ask for.
        is_buffer: whether it stands for a buffer, whose values its own stage has only.
    """

    handles_split_tensors = True
    handles_weights = True
    stages: "StageWeights"
    owner: int
    own: Tensor | None
    twin: Tensor
    weight_name: str
    origin: int
    is_buffer = False
    is_lent = False
    """Whether an optimizer has it in the place of a weight."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, StageTensor))
        return found.stages.apply(func, args, kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        raise ConfigError(
            f"{func}: code that torch does not ask the class of a tensor for (compiled, or a "
            f"function of autograd's) was given a weight of another pipeline stage; {_REMEDY}"
        )

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> "StageTensor":
        with self.stages.within_stage(), EnableTorchFunction():  # of a part it is a part again
            own = None if self.own is None else self.own.detach().clone()
        with DisableTorchFunctionSubclass():
            twin, name = self.twin.detach().clone(), self.weight_name
            made = self.stages.tensor(own, twin, self.owner, name, self.device)
            made.twin.requires_grad_(self.twin.requires_grad)
            made.is_buffer, made.origin = self.is_buffer, self.origin
            memo[id(self)] = made
            return made

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        raise ConfigError(
            f"{self.weight_name or 'a tensor'}: what stands for a weight of another pipeline stage "
            "cannot be pickled, as another process could not ask for it; nearest valid: "
            "lightning_megatron.gather(module), on every rank"
        )


class StageWeights:
    """The weights of all stages, as hooks of this rank see them.

    Args:
        topology: the layout.
        own: this rank's weights within the trunk by canonical name; each has a `Place`.
        known: all weights within the trunk.

    Attributes:
        sees_all: whether code of the user's that runs now is that of a hook.
        alive: whether the run goes on.
        shares_numbers: whether a number of a stage is sent to all ranks at once, and not only when
            one of several stages follows from it, or Python reads it.
    """

    shares_numbers = True

    def __init__(
        self,
        topology: Topology,
        own: Mapping[str, nn.Parameter],
        known: Sequence[StageWeight],
    ) -> None:
        self.topology = topology
        self.sees_all = False
        self.alive = True
        self._own = dict(own)
        self._known = {weight.name: weight for weight in known}
        self._absent = {w.name: self._weight(w) for w in known if w.name not in own}
        self._formats: dict[str, torch.dtype | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageWeights":
        return self

    def _weight(self, weight: StageWeight) -> StageTensor:
        twin = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        twin.requires_grad_(weight.requires_grad)
        made = self.tensor(None, twin, weight.owner, weight.name)
        made._is_param = True  # what nn.Parameter asks an instance
        return made

    def tensor(
        self,
        own: Tensor | None,
        twin: Tensor,
        owner: int,
        name: str = "",
        device: torch.device | None = None,
    ) -> StageTensor:
        """Return a tensor of the stages of a rank, by default on the device of the run."""
        device = self.topology.device if device is None else device
        with DisableTorchFunctionSubclass():
            made: StageTensor = stand_in(StageTensor, twin, twin.shape, device)
        made.stages, made.owner, made.own, made.twin = self, owner, own, twin
        made.weight_name, made.origin = name, zlib.crc32(name.encode())
        return made

    def change_formats(self, *, at_rest: bool) -> None:
        """Let what stands for others' weights have their format at rest, or that of steps."""
        for name, weight in self._absent.items():
            known = self._known[name]
            dtype = known.at_rest if at_rest else known.dtype
            if weight.twin.dtype is dtype:
                continue
            weight.twin = torch.empty(known.shape, dtype=dtype, device="meta")
            weight.twin.requires_grad_(known.requires_grad)
            with DisableTorchFunctionSubclass():
                weight.data = stand_in(StageTensor, weight.twin, weight.twin.shape, weight.device)

    def weight(self, name: str) -> Tensor:
        """The weight with a canonical name: this rank's, or what stands for another's."""
        return self._own[name] if name in self._own else self._absent[name]

    @property
    def names(self) -> KeysView[str]:
        """Canonical names of all weights within the trunk, in the order of the network."""
        return self._known.keys()

    def known(self, name: str) -> StageWeight:
        """Return shape, format and owner of a weight."""
        return self._known[name]

    @property
    def own(self) -> Mapping[str, nn.Parameter]:
        """This rank's weights within the trunk by canonical name."""
        return self._own

    # Where code runs ------------------------------------------------------------------------------

    @property
    def in_hooks(self) -> bool:
        """Whether code of the user's runs that is neither a step nor a layer."""
        return self.sees_all and not runs_layer()

    @contextmanager
    def within_stage(self) -> Iterator[None]:
        """Context in which this rank's weights are plain, and others' are refused."""
        before, self.sees_all = self.sees_all, False
        try:
            yield
        finally:
            self.sees_all = before

    @contextmanager
    def as_in_hooks(self) -> Iterator[None]:
        """Context in which code of the user's sees the weights of all stages, in a run."""
        before, self.sees_all = self.sees_all, self.alive
        try:
            yield
        finally:
            self.sees_all = before

    def owner_of(self, leaf: Any) -> int | None:
        """Pipeline rank that has the values of a tensor; None if every rank has its own."""
        if isinstance(leaf, StageTensor):
            return leaf.owner
        if isinstance(leaf, PartWeight | PartDTensor):
            place = place_of(leaf)
            return None if place is None or place.stages is None else place.owner
        return None

    @property
    def is_shown(self) -> bool:
        """Whether code of the user's runs, in a run."""
        return self.alive and asks_classes() and not runs_layer()

    def fill(
        self, item: nn.Module, weights: Mapping[str, str], buffers: Sequence[StageBuffer]
    ) -> None:
        """Put what stands for weights and buffers of another stage into a module.

        Args:
            item: module without tensors, of the names of the item's.
            weights: canonical name of each weight by its name within the item.
            buffers: of the item.
        """
        for local, name in weights.items():
            owner, leaf = _inside(item, local)
            owner._parameters[leaf] = self.weight(name)  # type: ignore[assignment]
        for buffer in buffers:
            owner, leaf = _inside(item, buffer.name)
            twin = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
            made = self.tensor(None, twin, buffer.owner, buffer.name)
            made.is_buffer = True
            owner._buffers[leaf] = made

    # Functions ------------------------------------------------------------------------------------

    def apply(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """``func`` of tensors of stages, as one process would run it."""
        args, kwargs = by_place(func, args, kwargs)
        first = args[0] if args else None
        if not (self.alive and self.in_hooks) and not any(
            isinstance(x, StageTensor) and x.own is None for x in tree_flatten((args, kwargs))[0]
        ):  # kept from a hook, by the rank that has it
            return func(*tree_map(_value, args), **tree_map(_value, kwargs))
        if isinstance(first, StageTensor) and first.is_buffer and stays(func):
            return first
        kind = kind_of(func)
        if kind in GRADIENT and self.owner_of(first) is not None:
            return self._gradient(func, args)
        if kind == "storage" and isinstance(first, StageTensor):
            raise ConfigError(
                f"{name_of(func)}: {first.weight_name or 'this tensor'} is on pipeline rank "
                f"{first.owner}, and has no address on other ranks; nearest valid: id(p) for a "
                "key, as a weight that layers share is one object"
            )
        if tells_no_values(func):
            return self._described(func, args, kwargs)
        self._refuse_buffers(func, args, kwargs)
        if not self.in_hooks:
            self._refuse(func, args, kwargs)
        if kind == "foreach":
            return self._foreach(func, args, kwargs)
        if kind == "differentiate":
            raise ConfigError(
                "torch.autograd.grad of weights of pipeline stages, in a hook: the loss is of one "
                f"stage; {_REMEDY}"
            )
        return self._each(func, args, kwargs, share=self.shares_numbers)

    def _refuse(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        leaves = tree_flatten((args, kwargs))[0]
        of = next((x for x in leaves if isinstance(x, StageTensor)), None)
        assert of is not None
        what = f"{of.weight_name} is" if of.weight_name else "this tensor is of weights"
        ended = "" if self.alive else ", and the run has ended"
        raise ConfigError(
            f"{name_of(func)}: {what} on pipeline rank {of.owner}{ended}, and with "
            f"pp={self.topology.pp.size} a step has the weights of its own stage; {_REMEDY}"
        )

    def _refuse_buffers(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        """Refuse to read what hooks see of their own stage only."""
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, StageTensor) and x.is_buffer:
                raise ConfigError(
                    f"{name_of(func)}: {x.weight_name} is a buffer on pipeline rank {x.owner}, and "
                    "hooks see weights of all stages, and buffers of their own; nearest valid: "
                    "lightning_megatron.gather(module), which has those of all"
                )

    def _foreach(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """A function of lists: each of its stage; numbers are shared together."""
        name = TORCH_FUNCTIONS[func].of_each
        each: Any = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name)
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
        found: list[Any] = []
        for place in range(len(lists[0])):
            own = tuple(a[place] if isinstance(a, list | tuple) else a for a in args)
            named = {k: v[place] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
            staged = any(self.owner_of(x) is not None for x in tree_flatten((own, named))[0])
            found.append(
                self._each(each, own, named, share=False) if staged else each(*own, **named)
            )
        if name.endswith("_"):
            return None
        if not self.shares_numbers:
            return found
        numbers = [x for x in found if isinstance(x, StageTensor) and not x.twin.dim()]
        shared = iter(self.shared(numbers, name))
        is_number = {id(x) for x in numbers}
        return [next(shared) if id(x) in is_number else x for x in found]

    def _each(self, func: Callable[..., Any], args: Args, kwargs: Kwargs, *, share: bool) -> Any:
        """``func`` of one stage, or on values of all ranks."""
        changed: Any = args[0] if args and writes(func) else kwargs.get("out")
        at = self.owner_of(changed)
        owners = {o for x in tree_flatten((args, kwargs))[0] if (o := self.owner_of(x)) is not None}
        if changed is not None:
            args, kwargs = self._with_values(func, (args, kwargs), apart_from=at)
        elif len(owners) > 1 or kind_of(func) in READS:
            args, kwargs = self._with_values(func, (args, kwargs))
        if not any(self.owner_of(x) is not None for x in tree_flatten((args, kwargs))[0]):
            return locked(func, func(*args, **kwargs))
        if changed is not None:
            return self._changed(func, args, kwargs, changed)
        try:
            twins = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
            # It depends on values, or is wrong: values show which.
            args, kwargs = self._with_values(func, (args, kwargs))
            return func(*args, **kwargs)
        return self._there(func, args, kwargs, twins, min(owners), share=share)

    def _changed(self, func: Callable[..., Any], args: Args, kwargs: Kwargs, changed: Any) -> Any:
        """``func``, which changes a tensor of a stage, on the ranks that have it."""
        if kind_of(func) == "reshape_in_place":
            raise ConfigError(
                f"{name_of(func)}_: changes the shape of a weight of a pipeline stage in place; "
                "nearest valid: the same function without an underscore at its end"
            )
        self._run(func, args, kwargs)
        return changed

    def _run(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """``func`` where its tensors are; elsewhere None, after what it draws."""
        given = tree_flatten((args, kwargs))[0]
        if not any(isinstance(x, StageTensor) and x.own is None for x in given):
            follows = kind_of(func) in ("elementwise", "by_channel", "like") or draws(func)
            before = None if follows else self._drawn()
            with self.within_stage(), EnableTorchFunction():
                found = func(*tree_map(_value, args), **tree_map(_value, kwargs))
            if before is not None and not torch.equal(before, self._drawn()):
                raise ConfigError(
                    f"{name_of(func)}: draws random numbers for a weight of a pipeline stage in a "
                    "way that other stages cannot follow; nearest valid: torch.rand_like and its "
                    "like, or torch.rand(weight.shape), and the rest from what they return"
                )
            return found
        if draws(func):
            self._draw(func, args, kwargs)
        return None

    def _drawn(self) -> Tensor:
        """State of the generator of the device."""
        return default_state(self.topology.device)

    def _there(
        self,
        func: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        twins: Any,
        owner: int,
        *,
        share: bool,
    ) -> Any:
        """``func`` on the ranks that have its tensors; ``twins`` are its results on meta."""
        given = tree_flatten((args, kwargs))[0]
        is_here = not any(isinstance(x, StageTensor) and x.own is None for x in given)
        found = self._run(func, args, kwargs)
        found = found if is_here else twins
        results, leaves = tree_flatten(twins)[0], tree_flatten(found)[0]
        origin, device = (
            self._origin(name_of(func), given),
            device_of_result(func, args, kwargs),
        )
        made = {
            id(leaf): self.tensor(leaf if is_here else None, twin, owner, device=device)
            for leaf, twin in zip(leaves, results, strict=True)
            if isinstance(leaf, Tensor)
        }
        for number, x in enumerate(made.values()):
            x.origin = origin + number
        if share and all(x.dim() for x in given if self.owner_of(x) is not None):
            numbers = [
                (key, x) for key, x in made.items() if not x.twin.dim() and not x.twin._is_view()
            ]
            plain = self.shared([x for _, x in numbers], name_of(func))
            made |= {key: value for (key, _), value in zip(numbers, plain, strict=True)}  # type: ignore[misc]
        return tree_map(lambda x: made.get(id(x), x) if isinstance(x, Tensor) else x, found)

    def _on_meta(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run ``func`` on the meta device, on all ranks alike, for the shapes of its results."""

        def twin(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._twin(leaf)
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        if kind_of(func) == "moved":
            return moved(func, args, kwargs, twin)
        with EnableTorchFunction():
            return func(*tree_map(twin, args), **tree_map(twin, kwargs))

    def _twin(self, leaf: Tensor) -> Tensor:
        if isinstance(leaf, StageTensor):
            return leaf.twin
        if self.owner_of(leaf) is None:
            return leaf.to("meta")
        place = place_of(leaf)
        with DisableTorchFunctionSubclass():
            made = torch.empty(place.shape, dtype=leaf.dtype, device="meta")
            return made.requires_grad_(leaf.requires_grad)

    def _draw(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        """Draw what another stage draws, so that all ranks go on with the same numbers."""

        def zeros(leaf: Any) -> Any:
            if not isinstance(leaf, StageTensor):
                return leaf
            return torch.zeros(leaf.twin.shape, dtype=leaf.twin.dtype, device=leaf.device)

        with torch.no_grad():
            func(*tree_map(zeros, args), **tree_map(zeros, kwargs))

    # Values for all ranks -------------------------------------------------------------------------

    def _with_values(
        self, func: Callable[..., Any], given: tuple[Args, Kwargs], apart_from: int | None = None
    ) -> tuple[Args, Kwargs]:
        """Arguments with values for tensors of stages, but for those of one rank."""
        wanted: dict[int, Tensor] = {}
        for leaf in tree_flatten(given)[0]:
            owner = self.owner_of(leaf)
            if owner is not None and owner != apart_from:
                wanted[id(leaf)] = leaf
        values = dict(zip(wanted, self.shared(list(wanted.values()), name_of(func)), strict=True))
        args, kwargs = tree_map(
            lambda x: values.get(id(x), x) if isinstance(x, Tensor) else x, given
        )
        return args, kwargs

    def shared(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return the values of tensors of stages as plain tensors, on all ranks; collective.

        Gradients go back to the ranks that have the values.

        Raises:
            ConfigError: ranks ask for different tensors.
        """
        if not tensors:
            return []
        self._compare(tensors, what)
        learns = torch.is_grad_enabled()
        found: list[Tensor] = []
        for x in tensors:
            owner, twin = self.owner_of(x), self._twin(x)
            assert owner is not None
            own = x.own if isinstance(x, StageTensor) else x
            if own is not None:
                own = self._whole(own, twin.dtype)
            value = (
                torch.empty(twin.shape, dtype=twin.dtype, device=self.topology.device)
                if own is None
                else own.detach().to(self.topology.device, copy=True).contiguous()
            )
            dist.broadcast(value, self.topology.pp.ranks[owner], group=self.topology.pp.group)
            if learns and twin.requires_grad and value.is_floating_point():
                source = value.new_zeros((), requires_grad=True) if own is None else own
                with DisableTorchFunctionSubclass():
                    value = _FromStage.apply(source, value, self, own is not None)  # type: ignore[no-untyped-call]
            found.append(value.to(x.device))
        return found

    def _whole(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole of a value of this rank's stages, as a plain tensor."""
        with self.within_stage(), EnableTorchFunction():
            found: Tensor = whole(whole_weight(own))
        with DisableTorchFunctionSubclass():
            return found.as_subclass(Tensor).to(dtype)

    def _compare(self, tensors: Sequence[Tensor], what: str) -> None:
        """Refuse to share where ranks ask for different tensors, as code differs between them."""
        asked = self._origin(what, tensors)
        mine = torch.tensor([asked, -asked], device=self.topology.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.topology.pp.group)
        largest, smallest = mine.tolist()
        if largest != -smallest:
            raise ConfigError(
                f"{what}: the ranks of the pipeline ask for values of different weights; code of "
                "a hook must do the same on every rank; nearest valid: self.parameters(), which "
                "has those of all stages on each, without a condition on the rank"
            )

    def _origin(self, what: str, tensors: Iterable[Any]) -> int:
        """Number of what a function gives of tensors of stages; the same on all ranks."""
        sources = [
            (x.origin if isinstance(x, StageTensor) else self._name_of(x), self.owner_of(x))
            for x in tensors
            if self.owner_of(x) is not None
        ]
        told = [o if isinstance(o, int) else zlib.crc32(str(o).encode()) for o, _ in sources]
        return zlib.crc32(f"{what} {told} {[owner for _, owner in sources]}".encode())

    def _name_of(self, weight: Tensor) -> str | None:
        place = place_of(weight)
        return None if place is None else str(place.name)

    # Weights themselves ---------------------------------------------------------------------------

    def _described(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """A function that tells or sets no values: of the tensor here, or of what stands for it."""
        first = args[0]
        if isinstance(first, StageTensor) and kind_of(func) == "repr":
            return (
                f"StageTensor({first.weight_name!r}, {tuple(first.twin.shape)}, "
                f"{first.twin.dtype}, on pipeline rank {first.owner})"
            )
        if not isinstance(first, StageTensor):
            with self.within_stage():
                return func(*args, **kwargs)
        if kind_of(func) in OF_LEARNING:
            inner = first.twin if first.own is None else first.own
            with self.within_stage(), EnableTorchFunction():
                found = func(inner, *args[1:], **kwargs)
            return first if found is inner else found
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _gradient(self, func: Callable[..., Any], args: Args) -> Any:
        """Get or set ``.grad`` or ``.data``."""
        x, kind = args[0], kind_of(func)
        owner = self.owner_of(x)
        assert owner is not None
        name = getattr(x, "weight_name", None) or self._name_of(x)
        if not self.in_hooks:
            if not isinstance(x, StageTensor):
                with self.within_stage():
                    return func(*args)
            if kind == "gradient":
                return None
            self._refuse(func, args, {})
        inner = x.own if isinstance(x, StageTensor) else x
        if kind not in ("gradient", "data"):
            what = "data" if kind == "set_data" else "grad"
            return self._set(func, x, inner, args[1:], what, name)
        twin = self._twin(x).detach()
        if kind == "gradient":
            dtype = self._gradients()[str(name)] if self._is_weight(x, name) else None
            if dtype is None:
                return None
            twin = twin if isinstance(x, StageTensor) and x.is_lent else twin.to(dtype)
        found = None
        if inner is not None:
            with self.within_stage(), EnableTorchFunction():
                found = func(inner)
            if found is None:
                return None
        made = self.tensor(found, twin, owner, device=x.device)
        made.origin = self._origin(f"get {kind}", [x])
        return made

    def _set(
        self, func: Any, x: Tensor, inner: Tensor | None, values: Args, what: str, name: str | None
    ) -> None:
        """Set ``.grad`` or ``.data`` where the tensor is."""
        owner = self.owner_of(x)
        (values, _) = self._with_values(func, (values, {}), apart_from=owner)
        value = values[0] if values else None
        twin = self._twin(x)
        if isinstance(value, Tensor) and value.shape != twin.shape:
            raise ConfigError(
                f"{name or 'tensor'}: .{what} was assigned {tuple(value.shape)}, and this "
                f"parameter has {tuple(twin.shape)}; nearest valid: values of that shape"
            )
        if what == "grad" and self._formats is not None and self._is_weight(x, name):
            self._formats[str(name)] = None if value is None else value.dtype
        if inner is not None:
            with self.within_stage(), EnableTorchFunction():
                func(inner, *map(_value, values))

    def _is_weight(self, x: Tensor, name: Any) -> bool:
        """Whether a tensor is a weight of the run, or lent in its place, and no copy of one."""
        if isinstance(x, StageTensor) and x.is_lent:
            return True
        return name in self._known and self.weight(name) is x

    def _gradients(self) -> dict[str, torch.dtype | None]:
        """Number formats of the gradients there are; collective where these may have changed."""
        if self._formats is None:
            mine = []
            with DisableTorchFunctionSubclass():
                for name in self._known:
                    held_in = gradient_format(self._own[name]) if name in self._own else None
                    mine.append(0 if held_in is None else 1 + FORMATS.index(held_in))
                found = torch.tensor(mine, dtype=torch.uint8, device=self.topology.device)
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.topology.pp.group)
            formats = [FORMATS[number - 1] if number else None for number in found.tolist()]
            self._formats = dict(zip(self._known, formats, strict=True))
        return self._formats

    def forget_gradients(self) -> None:
        """Ask anew which weights have gradients."""
        self._formats = None


class _FromStage(Function):
    """Values that a stage has sent; gradients go back to them."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, value: Tensor, stages: StageWeights, is_here: bool
    ) -> Tensor:
        ctx.stages, ctx.is_here = stages, is_here
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.stages.forget_gradients()
        return (gradient if ctx.is_here else gradient.new_zeros(())), None, None, None


def _value(leaf: Any) -> Any:
    """The value of a tensor of this rank's stages; anything else as it is."""
    if isinstance(leaf, StageTensor):
        return leaf.own
    place = place_of(leaf)
    if place is None or place.is_cut or place.copies > 1:
        return leaf
    with DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)
