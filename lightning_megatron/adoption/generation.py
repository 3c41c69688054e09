"""``generate`` of an adopted model, under every layout.

transformers writes text by calls of the model, one per token. They are its own code here as well.
What is different on several ranks:

* under tp, cp and pp all ranks call it with the same arguments, and all choose the same tokens:
  their logits are those of the first tp and cp rank, and so is the state of their random numbers;
* under pp a call goes along the stages (`adoption.trunk.RelayProgram`);
* a single token cannot be split, so no layer splits sequences;
* under ZeRO 3, and where experts are spread, a forward needs those of the ranks with other samples:
  who has finished runs along until the last one has (`_Company`). ``synced_gpus`` of transformers,
  which is for that, fails where ranks finish at different lengths and there is a mask.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_megatron.adoption.caches import given_cache, without_cache
from lightning_megatron.adoption.classes import own_class
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.launch.store_barrier import StoreBarrier
from lightning_megatron.layers.experts.decisions import company
from lightning_megatron.topology.coordinates import coordinates_of
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology, share_draws
from lightning_megatron.whole.splits import split_of, whole

_CACHES = (None, "dynamic", "dynamic_full")


Gathered: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Function that calls another one with the parameters that a step gathers."""


class _Writers:
    """The ranks that have parts of one model, in a run: they write together.

    Args:
        name: name of the model in its module.
        topology: the layout.
        gathered: None if a step gathers no parameters.
    """

    def __init__(self, name: str, topology: Topology, gathered: Gathered | None) -> None:
        self.topology = topology
        self.gathered = gathered
        degrees, rank = topology.degrees, topology.rank
        mine = _samples_of(rank, degrees)
        ranks = [r for r in range(degrees.world_size) if _samples_of(r, degrees) == mine]
        self._barrier = StoreBarrier(f"generate {name}", ranks, rank)

    def await_all(self) -> None:
        """Wait until all have called ``generate``; raises a `ConfigError` if some do not."""
        self._barrier.require_all("generate")

    def __deepcopy__(self, memo: Any) -> "_Writers":
        """Return itself: a copy of the model is on the same ranks."""
        return self


def generate_together(module: nn.Module, topology: Topology, gathered: Gathered | None) -> None:
    """Tell the adopted models in a module, on its layout, what they need of a run to generate.

    A call on one rank alone would wait for the others until the timeout of their groups. So the
    ranks that have parts of one model meet at the store first, which can say who has not come.

    Args:
        module: the LightningModule.
        topology: the layout.
        gathered: None if a step gathers no parameters.
    """
    for name, model in module.named_modules():
        if isinstance(model, AdoptedGenerator):
            model.__dict__["writers"] = _Writers(name, topology, gathered)


def _samples_of(rank: int, degrees: Degrees) -> tuple[int, int]:
    """Which samples a rank reads."""
    at = coordinates_of(rank, degrees)
    return at["dp_replicate"], at["dp_shard"]


class AdoptedGenerator(nn.Module):
    """Class in front of the class of an adopted model that can generate."""

    surrounds: tuple[str, ...] = ("forward", "generate")
    writes_alike: Topology | None = None
    """Layout whose ranks are to see the same logits now; None outside of `generate`."""
    writers: _Writers | None = None
    """The ranks of a run that have parts of the model; None before one."""
    company: "_Company | None" = None
    """Ranks that run along now."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; while it generates, with logits that are whole and equal on all ranks."""
        if self.company is not None:
            self.company.runs(args, kwargs)
        out = super().forward(*args, **kwargs)
        topology = self.writes_alike
        if topology is not None and isinstance(getattr(out, "logits", None), Tensor):
            of_parts = split_of(out.logits) is not None
            out.logits = _agreed(whole(out.logits), topology, of_parts=of_parts)
        return out

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Write text as the model's own ``generate`` does; on all ranks together."""
        own: Any = own_class(self)
        call = partial(own.generate, self, *args, **kwargs)
        if self.writers is None or self.writes_alike is not None:
            return call()
        topology = self.writers.topology
        _check_clock(kwargs, topology)
        if isinstance(self, AdoptedTrunk):
            self.stand_aside()
            if not self.is_whole:
                _check_cache(self, kwargs)
        self.writers.await_all()
        if _needs_others(self, topology):
            alone = partial(call, synced_gpus=False)
            call = partial(_Company(self, topology).around, alone)
        if isinstance(self, AdoptedTrunk):
            call = partial(self.relayed, call)
        if self.writers.gathered is not None:
            call = partial(self.writers.gathered, call)
        with topology.whole_sequences(), self._alike(topology), torch.no_grad():
            return call()

    @contextmanager
    def _alike(self, topology: Topology) -> Iterator[None]:
        """Context in which all ranks of a network draw and see the same."""
        if topology.tp.size * topology.cp.size * topology.pp.size > 1:
            share_draws(topology)
        self.__dict__["writes_alike"] = topology
        try:
            yield
        finally:
            self.__dict__["writes_alike"] = None


def _check_clock(kwargs: Mapping[str, Any], topology: Topology) -> None:
    """Refuse an end that each rank would find by its own clock."""
    config = kwargs.get("generation_config")
    limit = kwargs.get("max_time", getattr(config, "max_time", None))
    if limit is not None and topology.world_size > 1:
        raise ConfigError(
            f"generate(max_time={limit}): each rank would stop by its own clock, and the others "
            "wait for it; nearest valid: max_new_tokens=..."
        )


def _agreed(logits: Tensor, topology: Topology, *, of_parts: bool) -> Tensor:
    """Logits of the first tp and cp rank; those ``of_parts`` are equal over tp anyway."""
    logits = logits.contiguous()
    for axis in (topology.cp,) if of_parts else (topology.tp, topology.cp):
        if axis.group is not None:
            dist.broadcast(logits, axis.ranks[0], group=axis.group)
    return logits


class _Company:
    """Forwards that ranks with other samples run together, as long as one of them has any.

    Args:
        model: the model.
        topology: its layout.
    """

    def __init__(self, model: AdoptedGenerator, topology: Topology) -> None:
        self._model = model
        self._topology = topology
        self._given: tuple[Any, dict[str, Any]] | None = None

    def around(self, call: Callable[[], Any]) -> Any:
        """Generate, and run along with the others afterwards."""
        state = self._model.__dict__
        state["company"] = self
        try:
            result = call()
        finally:
            state["company"] = None
        with company():
            while self._somebody(runs=False):
                args, kwargs = self._given or ((), {})
                self._model(*args, **kwargs)
        return result

    def runs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note that this rank runs a forward, and what its first one is given."""
        self._somebody(runs=True)
        if self._given is None:
            self._given = args, {**without_cache(kwargs), "use_cache": False}

    def _somebody(self, *, runs: bool) -> bool:
        """Whether any rank runs a forward now."""
        return Peers.over(self._topology.loss).vote(runs, self._topology.device, all=False)


def _needs_others(model: nn.Module, topology: Topology) -> bool:
    """Whether a forward needs those of ranks with other samples."""
    if topology.loss.size == 1:
        return False
    return topology.ep.size > 1 or any(isinstance(p, DTensor) for p in model.parameters())


def _check_cache(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse caches that need memory for the keys and values of layers on other stages."""
    config = options.get("generation_config") or model.generation_config
    kind = options.get("cache_implementation", getattr(config, "cache_implementation", None))
    if kind not in _CACHES:
        raise ConfigError(
            f"pp > 1, cache_implementation={kind!r}: a rank has the keys and values of its own "
            "layers only; nearest valid: cache_implementation='dynamic'"
        )
    given = given_cache(options)
    if getattr(given, "is_compileable", False):
        raise ConfigError(
            f"pp > 1, a given {type(given).__name__}: a rank has the keys and values of "
            "its own layers only; nearest valid: a DynamicCache"
        )
