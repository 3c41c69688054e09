"""FP8 training: `Fp8Precision` makes linear layers multiply in FP8 (`precision.fp8_recipes`).

Everything else is ``bf16-mixed``: master weights and optimizer in float32, parameters gathered and
activations passed on in bfloat16, gradients reduced in float32. Low precision harms the layers at
both ends of a network most, and they are a small part of the work. So by default only the linear
layers and the experts inside the stack of blocks run in FP8, except those of the first and last
block. Routers, whose choices a rounding would change, never do.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._torch.fsdp import gather_through
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import lists_of_names, raise_if_any, switches, whole_numbers
from lightning_megatron.layers.delayed_wgrad import GEMM_BACKEND, set_gemm_backend
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.gemm import GemmBackend, GroupedGemm
from lightning_megatron.layers.linear import ParallelLinear, Placement
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.precision.bf16 import MixedShardedPrecision
from lightning_megatron.precision.fp8_blocks import BlockwiseGemm, lack_of_kernels
from lightning_megatron.precision.fp8_experts import EachExpert, held_experts
from lightning_megatron.precision.fp8_gather import Fp8Codec, Fp8Extension, WeightScales
from lightning_megatron.precision.fp8_gemm import (
    DelayedGemm,
    RowwiseGemm,
    SplitOperands,
    TensorwiseGemm,
)
from lightning_megatron.precision.fp8_recipes import (
    IN_BLOCKS,
    Backend,
    Recipe,
    device_problems,
    gather_problems,
    offload_problems,
    option_problems,
    unmatched,
)
from lightning_megatron.precision.fp8_te import TE_ALIGNMENT, TransformerEngineGemm
from lightning_megatron.precision.fp8_torchao import TorchaoGemm
from lightning_megatron.precision.scaling import ALIGNMENT, BLOCK, E4M3, E5M2, MX_BLOCK
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.zero.fully_sharded import FullySharded
from lightning_megatron.zero.gradients import GradientSet, local
from lightning_megatron.zero.owned_rows import OwnedRows
from lightning_megatron.zero.whole_parameters import WholeParameters

log = logging.getLogger(__name__)

_SPLIT: dict[Placement, SplitOperands] = {
    "column": (False, True, True),
    "row": (True, True, False),
    "whole": (False, False, False),
}
"""Operands of a linear layer that tp splits."""


class Fp8Precision(MixedShardedPrecision):
    """``bf16-mixed`` with linear layers in FP8: ``Trainer(plugins=Fp8Precision("rowwise"))``.

    The plugin works with every layout, schedule and ZeRO stage.

    Args:
        recipe: ``"tensorwise"``, ``"rowwise"``, ``"delayed"``, ``"blockwise"`` or ``"mxfp8"``, see
            `precision.fp8_recipes`.
        backend: library that computes: ``"torch"`` every recipe (``"auto"`` means this), ``"te"``
            (`precision.fp8_te`) and ``"torchao"`` (`precision.fp8_torchao`) some.
        keep_first: number of blocks at the start of the stack that stay in bfloat16.
        keep_last: number of blocks at the end of the stack that stay in bfloat16.
        include: patterns of names of linear layers that run in FP8 wherever they are (``*.head``).
        exclude: patterns of names that stay in bfloat16, even if other options choose them.
        plain_linear: whether ``nn.Linear`` runs in FP8, besides the parallel layers and the experts
            of mixtures (`precision.fp8_experts`).
        history: number of steps that ``"delayed"`` looks back.
        gather: number format in which ZeRO gathers the weights of FP8 layers: ``"bf16"``, or with
            ``"tensorwise"`` and ``zero`` 1 to 3 ``"fp8"``, which halves the bytes and changes no
            number (`precision.fp8_gather`); those of experts always in bfloat16.

    Raises:
        ConfigError: an argument is not valid, the backend's package is missing, or (when the run
            begins) the GPU has no FP8 units, or ``gather="fp8"`` meets shards in host memory
            (``offload_parameters``).
    """

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
        backend: Backend = "auto",
        *,
        keep_first: int = 1,
        keep_last: int = 1,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        plain_linear: bool = False,
        history: int = 16,
        gather: Literal["bf16", "fp8"] = "bf16",
    ) -> None:
        problems = option_problems(recipe, backend) + gather_problems(gather, recipe, backend)
        problems += whole_numbers(0, keep_first=keep_first, keep_last=keep_last)
        problems += whole_numbers(1, history=history) + switches(plain_linear=plain_linear)
        raise_if_any(problems + lists_of_names(include=include, exclude=exclude))
        super().__init__("bf16-mixed", "cpu")
        self.recipe = recipe
        self.backend = "torch" if backend == "auto" else backend
        self._alignment = TE_ALIGNMENT[recipe] if backend == "te" else ALIGNMENT
        self._keep = keep_first, keep_last
        self._history = history
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._plain = plain_linear
        self._delayed: dict[str, DelayedGemm] = {}
        self._delayed_experts: dict[str, DelayedGemm] = {}
        self._topology: Topology | None = None
        self._gather = gather
        self._scales: WeightScales | None = None
        self._said = False

    @override
    def use(self, gradients: GradientSet) -> None:
        super().use(gradients)
        self.device = gradients.device.type

    @override
    def prepare(self, parallel: ParallelModule) -> None:
        super().prepare(parallel)
        topology = self._topology = parallel.topology
        transforms = parallel.transforms
        offload = transforms.sharding.offload_parameters
        raise_if_any(
            device_problems(self.recipe, self.backend, topology.device)
            + offload_problems(self._gather, offload, topology.device)
        )
        names = [name.rpartition(".")[0] for name in parallel.canonical]
        problems = unmatched(names, include=self._include, exclude=self._exclude)
        problems += [
            f"Fp8Precision: {name} computes its experts by code of its own, which does not run in "
            f"FP8; nearest valid: exclude=['{name}'], or a pattern of all like it"
            for name, layer in parallel.module.named_modules()
            if isinstance(layer, Experts) and not layer.sizes()
            if self._is_wanted(name, parallel.module)
        ]
        if self._gather == "fp8" and transforms.sharding.stage == 0:
            problems.append(
                "gather='fp8', zero=0: weights are whole, so none is gathered; nearest valid: "
                "zero=1, or gather='bf16'"
            )
        raise_if_any(problems)
        known = {name: h.history[: h.steps] for name, h in self._histories().items()}
        self._delayed, self._delayed_experts = {}, {}
        chosen, misfits = self._choose(parallel.module)
        for name, layer in chosen.items():
            if isinstance(layer, Experts):
                layer.gemm = self._experts_gemm(name, layer, topology)
                continue
            gemm = self._gemm(layer, topology)
            if isinstance(gemm, DelayedGemm):
                self._delayed[name] = gemm
            set_gemm_backend(layer, gemm)
        # Those of before a measured partition.
        self._restore({name: rows.tolist() for name, rows in known.items()})
        if self._gather == "fp8" and topology.fsdp.size > 1:
            self._gather_low(parallel, chosen)
        self._report(parallel, chosen, misfits)

    def _gather_low(self, parallel: ParallelModule, chosen: Mapping[str, nn.Module]) -> None:
        """Make ZeRO gather in FP8 the weights that only FP8 products read."""
        uses = Counter(p for _, p in parallel.module.named_parameters(remove_duplicate=False))
        data = parallel.data
        layers: list[nn.Module] = []
        weights: list[nn.Parameter] = []
        for layer in chosen.values():
            if isinstance(layer, Experts):  # a scale for each matrix, not for what is gathered
                continue
            weight = layer.get_parameter("weight")
            rows = data.rows.get(weight)
            divided = isinstance(weight, DTensor) if rows is None else rows.is_wider
            if divided and uses[weight] == 1:
                layers.append(layer)
                weights.append(weight)
        parts = [partial(_part_of, weight, data.rows.get(weight)) for weight in weights]
        self._scales = scales = WeightScales(parts, parallel.topology)
        packers: list[tuple[nn.Parameter, Fp8Codec]] = []
        for index, (weight, layer) in enumerate(zip(weights, layers, strict=True)):
            found = partial(scales.of, index)
            packer: Fp8Codec | Fp8Extension
            if isinstance(data, FullySharded):
                sharded: Any = weight
                packer = Fp8Extension(sharded, found)
                gather_through(data.units, sharded, packer)
            else:
                assert isinstance(data, WholeParameters)
                packer = Fp8Codec(found)
                packers.append((weight, packer))
                data.pack_with(weight, packer)
            gemm = getattr(layer, GEMM_BACKEND)
            assert isinstance(gemm, TensorwiseGemm)
            gemm.weight_scale = packer.scale
        with torch.no_grad():
            for weight, codec in packers:  # as they will look after every step
                weight.copy_(codec.begin(weight))

    def _choose(self, module: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
        """Linear layers that run in FP8, by name, and names of those whose sizes do not fit."""
        chosen, misfits = {}, []
        for name, layer in module.named_modules():
            if not self._is_linear(layer) or not self._is_wanted(name, module):
                continue
            sizes = _local_sizes(layer)
            if any(size % self._alignment for size in sizes):
                misfits.append(f"{name} {sizes[0]} x {sizes[1]}")
            else:
                chosen[name] = layer
        return chosen, misfits

    def _is_linear(self, layer: nn.Module) -> bool:
        if type(layer) is nn.Linear:
            return self._plain
        if isinstance(layer, Experts):
            return bool(layer.sizes())
        return isinstance(layer, ParallelLinear) and layer.placement != "whole"

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in self._exclude):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self._include):
            return True
        path = name.split(".")
        place = next((i for i, part in enumerate(path) if part.isdigit()), None)
        if place is None:
            return False
        stack: Any = module.get_submodule(".".join(path[:place]))
        first, last = self._keep
        return first <= int(path[place]) < len(stack) - last

    def _experts_gemm(
        self, name: str, experts: Experts, topology: Topology
    ) -> dict[str, GroupedGemm]:
        """Backends of the matrices of a mixture's experts."""
        found: dict[str, GroupedGemm] = {}
        for parameter, sizes in experts.sizes().items():
            backends = []
            for expert in held_experts(experts, topology):
                gemm = self._backend(sizes, topology, None, (False, False, False), experts=True)
                if isinstance(gemm, DelayedGemm):
                    self._delayed_experts[f"{name}.{parameter}.{expert}"] = gemm
                backends.append(gemm)
            found[parameter] = EachExpert(backends)
        return found

    def _gemm(self, layer: nn.Module, topology: Topology) -> GemmBackend:
        placement = layer.placement if isinstance(layer, ParallelLinear) else "whole"
        return self._backend(_local_sizes(layer), topology, topology.tp.group, _SPLIT[placement])

    def _backend(
        self,
        sizes: tuple[int, int],
        topology: Topology,
        group: dist.ProcessGroup | None,
        split: SplitOperands,
        *,
        experts: bool = False,
    ) -> GemmBackend:
        """Backend of a matrix of ``sizes``, whose operands ``group`` may split."""
        if self.backend == "te":
            return TransformerEngineGemm(self.recipe, *sizes, group)
        if self.backend == "torchao":
            mesh = None if group is None else topology.mesh["tp"]
            return TorchaoGemm(self.recipe, mesh, split)
        coarse = self.recipe in ("tensorwise", "delayed", "rowwise")
        gradients = E5M2 if coarse else E4M3
        if self.recipe == "rowwise":
            return RowwiseGemm(gradients)
        if not coarse:
            mx = self.recipe == "mxfp8"
            native = lack_of_kernels(self.recipe, topology.device) is None
            return BlockwiseGemm(gradients, MX_BLOCK if mx else BLOCK, not mx, native)
        if self.recipe == "tensorwise":
            return TensorwiseGemm(gradients, group, split)
        return DelayedGemm(gradients, group, split, self._history, topology.device, experts)

    def _report(
        self, parallel: ParallelModule, chosen: Mapping[str, Any], misfits: Sequence[str]
    ) -> None:
        """Log once, on one rank of each stage, which layers do not run as the recipe says."""
        topology = parallel.topology
        if self._said or topology.tp.rank or topology.loss.rank:
            return
        self._said = True
        if misfits:
            log.warning(
                "Fp8Precision leaves these layers in bfloat16, as the sizes of their weights on a "
                "rank are not multiples of %d: %s",
                self._alignment,
                ", ".join(misfits),
            )
        if not chosen and topology.pp.size == 1:
            log.warning(
                "Fp8Precision: no layer runs in FP8. Candidates are the %s inside a numbered stack "
                "of blocks, without its first %d and last %d; see keep_first, keep_last, include "
                "and plain_linear",
                "linear layers" if self._plain else "parallel linear layers",
                *self._keep,
            )
        lack = None
        if self.backend == "torch" and self.recipe in IN_BLOCKS:
            lack = lack_of_kernels(self.recipe, topology.device)
        if chosen and lack is not None and topology.pp.rank == 0:
            log.warning(
                "Fp8Precision(recipe=%r) is emulated, as %s: operands are quantised and "
                "dequantised exactly, and multiplied in bfloat16. The numbers are the recipe's, "
                "the speed is bfloat16's",
                self.recipe,
                lack,
            )

    # Delayed scaling ---------------------------------------------------------------------------

    @contextmanager
    @override
    def train_step_context(self) -> Iterator[None]:
        self._watch(True)
        with super().train_step_context():
            yield

    @override
    def val_step_context(self) -> Any:
        self._watch(False)
        return super().val_step_context()

    @override
    def test_step_context(self) -> Any:
        self._watch(False)
        return super().test_step_context()

    @override
    def predict_step_context(self) -> Any:
        self._watch(False)
        return super().predict_step_context()

    @override
    def forget_batch(self) -> None:
        for gemm in self._histories().values():
            gemm.current.zero_()

    def _histories(self) -> dict[str, DelayedGemm]:
        return {**self._delayed, **self._delayed_experts}

    def _watch(self, on: bool) -> None:
        if not on:
            self.forget_weights()
        for gemm in self._histories().values():
            gemm.watching = on

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, advance delayed scales, and step."""

        def advancing() -> Any:
            result = closure()
            self._advance()
            return result

        result = super().optimizer_step(optimizer, model, advancing, **kwargs)
        self.forget_weights()
        return result

    @override
    def tell(self, optimizer: Optimizer) -> None:
        self.forget_weights()  # values are gathered with the scales of the new ones
        super().tell(optimizer)

    @override
    def forget_weights(self) -> None:
        if self._scales is not None:
            self._scales.forget()

    def _advance(self) -> None:
        """Add the largest magnitudes of this step to the history; collective over the stage."""
        topology = self._topology
        if topology is None or self.will_skip:
            return
        self._advance_over(self._delayed.values(), (topology.tp, topology.loss))
        self._advance_over(self._delayed_experts.values(), (topology.experts.mean,))

    @staticmethod
    def _advance_over(gemm: Collection[DelayedGemm], axes: Sequence[Axis]) -> None:
        """Advance histories that the ranks of ``axes`` share."""
        if not gemm:
            return
        found = torch.stack([p.current for p in gemm])
        for axis in axes:
            if axis.group is not None:
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis.group)
        for held, amax in zip(gemm, found, strict=True):
            held.advance(amax)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Histories by layer, independent of the layout; collective over pp and ep."""
        topology, counts = self._topology, super().state_dict()
        if self.recipe != "delayed" or topology is None:
            return counts
        rows = {name: h.history[: h.steps].tolist() for name, h in self._histories().items()}
        for axis in (topology.ep, topology.pp):
            rows = {k: v for part in Peers.over(axis).all_gather(rows) for k, v in part.items()}
        return {**counts, "amax_history": rows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the histories of a checkpoint."""
        self.forget_weights()
        super().load_state_dict(state_dict)
        self._restore(state_dict.get("amax_history", {}))

    def _restore(self, histories: Mapping[str, Sequence[Sequence[float]]]) -> None:
        for name, held in self._histories().items():
            rows = histories.get(name)
            if rows:
                kept = torch.tensor(rows[: len(held.history)], device=held.history.device)
                held.history[: len(kept)] = kept
                held.steps = len(rows)


def _local_sizes(layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of the weight with which this rank multiplies; of one expert's ``up``."""
    if isinstance(layer, Experts):
        *_, (narrow, wide) = layer.sizes().values()  # of down
        return wide, narrow
    weight: Tensor = layer.get_parameter("weight")
    if isinstance(layer, ParallelLinear) and not weight.is_meta:
        weight = layer.local_parameters()[0]
    return weight.shape[0], weight.shape[1]


def _part_of(weight: nn.Parameter, rows: OwnedRows | None) -> Tensor:
    """Part of a weight that this rank owns."""
    return local(weight).detach() if rows is None else rows.values
