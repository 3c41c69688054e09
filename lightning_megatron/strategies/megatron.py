"""The Lightning strategy: ``Trainer(strategy=MegatronStrategy(tp=4, pp=2))``.

Hooks only. What they do is decided in `strategies.preflight` (is the run legal), `parallel.apply`
(put the module on the layout), `strategies.steps` (run a batch) and `checkpoint` (save and load).
"""

import difflib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron import env
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.layers.batch_norm import synchronize_batch_norm
from lightning_megatron.optim.local_step import check_optimizer
from lightning_megatron.parallel.apply import ParallelModule, Transforms, parallelize
from lightning_megatron.parallel.data import ShardingConfig
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.precision.plugin import ShardedPrecision, sharded_precision
from lightning_megatron.strategies.checkpoint_hooks import CheckpointHooks
from lightning_megatron.strategies.collectives import TopologyCollectives
from lightning_megatron.strategies.data_position import DataPosition
from lightning_megatron.strategies.data_sampling import split_dataloader
from lightning_megatron.strategies.data_seeding import seed_dataloader
from lightning_megatron.strategies.preflight import LayoutOptions, examine
from lightning_megatron.strategies.steps import StepEngine, mean_over_tokens
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import derive_seed


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """How the processes find and talk to each other."""

    backend: str | None = None
    """``torch.distributed`` backend; None: nccl on GPUs, gloo on CPUs."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a peer does not join fails."""

    def problems(self) -> list[str]:
        """Faults of the options."""
        problems = []
        known = [b for b in dist.Backend.backend_list if b not in ("undefined", "fake")]
        # "cpu:gloo,cuda:nccl" names one for each kind of device.
        named = [part.rpartition(":")[2] for part in (self.backend or "gloo").split(",")]
        for name in named:
            if name.lower() not in known:
                close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
                problems.append(
                    f"connection.backend={self.backend!r}: torch.distributed has {', '.join(known)}"
                    f"; nearest valid: backend={close[0]!r}"
                )
        if not self.timeout_s > 0:
            problems.append(
                f"connection.timeout_s={self.timeout_s}: must be positive; nearest valid: "
                "timeout_s=1800"
            )
        return problems


class MegatronStrategy(CheckpointHooks, TopologyCollectives, ParallelStrategy):
    """Trains an ordinary LightningModule under tensor, pipeline and ZeRO data parallelism.

    The data-parallel degree is what remains: ``devices * num_nodes / (tp * pp)``. Layers from
    `lightning_megatron.layers` are split over tp, everything else is replicated over it; with
    ``pp > 1`` the module calls one `PipelineSequential` in each step. For the same seed and global
    batch every layout trains the same weights, to rounding.

    Args:
        tp: ranks that share every parallel layer.
        pp: pipeline stages, each on ranks of its own.
        zero: 0 replicates; 1 shards optimizer state and reduces gradients once per step; 2 reduces
            them every microbatch; 3 shards parameters too (see `parallel.data`).
        dp_replicate: with zero 1 to 3, number of copies of the shards (hybrid sharding).
        sequence_parallel: split activations between parallel layers over tp along the sequence.
        microbatch_size: samples per microbatch.
        num_microbatches: microbatches per batch, in place of ``microbatch_size``. By default 1, and
            4 per pipeline stage under a pipeline.
        schedule: order of forwards and backwards in the pipeline (see `pipeline.schedule`):
            ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"breadth-first"``, ``"zb-h1"``,
            ``"zb-h2"``, ``"zbv"``, ``"v-half"``, ``"v-min"``, ``"dualpipev"`` or ``"custom"``.
        pipeline: how the trunk is cut into stages, and how many a rank holds.
        sharding: what ZeRO treats as a unit.
        connection: backend and timeout of the process groups.

    Raises:
        ConfigError: when the run starts, on every rank and before any process group forms, with
            everything that is wrong.
    """

    strategy_name = "megatron"
    is_distributed = True

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        zero: Literal[0, 1, 2, 3] = 1,
        dp_replicate: int = 1,
        sequence_parallel: bool = False,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008 (frozen)
        sharding: ShardingConfig = ShardingConfig(),  # noqa: B008
        connection: ConnectionConfig = ConnectionConfig(),
    ) -> None:
        super().__init__()
        self.options = LayoutOptions(
            tp=tp,
            pp=pp,
            zero=zero,
            dp_replicate=dp_replicate,
            sequence_parallel=sequence_parallel,
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            pipeline=pipeline,
        )
        self._sharding, self._connection = sharding, connection
        self.num_nodes = 1
        self._topology: Topology | None = None
        self._parallel: ParallelModule | None = None
        self._engine: StepEngine | None = None
        self._defer_init = False
        self._blocked = False
        self._splits_data = False
        self._data_position = DataPosition()
        self._seed = 0

    # Processes ---------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:  # type: ignore[override]
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
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
            raise RuntimeError("the module is put on its layout in Strategy.setup")
        return self._parallel

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, utilities_rank_zero_only):
            setattr(function, "rank", self.global_rank)  # noqa: B010 (of a function)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Lightning's launcher does this for the first process of a node only; the others would
        # compute with as many threads each as there are cores.
        _set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        module = self._module()
        findings = examine(module.trainer, module, self.options, self._sharding, self.world_size)
        raise_if_any([*self._connection.problems(), *findings.problems])
        self._defer_init = findings.defer_init
        if findings.real_because:
            rank_zero_warn(
                "configure_model builds real weights on every rank, because these modules own "
                f"parameters or buffers but have no reset_parameters(): "
                f"{', '.join(findings.real_because)}"
            )
        self._connect()
        self._topology = self._make_topology(module)
        module._device_mesh = self.topology.mesh
        self._seed_process()

    def _connect(self) -> None:
        reset_seed()
        assert self.cluster_environment is not None
        device = self.root_device
        backend = self._connection.backend or _get_default_process_group_backend_for_device(device)
        _init_dist_connection(
            self.cluster_environment,
            backend,
            timeout=timedelta(seconds=self._connection.timeout_s),
            device_id=device if device.type != "cpu" else None,
        )
        mine = (self.options, self._sharding, env.global_seed())
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if differing:
            raise ConfigError(
                f"the ranks were given different configurations: rank 0 has {everyone[0]}, rank "
                f"{differing[0]} has {everyone[differing[0]]}; start all of them with the same"
            )

    def _make_topology(self, module: LightningModule) -> Topology:
        """A new topology, or the one that an earlier run put the module on."""
        degrees = self.options.degrees(self.world_size)
        earlier: ParallelModule | None = module.__dict__.get(_PARALLEL)
        if earlier is not None:
            same = (earlier.topology.degrees, earlier.topology.sequence_parallel)
            if same != (degrees, self.options.sequence_parallel):
                raise ConfigError(
                    f"{degrees}: an earlier Trainer has put this module on {same[0]}, and its "
                    "weights are spread accordingly; nearest valid: the same layout, or a new "
                    "module into which a checkpoint is loaded"
                )
            return earlier.topology
        seed = env.global_seed()
        self._seed = (
            seed if seed is not None else self._agree_on(random.SystemRandom().getrandbits(31))
        )
        return Topology(
            degrees,
            self.root_device,
            sequence_parallel=self.options.sequence_parallel,
            seed=self._seed,
            timeout=timedelta(seconds=self._connection.timeout_s),
        )

    def _agree_on(self, value: int) -> int:
        agreed: int = self.broadcast(value)
        return agreed

    def _seed_process(self) -> None:
        """Equal default random streams on ranks that read the same samples, others elsewhere."""
        if self.world_size > 1:
            seed = derive_seed(self.topology.seed, "default", self.topology.batch.rank)
            torch.manual_seed(seed)
            if env.global_seed() is None:
                random.seed(seed)
                numpy.random.seed(seed % 2**32)

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
        """Build on the meta device where every module can be initialised afterwards."""
        device = torch.device("meta") if self._defer_init else torch.device("cpu")
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # inference tensors cannot take part in later training
        trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
        # Lightning would shuffle every training loader; `split_dataloader` asks the user's loader.
        connector = trainer._accelerator_connector
        self._splits_data |= connector.use_distributed_sampler
        fitting = trainer.state.fn == TrainerFn.FITTING
        connector.use_distributed_sampler = self._splits_data and not fitting
        self._parallel = self._parallelize(module)
        self.model = module
        precision = self.precision_plugin
        assert isinstance(precision, ShardedPrecision)
        precision.gradients = self.parallel.gradients
        self._engine = StepEngine(
            module,
            self.parallel,
            self.options.microbatches(),
            self.options.make_schedule,
            self._host_group(),
        )
        self._point_metrics_at_batch_group(module)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallelize(self, module: LightningModule) -> ParallelModule:
        earlier: ParallelModule | None = module.__dict__.get(_PARALLEL)
        if earlier is not None:
            earlier.data.reshard()
            return earlier
        precision = self.precision_plugin
        assert isinstance(precision, ShardedPrecision)
        if self._layer_sync is not None:
            synchronize_batch_norm(module, self.topology.batch, self.root_device)
        transforms = Transforms(
            zero=self.options.zero,
            types=precision.types,
            pipeline=self.options.pipeline,
            sharding=self._sharding,
            stage_ranks=self.options.stage_ranks,
            manual_optimization=not module.automatic_optimization,
        )
        parallel = parallelize(precision.convert_module(module), self.topology, transforms)
        module.__dict__[_PARALLEL] = parallel
        return parallel

    def _host_group(self) -> dist.ProcessGroup | None:
        if self.topology.pp.group is None or dist.get_backend(self.topology.pp.group) == "gloo":
            return None
        return self.topology.new_group("pp", backend="gloo")

    def _point_metrics_at_batch_group(self, module: LightningModule) -> None:
        """Metrics are synchronised over the ranks that saw different samples."""
        group = self.topology.batch.group
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None:
                child.process_group = group
                if group is None:  # a metric takes this for the whole world
                    child.distributed_available_fn = _nobody_else

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            warning = check_optimizer(optimizer, self.topology.tp.size)
            if warning:
                rank_zero_warn(warning)

    @override
    def model_to_device(self) -> None:
        """Nothing: the layout put every parameter where it belongs."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.batch.size, "rank": self.topology.batch.rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        trainer = self._module().trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._splits_data and fitting:
            dataloader = split_dataloader(dataloader, self.topology)
        if self.world_size > 1:
            seed_dataloader(dataloader, self.topology)
        if fitting and not trainer.sanity_checking and trainer.fit_loop._combined_loader is None:
            # The training loader comes first.
            dataloader = self._data_position.resume(dataloader, self.topology)
        return dataloader

    # Steps ---------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        engine, trainer = self._steps(), self._module().trainer
        args = (*args, *kwargs.values())
        context = self.precision_plugin.train_step_context
        if not engine.interleaved:
            with context():
                output = self.parallel.step("training_step", *args)
            return mean_over_tokens(output, self.topology)
        divisor = trainer.accumulate_grad_batches
        return engine.train(
            args,
            context,
            fresh=trainer.fit_loop.epoch_loop.batch_idx % divisor == 0,
            blocked=self._blocked,
            divisor=divisor,
        )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward, or, where the step already did, bring its gradients to light."""
        self.pre_backward(closure_loss)
        module = self._module()
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._steps().interleaved:
            self._steps().release_gradients()
        else:
            self.parallel.data.begin(blocked=self._blocked)
            self.parallel.data.before_backward()
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            self.parallel.data.finish()
        if not self._blocked:
            self.parallel.gradients.finish()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self._steps().evaluate(name, (*args, *kwargs.values()), context)

    @override
    def on_validation_end(self) -> None:
        self.parallel.data.reshard()

    # End ------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started, which may wait for it for ever.

        They get a moment to fail by themselves: when this exception is but the echo of theirs, it
        is their traceback that tells the user what went wrong.
        """
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            deadline = time.monotonic() + _GRACE_S
            for process in self._launcher.procs:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
            self._launcher.kill(signal.SIGKILL)

    @override
    def teardown(self) -> None:
        """Release what Lightning gave us. No collective: this also runs after a failure.

        The process groups stay: another run of this process uses them, and Lightning destroys the
        default one at exit.
        """
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _steps(self) -> StepEngine:
        assert self._engine is not None
        return self._engine


def _nobody_else() -> bool:
    """What a metric is told that has no ranks to be synchronised with."""
    return False


_GRACE_S = 3.0
"""How long after a failure of rank 0 the other processes of the node may go on."""

_PARALLEL = "_lightning_megatron_parallel"
"""Attribute under which a module remembers its layout, for a second Trainer."""


# As Lightning's own strategies do when they are imported; `lightning_megatron` registers the name
# before that, without importing this file.
StrategyRegistry.register(
    MegatronStrategy.strategy_name,
    MegatronStrategy,
    description="Tensor, pipeline and ZeRO data parallelism for any LightningModule",
    override=True,
)
