"""Mixtures of experts: the layer against transformers', its products, and a step under ep.

*Block* (``block``): forward and backward of one mixture in one process, one thread, float32, beside
``MixtralSparseMoeBlock`` of transformers with the same weights, by ``grouped_mm`` and by its loop
over experts (``eager``). Neither has a balance loss, which transformers computes elsewhere; with
ours the block takes as long to about 1 %. Before timing, outputs and gradients are compared.

*Products* (``products``): the grouped products of one stack, forward and backward, beside one dense
product of as many operations. What is left of the ratio is reading and writing more matrices.

*Step* (``step``): a training step of a small transformer with mixtures under ep=2 against dp=2 with
all experts on both ranks, the same tokens a rank; the two runs take turns step by step in the same
processes. *Bytes* (``bytes``): what the meter of ep counts for one forward, beside one row for each
token and expert, and parameters and state of AdamW on a rank, beside the formula.

Figures are medians over rounds of the ratio of that round, by CPU time (of two ranks the slower).

    python -m benchmarks.experts [--rounds 25] [--only block] [--output benchmarks/results]
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Model, keep_freed_memory, parser, ratio, take_turns, write
from benchmarks.turns import Turn, runs_in_turns
from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import MixtureOfExperts, RouterConfig
from lightning_megatron.layers.experts.grouped import TorchGroupedGemm
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology


@dataclass(frozen=True)
class Size:
    """Sizes of a mixture and of its input."""

    experts: int
    top_k: int
    tokens: int
    hidden: int
    mlp: int

    @property
    def label(self) -> str:
        """Text in the table."""
        return f"E={self.experts} k={self.top_k} T={self.tokens} h={self.hidden} f={self.mlp}"


BLOCKS = {Size(8, 2, 1024, 256, 512): (0.95, 0.8), Size(64, 8, 1024, 256, 128): (0.9, 0.3)}
"""Targets against ``grouped_mm`` and ``eager``."""
PRODUCTS = {Size(8, 1, 2048, 256, 512): 1.2, Size(64, 1, 2048, 256, 128): 1.5}
"""Targets against one dense product; 256 and 32 rows for each expert."""


def _mixtral(size: Size, ours: MixtureOfExperts, kind: str) -> nn.Module:
    """The block of transformers with the weights of ours."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_local_experts=size.experts,
        num_experts_per_tok=size.top_k,
    )
    config._experts_implementation = kind
    block = MixtralSparseMoeBlock(config)
    experts = ours.experts
    assert experts.gate is not None
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat([experts.gate, experts.up], 1))
        block.experts.down_proj.copy_(experts.down)
    return block


def _block_step(block: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], list[Tensor]]:
    weights = list(block.parameters())

    def step() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = block(leaf)
        y.backward(grad)
        for weight in weights:
            weight.grad = None
        assert leaf.grad is not None
        return [y.detach(), leaf.grad]

    return step


def block_rows(rounds: int) -> list[dict[str, Any]]:
    """Lines of the table of blocks."""
    rows = []
    for size, targets in BLOCKS.items():
        torch.manual_seed(0)
        router = RouterConfig(balance="none")
        ours = MixtureOfExperts(size.hidden, size.mlp, size.experts, size.top_k, router=router)
        kinds = ("grouped_mm", "eager")
        blocks = {"ours": ours, **{kind: _mixtral(size, ours, kind) for kind in kinds}}
        x, grad = (torch.randn(1, size.tokens, size.hidden) for _ in range(2))
        steps = {name: _block_step(block, x, grad) for name, block in blocks.items()}
        expected = steps["ours"]()
        for kind in kinds:
            torch.testing.assert_close(steps[kind](), expected, rtol=1e-4, atol=1e-5)
        times = take_turns(steps, rounds, time.process_time)
        for kind, target in zip(kinds, targets, strict=True):
            rows.append(
                {
                    "block": size.label,
                    "ours, CPU ms": f"{statistics.median(times['ours']) * 1e3:.1f}",
                    "transformers": kind,
                    "CPU ms": f"{statistics.median(times[kind]) * 1e3:.1f}",
                    "ratio": ratio(times["ours"], times[kind]),
                    "target": f"{target}",
                }
            )
    return rows


def product_rows(rounds: int) -> list[dict[str, Any]]:
    """Lines of the table of products."""
    rows = []
    for size, target in PRODUCTS.items():
        torch.manual_seed(0)
        gemm = TorchGroupedGemm()
        chosen = torch.randint(size.experts, (size.tokens,))
        counts = torch.bincount(chosen, minlength=size.experts).tolist()
        x, grad = torch.randn(size.tokens, size.hidden), torch.randn(size.tokens, size.mlp)
        stack = torch.randn(size.experts, size.mlp, size.hidden)

        def grouped(gemm=gemm, x=x, grad=grad, stack=stack, counts=counts) -> None:  # type: ignore[no-untyped-def]
            gemm.output(x, stack, counts)
            gemm.input_gradient(grad, stack, counts)
            gemm.weight_gradient(grad, x, counts, 1.0, torch.float32)

        def dense(x=x, grad=grad, weight=stack[0]) -> None:  # type: ignore[no-untyped-def]
            F.linear(x, weight)
            grad.mm(weight)
            grad.t().mm(x)

        times = take_turns({"grouped": grouped, "dense": dense}, rounds, time.process_time)
        rows.append(
            {
                "products": f"E={size.experts} T={size.tokens} {size.hidden} x {size.mlp}",
                "grouped, CPU ms": f"{statistics.median(times['grouped']) * 1e3:.1f}",
                "dense, CPU ms": f"{statistics.median(times['dense']) * 1e3:.1f}",
                "ratio": ratio(times["grouped"], times["dense"]),
                "target": f"{target}",
            }
        )
    return rows


CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    vocab_size=256,
    experts=MixtureConfig(num_experts=8, top_k=2, mlp_size=512),
)
LENGTH, SAMPLES = 256, 2


class _Recorded(pl.Callback):
    """Bytes of experts' parameters and of their optimizer state on this rank, while it trains."""

    def __init__(self, found: dict[str, int]) -> None:
        self._found = found

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 1:
            return
        state = trainer.optimizers[0].state
        for name, parameter in pl_module.named_parameters():
            if ".experts." in name:
                held = [v for v in state[parameter].values() if v.dim()]
                for kind, tensors in (("parameters", [parameter]), ("state", held)):
                    size = sum(math.prod(t.shape) * t.element_size() for t in tensors)
                    self._found[kind] = self._found.get(kind, 0) + size


def _trained(ep: int, found: dict[str, int], turn: Turn) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        strategy=MegatronStrategy(ep=ep),
        max_epochs=1,
        callbacks=[_Recorded(found)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(CONFIG), DataLoader(turn, batch_size=None))


def step_job(rounds: int) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """CPU seconds of every step of both runs on this rank, and bytes at rest."""
    torch.set_num_threads(1)
    tokens = torch.randint(256, (SAMPLES, LENGTH + 1))
    rest: dict[str, dict[str, int]] = {"ep=2": {}, "dp=2": {}}

    def run(ep: int) -> Callable[[Turn], None]:
        return lambda turn: _trained(ep, rest["ep=2" if ep == 2 else "dp=2"], turn)

    runs = {"ep=2": run(2), "dp=2": run(1)}
    found = runs_in_turns(runs, (tokens[:, :-1], tokens[:, 1:]), rounds)
    return {name: by_clock["processor"] for name, by_clock in found.items()}, rest


def step_rows(pool: WorkerPool, rounds: int) -> list[dict[str, Any]]:
    """Lines of the table of steps and of what lies in memory."""
    by_rank = pool.run(2, step_job, rounds)
    slower = {
        name: [max(pair) for pair in zip(*(times[name] for times, _ in by_rank), strict=True)]
        for name in by_rank[0][0]
    }
    mixture = CONFIG.experts
    assert mixture is not None
    whole = CONFIG.num_layers * mixture.num_experts * 3 * CONFIG.hidden_size * CONFIG.expert_width
    rest = by_rank[0][1]["ep=2"]
    rows = [
        {
            "what": f"step, {CONFIG.num_layers} x {CONFIG.hidden_size}, E=8 k=2, "
            f"{SAMPLES * LENGTH} tokens a rank",
            "ep=2": f"{statistics.median(slower['ep=2']) * 1e3:.0f} ms",
            "beside": f"dp=2: {statistics.median(slower['dp=2']) * 1e3:.0f} ms",
            "ratio": ratio(slower["ep=2"], slower["dp=2"]),
            "target": "1.05",
        }
    ]
    for kind, size in (("parameters", 4), ("state", 8)):
        rows.append(
            {
                "what": f"{kind} of experts at rest",
                "ep=2": f"{rest[kind] / 1e6:.2f} MB",
                "beside": f"formula: {whole * size / 2 / 1e6:.2f} MB",
                "ratio": f"{rest[kind] / (whole * size / 2):.3f}",
                "target": "1.00",
            }
        )
    return rows


def sent_job(size: Size) -> float:
    """Bytes that this rank sends in the forward of one layer, with routes as a new router has."""
    dist.init_process_group("gloo")
    topology = Topology(Degrees(dp_shard=2, ep=2), torch.device("cpu"))
    torch.manual_seed(0)
    router = RouterConfig(balance="none")
    layer = MixtureOfExperts(size.hidden, size.mlp, size.experts, size.top_k, router=router)
    for module in (layer.router, layer.experts, layer):
        module.distribute(topology)
    layer.dispatch = "once"
    torch.manual_seed(topology.rank)
    layer(torch.randn(1, size.tokens, size.hidden))
    return topology.meters["ep"].bytes


def sent_rows(pool: WorkerPool) -> list[dict[str, Any]]:
    """Lines of the table of bytes."""
    rows = []
    for size, target in ((Size(64, 8, 1024, 256, 128), "0.30"), (Size(8, 2, 1024, 256, 512), "-")):
        sent = statistics.fmean(pool.run(2, sent_job, size))
        copies = 2 * size.tokens * size.top_k / 2 * size.hidden * 4
        rows.append(
            {
                "what": f"bytes of a forward, {size.label}",
                "ep=2": f"{sent / 1e6:.2f} MB",
                "beside": f"a row for each choice: {copies / 1e6:.2f} MB",
                "ratio": f"{sent / copies:.3f}",
                "target": target,
            }
        )
    return rows


def main() -> None:
    """Take turns, print the tables and write them."""
    options = parser(__doc__, steps=1)
    options.add_argument("--rounds", type=int, default=25, help="turns of every variant")
    options.add_argument("--only", choices=["block", "products", "ep"], help="one of the tables")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    tables: Mapping[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
        "block": ("A mixture of experts beside transformers'", lambda: block_rows(chosen.rounds)),
        "products": ("Products of experts", lambda: product_rows(chosen.rounds)),
        "ep": ("Experts on two ranks", lambda: _of_two_ranks(chosen.rounds)),
    }
    for name, (title, rows) in tables.items():
        if chosen.only in (None, name):
            print(write(f"experts_{name}", title, rows(), chosen.output))


def _of_two_ranks(rounds: int) -> list[dict[str, Any]]:
    with WorkerPool(2, timeout=900) as pool:
        return step_rows(pool, rounds) + sent_rows(pool)


if __name__ == "__main__":
    main()
