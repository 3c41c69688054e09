"""The Lightning strategy: ``Trainer(strategy=MegatronStrategy(tp=4, pp=2))``.

Hooks only, and here those that set a run up; the others are in `strategy.processes.connection`
(processes), `strategy.step_hooks`, `strategy.checkpoint_hooks`, `strategy.data.loaders` and
`strategy.collectives`; in front of all stands `strategy.section_hooks`. What they do is decided in
`strategy.preflight.checks` (is the run legal), `parallel.apply` (put the module on the layout),
`strategy.step_engine` (run a batch) and `checkpoint` (save and load).
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.rank_coordination import Peers
from lightning_megatron.errors import ConfigError, instances, raise_if_any
from lightning_megatron.layers.batch_norm import synchronize_batch_norm
from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.layers.written_values import WrittenValues
from lightning_megatron.optim.gathered_step import check_optimizer
from lightning_megatron.parallel.activations.config import MemoryConfig, blocks_to_recompute
from lightning_megatron.parallel.apply import (
    ParallelModule,
    Transforms,
    layout_of,
    parallelize,
    remember_layout,
)
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.parallel.layer_skeletons import spare_items
from lightning_megatron.parallel.plan import MEASURED, PipelineConfig
from lightning_megatron.parallel.unparallelize import allow_calls, is_whole, refuse_calls, restore
from lightning_megatron.parallel.zero import ShardingConfig
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.precision.plugin import sharded_precision
from lightning_megatron.strategy.checkpoint_hooks import CheckpointHooks
from lightning_megatron.strategy.collectives import TopologyCollectives
from lightning_megatron.strategy.coordinated_stop import StopHooks
from lightning_megatron.strategy.data.loaders import LoaderHooks
from lightning_megatron.strategy.data.position import DataPosition
from lightning_megatron.strategy.meta_build import Attempt, refuse_spread
from lightning_megatron.strategy.model_summary import (
    leave_summaries,
    remember_whole,
    summarise_layout,
)
from lightning_megatron.strategy.observers import looks_at_gradients, looks_at_weights
from lightning_megatron.strategy.preflight.averaging import averages
from lightning_megatron.strategy.preflight.checks import LayoutOptions, examine
from lightning_megatron.strategy.preflight.shared_directories import check_shared
from lightning_megatron.strategy.processes.connection import ConnectionConfig, Processes
from lightning_megatron.strategy.rank_options import named_options
from lightning_megatron.strategy.rng_state import RandomState
from lightning_megatron.strategy.section_hooks import SectionHooks
from lightning_megatron.strategy.sharded_errors import explain
from lightning_megatron.strategy.stage_state import StepState
from lightning_megatron.strategy.step_engine import StepEngine
from lightning_megatron.strategy.step_recovery import StepRecovery
from lightning_megatron.strategy.tuners.partition import MeasuredPartition
from lightning_megatron.strategy.tuners.recomputation import AdaptiveMemory
from lightning_megatron.strategy.tuners.schedule import AUTO, AutoSchedule
from lightning_megatron.topology.mesh import Topology, close_later, close_outlived, close_with
from lightning_megatron.topology.rng import HostRandomness


class MegatronStrategy(
    SectionHooks,
    StopHooks,
    CheckpointHooks,
    LoaderHooks,
    TopologyCollectives,
    StepRecovery,
    Processes,
):
    """Trains an ordinary LightningModule under tensor, pipeline and ZeRO data parallelism.

    The data-parallel degree is what remains: ``devices * num_nodes / (tp * pp)``. Layers from
    `lightning_megatron.layers` are split over tp, everything else is replicated over it; with
    ``pp > 1`` the module calls one `PipelineSequential` in each step. For the same seed and global
    batch every layout trains the same weights, to rounding.

    Args:
        tp: ranks that share every parallel layer.
        pp: pipeline stages, each on ranks of its own.
        zero: 0 replicates; 1 shards optimizer state and reduces gradients once per step; 2 reduces
            them every microbatch; 3 shards parameters too (see `parallel.zero`).
        sequence_parallel: split activations between parallel layers over tp along the sequence.
        microbatch_size: samples per microbatch.
        num_microbatches: microbatches per batch, in place of ``microbatch_size``. By default 1, and
            4 per pipeline stage under a pipeline.
        schedule: order of forwards and backwards in the pipeline (see `schedules.schedule`):
            ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"breadth-first"``, ``"zb-h1"``,
            ``"zb-h2"``, ``"zbv"``, ``"v-half"``, ``"v-min"``, ``"dualpipev"``, ``"custom"`` or
            ``"auto"`` (the fastest, by the times of the first steps).
        pipeline: how the trunk is cut into stages, and how many a rank holds.
        sharding: what ZeRO treats as a unit, and how many copies of its shards there are.
        memory: which activations are computed again in the backward, or wait in host memory.
        connection: backend and timeout of the process groups.
        checkpoint: whether saving stops training, and what follows a save that fails.

    Raises:
        ConfigError: a group of options is of another type; and when the run starts, on every rank
            and before any process group forms, with everything that is wrong.
    """

    strategy_name = "megatron"
    is_distributed = True

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        zero: Literal[0, 1, 2, 3] = 1,
        sequence_parallel: bool = False,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008 (frozen)
        sharding: ShardingConfig = ShardingConfig(),  # noqa: B008
        memory: MemoryConfig = MemoryConfig(),  # noqa: B008
        connection: ConnectionConfig = ConnectionConfig(),  # noqa: B008
        checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008
    ) -> None:
        super().__init__()
        raise_if_any(
            instances(
                pipeline=(pipeline, PipelineConfig),
                sharding=(sharding, ShardingConfig),
                memory=(memory, MemoryConfig),
                connection=(connection, ConnectionConfig),
                checkpoint=(checkpoint, CheckpointConfig),
            )
        )
        self.options = LayoutOptions(
            tp=tp,
            pp=pp,
            zero=zero,
            dp_replicate=sharding.dp_replicate,
            sequence_parallel=sequence_parallel,
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            pipeline=pipeline,
        )
        self._sharding, self.memory = sharding, memory
        self._connection, self._checkpoint = connection, checkpoint
        self._topology: Topology | None = None
        self._parallel: ParallelModule | None = None
        self._defer_init = False
        self._written: WrittenValues | None = None
        self._host_gloo: dist.ProcessGroup | None = None
        self._seed = 0
        self._gave_back: ParallelModule | None = None
        self._step_state: StepState | None = None

    # Processes ---------------------------------------------------------------------------------

    @property
    @override
    def topology(self) -> Topology:
        """Groups and coordinates of this run; exists once the processes are connected."""
        if self._topology is None:
            raise RuntimeError("the topology exists once the Trainer has started to run")
        return self._topology

    @property
    def pipeline(self) -> Pipeline | None:
        """What runs the pipeline of the current run; None without one."""
        executor = None if self._engine is None else self._engine.executor
        return executor if isinstance(executor, Pipeline) else None

    @property
    def parallel(self) -> ParallelModule:  # type: ignore[override]
        """The module on its layout; exists once the strategy has set it up."""
        if self._parallel is None:
            raise ConfigError(
                "no Trainer has put the module on its layout yet, so there is nothing of this "
                "strategy's to save; nearest valid: trainer.save_checkpoint after fit, validate, "
                "test or predict, or torch.save(module.state_dict(), path)"
            )
        return self._parallel

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Lightning 2.6 does this with torch 2.13, on every rank; the user can do nothing about it.
        warnings.filterwarnings(
            "ignore", ".*LeafSpec.*is deprecated", module=r"lightning\.pytorch\.utilities\._pytree"
        )
        # Lightning's launcher does this for the first process of a node only; the others would
        # compute with as many threads each as there are cores.
        _set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        self.events.identify(rank=self.global_rank)
        self.check_start()
        module = self._module()
        with self.told_to_others():
            self._examine(module)
        host = self._sharding.offload_parameters
        options = named_options(
            module.trainer,
            self.options,
            sharding=self._sharding,
            memory=self.memory,
            checkpoint=self._checkpoint,
        )
        self.find_peers(self._connection, options, from_host=host)
        self._topology = self._make_topology(module)
        module._device_mesh = self.topology.mesh
        if self.world_size > 1:
            # All ranks draw what one process would, but for what steps draw: see `StepSeeds`. So a
            # split of the data that ``setup`` draws is the same on all.
            self.broadcast(HostRandomness.capture()).restore()

    def _examine(self, module: LightningModule) -> None:
        """Raise everything that is wrong with the run, as far as one process can tell."""
        findings = examine(
            module.trainer, module, self.options, self._sharding, self.memory, self.world_size
        )
        host = self._sharding.offload_parameters
        problems = (
            *self._connection.problems(host),
            *self._checkpoint.problems(),
            *self.checkpoint_problems(),
        )
        raise_if_any([*problems, *findings.problems])
        self._defer_init = findings.real_because is None and layout_of(module) is None
        if findings.real_because is not None:
            _warn_of_real_weights(findings.real_because)

    def _make_topology(self, module: LightningModule) -> Topology:
        """A new topology, or the one that an earlier run put the module on."""
        degrees = self.options.degrees(self.world_size)
        close_outlived()
        earlier = layout_of(module)
        if earlier is not None:
            asked = self.options.lasting(self.world_size, self.precision_plugin)
            if asked != (held := earlier.transforms.lasting):
                raise ConfigError(
                    f"{asked}: an earlier Trainer has put this module on {held}; nearest valid: "
                    "the same, or a new module into which a checkpoint is loaded"
                )
            return earlier.topology
        seed = env.global_seed()
        if seed is None:
            seed = int(self.broadcast(random.SystemRandom().getrandbits(31)))
        self._seed = seed
        topology = Topology(
            degrees,
            self.root_device,
            sequence_parallel=self.options.sequence_parallel,
            seed=self._seed,
            timeout=timedelta(seconds=self._connection.timeout_s),
            nodes=self.node_names(),
        )
        close_with(topology, module)
        return topology

    # Module, optimizer, data ---------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else sharded_precision(plugin)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on the meta device what can be given its values afterwards.

        If ``configure_model`` turns out to need real tensors, it is called again with them.
        """
        self._written, precision = None, self.precision_plugin
        module = self.lightning_module
        deferred, self._defer_init = self._defer_init, False
        if not self.reduce_boolean_decision(deferred):
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
        reason, self._written = attempt.reason, None
        attempt.undo()
        with torch.device("cpu"), precision.tensor_init_context(), precision.module_init_context():
            _call_lightning_module_hook(module.trainer, "configure_model")
        refuse_spread(module)
        _warn_of_real_weights(reason)

    def _is_written_alike(self) -> bool:
        """Whether ``configure_model`` gave the same values everywhere, as far as it is noted."""
        if self.world_size == 1:
            return self._written is not None
        mine = None if self._written is None else self._written.signature()
        return self.reduce_boolean_decision(mine is not None and mine == self.broadcast(mine))

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module()
        # What is gathered as an inference tensor cannot take part in later training.
        trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
        if self.world_size > 1:
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False
        self.take_over_samplers(trainer)
        self._data_position, self._random_state = DataPosition(), RandomState(self.topology)
        self._host_gloo = self._host_group()
        if layout_of(module) is None:
            remember_whole(module)
        self.adopt(self._parallelize(module))
        self.model = module
        summarise_layout(trainer, module, spread=not is_whole(self.parallel))
        self.barrier()
        self.measured_partition = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            if not (self.on_one_machine or trainer.fast_dev_run):  # type: ignore[attr-defined]
                check_shared(trainer, Peers(self._host_world()))
            self.start_saver(self._checkpoint, self._connection.timeout_s)
            looks = looks_at_gradients(trainer, module)
            looks = self.reduce_boolean_decision(looks, all=False)  # on all ranks alike
            self.parallel.data.show_gradients(looks)
            self._watch_parts(trainer, module)
            if self.parallel.spare is not None:
                self.measured_partition = MeasuredPartition(self)
        self.start_agreement(trainer, self._host_world())
        self._share_step_state(trainer)
        self.setup_precision_plugin()

    def _share_step_state(self, trainer: Trainer) -> None:
        """Under a pipeline, make true on all stages what steps leave behind on the last."""
        self._step_state = None
        if self.topology.pp.size > 1:
            last = self._steps().last_rank
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            self._step_state = StepState(
                self._module(),
                self.topology.pp,
                last,
                self.topology.device,
                self._host_gloo,
                callbacks,
            )
            callbacks.insert(0, self._step_state)

    def _watch_parts(self, trainer: Trainer, module: LightningModule) -> None:
        """Have parts of weights seen by user's code made whole, where there are parts and users."""
        degrees = self.topology.degrees
        in_parts = self.options.zero == 3 and self.topology.batch.size > 1
        if in_parts or degrees.tp > 1 or degrees.pp > 1:
            somewhere, in_step = looks_at_weights(trainer, module)
            in_step = self.reduce_boolean_decision(in_step, all=False)
            if self.reduce_boolean_decision(somewhere, all=False) or in_step:
                self.watch_weights(step=in_step)

    def adopt(self, parallel: ParallelModule) -> None:
        """Run the module on this layout from now on; collective over all processes."""
        module, precision = self._module(), self._precision()
        self._parallel = parallel
        remember_layout(module, parallel)
        precision.use(parallel.gradients)
        precision.prepare(parallel)
        if self._reductions is not None:
            self._reductions.follow(parallel.gradients)
        rule = self.options.microbatches()
        make = self.options.make_schedule
        config = self.options.pipeline
        self._engine = StepEngine(
            module, parallel, rule, make, self._host_gloo, config.scatter_gather
        )
        self._engine.executor.sections = self.sections
        if self.options.schedule == AUTO and self.pipeline is not None:
            stages, limit = config.stages_per_rank or 2, config.activation_gib
            self._engine.auto = AutoSchedule(self.pipeline, stages, limit, rank_zero_info)
        self.adaptive_memory = None
        if self.memory.recompute == "adaptive":
            self.adaptive_memory = AdaptiveMemory(parallel, self.memory, make, rank_zero_info)
        self.share_metrics(module)

    def let_go(self) -> None:
        """Forget the layout and what was made for it, to have the memory for another."""
        remember_layout(self._module(), None)
        self._parallel = self._engine = None

    def _parallelize(self, module: LightningModule) -> ParallelModule:
        allow_calls(module)
        earlier = layout_of(module)
        if earlier is not None:
            earlier.data.resume()
            recomputed = blocks_to_recompute(module, self.memory)
            tp = self.topology.tp
            transform_blocks(module, recomputed, self.memory, self.root_device, tp)
            transforms = replace(earlier.transforms, memory=self.memory)
            return replace(earlier, transforms=transforms)
        precision = self._precision()
        if self._layer_sync is not None:
            synchronize_batch_norm(module, self.topology.batch, self.root_device)
        transforms = Transforms(
            zero=self.options.zero,
            lasting=self.options.lasting(self.world_size, precision),
            types=replace(precision.types, parameters=None)
            if averages(module.trainer)
            else precision.types,
            pipeline=self.options.pipeline,
            sharding=self._sharding,
            memory=self.memory,
            stage_ranks=self.options.stage_ranks,
            manual_optimization=not module.automatic_optimization,
        )
        converted = precision.convert_module(module)
        written, self._written = self._written, None
        if self.topology.pp.size == 1 or self.options.pipeline.partition != MEASURED:
            return parallelize(converted, self.topology, transforms, written)
        spare = spare_items(converted)
        return replace(parallelize(converted, self.topology, transforms, written), spare=spare)

    def _host_group(self) -> dist.ProcessGroup | None:
        if self.topology.pp.group is None or dist.get_backend(self.topology.pp.group) == "gloo":
            return None
        return self.topology.new_group("pp", backend="gloo")

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except ValueError as error:
            if self.topology.pp.size == 1 or "empty parameter list" not in str(error):
                raise
            with self._stand_ins():
                super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            warning = check_optimizer(
                optimizer, self.parallel.gradients.shard_specs, self.parallel.gradients.lends
            )
            if warning:
                rank_zero_warn(warning)

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Make optimizers of a few items, on whatever stage they are, not fail on an empty list.

        ``SGD(self.trunk.head.parameters())`` gets a parameter without elements on other stages.
        Where it is all that an optimizer has, it stays.
        """
        remote = [m for m in self._module().modules() if isinstance(m, RemoteItem)]
        made: dict[Tensor, RemoteItem] = {
            p: item for item in remote if (p := item.stand_in()) is not None
        }
        yield
        for optimizer in self.optimizers:
            groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
            held = [p for group in groups for p in group]
            kept = [] if any(p not in made for p in held) else held[:1]
            for group in groups:
                group[:] = [p for p in group if p not in made or any(p is k for k in kept)]
            for parameter in kept:
                made.pop(parameter, None)
        for item in made.values():
            item.stand_back()

    @override
    def model_to_device(self) -> None:
        """Nothing: the layout put every parameter where it belongs."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.check_saves()
        with self._sharing_step_state():
            return super().training_step(*args, **kwargs)

    @override
    def _evaluate(self, *args: Any) -> Any:
        with self._sharing_step_state():
            return super()._evaluate(*args)

    @contextmanager
    def _sharing_step_state(self) -> Iterator[None]:
        state = self._step_state
        if state is not None:
            state.begin_step()
        yield
        if state is not None:
            state.end_step()

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        if self._engine is not None:
            self._engine.gathers_samples()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self.before_update()

    @override
    def on_train_start(self) -> None:
        """The last hook before the first batch."""
        self._data_position.start(self._module().trainer)
        self._random_state.restore()

    # End ------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.unwatch_weights()
        if self.options.zero == 3:
            explain(exception, self._module())
        self.note_ending(exception)
        self.stop_saver(self._checkpoint.drain_timeout_s)
        super().on_exception(exception)

    def _give_module_back(self) -> None:
        """Leave the module as a user finds it after a run; the next run destroys the groups."""
        parallel = self._parallel
        if parallel is None or self._gave_back is parallel:
            return
        self._gave_back = parallel
        module = self._module()
        failed = module.trainer.state.status == TrainerStatus.INTERRUPTED
        parallel.data.release(collective=not failed)
        leave_summaries(module.trainer, module, spread=not is_whole(parallel))
        self.leave_groups_to(parallel.topology)
        if not is_whole(parallel):
            layout = self.options.lasting(self.world_size, self._precision())
            refuse_calls(parallel, layout)
            return
        restore(parallel)
        self.unshare_metrics(module)
        remember_layout(module, None)
        module._device_mesh = None
        parallel.gradients.forget_shard_specs()
        self._precision().use(parallel.gradients)
        # At once, a rank that has fewer batches than others would cut these off in the midst of a
        # collective, where a hang names it.
        close_later(parallel.topology)

    @override
    def teardown(self) -> None:
        """Release what Lightning gave us, and give the user's module back.

        After a failure nothing here is collective. Process groups stay: the next run of this
        process destroys those of this one, and Lightning the default one at exit.
        """
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._step_state is not None:
            callbacks: list[Any] = self._module().trainer.callbacks  # type: ignore[attr-defined]
            callbacks.remove(self._step_state)
            self._step_state = None
        self.end_watch()
        self.unwatch_weights()
        self.forget_interface()
        self.stop_saver()
        self._give_module_back()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


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


def _warn_of_real_weights(reason: str) -> None:
    rank_zero_warn(f"configure_model builds real weights on every rank, because {reason}")


# As Lightning's own strategies do when they are imported; `lightning_megatron` registers the name
# before that, without importing this file.
StrategyRegistry.register(
    MegatronStrategy.strategy_name,
    MegatronStrategy,
    description="Tensor, pipeline and ZeRO data parallelism for any LightningModule",
    override=True,
)
