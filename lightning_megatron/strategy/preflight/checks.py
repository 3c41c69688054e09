"""Finds everything that is wrong with a run before any process group forms.

The module may be built in ``configure_model``, which Lightning calls only after the processes are
connected. So the hook is rehearsed on the meta device, the structure it makes is examined, and the
module is put back as it was.

Most plain layers of torch run anywhere, on gathered parameters. `layer_problems` finds those that
do not: they write into their parameters in the forward, where it is a copy, or a part of the
samples, that they see; or their gradients cannot be added up over ranks; or their sizes are not
known yet.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader

from lightning_megatron._lightning.connectors import divides_data
from lightning_megatron._lightning.ddp import is_compiled
from lightning_megatron._lightning.hooks import set_device_mesh
from lightning_megatron._lightning.loaders import training_source
from lightning_megatron._torch.dtensor import has_hooks
from lightning_megatron.adoption.adapter_problems import adapter_problems
from lightning_megatron.adoption.adapters import join_adapters
from lightning_megatron.build.meta_build import OTHER_AXES, Attempt, axis_problem
from lightning_megatron.data.reading.global_batch import schedule_of
from lightning_megatron.data.reading.lengths import TokenBudget
from lightning_megatron.errors import ConfigError, switches, whole_numbers
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.apply import layout_of
from lightning_megatron.parallel.compile import CompileConfig
from lightning_megatron.parallel.plan import MEASURED, ModulePlan, PipelineConfig
from lightning_megatron.parallel.skeleton import skeleton_problems
from lightning_megatron.pipeline.microbatch import DEFAULT_PER_RANK, MicrobatchRule
from lightning_megatron.schedules.schedule import (
    CUSTOM,
    Schedule,
    make_schedule,
    schedule_problems,
)
from lightning_megatron.strategy.preflight.averaging import averaging_problems
from lightning_megatron.strategy.preflight.batch_sizes import (
    AUTO_SIZE,
    batch_size_problems,
    fitting_problems,
)
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.degrees import (
    Degrees,
    degree_problems,
    divisibility_problem,
    infer_degrees,
)
from lightning_megatron.topology.expert_layout import ExpertConfig
from lightning_megatron.tuning.schedule import AUTO, PLACED, first_schedule
from lightning_megatron.zero.data_parallel import ComputeTypes, ShardingConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Options of the strategy, by the names of its arguments."""

    tp: int
    pp: PipelineConfig
    cp: ContextConfig = ContextConfig(degree=1)
    ep: ExpertConfig = ExpertConfig(degree=1)
    zero: ShardingConfig
    sequence_parallel: bool
    microbatch_size: int | Literal["auto"] | None
    num_microbatches: int | None
    activations: ActivationConfig
    compile: CompileConfig
    global_batch_size: int | None = None

    def degrees(self, world_size: int) -> Degrees:
        """The full layout on so many processes."""
        degrees = infer_degrees(
            world_size,
            tp=self.tp,
            pp=self.pp.degree,
            cp=self.cp.degree,
            dp_replicate=self.zero.dp_replicate,
            zero=self.zero.stage,
            ep=self.ep.degree,
        )
        return replace(degrees, origin=self.stage_ranks[-1])

    def lasting(self, world_size: int, precision: Precision) -> str:
        """Description of the layout that a module keeps for all Trainers that it meets."""
        degrees = self.degrees(world_size)
        context = f"cp={self.cp.text()}, " if degrees.cp > 1 else ""
        context += f"ep={degrees.ep}, " if degrees.ep > 1 else ""
        return (
            f"tp={degrees.tp}, pp={degrees.pp}, {context}dp={degrees.dp}, dp_replicate="
            f"{degrees.dp_replicate}, sequence_parallel={self.sequence_parallel}, "
            f"zero={self.zero.stage}, precision={precision.precision!r}"
        )

    def microbatches(self) -> MicrobatchRule:
        """Rule by which batches are cut."""
        default = 1 if self.pp.degree == 1 else DEFAULT_PER_RANK * self.pp.degree
        size = self.microbatch_size if isinstance(self.microbatch_size, int) else None
        if self.microbatch_size == AUTO_SIZE:
            size = 1  # until the first batch
        return MicrobatchRule(size=size, number=self.num_microbatches, default=default)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage; raises `ConfigError` where the schedule is not legal."""
        return self.pp.placement(self._begins_with) if self.pp.degree > 1 else (0,)

    @property
    def _begins_with(self) -> str:
        """Schedule of the first steps."""
        config = self.pp
        if config.schedule != AUTO:
            return config.schedule
        return first_schedule(config.stages_per_rank, config.activation_gib is not None)

    def make_schedule(self, count: int) -> Schedule:
        """Pipeline schedule of a batch of ``count`` microbatches."""
        config, name = self.pp, self._begins_with
        return make_schedule(name, config.degree, count, config.stages_per_rank, config.table)

    def _schedule_problems(self) -> list[str]:
        config, count = self.pp, self.num_microbatches
        pp, name = _whole(config.degree), config.schedule
        limit = config.activation_gib
        problems = []
        if limit is not None and (name != AUTO or not limit > 0):
            problems.append(
                f"pp.activation_gib={limit}, schedule={name!r}: it is a number above 0 that limits "
                "the choice of schedule='auto'; nearest valid: activation_gib=None"
            )
        if name == AUTO:
            if config.stages_per_rank not in (None, *PLACED):
                problems.append(
                    f"pp.schedule='auto', stages_per_rank={config.stages_per_rank}: it chooses "
                    "among schedules with 1 or 2 stages per rank; nearest valid: stages_per_rank=2"
                )
            return problems
        found = schedule_problems(
            name, max(pp, 1), max(_whole(count), 1), config.stages_per_rank, config.table
        )
        problems += [f"pp.{problem}" for problem in found]
        if problems or name != CUSTOM or pp < 1:
            return problems
        if count is None:
            return [
                f"pp.schedule='custom', num_microbatches=None: the table {config.table} is for one "
                "number of microbatches; nearest valid: num_microbatches=<its number>"
            ]
        try:
            self.make_schedule(_whole(count))
        except ConfigError as error:
            return [f"pp.{problem}" for problem in error.problems]
        return []

    def problems(self, world_size: int) -> list[str]:
        """Faults that can be found without the module."""
        problems = degree_problems(
            world_size,
            tp=self.tp,
            pp=self.pp.degree,
            cp=self.cp.degree,
            dp_replicate=self.zero.dp_replicate,
            zero=self.zero.stage,
            ep=self.ep.degree,
        )
        problems += self._schedule_problems()
        problems += switches(sequence_parallel=self.sequence_parallel)
        if self.sequence_parallel is True and self.tp == 1:
            problems.append(
                "sequence_parallel=True, tp=1: the sequence is split over the tp axis; nearest "
                "valid: sequence_parallel=False, or tp=2"
            )
        problems += self.pp.problems() + self.cp.problems() + self.ep.problems()
        return problems + self._microbatch_problems()

    def group_problems(self, module: nn.Module | None) -> list[str]:
        """Faults of ``zero``, ``activations`` and ``compile``, and of applying them to a module."""
        zero, activations = self.zero, self.activations
        problems = zero.problems(module) + activations.problems(module)
        problems += self.compile.problems(activations, module)
        if activations.recompute == "adaptive" and self.pp.schedule == AUTO:
            problems.append(
                "activations.recompute='adaptive', pp.schedule='auto': how many microbatches are "
                "under way, and so what fits, would change after it was measured; nearest valid: "
                "pp.schedule='1f1b'"
            )
        if zero.offload_optimizer and zero.stage == 0:
            problems.append(
                "zero.offload_optimizer=True, zero=0: it is each rank's part of the optimizer that "
                "is kept in host memory; nearest valid: zero=1, or offload_optimizer=False"
            )
        if zero.offload_parameters and zero.stage != 3:
            problems.append(
                f"zero.offload_parameters=True, zero={zero.stage}: below ZeRO 3 every rank "
                "computes with whole parameters; nearest valid: zero=3, or offload_optimizer=True"
            )
        if activations.distribute_inputs and (self.tp == 1 or self.sequence_parallel):
            problems.append(
                f"activations.distribute_inputs=True, tp={self.tp}, sequence_parallel="
                f"{self.sequence_parallel}: it divides what several tensor-parallel ranks hold "
                "whole; nearest valid: distribute_inputs=False"
            )
        return problems

    def _microbatch_problems(self) -> list[str]:
        size = None if self.microbatch_size == AUTO_SIZE else self.microbatch_size
        given = {"microbatch_size": size, "num_microbatches": self.num_microbatches}
        problems = whole_numbers(1, **{n: v for n, v in given.items() if v is not None})
        if self.microbatch_size is not None and self.num_microbatches is not None:
            problems.append(
                f"microbatch_size={self.microbatch_size}, num_microbatches="
                f"{self.num_microbatches}: one follows from the other and the batch size; nearest "
                "valid: give only one"
            )
        return problems


@dataclass(frozen=True)
class Findings:
    """Findings of the rehearsal."""

    problems: tuple[str, ...]
    """Everything that is wrong."""
    real_because: str | None
    """Reason why ``configure_model`` cannot run on the meta device, if it is known."""


def examine(
    trainer: Trainer,
    module: LightningModule,
    options: LayoutOptions,
    world_size: int,
) -> Findings:
    """Examine a run; touches nothing."""
    problems = options.problems(world_size)
    layout_is_legal = not problems
    problems += options.group_problems(None)
    problems += _loop_problems(module, options)
    if is_compiled(module):
        problems.append(
            "torch.compile(module): the layout is put on parts of the module, which is now one "
            "graph; nearest valid: MegatronStrategy(compile=CompileConfig(scope='model'))"
        )
    if layout_is_legal:
        problems += _compile_problems(options)
    problems += _folder_problems(trainer)
    problems += batch_size_problems(
        trainer,
        options.global_batch_size,
        options.degrees(world_size).dp if layout_is_legal else None,
    )
    if layout_is_legal and options.microbatch_size == AUTO_SIZE:
        problems += fitting_problems(
            trainer, module, options.degrees(world_size), options.zero, options.activations
        )
    problems += _data_problems(trainer, options) + averaging_problems(
        trainer, module, whole=world_size == 1 or (options.zero.stage != 3 and _is_flat(options))
    )
    degrees = options.degrees(world_size) if layout_is_legal else None
    problems += _budget_problems(trainer, degrees)
    with _rehearsal(trainer, module) as outcome:
        if isinstance(outcome.error, ConfigError):
            problems += outcome.error.problems
        elif outcome.error is not None:
            # It may need what ``setup`` makes. Lightning's own call shows what is wrong with it.
            log.debug("configure_model cannot be rehearsed: %s", outcome.error)
        else:
            join_adapters(module)
            types = getattr(trainer.precision_plugin, "types", ComputeTypes())
            alone = (
                degrees is not None and degrees.dp * degrees.cp == 1 and types.parameters is None
            )
            tp = 1 if degrees is None else degrees.tp
            problems += layer_problems(module, alone=alone, tp=tp, ep=options.ep.degree)
            if any(has_unknown_sizes(child) for child in module.modules()):
                degrees = None  # what follows asks for sizes
            problems += options.group_problems(module)
            if degrees is not None:
                problems += adapter_problems(module, degrees)
                plan = ModulePlan(module, degrees, options.pp, options.stage_ranks)
                problems += plan.problems(sequence_parallel=options.sequence_parallel)
                problems += _skeleton_problems(module, plan, options.pp)
                problems += _context_problems(plan, options.cp, degrees)
                problems += _expert_problems(module, degrees)
                problems += _shape_problems(trainer, module, options)
                if not problems:
                    _warn_of_estimates(plan)
    return Findings(tuple(dict.fromkeys(problems)), outcome.real_because)


def _skeleton_problems(
    module: LightningModule, plan: ModulePlan, config: PipelineConfig
) -> list[str]:
    """Reasons why items could not move to other stages, where they are to be able to."""
    moves = config.degree > 1 and config.partition == MEASURED
    if not moves or plan.trunk is None or layout_of(module) is not None:
        return []
    return skeleton_problems(module, plan.trunk, plan.trunk_name or "")


def _context_problems(plan: ModulePlan, config: ContextConfig, degrees: Degrees) -> list[str]:
    """Layers that cannot exchange parts of sequences in the way that was chosen."""
    if degrees.cp == 1:
        return []
    return [
        problem
        for trunk in plan.trunks.values()
        for layer in trunk.modules()
        if isinstance(layer, ParallelLayer)
        for problem in layer.context_problems(config, degrees.tp)
    ]


def _expert_problems(module: nn.Module, degrees: Degrees) -> list[str]:
    """Say that there are no experts to spread."""
    if degrees.ep == 1 or any(isinstance(layer, Experts) for layer in module.modules()):
        return []
    return [
        f"ep={degrees.ep}: the module holds no MixtureOfExperts, whose experts ep spreads over "
        "ranks; nearest valid: lightning_megatron.layers.MixtureOfExperts in place of an MLP, or "
        "ep=1"
    ]


def _warn_of_estimates(plan: ModulePlan) -> None:
    if plan.estimated_items:
        rank_zero_warn(
            "pp.partition='flops': the operations of these items could not be counted, as they do "
            "not run on the meta device; 2 per parameter and token are taken for them: "
            f"{', '.join(plan.estimated_items)}. A method flops(sequence_length) of an item tells "
            "them, example_input_array of the module what the first item takes."
        )


class _Outcome:
    error: Exception | None = None
    real_because: str | None = None


@contextmanager
def _rehearsal(trainer: Trainer, module: LightningModule) -> Iterator[_Outcome]:
    """Within the block the module is as ``configure_model`` makes it, on the meta device."""
    outcome = _Outcome()
    if not is_overridden("configure_model", module) or _is_parallel(module):
        yield outcome
        return
    attempt = Attempt(module)
    set_device_mesh(module, _NoMeshYet())
    try:
        with _quiet(), attempt.running(), trainer.precision_plugin.module_init_context():
            module.configure_model()
        outcome.error = attempt.error
        if attempt.needs_values or (attempt.error is None and attempt.written() is None):
            outcome.real_because = attempt.reason
        yield outcome
    finally:
        attempt.undo()


class _NoMeshYet:
    """Stand-in for the device mesh, before there are processes."""

    def __getitem__(self, name: object) -> Any:
        if name in OTHER_AXES:
            raise ConfigError(axis_problem(name))
        raise RuntimeError("the device mesh exists once the processes are connected")


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block nothing is said that Lightning's own call of the hook says again."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_parallel(module: nn.Module) -> bool:
    return any(isinstance(m, ParallelLayer) and m.topology is not None for m in module.modules())


def _loop_problems(module: LightningModule, options: LayoutOptions) -> list[str]:
    """Faults of the module's code, as opposed to its layers."""
    pp = options.pp.degree
    several = pp != 1 or not _is_single(options)
    given = f"pp={pp}" if pp != 1 else "several microbatches"
    problems = []
    if several and not module.automatic_optimization:
        problems.append(
            f"{given}, automatic_optimization=False: forward and backward of microbatches are "
            "interleaved by the strategy, so the module cannot call manual_backward; nearest "
            "valid: automatic_optimization=True, or pp=1 and num_microbatches=1"
        )
    if several and is_overridden("backward", module):
        problems.append(
            f"{given}: {type(module).__name__}.backward is overridden, but the strategy runs "
            "backward per microbatch and stage and would not call it; nearest valid: remove the "
            "override, or pp=1 and num_microbatches=1"
        )
    return problems


def _compile_problems(options: LayoutOptions) -> list[str]:
    """Whether what is compiled as one would have to be timed in parts."""
    measured = options.pp.degree > 1 and options.pp.partition == MEASURED
    if options.compile.scope != "model" or not measured:
        return []
    return [
        "compile.scope='model', pp.partition='measured': it is items that are timed, and a stage "
        "that is one graph has none; nearest valid: compile.scope='block', or "
        "pp.partition='parameters'"
    ]


def _is_single(options: LayoutOptions) -> bool:
    return options.microbatch_size is None and options.num_microbatches in (None, 1)


def _is_flat(options: LayoutOptions) -> bool:
    return options.tp == options.ep.degree == options.pp.degree == 1


def _data_problems(trainer: Trainer, options: LayoutOptions) -> list[str]:
    """Faults that show in the data already attached to the trainer."""
    source = training_source(trainer)
    size = source.batch_size if isinstance(source, DataLoader) else _option(trainer, "batch_size")
    wanted = options.microbatch_size
    if wanted == AUTO_SIZE:
        return []
    if options.global_batch_size is not None or schedule_of(trainer) is not None:
        return []  # the loader's own size has no meaning
    if isinstance(size, int) and wanted is not None and _whole(wanted) > size:
        return [
            f"microbatch_size={wanted}, batch_size={size}: a microbatch is a part of the batch "
            f"that one data-parallel rank reads; nearest valid: microbatch_size={size}"
        ]
    return []


def _budget_problems(trainer: Trainer, degrees: Degrees | None) -> list[str]:
    """Faults of batches of tokens that data-parallel ranks are to divide."""
    source = training_source(trainer)
    batches = source.batch_sampler if isinstance(source, DataLoader) else None
    if degrees is None or not isinstance(batches, TokenBudget) or not divides_data(trainer):
        return []
    return batches.problems(len(groups_along("batch", degrees)[0]))


def _folder_problems(trainer: Trainer) -> list[str]:
    """Folders of this machine that the run is to write to and cannot."""
    if trainer.num_nodes > 1:
        return []  # those of the first machine count, and all ranks have to say the same
    loggers = [
        (f"{type(logger).__name__}(save_dir=)", logger.save_dir) for logger in trainer.loggers
    ]
    saving = trainer.checkpoint_callbacks
    places = loggers + [
        (f"{type(callback).__name__}(dirpath=)", getattr(callback, "dirpath", None))
        for callback in saving
    ]
    if saving and not loggers:
        places.append(("default_root_dir", trainer.default_root_dir))
    problems = []
    for option, place in places:
        if place is None or "://" in os.fspath(place):
            continue
        path = Path(place).absolute()
        nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            why = "cannot be written to" if nearest.is_dir() else "is no folder"
            problems.append(
                f"{option}={os.fspath(place)!r}: {nearest} {why}; nearest valid: a folder that "
                "this process may write to"
            )
    return problems


def _shape_problems(trainer: Trainer, module: LightningModule, options: LayoutOptions) -> list[str]:
    length = _option(trainer, "seq_len")
    uses_layers = any(isinstance(m, ParallelLayer) for m in module.modules())
    if not (options.sequence_parallel and uses_layers and isinstance(length, int)):
        return []
    problem = divisibility_problem("seq_len", length, "tp", options.tp)
    return [] if problem is None else [f"sequence_parallel=True, {problem}"]


def _option(trainer: Trainer, name: str) -> Any:
    """An option of the datamodule, as an attribute or a hyper-parameter."""
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is None:
        return None
    hparams = getattr(datamodule, "hparams", {})
    in_hparams = hparams.get(name) if isinstance(hparams, Mapping) else None
    return getattr(datamodule, name, in_hparams)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def layer_problems(module: nn.Module, *, alone: bool, tp: int = 1, ep: int = 1) -> list[str]:
    """Sentences about the layers inside ``module``.

    Args:
        module: the whole network.
        alone: whether each parameter is on one data-parallel rank, and used as it is.
        tp: ranks that share parallel layers.
        ep: ranks over which experts are spread.
    """
    problems, degrees = [], {"tp": tp, "ep": ep}
    for name, layer in module.named_modules():
        if isinstance(layer, ParallelLayer) and degrees[layer.shard_axis] > 1:
            axis = layer.shard_axis
            degree, without = degrees[axis], f"{axis}=1, or a layer of torch.nn"
            own = dict(layer.named_parameters(recurse=False))
            problems += [
                f"{name}.{leaf}: Tensor.register_hook on a parameter that {axis}={degree} slices, "
                f"of whose gradient each rank has a part; nearest valid: {without}"
                for leaf in layer.shard_dims()
                if leaf in own and has_hooks(own[leaf])
            ]
            problems += [
                f"{name}.{leaf}: a parametrization (weight_norm, spectral_norm) of a parameter "
                f"that {axis}={degree} slices, of which each rank would see a part; nearest "
                f"valid: {without}"
                for leaf in layer.shard_dims()
                if is_parametrized(layer, leaf)
            ]
            problems += [
                f"{name}.{leaf}: pruned, or computed before each forward (by weight_norm or "
                f"spectral_norm of torch.nn.utils), and {axis}={degree} slices it as a parameter; "
                f"nearest valid: {without}"
                for leaf in layer.shard_dims()
                if isinstance(vars(layer).get(leaf), Tensor)
            ]
        if has_unknown_sizes(layer):
            problems.append(
                f"{name or type(layer).__name__}: parameters of unknown size (a lazy layer that "
                "has not run) cannot be spread; nearest valid: the layer with its sizes, or one "
                "call of the network on an example before the Trainer starts"
            )
        if alone or not isinstance(layer, EMBEDDINGS):
            continue
        if layer.max_norm is not None:
            problems.append(
                f"{name}: max_norm={layer.max_norm} writes into the weights in the forward, which "
                "are copies here, or would differ from rank to rank; nearest valid: max_norm=None"
            )
        if layer.sparse:
            problems.append(
                f"{name}: sparse=True makes gradients that are not added up over ranks; nearest "
                "valid: sparse=False"
            )
    return problems


def has_unknown_sizes(module: nn.Module) -> bool:
    """Whether ``module`` itself has parameters or buffers without a shape."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in own)
