"""Sequences of adopted models, of which each rank of tp and cp has a part.

*Sequence parallelism* (arXiv 2205.05198). The residual stream of a block is a `SplitTensor`,
divided over tp along the sequence. It behaves like the whole tensor in the block's own code, so
norms, dropout and residual sums compute on the part, column-parallel layers gather their input,
row-parallel ones scatter their sum, and code that mixes positions gets all of them. The gradient of
a weight that is used on a part is summed over tp where it is used. A sequence whose length tp does
not divide stays whole: the block then computes on every rank what it computes without sequence
parallelism.

*Context parallelism*. A block gets this cp rank's positions of its first argument, which is the
residual stream, and of all other tensors that have one of each position (positions, rotary tables).
Masks stay whole, and attention exchanges keys and values (`adoption.attention`). Between blocks and
after them the stream is a `ContextTensor`, which behaves like the whole.

The model's own code around blocks sees whole sequences.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from lightning_megatron._torch.graphs import tree_flatten, tree_map
from lightning_megatron.adoption.attention import NAME, SEQUENCES, register
from lightning_megatron.adoption.block_hooks import call_with_hooks
from lightning_megatron.adoption.block_trial import BlockTrial, signature
from lightning_megatron.adoption.caches import given_cache, without_cache
from lightning_megatron.adoption.classes import own_class
from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.context_part import Place
from lightning_megatron.whole.context_rows import split
from lightning_megatron.whole.context_tensor import context_tensor
from lightning_megatron.whole.split_tensor import SplitTensor
from lightning_megatron.whole.splits import marked, own_part, part_of, split_of, whole

logger = logging.getLogger(__name__)

_Call = Callable[..., Any]


class BlockSequences:
    """Split of the sequences in the blocks of one model.

    Args:
        topology: layout of the run.

    Attributes:
        attended: number of calls of attention.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._context = topology.context.of_trunk() if topology.cp.size > 1 else None
        self._said: set[Any] = set()
        self._trials: dict[nn.Module, BlockTrial] = {}
        self._names: dict[Any, str] = {}
        self.attended = 0

    @property
    def context(self) -> Context | None:
        """Split of the sequences over cp at present; None if they are whole."""
        context = self._context
        return context if context is not None and context.is_active else None

    @property
    def _tp(self) -> Axis | None:
        """Axis over which residual streams are divided at present; None if they are not."""
        topology = self._topology
        return topology.tp if topology.sequence_parallel and topology.tp.size > 1 else None

    def enter(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Have the attention of a model of transformers exchange keys and values.

        Args:
            model: the model.
            blocks: its blocks that this rank holds, not spread over tp yet.
        """
        if self._context is None:
            return
        known: dict[Any, BlockTrial] = {}
        for block in blocks:
            kind = signature(block)
            if kind not in known:
                known[kind] = BlockTrial(block)
            self._trials[block] = known[kind]
        register()
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            name = getattr(config, "_attn_implementation", None)
            if config is None or not isinstance(name, str):
                continue
            module.__dict__[SEQUENCES] = self
            if name != NAME:
                self._names[id(config)] = name
                config._attn_implementation = NAME

    def leave(self, model: nn.Module) -> None:
        """Undo `enter`."""
        for module in model.modules():
            if module.__dict__.pop(SEQUENCES, None) is not None:
                config: Any = module.config
                config._attn_implementation = self._names.get(
                    id(config), config._attn_implementation
                )

    @contextmanager
    def calling(
        self, model: nn.Module, blocks: Sequence[nn.Module], kwargs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Context of a call of a model, with what is made of the keyword arguments.

        A call with a cache, or that asks for one, works on whole sequences on every cp rank, as a
        cache of keys and values is of whole sequences. Else the model makes none.

        Raises:
            ConfigError: the call asks for what a block has of its part of the sequences only.
        """
        assert self._context is not None
        config = getattr(model, "config", None)
        refused = ["output_attentions"]
        recorded = (getattr(model, "_can_record_outputs", None) or {}).get("hidden_states")
        if not isinstance(recorded, type) or not all(isinstance(b, recorded) for b in blocks):
            refused.append("output_hidden_states")
        for option in refused:
            if kwargs.get(option, getattr(config, option, False)):
                raise ConfigError(
                    f"cp={self._context.cp.size}, {option}=True: of what a block returns inside of "
                    f"the model each cp rank has a part; nearest valid: {option}=False, or cp=1"
                )
        if given_cache(kwargs) is not None or kwargs.get("use_cache"):
            with self._context.suspended():
                yield kwargs
            return
        caches = "use_cache" in inspect.signature(own_class(model).forward).parameters
        self._context.start_call()
        yield {**kwargs, "use_cache": False} if caches else kwargs

    def trial_of(self, block: nn.Module) -> BlockTrial | None:
        """Trial of a block; None for one that came later."""
        return self._trials.get(block)

    def around(self, block: nn.Module, call: _Call, *, last: bool) -> _Call:
        """Return the call of a block whose residual stream is split.

        Args:
            block: the block.
            call: its call.
            last: whether no block follows.
        """

        def split_call(*args: Any, **kwargs: Any) -> Any:
            context = self.context
            if context is not None:
                on_parts = partial(_ContextCall(self, context, block, last).run, call)
                return call_with_hooks(block, args, kwargs, on_parts)
            if self._tp is not None:
                args, kwargs = _with_stream(args, kwargs, self.divided)
            return call(*args, **kwargs)

        return split_call

    def draws(self) -> AbstractContextManager[None]:
        """Context in which a block of cp ranks draws: each other numbers, for other positions."""
        pipelined = self._topology.pp.size > 1  # its stages draw there as a whole
        if self.context is None or pipelined:
            return nullcontext()
        return self._topology.rng.trunk()

    def divided(self, x: Tensor) -> Tensor:
        """Return a residual stream as a `SplitTensor`, where tp divides its length."""
        if self._tp is None or not self._topology.sequence_parallel or _is_divided(x):
            return x  # text is written with whole sequences
        x, length = whole(x), x.shape[SEQUENCE_DIM]
        if not divides(self._tp.size, length):
            self._say_undivided(length)
            return x
        return self._marked(split_to(x, self._tp, SEQUENCE_DIM))

    def _marked(self, part: Tensor) -> Tensor:
        return marked(part, SplitTensor, self._topology, SEQUENCE_DIM)

    def cut(self, x: Tensor, layout: ContextLayout) -> Tensor:
        """Return a cp rank's part of a residual stream, divided over tp where that is asked for."""
        assert self._context is not None
        behind = part_of(x)
        if behind is not None and behind.place.residual is not None:
            if behind.is_behind(x) and not behind.is_settled and behind.place.layout == layout:
                return self._marked(own_part(behind.part).view_as(behind.part))
            x = whole(x)
        elif behind is None:
            x = whole(x)
        return self.divided(split(x, layout, self._context.cp.rank))

    def joined(self, x: Tensor, layout: ContextLayout, *, last: bool) -> Tensor:
        """Return the whole of which a block has returned this rank's part."""
        assert self._context is not None
        residual = self._tp if _is_divided(x) else None
        x = own_part(x) if residual is not None else whole(x)
        if residual is not None and last:
            x, residual = gather_from(x, residual, SEQUENCE_DIM), None
        place = Place(
            layout, self._context.cp, 0, layout.length, residual=residual, said=self._said
        )
        count = sum(n for _, n in place.own)
        return context_tensor(x if residual is not None else x.narrow(1, 0, count), place)

    def sent(self, leaf: Any) -> Any:
        """Return what is sent of an argument of the next stage: of a split sequence the part."""
        behind = part_of(leaf)
        if behind is None:
            return own_part(leaf) if _is_divided(leaf) else leaf
        one = behind.is_behind(leaf) and not behind.is_settled and behind.place.is_complete
        if not one or split_of(behind.part) is not None or self._sizes(leaf) is None:
            return whole(leaf)
        return behind.local()

    def received(self, x: Tensor, expected: Tensor) -> Tensor:
        """Return what was received as an argument, which is ``expected`` without values."""
        if x.dim() <= SEQUENCE_DIM or x.shape == expected.shape:
            return x
        x = x.view_as(x)
        if self.context is None:
            return self._marked(x)
        sizes = self._sizes(expected)
        assert sizes is not None
        assert x.shape[SEQUENCE_DIM] in sizes
        if self._tp is not None and x.shape[SEQUENCE_DIM] == sizes[1]:
            x = self._marked(x)
        assert self._context is not None
        return self.joined(x, self._context.split(expected.shape[SEQUENCE_DIM]), last=False)

    def _sizes(self, x: Tensor) -> tuple[int, int] | None:
        """Positions of a cp rank, and of a tp rank of it; None where one is that of the whole."""
        assert self._context is not None
        length = x.shape[SEQUENCE_DIM]
        layout = ContextLayout(length, self._context.cp.size, self._context.order, self._context.tp)
        sizes = layout.local, layout.local // self._context.tp
        return None if length in sizes else sizes

    def _say_undivided(self, length: int) -> None:
        if length > 1 and length not in self._said:
            self._said.add(length)
            tp = self._topology.tp.size
            logger.warning(
                "sequence_parallel=True, tp=%d: a sequence of %d positions cannot be divided, and "
                "stays whole on each rank; nearest valid: %d positions",
                tp,
                length,
                -(-length // tp) * tp,
            )


class _ContextCall:
    """One call of a block with this cp rank's part of a sequence.

    Args:
        sequences: split of the model's sequences.
        context: split of the sequences at present.
        block: the block.
        last: whether no block follows.
    """

    def __init__(
        self, sequences: BlockSequences, context: Context, block: nn.Module, last: bool
    ) -> None:
        self._sequences = sequences
        self._context = context
        self._block = block
        self._last = last

    def run(self, call: _Call, *args: Any, **kwargs: Any) -> Any:
        """Call the block with whole arguments; returns whole results.

        Raises:
            ConfigError: the block does not compute attention by the function of the registry, or
                returns what is neither a part of a sequence nor whole.
        """
        sequences = self._sequences
        stream = _stream_of(args, kwargs)
        if stream is None:
            raise self._refused("is called without a tensor [b, s, h] as its first argument")
        self._layout = self._context.split(stream.shape[SEQUENCE_DIM])
        given = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}

        def cut(name: str, tree: Any) -> Any:
            return tree_map(lambda leaf: self._cut(name, leaf, stream), tree)

        names = list(inspect.signature(own_class(self._block).forward).parameters)[1:]
        parts = tuple(cut(name, x) for name, x in zip_longest(names[: len(args)], args))
        named = {name: cut(name, x) for name, x in kwargs.items()}
        self._try_first(args, kwargs, stream)
        before = sequences.attended
        with sequences.draws():
            out = call(*parts, **named)
        if sequences.attended == before:
            raise self._refused(
                "did not call the attention of transformers' registry (ALL_ATTENTION_FUNCTIONS), "
                "the only one that exchanges keys and values between cp ranks"
            )
        return tree_map(lambda x: x if id(x) in given else self._joined(x), out)

    def _try_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor) -> None:
        """Refuse a block that does not act on each position by itself."""
        trial = self._sequences.trial_of(self._block)

        def sized(x: Tensor) -> int | None:
            dims = [d for d, size in enumerate(x.shape) if size == self._layout.length]
            if x is stream or (SEQUENCE_DIM in dims and x.shape[0] in (1, stream.shape[0])):
                return SEQUENCE_DIM
            return dims[0] if len(dims) == 1 else None

        fault = None if trial is None else trial.fault(args, without_cache(kwargs), sized)
        if fault is not None:
            raise self._refused(fault)

    def _cut(self, name: str, x: Any, stream: Tensor) -> Any:
        """Return what the block gets in the place of a tensor among its arguments."""
        if x is stream:
            return self._sequences.cut(x, self._layout)
        length = self._layout.length
        if not isinstance(x, Tensor) or "mask" in name or x.shape[-2:] == (length, length):
            return x
        dims = [d for d, size in enumerate(x.shape) if size == length]
        if SEQUENCE_DIM in dims and x.shape[0] in (1, stream.shape[0]):
            dims = [SEQUENCE_DIM]
        if not dims or length == 1:
            return x
        if len(dims) > 1 or (dims[0] > SEQUENCE_DIM and x.is_floating_point()):
            raise self._refused(
                f"gets {name} of shape {tuple(x.shape)} beside a sequence of {length} positions, "
                f"of which dims {dims} may be those of the sequence"
            )
        return split(whole(x), self._layout, self._context.cp.rank, dims[0])

    def _joined(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.dim() <= SEQUENCE_DIM or x.shape[SEQUENCE_DIM] != self._layout.local:
            raise self._refused(
                f"returned a tensor of shape {tuple(x.shape)}, computed from {self._layout.local} "
                f"of {self._layout.length} positions"
            )
        return self._sequences.joined(x, self._layout, last=self._last)

    def _refused(self, what: str) -> ConfigError:
        name = own_class(self._block).__name__
        end = ", or cp=1" if "nearest valid" in what else "; nearest valid: cp=1"
        return ConfigError(f"cp={self._context.cp.size}: {name} {what}{end}")


def divides(tp: int, length: int) -> bool:
    """Whether a sequence of that length is split over ``tp`` ranks."""
    return length > 0 and length % tp == 0


def _with_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the residual stream."""
    stream = _stream_of(args, kwargs)
    if stream is None:
        return args, kwargs
    if args:
        return (change(stream), *args[1:]), kwargs
    return args, {name: change(x) if x is stream else x for name, x in kwargs.items()}


def _stream_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """First argument of a block, which is the residual stream; None if it is no activation."""
    given = args[:1] or [x for x in kwargs.values() if _is_stream(x)][:1]
    return given[0] if given and _is_stream(given[0]) else None


def _is_stream(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > SEQUENCE_DIM + 1 and x.is_floating_point()


def _is_divided(x: Any) -> bool:
    found = split_of(x)
    return found is not None and found.dim == SEQUENCE_DIM and x.dim() > SEQUENCE_DIM + 1
