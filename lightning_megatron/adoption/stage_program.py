"""Programs of one run of an adopted model's forward: what the call of an item does on this rank.

`StageProgram` is that of a pipeline stage, which `adoption.trunk` describes; `RelayProgram` that of
a call outside of a step, in which what an item returns goes to all ranks. Items find the program
that runs in `Running`, which all of them share.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.adoption.absent import Absent, absent_like, on_meta, with_values
from lightning_megatron.adoption.caches import caches_in, recorded, repeat
from lightning_megatron.adoption.sequences import BlockSequences
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import Relay, RemoteItem

_Call = Callable[..., Any]
T = TypeVar("T")


class Program(Protocol):
    """Rule for what a call of an item does on this rank."""

    def item(self, index: int, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the call of an item does on this rank, and return what it returns."""
        ...


class Running:
    """Program that runs at present, as the items of one model share it.

    Attributes:
        program: None while items are called as the modules that they are.
        device: device of the model's weights.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self.device = torch.device("cpu")


class AdoptedItem(nn.Module):
    """Class in front of an item that this rank holds.

    Attributes:
        running: what all items of the model share.
        item_index: place among the items.
        sequences: what splits the sequences of a block; else None.
        is_last_block: whether it is a block, and the next item is none.
    """

    running: Running
    item_index: int
    sequences: BlockSequences | None = None
    is_last_block: bool = False

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program, call = self.running.program, super().__call__
        if self.sequences is not None:
            call = self.sequences.around(self, call, last=self.is_last_block)
        if program is None:
            return call(*args, **kwargs)
        return program.item(self.item_index, call, args, kwargs)


class AbsentItem(RemoteItem):
    """Placeholder for an item that another stage holds, which the model's forward calls.

    Args:
        name: name of the item in the model.
        stage: stage that holds it.
        running: what all items of the model share.
        index: place among the items.
        twin: copy of the item on the meta device. The model's forward may read attributes of an
            item, such as the number format of a weight, and gets those of the copy.
    """

    def __init__(
        self, name: str, stage: int, running: Running, index: int, twin: nn.Module
    ) -> None:
        super().__init__(name, stage, twin)
        self.running = running
        self.item_index = index
        self.__dict__["twin"] = twin  # it is not a submodule
        for key, value in vars(twin).items():
            if isinstance(value, bool | int | float | str):
                self.__dict__.setdefault(key, value)

    @override
    def __getattr__(self, name: str) -> Any:
        running: Running | None = self.__dict__.get("running")
        twin: Any = self.__dict__.get("twin")
        if running is None or running.program is None or not hasattr(twin, name):
            return super().__getattr__(name)
        return getattr(_Shadow(twin, running.device), name)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program = self.running.program
        if program is None:
            return super().__call__(*args, **kwargs)
        return program.item(self.item_index, super().__call__, args, kwargs)


class _Shadow:
    """Attributes of a module on the meta device, with absent tensors in place of its tensors."""

    def __init__(self, twin: nn.Module, device: torch.device) -> None:
        self.__dict__.update({"_twin": twin, "_device": device})

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._twin, name)
        if isinstance(found, nn.Module):
            return _Shadow(found, self._device)
        return Absent.of(found.detach(), self._device) if isinstance(found, Tensor) else found

    def __getitem__(self, index: Any) -> Any:
        return _Shadow(self._twin[index], self._device)


class StageEnd(BaseException):
    """Leaves the forward of a model with what the next stage takes."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class StageProgram(Program):
    """One run of a model's forward on one stage.

    Args:
        outputs: absent outputs of the items of other stages.
        held: indices of the items of this stage.
        names: names of all items of the model.
        received: tensors that the stage before has sent, in order.
        sent: for the arguments of the first item of the next stage, the slots of the leaves that
            are sent (see `slots_of`); None where there is no next stage.
        sequences: what splits the sequences of blocks; None if nothing does.
    """

    def __init__(
        self,
        outputs: "AbsentOutputs",
        held: range,
        names: Sequence[str],
        received: Sequence[Any],
        sent: Sequence[int | None] | None,
        sequences: BlockSequences | None = None,
    ) -> None:
        self._outputs = outputs
        self._held = held
        self._names = names
        self._received = received
        self._sent = sent
        self._next = 0
        self._sequences = sequences
        self.observer: Callable[[int, Any], None] | None = None

    @override
    def item(self, index: int, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the call of an item does on this stage.

        Raises:
            ConfigError: items are not called in their order, each once.
        """
        if index != self._next:
            self._refuse_order(f"calls its item {self._names[index]!r}")
        self._next += 1
        if index < self._held.start:
            return self._outputs.of(index, args, kwargs)
        if index == self._held.stop:
            raise StageEnd(self._leaves_to_send(args, kwargs))
        if index == self._held.start:
            if index > 0:
                self._receive(args, kwargs)
            if self.observer is not None:
                self.observer(-1, with_values(args))
        args, kwargs = self._known(index, args, kwargs)
        out = call(*args, **kwargs)
        if self.observer is not None:
            self.observer(index - self._held.start, out)
        return out

    def _refuse_order(self, does: str) -> None:
        following = [repr(name) for name in self._names[self._next : self._next + 1]]
        raise ConfigError(
            f"pp > 1: the model {does} where {following[0] if following else 'its end'} would be "
            "next, but each item is called once, in order; nearest valid: inputs and options with "
            "which it calls all (input_ids for inputs_embeds, for example), trunk=[...] of adopt() "
            "without items that are called in another order, or pp=1"
        )

    def end(self) -> None:
        """Say that the forward has returned.

        Raises:
            ConfigError: it has left out items.
        """
        if self._next < len(self._names):
            self._refuse_order("returns")

    def _receive(self, args: Any, kwargs: Any) -> None:
        """Give the absent tensors among the arguments of the first item their values."""
        leaves, _ = tree_flatten((args, kwargs))
        slots = slots_of(leaves)
        wanted = 1 + max((slot for slot in slots if slot is not None), default=-1)
        if wanted != len(self._received):
            raise ConfigError(
                f"pp > 1: an item depends on {wanted} activations of the stage before, which has "
                f"sent {len(self._received)}; nearest valid: the same kinds of arguments on every "
                "rank, or pp=1"
            )
        for leaf, slot in zip(leaves, slots, strict=True):
            if slot is not None:
                x = self._received[slot]
                x = x if self._sequences is None else self._sequences.received(x, leaf)
                if x.shape != leaf.shape:
                    raise ConfigError(
                        f"pp > 1: an activation of shape {tuple(x.shape)} came where this stage "
                        f"counts on {tuple(leaf.shape)}, as an item before it cannot be followed "
                        "without values; nearest valid: items whose shapes do not depend on "
                        "values, or pp=1"
                    )
                leaf.value = x

    def _known(self, index: int, args: Any, kwargs: Any) -> Any:
        """Return the arguments of an item with what was received in place of absent tensors."""
        known = with_values((args, kwargs))
        if any(isinstance(leaf, Absent) for leaf in tree_flatten(known)[0]):
            raise ConfigError(
                f"pp > 1: item {index} of the model takes an activation of an earlier stage, which "
                f"item {self._held.start}, the first one of this stage, does not take; nearest "
                "valid: pp.partition=[...] with both items on one stage, or pp=1"
            )
        return known

    def _leaves_to_send(self, args: Any, kwargs: Any) -> Any:
        assert self._sent is not None
        leaves, _ = tree_flatten(self._known(self._held.stop, args, kwargs))
        found: dict[int, Any] = {}
        for leaf, slot in zip(leaves, self._sent, strict=True):
            if slot is not None and slot not in found:
                found[slot] = leaf if self._sequences is None else self._sequences.sent(leaf)
        out = tuple(found[slot] for slot in range(len(found)))
        return out[0] if len(out) == 1 else out


class Rehearsal(StageProgram):
    """Run in which all items are absent; ends at the call of one of them."""

    def __init__(self, outputs: "AbsentOutputs", end: int, names: Sequence[str]) -> None:
        super().__init__(outputs, range(end, end), names, (), ())

    @override
    def _leaves_to_send(self, args: Any, kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        return slots_of(leaves)


def slots_of(leaves: Sequence[Any]) -> list[int | None]:
    """Number the different absent tensors among ``leaves`` in order; None for all else."""
    known: dict[int, int] = {}
    return [
        known.setdefault(id(leaf), len(known)) if isinstance(leaf, Absent) else None
        for leaf in leaves
    ]


class AbsentOutputs:
    """Results that items of other stages would return: their outputs on the meta device.

    Attributes:
        items: copies of all items on the meta device, whole.
    """

    def __init__(self, items: Sequence[nn.Module]) -> None:
        self.items = items
        self._known: dict[Any, Any] = {}

    def of(self, index: int, args: Any, kwargs: Any) -> Any:
        """Return absent tensors in the structure of the output of an item.

        Where an item cannot run on the meta device, it is taken to return a tensor like its first.
        """
        leaves, _ = tree_flatten((args, kwargs))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        given = on_meta((args, kwargs))
        key = (index, structure_of(given, sizes=True))
        if key not in self._known:
            item = self.items[index]
            try:
                with torch.no_grad():
                    self._known[key] = item(*given[0], **given[1])
            except Exception:  # an item raises what it likes about tensors without values
                tensors = (leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor))
                self._known[key] = next(tensors)
        return absent_like(self._known[key], device)

    def fill_caches(self, index: int, args: Any, kwargs: Any) -> None:
        """Have an item put keys and values without memory into the caches among its arguments."""
        given = on_meta((args, kwargs))
        with torch.no_grad():
            self.items[index](*given[0], **given[1])


class RelayProgram(Program):
    """Run of all stages together, outside of a step: what an item returns goes to all ranks.

    Items may be called in any order, and any number of times.

    Args:
        relay: carries what items return.
        stages: stage of each item.
    """

    def __init__(self, relay: Relay, stages: Sequence[int]) -> None:
        self._relay = relay
        self._stages = stages

    @override
    def item(self, index: int, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, caches = self._stages[index], caches_in(args, kwargs)
        if self._relay.stages[stage] is None:
            out, updates = self._relay.share(stage, None)
            repeat(updates, caches)
            return out
        with recorded(caches) as updates:
            out = call(*args, **kwargs)
        return self._relay.share(stage, (out, updates))[0]


def structure_of(tree: Any, *, sizes: bool) -> Any:
    """Hashable description of ``tree``: which leaves are tensors, and of what kind."""
    leaves, spec = tree_flatten(tree)
    kinds = tuple(
        (tuple(leaf.shape) if sizes else leaf.dim(), leaf.dtype)
        if isinstance(leaf, Tensor)
        else (type(leaf).__name__, leaf if isinstance(leaf, bool | int | float | str) else None)
        for leaf in leaves
    )
    return str(spec), kinds


def meta_copies(items: Sequence[nn.Module]) -> list[nn.Module]:
    """Copies of modules with all parameters and buffers on the meta device, ties included."""
    memo: dict[int, Any] = {}
    for item in items:
        for child in item.modules():
            for own in (child._parameters, child._buffers):
                for tensor in own.values():
                    if tensor is not None and id(tensor) not in memo:
                        memo[id(tensor)] = _twin(tensor)
    return [copy.deepcopy(item, memo) for item in items]


def _twin(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
