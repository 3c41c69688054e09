"""The Lightning strategy: ``Trainer(strategy=MegatronStrategy(tp=4, pp=2))``.

One class, in which every hook of Lightning stands once; its body is the list of who acts. The parts
that act own their state and are made in `MegatronStrategy.__init__`; they see the strategy as a
`strategy.run.Run`. A training step, from top to bottom::

    on_train_batch_start    tuners measure and change, recovery notes how things are
    optimizer_step          recovery hands the optimizer its closure, in which run:
      training_step           checkpoints raise what failed in the background
                              a step begins (`strategy.step`) and runs the microbatches: forward
                              and, where they are interleaved, backward
      backward                the step brings its gradients to light, or runs backward here
        post_backward         stop lets all ranks vote, checkpoints wait for copies from the device
                            precision steps on what this rank owns, unless it skips the step
                            recovery has skipped schedules stand still
    block_backward_sync     surrounds the closure instead, where gradients accumulate

What parts do is decided in `strategy.preflight` (is the run legal), `parallel.apply` (put the
module on the layout), `pipeline.runner` (run microbatches) and `checkpoint` (save and load). The
file is long because Lightning has that many hooks, and the order of what happens in them is to be
read in one place.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._lightning.ddp import SeenAsDDP
from lightning_megatron._lightning.hooks import (
    keep_precision,
    set_device_mesh,
    synchronizes_batch_norm,
)
from lightning_megatron._lightning.launch import LauncherBase, limit_threads
from lightning_megatron._lightning.loops import (
    avoid_inference_mode,
    replace_monitored_value,
    runs_last_batch,
)
from lightning_megatron._lightning.warnings import hide_pytree_warning
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.comm.peers import Peers
from lightning_megatron.comm.votes import PerBatchVotes
from lightning_megatron.errors import ConfigError, instances, numbers_or_instances, raise_if_any
from lightning_megatron.launch.attempt import Attempt
from lightning_megatron.optim.gathered_step import check_optimizer
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.apply import (
    ParallelModule,
    remember_layout,
)
from lightning_megatron.parallel.compile import CompileConfig
from lightning_megatron.parallel.plan import MEASURED, PipelineConfig
from lightning_megatron.parallel.unparallelize import is_whole
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.precision.plugin import sharded_precision
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.run_log import sections
from lightning_megatron.run_log.events import EventLog
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.services import MegatronServices
from lightning_megatron.strategy import collectives, names
from lightning_megatron.strategy.checkpointing import Checkpointing
from lightning_megatron.strategy.code_inspection import looks_at_gradients, transforms_batches
from lightning_megatron.strategy.coordinated_stop import CoordinatedStop
from lightning_megatron.strategy.data.batch_shares import BatchShares, MeasuredShares
from lightning_megatron.strategy.data.loaders import DataLoading, batch_share, sampler_kwargs
from lightning_megatron.strategy.model_summary import (
    summarise_layout,
)
from lightning_megatron.strategy.module_layout import (
    ModuleLayout,
    gather_problems,
    host_group_along_pp,
    stand_ins,
)
from lightning_megatron.strategy.optimizer_parameters import OptimizerParameters
from lightning_megatron.strategy.preflight.batch_sizes import AUTO_SIZE
from lightning_megatron.strategy.preflight.checks import LayoutOptions, examine
from lightning_megatron.strategy.preflight.shared_directories import check_shared
from lightning_megatron.strategy.pretrained_models import save_together
from lightning_megatron.strategy.processes.connection import ConnectionConfig
from lightning_megatron.strategy.processes.processes import Processes
from lightning_megatron.strategy.rank_options import named_options
from lightning_megatron.strategy.replica_watch import ReplicaWatch
from lightning_megatron.strategy.rng_state import RandomState
from lightning_megatron.strategy.sharded_errors import explain
from lightning_megatron.strategy.stage_state import StepState
from lightning_megatron.strategy.step.steps import Steps
from lightning_megatron.strategy.step_recovery import StepRecovery
from lightning_megatron.strategy.value import StrategyValue
from lightning_megatron.strategy.weight_watch import WeightWatch
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.expert_layout import ExpertConfig
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import HostRandomness
from lightning_megatron.tuning.fit_memory import FittingMicrobatch
from lightning_megatron.tuning.partition import MeasuredPartition
from lightning_megatron.tuning.recomputation import AdaptiveMemory
from lightning_megatron.tuning.schedule import AUTO, AutoSchedule
from lightning_megatron.tuning.tuner import Tuner
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.data_parallel import ShardingConfig
from lightning_megatron.zero.fully_sharded import FullySharded
from lightning_megatron.zero.gradients import GradientSet


class MegatronStrategy(StrategyValue, SeenAsDDP):
    """Trains an ordinary LightningModule under tensor, pipeline and ZeRO data parallelism.

    The data-parallel degree is what remains: ``devices * num_nodes / (tp * pp * cp)``. Layers from
    `lightning_megatron.layers` are split over tp, everything else is replicated over it; with
    ``pp > 1`` the module calls one `PipelineSequential` in each step. For the same seed and global
    batch every layout trains the same weights, to rounding.

    Args:
        tp: ranks that share every parallel layer.
        pp: pipeline ranks, or these with the schedule, how the trunk is cut into stages and more.
        cp: ranks over which the sequence of every sample is split inside of a `PipelineSequential`,
            or these with the way in which attention exchanges keys and values and more.
        ep: ranks over which the experts of every `MixtureOfExperts` are spread, or these with the
            way in which tokens reach them. They are some of the ranks of dp, cp and tp, so that ep
            does not change the number of processes.
        zero: 0 replicates; 1 shards optimizer state and reduces gradients once per step; 2 reduces
            them every microbatch; 3 shards parameters too (see `zero.data_parallel`). Or the same
            with the number of copies of the shards, what waits in host memory and more.
        sequence_parallel: split activations between parallel layers over tp along the sequence.
        microbatch_size: samples per microbatch, or ``"auto"`` for as many as every rank has memory
            for (`tuning.fit_memory`).
        num_microbatches: microbatches per batch, in place of ``microbatch_size``. By default 1, and
            4 per pipeline rank under a pipeline.
        global_batch_size: samples of an optimizer step over all data-parallel ranks; the strategy
            gives the training loaders batches of each rank's equal share, whatever their own size.
            By default the loaders' sizes are those of each rank.
        batch_shares: parts of the global batch that the data-parallel ranks read, in any unit and
            by rank: ``[2, 1, 1]``. ``"measured"`` has them follow the speed of the ranks;
            `MeasuredShares` says how often. None: equal parts.
        activations: which are computed again in the backward, or wait in host memory.
        compile: what of the network runs through ``torch.compile``.
        connection: backend and timeout of the process groups.
        checkpoint: whether saving stops training, and what follows a save that fails.
        gather_at_end: whether the module is whole on every rank after a run, in host memory, where
            it was in parts (tp, pp, ep, ``zero=3``). ``"auto"``: up to 8 GiB, if all processes of a
            node need at most half of its free memory for it.

    Raises:
        ConfigError: a group of options is of another type; and when the run starts, on every rank
            and before any process group forms, with everything that is wrong.
    """

    strategy_name = names.NAME
    is_distributed = True
    num_nodes = 1

    def __init__(  # noqa: PLR0913 (the axes, the batch, and groups of the rest)
        self,
        tp: int = 1,
        pp: int | PipelineConfig = 1,
        cp: int | ContextConfig = 1,
        ep: int | ExpertConfig = 1,
        zero: Literal[0, 1, 2, 3] | ShardingConfig = 1,
        sequence_parallel: bool = False,
        microbatch_size: int | Literal["auto"] | None = None,
        num_microbatches: int | None = None,
        global_batch_size: int | None = None,
        batch_shares: list[float] | Literal["measured"] | MeasuredShares | None = None,
        activations: ActivationConfig = ActivationConfig(),  # noqa: B008 (frozen)
        compile: CompileConfig = CompileConfig(),  # noqa: B008
        connection: ConnectionConfig = ConnectionConfig(),  # noqa: B008
        checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008
        gather_at_end: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        names.refuse_elsewhere()
        raise_if_any(
            numbers_or_instances(
                pp=(pp, PipelineConfig),
                cp=(cp, ContextConfig),
                ep=(ep, ExpertConfig),
                zero=(zero, ShardingConfig),
            )
            + instances(
                activations=(activations, ActivationConfig),
                compile=(compile, CompileConfig),
                connection=(connection, ConnectionConfig),
                checkpoint=(checkpoint, CheckpointConfig),
            )
            + gather_problems(gather_at_end)
        )
        self.options = LayoutOptions(
            tp=tp,
            pp=pp if isinstance(pp, PipelineConfig) else PipelineConfig(degree=pp),
            cp=cp if isinstance(cp, ContextConfig) else ContextConfig(degree=cp),
            ep=ep if isinstance(ep, ExpertConfig) else ExpertConfig(degree=ep),
            zero=zero if isinstance(zero, ShardingConfig) else ShardingConfig(stage=zero),
            sequence_parallel=sequence_parallel,
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            activations=activations,
            compile=compile,
            global_batch_size=global_batch_size,
        )
        self._connection = connection
        self._checkpoint = checkpoint
        self.events = EventLog()
        self.clock = SectionClock()
        self.votes = PerBatchVotes()
        self.data = DataLoading(BatchShares(batch_shares), global_batch_size)
        self.stop = CoordinatedStop(self, self.data)
        self.processes = Processes(self, connection, self.stop.flag)
        self.layout = ModuleLayout(self, self.options, gather_at_end)
        self.tuners: list[Tuner] = []
        self.weight_watch = WeightWatch(self)
        self.optimizer_parameters = OptimizerParameters(self, self.weight_watch.know_new)
        self.recovery = StepRecovery(self)
        self.replicas = ReplicaWatch(self)
        self.checkpoints = Checkpointing(self, checkpoint, self.processes, self.data)
        self.held: Callable[[], bool] | None = None
        self._random_state: RandomState | None = None
        self._section_outside = sections.OTHER
        self._topology: Topology | None = None
        self._parallel: ParallelModule | None = None
        self._steps: Steps | None = None
        self._host_gloo: dist.ProcessGroup | None = None
        self._gave_back: ParallelModule | None = None
        self._step_state: StepState | None = None
        self.shows_gradients = False
        self._metrics: collectives.SharedMetrics | None = None
        self.fitting: FittingMicrobatch | None = None

    # Processes ---------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Groups and coordinates of this run; exists once the processes are connected."""
        if self._topology is None:
            raise RuntimeError("the topology exists once the Trainer has started to run")
        return self._topology

    @property
    def pipeline(self) -> Pipeline | None:
        """Runner of the pipeline in the current run; None without one."""
        executor = None if self._steps is None else self._steps.executor
        return executor if isinstance(executor, Pipeline) else None

    @property
    def parallel(self) -> ParallelModule:
        """The module on its layout; exists once the strategy has set it up."""
        if self._parallel is None:
            raise ConfigError(
                "no Trainer has put the module on its layout yet, so there is nothing of this "
                "strategy's to save; nearest valid: trainer.save_checkpoint after fit, validate, "
                "test or predict, or torch.save(module.state_dict(), path)"
            )
        return self._parallel

    @property
    @override
    def divides_by_all(self) -> bool:
        options = vars(self).get("options")  # which its constructor has not made at first
        if options is None:
            return False
        return (options.tp, options.pp.degree, options.cp.degree) == (1, 1, 1)

    @property
    def gradients(self) -> GradientSet:
        """This rank's part of the gradients, with their global norm."""
        return self.parallel.gradients

    @property
    def precision(self) -> ShardedPrecision:
        """The precision plugin, which knows the shards."""
        assert isinstance(self.precision_plugin, ShardedPrecision)
        return self.precision_plugin

    @property
    def steps(self) -> Steps:
        """Steps on the layout; exist once the module is on it."""
        assert self._steps is not None
        return self._steps

    @property
    def module(self) -> LightningModule:
        """The user's module."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs it."""
        return self.module.trainer

    @property
    def random_state(self) -> RandomState:
        """Generators of this process; exists once the run is set up."""
        assert self._random_state is not None
        return self._random_state

    @property
    def attempt(self) -> Attempt:
        """Attempt that this start of the processes is; exists once they are connected."""
        return self.processes.attempt

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are on this node."""
        return self.processes.on_one_machine

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, for objects and tensors on the host; None for the default group."""
        return self.processes.host_group

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def make_launcher(self) -> LauncherBase | None:
        return self.processes.launcher(self)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        # Nodes may join and leave; Trainer(num_nodes=) says how many.
        self.num_nodes = self.processes.nodes
        self.processes.number_ranks()

    @override
    def setup_environment(self) -> None:
        self.clock.enter(sections.START)  # once more for each run
        self.check_trainer()
        super().setup_environment()
        hide_pytree_warning()
        # Lightning's launcher does this for the first process of a node only; the others would
        # compute with as many threads each as there are cores.
        limit_threads(self.num_processes)
        self.set_world_ranks()
        self.events.identify(rank=self.global_rank)
        self.processes.check_start()
        module = self.module
        with self.processes.told_to_others():
            self._examine(module)
        host = self.options.zero.offload_parameters
        options = named_options(module.trainer, self.options, checkpoint=self._checkpoint)
        options["batch_shares"] = self.data.shares.text
        options["gather_at_end"] = repr(self.layout.gather_at_end)
        self.processes.find_peers(options, from_host=host)
        self._topology = self.layout.topology(
            self._connection.timeout_s, self.processes.node_names()
        )
        set_device_mesh(module, self.topology.mesh)
        if self.world_size > 1:
            # All ranks draw what one process would, but for what steps draw: see `StepSeeds`. So a
            # split of the data that ``setup`` draws is the same on all.
            self.broadcast(HostRandomness.capture()).restore()

    def _examine(self, module: LightningModule) -> None:
        """Raise everything that is wrong with the run, as far as one process can tell."""
        findings = examine(module.trainer, module, self.options, self.world_size)
        problems = (
            *self._connection.problems(
                self.options.zero.offload_parameters, self.root_device, self.options.cp
            ),
            *self.checkpoints.problems(self.checkpoint_io),
            *self.data.share_problems(module, self.options, self.world_size, self.root_device),
        )
        raise_if_any([*problems, *findings.problems])
        self.layout.defer(findings.real_because)

    # Module, optimizer, data ---------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        keep_precision(self, None if plugin is None else sharded_precision(plugin))

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on the meta device what can be given its values afterwards.

        If ``configure_model`` turns out to need real tensors, it is called again with them.
        """
        with self.layout.building(self.lightning_module):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.module
        # What is gathered as an inference tensor cannot take part in later training.
        avoid_inference_mode(trainer, outside_training=self.world_size > 1)
        self.data.begin(trainer)
        self._random_state = RandomState(self.topology)
        self._host_gloo = host_group_along_pp(self.topology)
        self.tuners, self.shows_gradients = [], False
        self.fitting = self._new_fitting()
        self._parallel = self._steps = None  # an earlier run's, with the memory of its parts
        if trainer.state.fn == TrainerFn.FITTING:
            self.checkpoints.forget_parts()
        self.adopt(self.layout.put(sync_batch_norm=synchronizes_batch_norm(self)))
        self.model = module
        save_together(module, self.host_group)
        summarise_layout(trainer, module, spread=not is_whole(self.parallel))
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers = []
            self.lr_scheduler_configs = []
            self.setup_optimizers(trainer)
            if not (self.on_one_machine or trainer.fast_dev_run):  # type: ignore[attr-defined]
                check_shared(trainer, Peers(self.host_group))
            self.checkpoints.open()
            looks = looks_at_gradients(trainer, module)
            looks = self.reduce_boolean_decision(looks, all=False)  # on all ranks alike
            self.shows_gradients = looks
            self.parallel.data.show_gradients(looks)
            if (
                self.topology.pp.size > 1
                and self.parallel.transforms.pipeline.partition == MEASURED
            ):
                self.tuners.append(MeasuredPartition(self))
        self.stop.begin()
        if self.world_size > 1:
            monitored = collectives.MonitoredValues(self.votes.exchange)
            replace_monitored_value(trainer, monitored.share)
        if self.topology.pp.size > 1:
            self._step_state = StepState(
                module,
                self.topology,
                self.steps.last_rank,
                self._host_gloo,
                microbatches=lambda: self.steps.step.count,
                ends_epoch=lambda: runs_last_batch(trainer),
            )
        self.setup_precision_plugin()
        self.optimizer_parameters.begin()
        self.weight_watch.begin()

    def _new_fitting(self) -> FittingMicrobatch | None:
        """Search for the size of microbatches, where the user leaves it to the strategy."""
        if self.options.microbatch_size != AUTO_SIZE:
            return None
        device, alone = self.root_device, self.world_size == 1
        note = self.recovery.note
        return FittingMicrobatch(device, self.host_group, note, alone=alone, say=rank_zero_info)

    @own_weights
    def adopt(self, parallel: ParallelModule) -> None:
        """Run the module on this layout from now on; collective over all processes."""
        module, precision = self.module, self.precision
        self._parallel = parallel
        remember_layout(module, parallel)
        if self.shows_gradients:  # it moves amid a run
            parallel.data.show_gradients(True)
        self.optimizer_parameters.follow()
        precision.use(parallel.gradients)
        precision.prepare(parallel)
        self._steps = Steps(
            module,
            parallel,
            precision,
            options=self.options,
            clock=self.clock,
            host_group=self._host_gloo,
            fitting=self.fitting,
        )
        self.weight_watch.follow()
        kept = [tuner for tuner in self.tuners if tuner.outlives_layout]
        self.tuners = [*self._tuners_of(parallel), *kept]
        self._metrics = collectives.SharedMetrics(self.topology)
        if isinstance(parallel.data, FullySharded):
            parallel.data.order.settle_by(self.votes.register("units of ZeRO 3"))
            self.votes.on_settled(self._check_units)

    def _check_units(self) -> None:
        if self._parallel is not None and isinstance(self._parallel.data, FullySharded):
            self._parallel.data.order.check()

    def _tuners_of(self, parallel: ParallelModule) -> Iterator[Tuner]:
        """Tuners for a new layout."""
        options, config = self.options, self.options.pp
        if options.activations.recompute == "adaptive":
            yield AdaptiveMemory(
                parallel,
                options.activations,
                options.make_schedule,
                rank_zero_info,
                compiled=options.compile.scope != "none",
            )
        if config.schedule == AUTO and self.pipeline is not None:
            stages, limit = config.stages_per_rank or 2, config.activation_gib
            pp = parallel.topology.pp
            yield AutoSchedule(self.pipeline, pp, stages, limit, rank_zero_info)

    def let_go(self) -> None:
        """Forget the layout and what was made for it, to have the memory for another."""
        self.weight_watch.let_go()
        remember_layout(self.module, None)
        self._parallel = self._steps = None

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with self.weight_watch.making_optimizers():
            try:
                super().setup_optimizers(trainer)
            except ValueError as error:
                if self.topology.pp.size == 1 or "empty parameter list" not in str(error):
                    raise
                with stand_ins(self):
                    super().setup_optimizers(trainer)
        self.optimizer_parameters.know()
        for optimizer in self.optimizers:
            warning = check_optimizer(
                optimizer, self.parallel.gradients.shard_specs, self.parallel.gradients.lends
            )
            if warning:
                rank_zero_warn(warning)

    @override
    def model_to_device(self) -> None:
        """No-op: the layout put every parameter where it belongs."""

    # Data -----------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number and rank of the readers, for the samplers that Lightning makes itself.

        Raises:
            ConfigError: the layout does not fit the number of processes.
        """
        if self._topology is None:
            return sampler_kwargs(self.options, self.world_size, self.global_rank)
        return {"num_replicas": self.topology.batch.size, "rank": self.topology.batch.rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """The loader with this rank's share of the samples, and its random streams."""
        if self._topology is None:  # a loop that is called by hand, before any run
            return dataloader
        return self.data.prepare(dataloader, self.trainer, self.topology)

    def batch_share(self, global_batch: int) -> int:
        """Batch size of this run's loaders for a batch that all ranks read together.

        For ``train_dataloader`` of a module or data module whose run may go on with fewer or more
        nodes (``torchrun --nnodes 1:2``): the optimizer's steps then stay what they were. With
        ``microbatch_size`` a rank's larger share takes more time and not more memory.

        Raises:
            ConfigError: the data-parallel ranks cannot share it evenly.
        """
        return batch_share(global_batch, self.topology.batch.size)

    # Training -------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        """The last hook before the first batch."""
        self.data.position.start(self.trainer)
        self.data.shares.start(self)
        self.replicas.begin(on=self.options.zero.compare_copies)
        self.random_state.restore()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight_watch.narrow()
        self.data.check(batch, self)
        self.clock.step = self.events.step = self.trainer.global_step
        self.clock.enter(sections.FORWARD)
        self.data.begin_batch(batch_idx)
        first = self.steps.first_of_accumulation
        if first:
            self.replicas.before_batch()
        for tuner in tuple(self.tuners):  # one may move the module to a layout with others
            tuner.before_batch(accumulated=not first)
        if first and self.trainer.accumulate_grad_batches > 1:
            epoch: Any = self.trainer.fit_loop.epoch_progress.current
            at = epoch.processed, batch_idx
            self.random_state.note(at, self.module, self.steps.loss_per_token)
        self.data.shares.before_batch(self)
        self.recovery.begin_batch(first_of_accumulation=first)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch; what the hooks around it draw (augmentations) is drawn as in a step."""
        self.weight_watch.narrow()
        if not transforms_batches(self.module):
            return super().batch_to_device(batch, device, dataloader_idx)
        seeds = self.parallel.topology.step_seeds
        with seeds.batch():
            seeds.microbatch(0)
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.raise_failed_saves()
        with self._around_step():
            if self.recovery.skips_batch:
                output: Any = self.recovery.zero_loss()
            else:
                step = self.steps.begin(self.data.shares.portion)
                automatic = self.module.automatic_optimization  # then gradients are cleared behind
                within = self.weight_watch.own_backwards() if automatic else nullcontext()
                self.weight_watch.begin_batch()
                with self.weight_watch.on_own_stage(), within:
                    output = step.run((*args, *kwargs.values()))
                for tuner in self.tuners:
                    tuner.after_batch(step.count)
            self.steps.before_zero_grad()
            if not self.module.automatic_optimization:  # then this is the whole batch
                self.stop.vote()
        if not self.module.automatic_optimization:
            self.clock.enter(sections.DATA)
        return output

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward, or, where the step already did, bring its gradients to light."""
        self.clock.enter(sections.BACKWARD)
        loss = closure_loss
        if not self.recovery.skips_batch:
            self.pre_backward(loss)
            loss = self.precision.pre_backward(loss, self.module)
            watch = self.weight_watch
            with watch.on_own_stage(), watch.own_backwards():  # of a stage, which it may repeat
                self.steps.step.backward(loss, optimizer, *args, **kwargs)
                watch.end_backward()
            loss = self.precision.post_backward(loss, self.module)
        self.post_backward(loss)
        automatic = self.module.automatic_optimization
        self.clock.enter(sections.OPTIMIZER if automatic else sections.FORWARD)
        return loss

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.stop.vote()
        self.checkpoints.before_update()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        automatic = self.module.automatic_optimization
        if not automatic:
            self.clock.enter(sections.OPTIMIZER)  # else its closure runs forward and backward
            self.checkpoints.before_update()  # there may have been no backward of this strategy's
        self.weight_watch.narrow()  # a hook around epochs may step
        closure = self.recovery.begin_update(closure)
        self.weight_watch.show_groups(getattr(optimizer, "optimizer", optimizer))
        with self.data.scaled_rates(optimizer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        taken = self.recovery.end_update()
        self.steps.router_bias.after_step(optimizer, taken=taken)
        self.clock.enter(sections.DATA if automatic else sections.FORWARD)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.accumulation():
            yield
        self.clock.enter(sections.DATA)  # a batch without an optimizer step has ended

    @override
    def on_train_end(self) -> None:
        self._check_attributes()
        with self.clock.section(sections.CHECKPOINT):
            self.checkpoints.finish()
            # Under manual optimization what ran last is gathered.
            self.parallel.data.come_to_rest()
        self.replicas.end()
        self.data.shares.stop()
        self.clock.enter(sections.OTHER)

    # Evaluation -----------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._enter_evaluation()
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.random_state.begin_validation()
        self.stop.begin_evaluation()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return self.steps.evaluation.run("validation_step", (*args, *kwargs.values()))

    @override
    def on_validation_end(self) -> None:
        self._check_attributes()
        self.parallel.data.come_to_rest()
        self.random_state.end_validation()
        self.clock.enter(self._section_outside)

    @override
    def on_test_start(self) -> None:
        self._enter_evaluation()
        self.stop.begin_evaluation()

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return self.steps.evaluation.run("test_step", (*args, *kwargs.values()))

    @override
    def on_test_end(self) -> None:
        self._check_attributes()
        self.clock.enter(sections.OTHER)

    @override
    def on_predict_start(self) -> None:
        self._enter_evaluation()
        self.stop.begin_evaluation()

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return self.steps.evaluation.run("predict_step", (*args, *kwargs.values()))

    @override
    def on_predict_end(self) -> None:
        self._check_attributes()
        self.clock.enter(sections.OTHER)

    def _enter_evaluation(self) -> None:
        self._section_outside = self.clock.current
        self.clock.enter(sections.VALIDATION)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context of a batch that does not train."""
        self.clock.enter(sections.VALIDATION)  # once more: each batch is progress
        watch = self.weight_watch
        watch.narrow()
        with self._around_step(), watch.on_own_stage(), watch.own_backwards():
            yield
        self.stop.end_evaluation()

    def _around_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self._step_state is None else self._step_state.around_step()

    def _check_attributes(self) -> None:
        """Refuse what steps have changed unseen, where an epoch ended before its last batch."""
        if self._step_state is not None:
            self._step_state.check()

    # Checkpoints ----------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into the shards."""
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """`load_model_state_dict` restores the optimizers."""
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the module, by global name."""
        return self.checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Description of this rank's part of the optimizer's state."""
        return self.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write the checkpoint ``filepath``; collective over all processes."""
        self.stop.mend(checkpoint)
        self.checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint of any layout; `load_model_state_dict` loads it. Collective."""
        with self.clock.section(sections.CHECKPOINT):
            return self.checkpoints.load(
                checkpoint_path, self.checkpoint_io, weights_only=weights_only is not False
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.load_weights(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """No-op: `load_model_state_dict` has loaded the optimizers."""

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on rank zero; after the saves that are in flight."""
        with self.clock.section(sections.CHECKPOINT):
            self.checkpoints.remove(filepath)

    # Communication --------------------------------------------------------------------------------

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples: what `all_gather` stacks."""
        return 1 if self._topology is None else self._topology.batch.size

    @property
    def global_batch_factor(self) -> float:
        """Number of batches of the size of this rank's latest one in the global batch."""
        portion = self.data.shares.portion
        return self.topology.batch.size if portion is None else portion.total / portion.rows

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's tensor in the result of `all_gather`.

        Under tp and pp several processes have the same one, so ``self.global_rank`` is no index.

        Example:
            A contrastive loss whose negatives are those of all ranks; ``queries`` and ``keys`` are
            ``[batch, features]``::

                keys = self.all_gather(keys, sync_grads=True).flatten(0, 1)
                labels = torch.arange(len(queries), device=self.device)
                labels += len(queries) * self.trainer.strategy.data_parallel_rank
                loss = F.cross_entropy(queries @ keys.T, labels)

            Each rank's loss then has the gradient of its own queries through all keys; their mean
            over the ranks is that of one process with the whole batch.
        """
        return 0 if self._topology is None else self._topology.batch.rank

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        collectives.barrier(self.root_device)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of global rank ``src``, on all processes."""
        return Peers().broadcast(obj, src)

    @override
    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce over the ranks that saw different samples (or over ``group``).

        Args:
            tensor: of any shape; anything but a tensor is returned as it is.
            group: None for the batch axis.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"`` or a ``ReduceOp``.
                The mean of integers is a floating-point number.
        """
        if not isinstance(tensor, Tensor) or self._topology is None:
            return tensor
        return collectives.reduce(tensor, self._topology, group, reduce_op, self.root_device)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Stack on a new dim 0 the tensors of the ranks that saw different samples.

        Args:
            tensor: of the same shape on all ranks.
            group: other ranks. None is the batch axis, and so is the whole world, which
                ``LightningModule.all_gather`` fills in when the user gives no group.
            sync_grads: whether gradients flow back to every rank's tensor.
        """
        if self._steps is not None:
            self._steps.gathers_samples()
        return collectives.all_gather(tensor, self._topology, group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the processes of the job decided so."""
        return Peers().vote(decision, self.root_device, all=all)

    # End ------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.weight_watch.stop()
        if self.options.zero.stage == 3:
            explain(exception, self.module)
        self.processes.failures.note(exception)
        self.checkpoints.abandon()
        self.processes.failures.end_children(exception)
        self.stop.after(exception)

    def _give_module_back(self) -> None:
        """Leave the module as a user finds it after a run; the next run destroys the groups."""
        parallel = self._parallel
        if parallel is None or self._gave_back is parallel:
            return
        self._gave_back = parallel
        self.checkpoints.leave_groups_to(parallel.topology)
        self.processes.leave_groups_to(parallel.topology)
        self.layout.give_back(parallel, self.checkpoints.leave_parts)

    @override
    def teardown(self) -> None:
        """Release what Lightning gave us, and give the user's module back.

        After a failure nothing here is collective. Process groups stay: the next run of this
        process destroys those of this one, and Lightning the default one at exit.
        """
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._step_state = None
        if self._metrics is not None:
            self._metrics.rest(self.module)
        self.processes.failures.end_watch()
        self.weight_watch.stop()
        self.optimizer_parameters.stop()
        self.data.shares.stop()
        self.processes.forget_interface()
        self.checkpoints.close()
        self._give_module_back()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


if TYPE_CHECKING:

    def _services(strategy: MegatronStrategy) -> MegatronServices:
        """Have mypy check that the strategy has what callbacks use."""
        return strategy


# As Lightning's own strategies do when they are imported; `lightning_megatron` registers the names
# before that, without importing this file.
names.register(StrategyRegistry, MegatronStrategy)
