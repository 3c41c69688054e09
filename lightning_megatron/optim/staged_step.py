"""Steps of optimizers of which nobody knows whether they unite several pipeline stages.

Each rank of a pipeline has the parameters of its own stages. An optimizer that takes them one by
one is right on these alone. One that computes a number from all of them (a norm of all gradients,
the learning rate of D-Adaptation and Prodigy, the vector of LBFGS) needs those of all stages.
What an optimizer does is seen in its first steps: `StagedStep` lends it a
`whole.stage_weights.StageTensor` for each parameter of all stages. Functions of one stage's tensors
run there and send nothing. Where one of several stages is called, or Python reads a value, the
values are sent to all ranks, and so the step is that of one process.

An optimizer that has asked for no values in `FIRST` steps treats parameters one by one, and steps
on its own stage from then on. Any other goes on like this. State is that of own parameters between
steps, as checkpoints want it; that of others is kept apart.

Not every optimizer can be lent tensors of other stages: one that has made lists of tensors of its
own, such as copies of its parameters, has those of its stage in them. It is lent its own ones, in
the same way, each as if it were on a stage of its own, and refused once it asks for values.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, tree_flatten, tree_map
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.gathered_step import GatheredStep, LentTensor
from lightning_megatron.optim.held_tensors import optimizers_in
from lightning_megatron.optim.shard_spec import ShardSpec
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.whole.divided_gradient import gradient_format
from lightning_megatron.whole.stage_functions import writes
from lightning_megatron.whole.stage_weights import StageTensor, StageWeights
from lightning_megatron.whole.torch_functions import Args, Kwargs

FIRST = 2
"""Steps in which an optimizer shows what it does; in the first there is often no state."""


class LentWeights(StageWeights):
    """The weights of all stages, as an optimizer's step sees them.

    Args:
        stages: as hooks see them.

    Attributes:
        asked: function that values were sent to all ranks for, last; empty for none.
        filled: the same of one that wrote into a tensor of everybody's.
    """

    shares_numbers = False
    _fills = False

    def __init__(self, stages: StageWeights) -> None:
        known = [stages.known(name) for name in stages.names]
        super().__init__(stages.topology, stages.own, known)
        self.sees_all = True
        self.asked = self.filled = ""

    @override
    def _each(self, func: Callable[..., Any], args: Args, kwargs: Kwargs, *, share: bool) -> Any:
        changed: Any = args[0] if args and writes(func) else None
        self._fills = isinstance(changed, Tensor) and self.owner_of(changed) is None
        return super()._each(func, args, kwargs, share=share)

    @override
    def shared(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        if tensors and self._fills:
            self.filled = what
        elif tensors:
            self.asked = what
        return super().shared(tensors, what)


class WatchedWeights(LentWeights):
    """The weights of one stage, each as if it were on a stage of its own.

    Tensors that the optimizer keeps besides belong to the weight with which they are used first.
    """

    def __init__(self, stages: StageWeights) -> None:
        super().__init__(stages)
        self._belongs: dict[int, int] = {}

    @override
    def owner_of(self, leaf: Any) -> int | None:
        owner = super().owner_of(leaf)
        return owner if owner is None else self._belongs.get(owner, owner)

    @override
    def _each(self, func: Callable[..., Any], args: Args, kwargs: Kwargs, *, share: bool) -> Any:
        found = (self.owner_of(x) for x in tree_flatten((args, kwargs))[0])
        owners = {owner for owner in found if owner is not None}
        bound = [owner for owner in owners if owner >= 0]
        if len(bound) == 1:
            self._belongs |= dict.fromkeys(owners - {*bound}, bound[0])
        return super()._each(func, args, kwargs, share=share)

    @override
    def shared(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        self.asked = what if tensors else self.asked
        with DisableTorchFunctionSubclass():
            return [_held(x).detach().clone() for x in tensors]

    @override
    def _gradients(self) -> dict[str, torch.dtype | None]:
        with DisableTorchFunctionSubclass():
            return {name: gradient_format(p) for name, p in self.own.items()}


@dataclass(frozen=True)
class _Shape:
    """Tensor of another stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Number:
    """Tensor without dims, which all ranks are sent."""

    value: Any
    dtype: torch.dtype


class StagedStep(GatheredStep):
    """Gives one optimizer the parameters of all stages, for each step; collective over pp.

    Args:
        optimizer: any optimizer.
        stages: as hooks see them.
        specs: shard spec of each parameter.
        rows: rows of plain parameters that this rank owns.
        tell: tells other ranks what an optimizer has made of this rank's part; collective.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stages: StageWeights,
        specs: Mapping[Tensor, ShardSpec],
        rows: Mapping[Any, RowShard],
        tell: Callable[[Optimizer], None],
    ) -> None:
        super().__init__(optimizer, specs, rows, tell)
        self._topology = stages.topology
        self._peers = Peers.over(stages.topology.pp)
        self._steps = 0
        self._names: dict[Any, str] = {
            p: name for name, p in stages.own.items() if name in stages.names
        }
        self._staged: dict[str, StageTensor] = {}
        """Tensors that are lent, by the name of the weight."""
        self._kept: list[tuple[dict[str, Any], str, Any]] = []
        """Entries that have other values during a step: where, their names, and their values."""
        self._states: list[tuple[str, Any, Any]] = []
        """States: path of the optimizer, the state between steps, and during this one."""
        self._during: dict[str, defaultdict[Any, Any]] = {}
        self._others: dict[tuple[str, str], Any] = {}
        """State of parameters of other stages, by path and name."""
        self._left: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        """State of own parameters as the last step left it, and as that step saw it."""
        self._formats: dict[str, torch.dtype] = {}
        self._copies: dict[int, StageTensor] = {}
        """Tensors that are lent in the place of those that the optimizer keeps."""
        with DisableTorchFunctionSubclass():
            self._watched = not self._can_see_all()
        self._weights = (WatchedWeights if self._watched else LentWeights)(stages)

    @property
    def is_alone(self) -> bool:
        """Whether the optimizer is known to treat parameters one by one."""
        return self._steps >= FIRST and not self.unites

    @property
    def unites(self) -> str:
        """Function that asked for values of several parameters; empty if none has."""
        return self._weights.asked or self._weights.filled

    @contextmanager
    @override
    def lent(self) -> Iterator[None]:
        with super().lent():
            yield
            self._settle()
            self._judge()
        self._steps += 1
        if self._steps < FIRST:  # state that begins with numbers of no parameter belongs to one now
            self._weights.filled = ""

    def _settle(self) -> None:
        """Send numbers to all ranks that the step has left in options or attributes."""
        optimizers = optimizers_in(self._optimizer).values()
        groups = [group for each in optimizers for group in each.param_groups]
        for values in (*groups, *map(vars, optimizers)):
            numbers = {
                k: v for k, v in values.items() if isinstance(v, StageTensor) and not v.dim()
            }
            values.update(zip(numbers, self._weights.shared([*numbers.values()], "+"), strict=True))

    def _judge(self) -> None:
        """Refuse an optimizer that unites parameters, and cannot see those of all stages."""
        if not self._watched or self._steps >= FIRST:
            return
        every = self._peers.all_gather((self._weights.asked, len(self._lent)))
        found = next((asked for asked, _ in every if asked), "")
        if not found and max(count for _, count in every) > 1:
            return
        raise ConfigError(
            f"optimizer={type(self._optimizer).__name__}, pp={len(every)}: its step takes values "
            f"of parameters together ({found or 'of one on each stage'}), which are on several "
            "pipeline ranks, and it keeps tensors outside of optimizer.state, which are of one "
            "stage; nearest valid: optimizer.state[p] for what it keeps of a parameter, or pp=1"
        )

    # Groups and lists -----------------------------------------------------------------------------

    @override
    def _is_lent(self, parameter: Tensor) -> bool:
        return parameter in self._specs

    def _can_see_all(self) -> bool:
        """Whether all ranks know all that this optimizer would hold in one process."""
        lists = self._lists()
        known = bool(lists) and all(
            _of_all(group["params"], lists) is not None for group in self._groups()
        )
        if known:
            without = [id(values[name]) for values, name, _ in self._lists_of_its_own(lists)]
            for optimizer in optimizers_in(self._optimizer).values():
                without += [id(optimizer.state), *map(id, optimizer.param_groups)]
            known = all(not x.dim() for x in self._held.tensors(without))
        every = self._peers.all_gather(
            (known, {name: self._own(p).dtype for p, name in self._names.items()})
        )
        for _, formats in every:
            self._formats |= formats
        return all(each for each, _ in every)

    def _groups(self) -> Iterator[dict[str, Any]]:
        groups = [g for o in optimizers_in(self._optimizer).values() for g in o.param_groups]
        yield from {id(group): group for group in groups}.values()

    def _lists(self) -> list[tuple[list[Any], list[Any]]]:
        """Own parameters and those of all stages, of each group and of all; empty if unknown."""
        found: list[tuple[list[Any], list[Any]]] = []
        for group in self._optimizer.param_groups:
            every = getattr(group["params"], "of_all_stages", None)
            if every is None:
                return []
            found.append((group["params"].of_own_stage, every))
        own, every = ([p for pair in found for p in pair[at]] for at in (0, 1))
        return [*found, (own, every)]

    def _lists_of_its_own(
        self, lists: Sequence[tuple[list[Any], list[Any]]]
    ) -> Iterator[tuple[dict[str, Any], str, list[Any]]]:
        """Attributes that are all parameters of a group, and those of all stages."""
        for optimizer in optimizers_in(self._optimizer).values():
            for name, value in list(vars(optimizer).items()):
                every = _of_all(value, lists) if type(value) is list and value else None
                if every is not None:
                    yield vars(optimizer), name, every

    # Exchange -------------------------------------------------------------------------------------

    @override
    def _put_in(self, lent: Mapping[int, Tensor]) -> None:
        self._weights.forget_gradients()
        of = dict(lent)
        for number, (p, tensor) in enumerate(self._lent.items()):
            if p in self._names:
                of[id(p)] = self._staged_for(self._names[p], tensor, number)
        lists, optimizers = self._lists(), optimizers_in(self._optimizer)
        for group in self._groups():
            every = None if self._watched else _of_all(group["params"], lists)
            members = _own_list(group["params"]) if every is None else every
            self._replace(group, "params", [self._lent_of(p, of) for p in members])
        for values, name, every in () if self._watched else list(self._lists_of_its_own(lists)):
            self._replace(values, name, [self._lent_of(p, of) for p in every])
        for path, optimizer in optimizers.items():
            if "zero_grad" in vars(optimizer):  # takes the parameters of this rank alone
                self._replace(
                    vars(optimizer), "zero_grad", type(optimizer).zero_grad.__get__(optimizer)
                )
            self._replace_state(path, optimizer, of)
        without = [id(s) for _, *both in self._states for s in both]
        if self._watched:
            self._lend_copies(of, without)
        else:
            self._bring_others()
        self._held.exchange(of, without)

    def _lend_copies(self, of: dict[int, Tensor], without: Sequence[int]) -> None:
        """Watch the tensors, too, that the optimizer keeps outside of groups and state."""
        groups = [id(group) for group in self._groups()]
        for number, x in enumerate(self._held.tensors([*without, *groups])):
            if (
                x.dim()
                and x.numel()
                and id(x) not in of
                and not isinstance(x, StageTensor | LentTensor)
            ):
                of[id(x)] = self._copies[id(x)] = self._tensor(x, -1 - number)

    def _replace(self, values: dict[str, Any], name: str, other: Any) -> None:
        self._kept.append((values, name, values[name]))
        values[name] = other

    def _lent_of(self, parameter: Any, of: Mapping[int, Tensor]) -> Tensor:
        """Return the tensor that is lent in the place of a parameter of any stage."""
        if isinstance(parameter, StageTensor):
            return self._staged_for(parameter.weight_name, None, 0)
        return of.get(id(parameter), parameter)

    def _staged_for(self, name: str, own: Tensor | None, number: int) -> StageTensor:
        known = self._weights.known(name)
        made = self._staged.get(name)
        if made is None:
            twin = torch.empty(known.shape, dtype=self._formats[name], device="meta")
            owner = number if self._watched else known.owner
            made = self._weights.tensor(own, twin, owner, name)
            made._is_param = made.is_lent = True
            self._staged[name] = made
        made.own = own
        made.twin.requires_grad_(known.requires_grad if own is None else own.requires_grad)
        return made

    @override
    def _take_out(self, parameters: Mapping[int, Tensor]) -> None:
        of = dict(parameters)
        for p, name in self._names.items():
            if name in self._staged:
                of[id(self._staged[name])] = p
        for path, between, during in self._states:
            self._leave_state(path, between, during, of)
        without = [id(s) for _, *both in self._states for s in both]
        for values, name, value in reversed(self._kept):
            values[name] = value
        self._states, self._kept, self._copies = [], [], {}
        if self._watched:
            staged = [x for x in self._held.tensors(without) if isinstance(x, StageTensor)]
            of |= {id(x): x.own for x in staged if id(x) not in of and x.own is not None}
        self._held.exchange(of, without)
        self._weights.forget_gradients()

    # State ----------------------------------------------------------------------------------------

    def _replace_state(self, path: str, optimizer: Any, of: Mapping[int, Tensor]) -> None:
        """Let an optimizer have the state of what it was lent."""
        known = next((during for _, b, during in self._states if b is optimizer.state), None)
        if known is None:
            known = self._during.setdefault(path, defaultdict(dict))  # the step may hold it
            known.clear()
            for p, values in dict.items(optimizer.state):
                name = self._names.get(p) if isinstance(p, Tensor) else None
                seen = values if name is None else self._seen_state(path, name, values)
                known[of.get(id(p), p)] = seen
            self._states.append((path, optimizer.state, known))
        self._replace(vars(optimizer), "state", known)

    def _seen_state(self, path: str, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """State of an own parameter as the step is to see it."""
        left, seen = self._left.get((path, name), ({}, {}))  # the step may hold ``seen``
        owner = self._staged[name].owner

        def tensor(value: Any) -> Any:
            return self._tensor(value, owner) if _has_dims(value) else value

        known = {key for key, value in left.items() if values.get(key) is value}
        known -= {key for key in known if _has_dims(seen[key]) and seen[key] is left[key]}
        found = {
            key: seen[key] if key in known else tree_map(tensor, value)
            for key, value in values.items()
        }
        seen.clear()
        seen.update(found)
        return seen

    def _tensor(self, own: Tensor, owner: int, *, is_here: bool = True) -> StageTensor:
        twin = torch.empty(own.shape, dtype=own.dtype, device="meta")
        return self._weights.tensor(own if is_here else None, twin, owner, device=own.device)

    def _leave_state(self, path: str, between: Any, during: Any, of: Mapping[int, Tensor]) -> None:
        """Leave the state of own parameters to the optimizer, and keep that of others."""
        before = {id(p): values for p, values in dict.items(between)}
        dict.clear(between)
        for key, values in during.items():
            parameter = of.get(id(key), key)
            if isinstance(parameter, StageTensor):
                self._others[path, parameter.weight_name] = values
                continue
            name = self._names.get(parameter) if isinstance(parameter, Tensor) else None
            if name is not None:
                own = before.get(id(parameter), {})
                own_values = {k: tree_map(_held, v) for k, v in values.items()}
                own.clear()
                own.update(own_values)
                self._left[path, name] = own_values, values
                values = own
            dict.__setitem__(between, parameter, values)

    def _bring_others(self) -> None:
        """Let the step see the state of other stages' parameters as these have it."""
        changed = int(self._has_changed())
        flag = torch.tensor(changed, device=self._topology.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._topology.pp.group)
        if flag.item():
            self._ask_for_state()
        during = {path: values for path, _, values in self._states}
        for (path, name), values in self._others.items():
            owner = self._weights.known(name).owner
            for key, value in values.items():
                if _has_dims(value) and not isinstance(value, StageTensor):
                    values[key] = self._tensor(value, owner, is_here=False)
            if path in during:
                during[path][self._staged_for(name, None, 0)] = values

    def _has_changed(self) -> bool:
        """Whether the state is not as the last step left it, as after a checkpoint was loaded."""
        found = {
            (path, name): values
            for path, between, _ in self._states
            for p, values in dict.items(between)
            if isinstance(p, Tensor) and (name := self._names.get(p)) is not None
        }
        return found.keys() != self._left.keys() or any(
            values.keys() != self._left[at][0].keys()
            or any(values[key] is not old for key, old in self._left[at][0].items())
            for at, values in found.items()
        )

    def _ask_for_state(self) -> None:
        mine = {
            (path, self._names[p]): {k: tree_map(_described, v) for k, v in values.items()}
            for path, between, _ in self._states
            for p, values in dict.items(between)
            if p in self._names
        }
        self._others = {}
        own = set(self._names.values())
        for theirs in self._peers.all_gather(mine):
            for (path, name), values in theirs.items():
                if name not in own:
                    owner = self._weights.known(name).owner
                    made = {
                        k: tree_map(lambda v, o=owner: self._made(v, o), d)
                        for k, d in values.items()
                    }
                    self._others.setdefault((path, name), made)

    def _made(self, described: Any, owner: int) -> Any:
        if isinstance(described, _Number):
            return torch.tensor(described.value, dtype=described.dtype)
        if not isinstance(described, _Shape):
            return described
        twin = torch.empty(described.shape, dtype=described.dtype, device="meta")
        return self._weights.tensor(None, twin, owner)


def _own_list(members: Any) -> list[Any]:
    return list(getattr(members, "of_own_stage", members))


def _of_all(members: Any, lists: Sequence[tuple[list[Any], list[Any]]]) -> list[Any] | None:
    """Parameters of all stages that belong to a list of own ones; None if it is no group."""
    own = _own_list(members)
    for mine, every in lists:
        if len(mine) == len(own) and all(p is q for p, q in zip(mine, own, strict=True)):
            return every
    return None


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _held(value: Any) -> Any:
    """What this rank has of a tensor of a stage; anything else as it is."""
    return value.own if isinstance(value, StageTensor) else value


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim():
        return _Shape(tuple(value.shape), value.dtype)
    return _Number(value.item(), value.dtype)
