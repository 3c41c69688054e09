"""Parameter groups and state of optimizers, as hooks see them under a pipeline."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import asks_classes, register_list
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import Placeholder
from lightning_megatron.whole.stage_weights import StageTensor, StageWeights

_READS = (
    *("__contains__", "__eq__", "__ne__", "__getitem__", "__iter__", "__len__", "__mul__"),
    *("__repr__", "__reversed__", "__rmul__", "copy", "count", "index"),
)
_WRITES = (
    *("__delitem__", "__iadd__", "__imul__", "__setitem__", "append", "clear", "extend"),
    *("insert", "pop", "remove", "reverse", "sort"),
)


class GroupWeights(list[Any]):
    """Parameters of a group: in hooks those of all stages, else those that this rank steps on.

    The list itself holds those of all stages, as functions in C read it and ask no method: a weight
    of another stage is then refused, where one that is missing would be missed by nobody.

    Args:
        shown: parameters of the group on all stages.
        stages: weights of all stages.
        is_known: whether all ranks have the same groups, so that it is known what this one has on
            other stages.
    """

    def __init__(
        self, shown: Sequence[Tensor], stages: StageWeights, *, is_known: bool = True
    ) -> None:
        super().__init__(shown)
        self._stages = stages
        self._is_known = is_known
        self._own: list[Any] = []
        self._sort_out()

    def _sort_out(self) -> None:
        """Note what this rank steps on; a placeholder of a stage without weights is not shown."""
        every = list.copy(self)
        self._own = [p for p in every if not isinstance(p, StageTensor)]
        list.__setitem__(self, slice(None), [p for p in every if not isinstance(p, Placeholder)])

    @property
    def of_all_stages(self) -> list[Any] | None:
        """Parameters of the group on all stages; None if this rank does not know them."""
        return list.copy(self) if self._is_known else None

    @property
    def of_own_stage(self) -> list[Any]:
        """Those on which this rank steps."""
        return list(self._own)

    @property
    def _is_shown(self) -> bool:
        """Whether code of the user's looks in a hook."""
        if not (self._stages.in_hooks and asks_classes()):
            return False
        if not self._is_known:
            raise ConfigError(
                "optimizer.param_groups: the pipeline's ranks have other groups or other options "
                "of them, so no rank knows the weights of a group on all stages; nearest valid: "
                "self.named_parameters() in hooks, or groups that every stage has, in one order"
            )
        return True

    @override
    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]  # sum((group["params"] for group in groups), [])

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        return list, (list(self),)


def _read(name: str) -> Any:
    of_list = getattr(list, name)

    def method(self: GroupWeights, *args: Any, **kwargs: Any) -> Any:
        return of_list(self if self._is_shown else self._own, *args, **kwargs)

    return method


def _write(name: str) -> Any:
    of_list = getattr(list, name)

    def method(self: GroupWeights, *args: Any, **kwargs: Any) -> Any:
        if self._is_shown:
            found = of_list(self, *args, **kwargs)
            self._sort_out()
            return found
        found = of_list(self._own, *args, **kwargs)
        return self if found is self._own else found

    return method


for _name in _READS:
    setattr(GroupWeights, _name, _read(_name))
for _name in _WRITES:
    setattr(GroupWeights, _name, _write(_name))
register_list(GroupWeights)


class StageState(defaultdict[Any, Any]):
    """State of an optimizer, in which a hook asks in vain for that of another stage's weight."""

    @override
    def __missing__(self, key: Any) -> Any:
        _refuse(key)
        return super().__missing__(key)

    @override
    def __contains__(self, key: object) -> bool:
        _refuse(key)
        return super().__contains__(key)

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        _refuse(key)
        return super().get(key, default)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, StageTensor):  # else its stage does
            super().__setitem__(key, value)


def _refuse(key: object) -> None:
    if isinstance(key, StageTensor):
        raise ConfigError(
            f"optimizer.state[{key.weight_name}]: this weight is on pipeline rank {key.owner}, and "
            "each rank has the optimizer's state of what it steps on; nearest valid: p.grad and "
            "the weights, which hooks see on every rank, or the state of own weights, "
            "for p in optimizer.state"
        )
