"""Model of another library as a pipeline: its forward runs unchanged on every stage.

`PipelineSequential` calls its items one after the other. The forward of an adopted model does so
itself, and does other things between: it makes masks and positions, scales embeddings, keeps
caches. So it runs on each stage from its beginning, and what it calls tells where a stage begins
and ends (`StageProgram`):

* an item of an earlier stage returns absent tensors (`adoption.absent`) at once;
* the first item of this stage gets, in place of every absent tensor among its arguments, the one
  that the stage before has sent, and so does whatever takes that tensor later;
* where the first item of the next stage is called, the stage has ended: its arguments that depend
  on items are what is sent, and the forward is left by an exception.

Which arguments these are a stage learns from one run of the forward in which all items are absent,
for every new structure of the arguments. Code between two items runs on the stage of the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from lightning_megatron.adoption import block_hooks
from lightning_megatron.adoption.absent import with_values
from lightning_megatron.adoption.classes import become, own_class
from lightning_megatron.adoption.sequences import BlockSequences
from lightning_megatron.adoption.stage_program import (
    AbsentItem,
    AbsentOutputs,
    AdoptedItem,
    Rehearsal,
    RelayProgram,
    Running,
    StageEnd,
    StageProgram,
    meta_copies,
    structure_of,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential, Relay, RemoteItem, StageItems
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

_Call = Callable[..., Any]
T = TypeVar("T")


class _ProgramItems(StageItems):
    """Items of one stage; its forward is that of the whole model."""

    trunk: "AdoptedTrunk"

    def __init__(self, trunk: "AdoptedTrunk", held: range, items: Sequence[nn.Module]) -> None:
        super().__init__(items, [None] * len(items))
        self.__dict__["trunk"] = trunk  # it is not a submodule of its stages
        self.held = held

    @override
    def forward(self, received: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if callable(args):
            return args()
        return self.trunk.run_stage(self, received, args, kwargs)


class AdoptedTrunk(PipelineSequential):
    """Class in front of the class of an adopted model, whose items are submodules of any name.

    ``become(model, AdoptedTrunk)`` and then `name_items`.

    Attributes:
        block_names: names of the items between whose ends sequences may be split.
        running: what all items share.
        sequences: what splits the sequences of blocks; None if nothing does.
        tp_problems: reasons why the model's own plan cannot split its layers.
    """

    surrounds: tuple[str, ...] = ("forward",)
    splits_sequences = True
    tp_problems: tuple[str, ...] = ()
    block_names: tuple[str, ...]
    running: Running
    sequences: BlockSequences | None
    _outputs: AbsentOutputs
    _sent: dict[Any, Sequence[int | None]]

    def name_items(self, names: Sequence[str], blocks: Sequence[str] = ()) -> None:
        """Set the items, which a pipeline divides into stages.

        Args:
            names: names of submodules, in the order in which the forward calls them.
            blocks: names of those between whose ends sequences may be split.
        """
        self.__dict__["block_names"] = tuple(blocks)
        self.__dict__["running"] = Running()
        self.__dict__["sequences"] = None
        self.__dict__["_outputs"] = AbsentOutputs([])
        self.__dict__["_sent"] = {}
        self._name_items(names)

    @override
    def keep(self, stages: Sequence[range], mine: Sequence[int]) -> None:
        self.__dict__["_outputs"] = AbsentOutputs(meta_copies(list(self.items())))
        self._intercept()
        super().keep(stages, mine)

    def _intercept(self) -> None:
        """Let the items know of their calls."""
        for index, item in enumerate(self.items()):
            if not isinstance(item, RemoteItem):
                held = become(item, AdoptedItem)
                held.__dict__["running"], held.__dict__["item_index"] = self.running, index

    @override
    def split_sequences(self, topology: Topology | None) -> None:
        if self.sequences is not None:
            self.sequences.leave(self)
        divided = topology is not None and topology.sequence_parallel and topology.tp.size > 1
        sequences = None
        if topology is not None and (divided or topology.cp.size > 1):
            sequences = BlockSequences(topology)
            found = (self.get_submodule(name) for name in self.block_names)
            sequences.enter(self, [x for x in found if not isinstance(x, RemoteItem)])
            self._intercept()
        self.__dict__["sequences"] = sequences
        blocks, names = set(self.block_names), self.item_names
        for name, following in zip(names, (*names[1:], ""), strict=True):
            item = self.get_submodule(name)
            if name in blocks and isinstance(item, AdoptedItem):
                item.__dict__["sequences"] = sequences
                item.__dict__["is_last_block"] = following not in blocks

    def problems(self, degrees: Degrees) -> list[str]:
        """Reasons why the model cannot be divided so: those of its own plan, under tp and ep."""
        return list(self.tp_problems) if degrees.tp > 1 or degrees.ep > 1 else []

    @override
    def context_problems(self, cp: int) -> list[str]:
        name = own_class(self).__name__
        if not self.block_names:
            return [
                f"cp={cp}: the plan of {name} names no blocks, to split their sequences; "
                "nearest valid: a model of transformers with a pp_plan of its own, or cp=1"
            ]
        hooks = block_hooks.problems({b: self.get_submodule(b) for b in self.block_names})
        if hooks:
            return [
                f"cp={cp}: hooks inside of blocks of {name} see this rank's part of the "
                f"sequences only: {', '.join(hooks)}; nearest valid: hooks on the model or on "
                "what stands outside of its blocks, or cp=1"
            ]
        if getattr(self, "_supports_attention_backend", False):
            return []
        return [
            f"cp={cp}: {name} computes attention itself, and not by the function of transformers' "
            "registry (ALL_ATTENTION_FUNCTIONS), in whose place keys and values are exchanged; "
            "nearest valid: cp=1"
        ]

    @override
    def _remote(self, index: int, stage: int) -> RemoteItem:
        twin = self._outputs.items[index]
        return AbsentItem(self.item_names[index], stage, self.running, index, twin)

    @override
    def _run_of(self, held: range) -> StageItems:
        items = list(self.items())
        return _ProgramItems(self, held, [items[i] for i in held])

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; under a pipeline, this stage's part of it."""
        self._refresh()
        sequences = self.sequences
        if sequences is None or sequences.context is None:
            return self._run(args, kwargs)
        blocks = [self.get_submodule(name) for name in self.block_names]
        held = [block for block in blocks if isinstance(block, AdoptedItem)]
        with sequences.calling(self, held, kwargs) as given:
            return self._run(args, given)

    @override
    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        port = self._port
        if port is not None or not self.is_whole:
            self._check_outputs(kwargs)
        if port is None:
            with self.draws():
                return self.relayed(lambda: own_class(self).forward(self, *args, **kwargs))
        entering = port.enter(())
        if port.has_run:
            return port.leave(None)
        with port.random():
            output = self._runs[port.position](entering, args, kwargs)
        return port.leave(output)

    def _check_outputs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse to collect what each layer returns, as a stage has some of the layers only."""
        config = getattr(self, "config", None)
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.get(name)
            if asked or (asked is None and getattr(config, name, False)):
                raise ConfigError(
                    f"pp > 1, {name}=True: a pipeline stage has the outputs of its own layers "
                    f"only; nearest valid: {name}=False, or pp=1"
                )

    def relayed(self, call: Callable[[], T]) -> T:
        """Call what calls items, outside of a step; on all stages together under a pipeline."""
        if self.is_whole or isinstance(self.running.program, RelayProgram):
            return call()
        relay = self.open_relay()
        stages = [self._stage_of(index, relay) for index in range(len(self))]
        for run in self._runs:  # ZeRO 3 surrounds each of them
            call = partial(run, (), call, {})
        before, self.running.program = self.running.program, RelayProgram(relay, stages)
        try:
            with self.around_items():
                return call()
        finally:
            self.running.program = before

    def _stage_of(self, index: int, relay: Relay) -> int:
        item = self.get_submodule(self.item_names[index])
        if isinstance(item, RemoteItem):
            return item.stage
        position = next(p for p, held in enumerate(self.held) if index in held)
        return relay.stages.index(position)

    def run_stage(
        self, stage: _ProgramItems, received: tuple[Any, ...], args: Any, kwargs: Any
    ) -> Any:
        """Run a stage's part of the forward; returns the output of the model on the last one."""
        end, sent = stage.held.stop, None
        if end < len(self):
            key = (end, self.training, structure_of((args, kwargs), sizes=False))
            if key not in self._sent:
                self._sent[key] = self._rehearse(end, args, kwargs)
            sent = self._sent[key]
        program = StageProgram(
            self._outputs, stage.held, self.item_names, received, sent, self.sequences
        )
        program.observer = stage.observer
        return with_values(self._under(program, args, kwargs))

    def run_in_two(self, cut: int, args: Any, kwargs: Any) -> Any:
        """Run the forward as two stages, one after the other; no rank may have dropped an item.

        Args:
            cut: number of items in the first stage.
            args: arguments of the forward.
            kwargs: keyword arguments of the forward.
        """
        self.__dict__["_outputs"] = AbsentOutputs(meta_copies(list(self.items())))
        self._intercept()
        first, second = (_ProgramItems(self, h, ()) for h in (range(cut), range(cut, len(self))))
        sent = self.run_stage(first, (), args, kwargs)
        received = sent if isinstance(sent, tuple) else (sent,)
        return self.run_stage(second, received, args, kwargs)

    def _rehearse(self, end: int, args: Any, kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), self._unchanged():
            return self._under(Rehearsal(self._outputs, end, self.item_names), args, kwargs)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Context after which the model's own modules outside of items are as they were."""
        inside = {child for item in self.items() for child in item.modules()}
        outside = [module for module in self.modules() if module not in inside]
        before = [(m, dict(vars(m)), dict(m._buffers)) for m in outside]
        values = [
            (b, b.clone(), b._version)
            for m in outside
            for b in m._buffers.values()
            if b is not None and not b.is_meta
        ]
        try:
            yield
        finally:
            for module, attributes, buffers in before:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            for buffer, value, version in values:
                if buffer._version != version:
                    buffer.copy_(value)

    def _under(self, program: StageProgram, args: Any, kwargs: Any) -> Any:
        self.running.device = next((p.device for p in self.parameters()), self.running.device)
        before, self.running.program = self.running.program, program
        try:
            out = own_class(self).forward(self, *args, **kwargs)
        except StageEnd as end:
            return end.output
        else:
            program.end()
            return out
        finally:
            self.running.program = before
