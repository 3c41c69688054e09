"""Parameter groups of optimizers, in which hooks see the weights of all pipeline stages."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import asks_classes
from lightning_megatron.whole.splits import place_of
from lightning_megatron.whole.stage_weights import StageTensor, StageWeights


class GroupWeights(list[Any]):
    """Parameters of a group: those that this rank steps on; in hooks those of all stages.

    Args:
        given: parameters, among which those of other stages may be.
        stages: weights of all stages.
        group: number of the optimizer and of the group, as other ranks know it.
    """

    def __init__(
        self, given: Sequence[Tensor], stages: StageWeights, group: tuple[int, int]
    ) -> None:
        own = [p for p in given if not isinstance(p, StageTensor)]
        super().__init__(own)
        names = [place_of(p).name for p in own if stages.owner_of(p) is not None]
        added = [p.weight_name for p in given if isinstance(p, StageTensor)]
        members = {*names, *added} | {n for n in stages.names if stages.known(n).group == group}
        inside = [stages.weight(name) for name in stages.names if name in members]
        outside = [p for p in own if stages.owner_of(p) is None]
        first = next((at for at, p in enumerate(own) if stages.owner_of(p) is not None), len(own))
        before = [p for p in own[:first] if any(p is o for o in outside)]
        after = [p for p in own[first:] if any(p is o for o in outside)]
        self._stages = stages
        self._all = [*before, *inside, *after]

    @property
    def _shown(self) -> list[Any] | None:
        """Weights of all stages, where code of the user's looks in a hook; else None."""
        return self._all if self._stages.in_hooks and asks_classes() else None

    @override
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._shown is None else iter(self._shown)

    @override
    def __len__(self) -> int:
        return super().__len__() if self._shown is None else len(self._shown)

    @override
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self._shown is None else self._shown[index]

    @override
    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]  # sum((group["params"] for group in groups), [])

    @override
    def __reduce_ex__(self, _: Any) -> Any:
        return list, (list(self),)
