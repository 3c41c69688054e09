"""The part of the strategy that builds the module, puts it on its layout and gives it back.

A run goes through it in this order: `ModuleLayout.topology` forms the groups; `building` surrounds
``configure_model``, on the meta device where that is possible; `put` transforms the module; after
the run `give_back` makes the module what a user expects. A module remembers its layout, so that a
second Trainer goes on with it.
"""

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron import env
from lightning_megatron._lightning.hooks import call_module_hook, set_device_mesh
from lightning_megatron._torch.devices import on_host
from lightning_megatron.adoption.adapters import join_adapters
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.build.meta_build import Attempt, refuse_spread
from lightning_megatron.build.written_values import WrittenValues
from lightning_megatron.checkpoint.chunks import clean_name
from lightning_megatron.checkpoint.gather_state import gather_tensors
from lightning_megatron.checkpoint.local.directory import memory_left
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError
from lightning_megatron.launch.store_barrier import PATIENCE_S, StoreBarrier
from lightning_megatron.layers.batch_norm import synchronize_batch_norm
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.activations.config import blocks_to_recompute
from lightning_megatron.parallel.apply import (
    ParallelModule,
    Transforms,
    layout_of,
    parallelize,
    remember_layout,
)
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.parallel.plan import MEASURED
from lightning_megatron.parallel.skeleton import skeleton_of, spare_modules, trunk_prefix
from lightning_megatron.parallel.unparallelize import (
    allow_use,
    fill,
    is_whole,
    refuse_use,
    restore,
)
from lightning_megatron.strategy import collectives
from lightning_megatron.strategy.adapter_files import (
    save_adapters_alone,
    save_adapters_together,
)
from lightning_megatron.strategy.model_summary import leave_summaries, remember_whole
from lightning_megatron.strategy.preflight.averaging import averages
from lightning_megatron.strategy.preflight.checks import LayoutOptions
from lightning_megatron.strategy.pretrained_models import note_whole_models, save_alone
from lightning_megatron.strategy.run import Run
from lightning_megatron.topology.mesh import Topology, close_later, close_outlived, close_with

log = logging.getLogger(__name__)

MOST_BYTES = 8 * 2**30
"""Largest module that ``gather_at_end="auto"`` makes whole."""


def gather_problems(gather_at_end: object) -> list[str]:
    """Faults of the option ``gather_at_end``."""
    if gather_at_end in (True, False, "auto"):
        return []
    return [
        f"gather_at_end={gather_at_end!r}: must be True, False or 'auto'; nearest valid: 'auto'"
    ]


class ModuleLayout:
    """The way of a module to its layout and back.

    Args:
        run: whose module it is.
        options: of the layout.
        gather_at_end: whether the module is whole after a run.
    """

    def __init__(
        self, run: Run, options: LayoutOptions, gather_at_end: bool | Literal["auto"]
    ) -> None:
        self._run = run
        self._options = options
        self.gather_at_end = gather_at_end
        self._defers = False
        self._written: WrittenValues | None = None

    def topology(self, timeout_s: float, nodes: list[str]) -> Topology:
        """A new topology, or the one that an earlier run put the module on.

        Args:
            timeout_s: of its groups.
            nodes: name of the node of every rank.
        """
        run, options = self._run, self._options
        degrees = options.degrees(run.world_size)
        close_outlived()
        earlier = layout_of(run.module)
        if earlier is not None:
            asked = options.lasting(run.world_size, run.precision)
            if asked != (held := earlier.transforms.lasting):
                raise ConfigError(
                    f"{asked}: an earlier Trainer has put this module on {held}; nearest valid: "
                    "the same, or a new module into which a checkpoint is loaded"
                )
            return earlier.topology
        seed = env.global_seed()
        if seed is None:
            seed = int(Peers().broadcast(random.SystemRandom().getrandbits(31)))
        topology = Topology(
            degrees,
            run.root_device,
            sequence_parallel=options.sequence_parallel,
            seed=seed,
            timeout=timedelta(seconds=timeout_s),
            nodes=nodes,
            context=options.cp,
            experts=options.ep,
        )
        close_with(topology, run.module)
        return topology

    def defer(self, real_because: str | None) -> None:
        """Build the module on the meta device, unless something speaks against it."""
        self._defers = real_because is None and layout_of(self._run.module) is None
        if real_because is not None:
            _warn_of_real_weights(real_because)

    @contextmanager
    def building(self, module: LightningModule | None) -> Iterator[None]:
        """Context of ``configure_model``, which is called again if it needs real tensors."""
        self._written, precision = None, self._run.precision
        deferred, self._defers = self._defers, False
        if not self._all_agree(deferred):
            with _built_once(module), torch.device("cpu"), precision.tensor_init_context():
                yield
            return
        assert module is not None
        attempt = Attempt(module)
        with attempt.running(), precision.tensor_init_context():
            yield
        if attempt.error is None:
            refuse_spread(module)
        self._written = attempt.written()
        if self._is_written_alike():
            return
        reason = _ONLY_ELSEWHERE if self._written is not None else attempt.reason
        self._written = None
        attempt.undo()
        with torch.device("cpu"), precision.tensor_init_context(), precision.module_init_context():
            call_module_hook(module.trainer, "configure_model")
        refuse_spread(module)
        _warn_of_real_weights(reason)

    def _is_written_alike(self) -> bool:
        """Whether ``configure_model`` gave the same values everywhere, as far as it is noted."""
        if self._run.world_size == 1:
            return self._written is not None
        mine = None if self._written is None else self._written.signature()
        return self._all_agree(mine is not None and mine == Peers().broadcast(mine))

    def _all_agree(self, decision: bool) -> bool:
        return Peers().vote(decision, self._run.root_device, all=True)

    def put(self, *, sync_batch_norm: bool) -> ParallelModule:
        """The module on its layout; collective.

        Args:
            sync_batch_norm: whether batch norms compute over all samples of a batch.
        """
        run, options, module = self._run, self._options, self._run.module
        topology = run.topology
        if layout_of(module) is None:
            remember_whole(module)
        allow_use(module)
        earlier = layout_of(module)
        if earlier is not None:
            return self._put_again(earlier)
        if sync_batch_norm:
            synchronize_batch_norm(module, topology.batch, run.root_device)
        transforms = Transforms(
            lasting=options.lasting(run.world_size, run.precision),
            types=replace(run.precision.types, parameters=None)
            if averages(module.trainer)
            else run.precision.types,
            pipeline=options.pp,
            sharding=options.zero,
            activations=options.activations,
            compile=options.compile,
            stage_ranks=options.stage_ranks,
            manual_optimization=not module.automatic_optimization,
        )
        converted = run.precision.convert_module(module)
        join_adapters(converted)
        if run.world_size > 1:
            save_adapters_together(converted, run.host_group)
        note_whole_models(converted)
        written, self._written = self._written, None
        if topology.pp.size == 1:
            return parallelize(converted, topology, transforms, written)
        if options.pp.partition != MEASURED:
            spare = self._skeleton(converted)
            return replace(parallelize(converted, topology, transforms, written), spare=spare)
        spare = skeleton_of(converted)
        return replace(parallelize(converted, topology, transforms, written), spare=spare)

    def _skeleton(self, module: nn.Module) -> list[nn.Module] | None:
        """Items to take the place of those of other stages after the run; None if it stays so.

        Ranks agree on whether there is room, as each sees the memory of its own moment.
        """
        trunk = next((m for m in module.modules() if isinstance(m, PipelineSequential)), None)
        size = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        if not all(Peers(self._run.host_group).all_gather(size <= self._most_bytes())):
            return None
        if trunk is None or isinstance(trunk, AdoptedTrunk):
            self._say_parts("an adopted model is built anew for each stage")
            return None
        try:
            return skeleton_of(module)
        except ConfigError as error:
            self._say_parts(str(error))
            return None

    def _say_parts(self, reason: str) -> None:
        """Say that the module stays in parts: aloud to a user who has asked for the whole."""
        text = f"the module stays in parts after the run: {reason}"
        if self.gather_at_end is True:
            rank_zero_warn(text)
        else:
            log.debug(text)

    def _most_bytes(self) -> int:
        """Size of a whole module for which this process has room in host memory."""
        if self.gather_at_end == "auto":
            room = (left // (2 * self._run.num_processes) for left in memory_left())
            return min((MOST_BYTES, *room))
        return sys.maxsize if self.gather_at_end else 0

    def _put_again(self, earlier: ParallelModule) -> ParallelModule:
        """The layout of an earlier run, with the options of this one for activations."""
        options, module = self._options, self._run.module
        _refuse_new_adapters(module, earlier)
        earlier.data.resume()
        transform_blocks(
            module,
            blocks_to_recompute(module, options.activations),
            options.activations,
            self._run.root_device,
            self._run.topology.tp,
            options.compile,
        )
        transforms = replace(
            earlier.transforms, activations=options.activations, compile=options.compile
        )
        return replace(earlier, transforms=transforms)

    def _gather(self, parallel: ParallelModule, leave_parts: Callable[[], None]) -> bool:
        """Make the module whole, in host memory, and return whether it is; collective.

        All of it is gathered before anything changes. Ranks meet at the store first, as one may
        have failed.
        """
        run, module = self._run, self._run.module
        if self.gather_at_end is False or (parallel.topology.pp.size > 1 and not parallel.spare):
            return False
        barrier = StoreBarrier("gather at end", range(run.world_size), dist.get_rank())
        if not barrier.wait(PATIENCE_S):
            rank_zero_warn("the module stays in parts, as not all ranks came to the end of the run")
            return False
        names = []
        if parallel.trunk is not None and parallel.spare is not None:
            prefix = trunk_prefix(module, parallel.trunk)
            names = [
                f"{path}.{name}"  # a hook may have replaced weights of another stage
                for path, part in spare_modules(parallel.spare, parallel.trunk, prefix).items()
                for name, tensor in (*part._parameters.items(), *part._buffers.items())
                if tensor is not None
            ]
        names = [clean_name(name) for name in names]
        tensors = gather_tensors(module, torch.device("cpu"), self._most_bytes(), names)
        if not tensors:
            return False
        if run.trainer.state.fn == TrainerFn.FITTING:
            leave_parts()
        fill(parallel, tensors, parallel.spare)
        return True

    def give_back(self, parallel: ParallelModule, leave_parts: Callable[[], None]) -> None:
        """Leave the module as a user finds it after a run; the next run destroys the groups.

        Args:
            parallel: the module on its layout.
            leave_parts: called before whole tensors take the place of parts, which optimizers keep.
        """
        run, module = self._run, self._run.module
        failed = run.trainer.state.status == TrainerStatus.INTERRUPTED
        parallel.data.release(collective=not failed)
        leave_summaries(run.trainer, module, spread=not is_whole(parallel))
        if not is_whole(parallel) and (failed or not self._gather(parallel, leave_parts)):
            refuse_use(parallel, self._options.lasting(run.world_size, run.precision))
            return
        restore(parallel)
        save_alone(module)
        collectives.leave_metrics()
        save_adapters_alone(module)
        remember_layout(module, None)
        set_device_mesh(module, None)
        parallel.gradients.forget_shard_specs()
        run.precision.use(parallel.gradients)
        # At once, a rank that has fewer batches than others would cut these off in the midst of a
        # collective, where a hang names it.
        close_later(parallel.topology)


def _refuse_new_adapters(module: LightningModule, earlier: ParallelModule) -> None:
    """Refuse adapters that the layout which an earlier run has put the module on does not know."""
    known = {role.parameter for role in earlier.gradients.roles}
    new = [n for n, p in module.named_parameters() if "lora_" in n and p not in known]
    if new:
        raise ConfigError(
            f"{new[0]}: this adapter was added after an earlier Trainer had put the module on "
            f"{earlier.transforms.lasting}, which has no place for it; nearest valid: all adapters "
            "before the first run (model.add_adapter, then model.set_adapter), or a new module"
        )


def host_group_along_pp(topology: Topology) -> dist.ProcessGroup | None:
    """A gloo group along pp, where messages between stages are not on the host."""
    if topology.pp.group is None or on_host(topology.device):
        return None
    return topology.new_group("pp", backend="gloo")


@contextmanager
def stand_ins(run: Run) -> Iterator[None]:
    """Make optimizers of a few items, on whatever stage they are, not fail on an empty list.

    ``SGD(self.trunk.head.parameters())`` gets a parameter without elements on other stages.
    Where it is all that an optimizer has, it stays.
    """
    remote = [m for m in run.module.modules() if isinstance(m, RemoteItem)]
    made: dict[Tensor, RemoteItem] = {
        p: item for item in remote if (p := item.stand_in()) is not None
    }
    yield
    for optimizer in run.optimizers:
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        held = [p for group in groups for p in group]
        kept = [] if any(p not in made for p in held) else held[:1]
        for group in groups:
            group[:] = [p for p in group if p not in made or any(p is k for k in kept)]
        for parameter in kept:
            made.pop(parameter, None)
    for item in made.values():
        item.stand_back()


@contextmanager
def _built_once(module: LightningModule | None) -> Iterator[None]:
    """Refuse to build anew what an earlier run has put on a layout."""
    earlier = None if module is None or layout_of(module) is None else list(module.parameters())
    yield
    if earlier is None and module is not None:
        refuse_spread(module)
    if module is None or earlier is None:
        return
    if list(map(id, module.parameters())) != list(map(id, earlier)):
        raise ConfigError(
            f"{type(module).__name__}.configure_model builds layers anew for a module that an "
            "earlier Trainer has put on its layout, and would lose what was trained; nearest "
            "valid: return at once where the layers are there, as in `if hasattr(self, 'net'): "
            "return`"
        )


_ONLY_ELSEWHERE = (
    "it needs them on another rank, or writes other values there (another default dtype, another "
    "environment)"
)
"""Reason of a rank on which nothing speaks against building on the meta device."""


def _warn_of_real_weights(reason: str) -> None:
    rank_zero_warn(f"configure_model builds real weights on every rank, because {reason}")
