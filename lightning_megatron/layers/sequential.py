"""Trunk of a network, whose items may be on other ranks.

`PipelineSequential` is an ``nn.Sequential`` with named parts. In one process it runs its items one
after the other. ``MegatronStrategy(pp=p)`` divides its items into ``p`` contiguous stages: every
rank keeps the items of its stage and holds a parameterless `RemoteItem` in the place of the others,
so that an item has the same name (``trunk.layers.7``) on every rank and in every layout.

The call of the trunk inside ``training_step`` is where one stage ends and the next begins. The
strategy installs a `StagePort` in the trunk: the port replaces the input by the activation received
from the previous stage, and, unless this is the last stage, takes the output away by raising a
private exception through the user's ``training_step``. Code before the call therefore runs on every
rank and code after it on the last stage only.

The file is long because a trunk, its absent items and the protocol of its port know each other.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from lightning_megatron._torch.graphs import runs_transform
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology


class StagePort(Protocol):
    """Port by which a pipeline runner turns one call of a trunk into one stage."""

    @property
    def position(self) -> int:
        """Index of the stage among those that this rank holds, in network order."""
        ...

    @property
    def has_run(self) -> bool:
        """Whether `leave` knows the output, so that the items need not run."""
        ...

    def random(self) -> AbstractContextManager[None]:
        """Context in which the stage draws its random numbers."""
        ...

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the user's input by the activation that this stage works on."""
        ...

    def leave(self, output: Any) -> Any:
        """Take the stage's output; returns it on the last stage and raises on the others."""
        ...

    def interrupt(self) -> None:
        """Raise an error: the trunk is about to be called beside the passage of the microbatch."""
        ...


class Relay(Protocol):
    """Way of what a stage returns to all stages, outside of a step."""

    topology: Topology

    @property
    def stages(self) -> Sequence[int | None]:
        """Position of each stage among those of this rank; None: another rank has it."""
        ...

    def begin(self) -> None:
        """Begin a call of the trunk."""
        ...

    def share(self, stage: int, value: Any) -> Any:
        """Return, on all ranks of the pipeline, the ``value`` that the rank of ``stage`` has."""
        ...


class Boundary(Protocol):
    """What a trunk does with tensors that come in and go out under context parallelism."""

    @property
    def is_active(self) -> bool:
        """Whether it does anything now."""
        ...

    def enter(self, args: tuple[Any, ...], *, alone: bool) -> tuple[Any, ...]:
        """Return the arguments of the first item; ``alone`` is without a pipeline."""
        ...

    def leave(self, output: Any, given: Any) -> Any:
        """Return the output of the last item as whole tensors."""
        ...


class Placeholder(nn.Parameter):
    """Parameter without elements, which an optimizer has where a stage has none for it."""


class RemoteItem(nn.Module):
    """Placeholder for an item that another pipeline stage holds.

    While a run lasts, code of the user's finds a module of the item's class, with the same modules
    inside, in which a `whole.stage_weights.StageTensor` stands for each weight.

    Args:
        name: name of the item in the trunk.
        stage: stage that holds it.
        item: the item that it stands for; nothing of its weights is kept.
    """

    def __init__(self, name: str, stage: int, item: nn.Module | None = None) -> None:
        super().__init__()
        self.name = name
        self.stage = stage
        self.__dict__["shell"] = nn.Module() if item is None else shell_of(item)
        self.__dict__["shown_in"] = None

    def show(self, stages: "Stages | None") -> nn.Module:
        """Let code of the user's find the item, or with None no longer; return what it finds."""
        self.__dict__["shown_in"] = stages
        shell: nn.Module = self.__dict__["shell"]
        if stages is None:
            for module in shell.modules():
                for held in (module._parameters, module._buffers):
                    for name in [name for name, value in held.items() if value is not None]:
                        del held[name]
        return shell

    def _shell(self) -> nn.Module | None:
        """Module that code of the user's finds; None for this library's, and out of a run."""
        stages: Stages | None = self.__dict__.get("shown_in")
        return self.__dict__["shell"] if stages is not None and stages.is_shown else None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class for `isinstance`, beside its own."""
        shell = self._shell()
        return type(self) if shell is None else type(shell)

    def _contents(self, name: str) -> dict[str, Any]:
        shell = self._shell()
        found: dict[str, Any] = (self if shell is None else shell).__dict__[
            f"own{name}" if shell is None else name
        ]
        return found

    @property
    def _parameters(self) -> dict[str, Any]:
        return self._contents("_parameters")

    @_parameters.setter
    def _parameters(self, value: dict[str, Any]) -> None:
        self.__dict__["own_parameters"] = value

    @property
    def _buffers(self) -> dict[str, Any]:
        return self._contents("_buffers")

    @_buffers.setter
    def _buffers(self, value: dict[str, Any]) -> None:
        self.__dict__["own_buffers"] = value

    @property
    def _modules(self) -> dict[str, Any]:
        return self._contents("_modules")

    @_modules.setter
    def _modules(self, value: dict[str, Any]) -> None:
        self.__dict__["own_modules"] = value

    def stand_in(self) -> nn.Parameter | None:
        """Add a parameter without elements and return it; None if there is one."""
        own: dict[str, Any] = self.__dict__["own_parameters"]
        if own:
            return None
        own["placeholder"] = made = Placeholder(torch.empty(0))
        return made

    def stand_back(self) -> None:
        """Remove the parameter that `stand_in` added."""
        del self.__dict__["own_parameters"]["placeholder"]

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        """Be made again as what this is, whatever class code of the user's finds."""
        return _bare_item, (), dict(self.__dict__)

    @override
    def extra_repr(self) -> str:
        return f"{self.name!r}, stage={self.stage}"

    @override
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save what code of the user's finds; the placeholder of an empty stage is no weight."""
        shell = self._shell()
        if shell is not None:
            shell._save_to_state_dict(*args, **kwargs)

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load into what code of the user's finds: values of other stages are sent to this one."""
        shell = self._shell()
        if shell is not None:
            shell._load_from_state_dict(*args, **kwargs)

    @override
    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        shell = self._shell()
        if shell is None:
            super().register_parameter(name, param)
        else:
            shell.register_parameter(name, param)

    @override
    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        shell = self._shell()
        if shell is None:
            super().register_buffer(*args, **kwargs)
        else:
            shell.register_buffer(*args, **kwargs)

    @override
    def add_module(self, name: str, module: nn.Module | None) -> None:
        shell = self._shell()
        if shell is None:
            super().add_module(name, module)
        else:
            shell.add_module(name, module)

    @override
    def __delattr__(self, name: str) -> None:
        shell = self._shell()
        if shell is None or name in self.__dict__:
            super().__delattr__(name)
        if shell is not None:
            delattr(shell, name)

    @override
    def __getattr__(self, name: str) -> Any:
        shell = self._shell()
        if shell is not None and hasattr(shell, name):
            return getattr(shell, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            given = self.__dict__
            raise AttributeError(
                f"item {given.get('name')!r} of the PipelineSequential is on pipeline stage "
                f"{given.get('stage')}, and so is its attribute {name!r}; nearest valid: its "
                "weights and modules, which hooks of a run see, configure_model to set it, or pp=1"
            ) from None

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        shell = self._shell()
        if shell is None or name in self.__dict__:
            super().__setattr__(name, value)
        if shell is not None:
            setattr(shell, name, value)

    def __getitem__(self, index: Any) -> Any:
        """Return a module of an item that is a list of such."""
        inside: Any = self._shell()
        return getattr(self, str(index)) if inside is None else inside[index]

    def __len__(self) -> int:
        inside: Any = self._shell()
        return len(inside)

    def __bool__(self) -> bool:
        return True  # of whatever length

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"Item {self.name!r} of the PipelineSequential is on pipeline stage {self.stage}; "
            "it can only be reached by calling the PipelineSequential, not directly."
        )


def _bare_item() -> RemoteItem:
    return object.__new__(RemoteItem)


class Stages(Protocol):
    """Part of `whole.stage_weights.StageWeights` that a `RemoteItem` asks."""

    @property
    def is_shown(self) -> bool:
        """Whether code of the user's runs, in a run."""
        ...


_CONSTANT = ("torch.nn.", "lightning_megatron.")
"""Libraries whose modules have attributes that no forward changes."""
_CONSTANTS = (bool, int, float, str, tuple)
_OF_MODULES = frozenset(vars(nn.Module()))


def shell_of(module: nn.Module) -> nn.Module:
    """Return a module of the same class, with the same modules inside and no tensors.

    Modules of torch and of this library keep their attributes. Those of a user's may be changed in
    a forward, which runs where the module is, so they are missing.
    """
    kind = type(module)
    shell: nn.Module = object.__new__(kind)
    is_constant = kind.__module__.startswith(_CONSTANT)
    held = {
        name: value
        for name, value in vars(module).items()
        if name in _OF_MODULES
        or (is_constant and isinstance(value, bool | int | float | str | tuple))
    }
    for name in ("_parameters", "_buffers"):
        held[name] = {key: None for key, value in held[name].items() if value is None}
    inside = module._modules.items()
    held["_modules"] = {name: None if m is None else shell_of(m) for name, m in inside}
    shell.__dict__.update(held)
    return shell


class ItemGroup(Protocol):
    """Function that runs several items as one."""

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, which calls the items, with these arguments."""
        ...


class StageItems(nn.Module):
    """Items that one rank runs in a row, as one callable module.

    Args:
        items: items in order; the first receives ``args``, each next one the result before it.
        accepts: keyword arguments that each item's forward takes (None: any).

    Attributes:
        observer: function that is called with -1 and the arguments before the first item, and after
            each item with its position and result; may be None.
        groups: items that run as one, keyed by the position of the first: the position after the
            last one, and the function that runs them. While there is an observer, each item is a
            group of its own.
    """

    observer: Callable[[int, Any], None] | None = None

    def __init__(
        self, items: Sequence[nn.Module], accepts: Sequence[frozenset[str] | None]
    ) -> None:
        super().__init__()
        self.items = nn.ModuleList(items)
        self._accepts = list(accepts)
        self.groups: dict[int, tuple[int, ItemGroup]] = {}

    def replace(self, position: int, item: nn.Module, accepts: frozenset[str] | None) -> None:
        """Replace the item at a position."""
        self.items[position] = item
        self._accepts[position] = accepts

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        observe = self.observer
        if observe is not None:
            observe(-1, args)
        pairs = list(zip(self.items, self._accepts, strict=True))
        stop, together = 0, None
        for position, pair in enumerate(pairs):
            if position == stop:
                stop, together = self.groups.get(position, (position + 1, None))
            elif observe is None:
                continue
            if together is None:
                args = (_run([pair], *args, **kwargs),)
            else:
                end = stop if observe is None else position + 1
                args = (together(partial(_run, pairs[position:end]), *args, **kwargs),)
            if observe is not None:
                observe(position, args[0])
        return args[0] if len(args) == 1 else args


def _run(
    pairs: Sequence[tuple[nn.Module, frozenset[str] | None]], *args: Any, **kwargs: Any
) -> Any:
    """Run the items, each with the keyword arguments that it takes."""
    for item, accepts in pairs:
        if not kwargs:
            args = (item(*args),)
        elif accepts is None:
            args = (item(*args, **kwargs),)
        else:
            args = (item(*args, **{k: v for k, v in kwargs.items() if k in accepts}),)
    return args[0]


class PipelineSequential(nn.Module):
    """Sequence of modules that pipeline parallelism divides into stages, anywhere between two.

    Items are modules of any kind: layers of this library, of ``torch.nn``, or the user's own. The
    first item receives the positional arguments of the call, each further one the result of the one
    before as its single argument (a tuple or dict travels as one object). A keyword argument of the
    call reaches every item whose ``forward`` names it, on whatever stage it is; under a pipeline
    each stage takes it from its own copy of the microbatch.

    Args:
        *items: unnamed items, which get the names ``"0"``, ``"1"`` and so on.
        **named: item, or list of items, by name; a list's items are named ``name.0`` and on.

    Attributes:
        draws: makes the context in which the items draw random numbers without a pipeline.
        check: called with the arguments of each call before it; may raise. None: nothing is.
        boundary: what makes the output whole again under context parallelism; else None.
        around_items: makes the context in which items run outside of a step.
        relay: by which a call outside of a step goes along the stages; None without a pipeline.
        relays: part of the output that such a call is asked for, made on the last stage; None: all.
        splits_sequences: whether it splits the sequences of its items, which else do so themselves.

    Raises:
        ConfigError: no item was given, or one is not a module.

    Example:
        >>> trunk = PipelineSequential(embed=nn.Embedding(10, 4), layers=[nn.Linear(4, 4)] )
        >>> trunk.item_names
        ('embed', 'layers.0')
    """

    draws: Callable[[], AbstractContextManager[None]] = nullcontext
    check: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    boundary: Boundary | None = None
    around_items: Callable[[], AbstractContextManager[None]] = nullcontext
    relay: Relay | None = None
    relays: Callable[[Any], Any] | None = None
    splits_sequences: bool = False

    def __init__(
        self, *items: nn.Module, **named: nn.Module | Sequence[nn.Module] | nn.ModuleList
    ) -> None:
        super().__init__()
        parts: Mapping[str, Any] = {**{str(i): item for i, item in enumerate(items)}, **named}
        names: list[str] = []
        for name, part in parts.items():
            names += self._add(name, part)
        if not names:
            raise ConfigError("PipelineSequential() has no items: give it at least one module")
        self._name_items(names)

    def _name_items(self, names: Sequence[str]) -> None:
        """Take the submodules of these names, in order, as the items."""
        self.item_names: tuple[str, ...] = tuple(names)
        self._paths = tuple(tuple(name.split(".")) for name in names)
        self._accepts = [accepted_keywords(item) for item in self.items()]
        self._runs: list[StageItems]
        self._held: list[range]
        self._set_runs([range(len(names))])
        self._kinds: tuple[type[nn.Module], ...] = ()
        self._port: StagePort | None = None

    def _add(self, name: str, part: Any) -> list[str]:
        if hasattr(PipelineSequential, name):
            raise ConfigError(
                f"PipelineSequential({name}=...): every PipelineSequential has an attribute of "
                f"that name; nearest valid: {name}_"
            )
        if isinstance(part, nn.Module) and not isinstance(part, nn.ModuleList):
            self.add_module(name, part)
            return [name]
        if isinstance(part, nn.ModuleList | list | tuple) and all(
            isinstance(item, nn.Module) for item in part
        ):
            self.add_module(name, nn.ModuleList(part))
            return [f"{name}.{i}" for i in range(len(part))]
        raise ConfigError(
            f"PipelineSequential({name}={type(part).__name__}): a part is a torch.nn.Module or a "
            "list of them"
        )

    def items(self) -> Iterator[nn.Module]:
        """Iterate over all items in order; `RemoteItem` where another stage holds the item."""
        return (self.get_submodule(name) for name in self.item_names)

    def __len__(self) -> int:
        """Number of items over all stages."""
        return len(self.item_names)

    @property
    def stage_items(self) -> tuple[StageItems, ...]:
        """Items of each stage of this rank as one module, which data parallelism wraps.

        There is one entry with all items until `keep` is called.
        """
        self._refresh()
        return tuple(self._runs)

    @property
    def held(self) -> tuple[range, ...]:
        """Item indices of each stage of this rank; one stage of all until `keep` is called."""
        return tuple(self._held)

    @property
    def kinds(self) -> tuple[type[nn.Module], ...]:
        """Classes of the modules of all items in order, also of those that other stages hold."""
        return self._kinds or tuple(type(module) for module in self.modules())

    def _refresh(self) -> None:
        """Read the items again: an adapter or a compiled block may have replaced one."""
        for indices, run in zip(self._held, self._runs, strict=True):
            for position, (index, held) in enumerate(zip(indices, run.items, strict=True)):
                item: nn.Module = self
                for part in self._paths[index]:
                    item = item._modules[part]  # type: ignore[assignment]  # an item is never None
                if item is not held:
                    self._accepts[index] = accepted_keywords(item)
                    run.replace(position, item, self._accepts[index])

    def keep(self, stages: Sequence[range], mine: Sequence[int]) -> None:
        """Drop every item outside the stages of this rank.

        Args:
            stages: item indices of every stage, in order.
            mine: stages of this rank, in order.
        """
        self._refresh()
        self._kinds = ()
        self._kinds = self.kinds
        for index, part in enumerate(stages):
            if index not in mine:
                for i in part:
                    self._replace(self.item_names[i], self._remote(i, index))
        self._set_runs([stages[stage] for stage in mine])

    def _remote(self, index: int, stage: int) -> RemoteItem:
        """Return what stands in for an item that another stage holds."""
        name = self.item_names[index]
        return RemoteItem(name, stage, self.get_submodule(name))

    def _run_of(self, held: range) -> StageItems:
        """Return the items of a stage as one module."""
        items = list(self.items())
        return StageItems([items[i] for i in held], [self._accepts[i] for i in held])

    def split_sequences(self, topology: Topology | None) -> None:
        """Begin to split sequences as the layout says, or with None end it."""

    def context_problems(self, cp: int) -> list[str]:
        """Reasons why what runs the items cannot split their sequences over ``cp`` ranks."""
        del cp
        return []

    def refill(self, items: Sequence[nn.Module]) -> None:
        """Replace all items by others of the same kinds, as if none had been dropped.

        Args:
            items: new items, in order.
        """
        for name, item in zip(self.item_names, items, strict=True):
            self._replace(name, item)
        self._set_runs([range(len(items))])

    def connect(self, port: StagePort | None) -> None:
        """Install (or with None remove) the port through which the next call runs."""
        self.__dict__["_port"] = port  # nn.Module's own way takes several microseconds

    def stand_aside(self) -> None:
        """Raise an error if the next call would be the passage of a microbatch through a stage.

        For what calls the trunk on all stages at once, as a generation does.
        """
        if self._port is not None:
            self._port.interrupt()

    def _replace(self, name: str, item: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        self.get_submodule(parent).add_module(leaf, item)

    def _set_runs(self, held: Sequence[range]) -> None:
        runs = [self._run_of(r) for r in held]
        # Not registered as submodules: every item already has its one name in the trunk.
        object.__setattr__(self, "_runs", runs)
        self._held = list(held)

    @override
    def train(self, mode: bool = True) -> "PipelineSequential":
        for run in self._runs:
            run.training = mode
        super().train(mode)
        return self

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the items; under a pipeline, run one stage.

        Raises:
            TypeError: no item takes one of the keyword arguments.
        """
        self._refresh()
        self._check_keywords(kwargs)
        if self.check is not None and not torch.compiler.is_compiling():
            self.check(args, kwargs)
        boundary = self.boundary
        if runs_transform() and not (self._port is None and self.is_whole and boundary is None):
            raise ConfigError(
                "The PipelineSequential was called within torch.vmap or a transform of torch.func, "
                "which no stage and no part of a sequence can leave; nearest valid: pp=1 and cp=1"
            )
        if boundary is None or not boundary.is_active:
            return self._run(args, kwargs)
        own = boundary.enter(args, alone=self._port is None)
        return boundary.leave(self._run(own, kwargs), (args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        port = self._port
        if port is None:
            with self.draws():
                if self.is_whole:
                    return self._runs[0](*args, **kwargs)
                return self._relayed(self.open_relay(), args, kwargs)
        entering = port.enter(args)
        if port.has_run:
            return port.leave(None)
        with port.random():
            output = self._runs[port.position](*entering, **kwargs)
        return port.leave(output)

    def _relayed(self, relay: Relay, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run all stages one after the other; every rank returns the output of the last."""
        output: Any = None
        relay.begin()
        for stage, position in enumerate(relay.stages):
            if position is not None:
                with self.around_items():
                    output = self._runs[position](*args, **kwargs)
                if stage == len(relay.stages) - 1 and self.relays is not None:
                    output = self.relays(output)
            output = relay.share(stage, output)
            args = (output,)
        return output

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all items."""
        return sum(len(held) for held in self._held) == len(self)

    def open_relay(self) -> Relay:
        """Return what a call outside of a step goes by.

        Raises:
            RuntimeError: it would need gradients.
        """
        if self.relay is None or torch.is_grad_enabled():
            raise RuntimeError(
                "The PipelineSequential was called outside of a step. With pp>1 its items live on "
                "several ranks, which only training_step, validation_step, test_step and "
                "predict_step reach with gradients; call it there, or on all ranks under "
                "torch.no_grad(), or train with pp=1"
            )
        return self.relay

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if not any(accepts is None or name in accepts for accepts in self._accepts):
                raise TypeError(f"No item of the PipelineSequential takes the argument {name!r}")


def accepted_keywords(item: nn.Module) -> frozenset[str] | None:
    """Keyword arguments that ``item.forward`` names; None when it takes any."""
    parameters = inspect.signature(item.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name)
