"""Context parallelism: what the exchange adds to attention, and what a step and its memory become.

*Attention* (``attention``): forward and backward of the attention of one layer, float32, heads of
64, between ``p`` processes of one thread each. Beside each kind stands

* *whole*: ``scaled_dot_product_attention`` of the whole sequence in one process, divided by ``p``:
  what perfect division would take;
* *torch*: the ring of torch's own context parallelism (``_templated_ring_attention`` and its
  backward, driven by the same CPU kernel, as torch has no way to it on CPUs), by its two ways to
  pass keys on.

Variants take turns round by round in the same processes; a figure is the median over rounds of the
ratio of that round, by CPU time of the slowest rank (of *whole* the mean), and by wall time. Before
timing all outputs and gradients are compared, and the bytes that the meter of the axis counts with
those of the formulas in `layers.context_attention`.

*Step* (``step``): a step of a small transformer under cp=2 against dp=2 with as many tokens a rank
in shorter sequences, so that it lacks the attention to the further half: these pairs are measured
and added. *Activations*: bytes that autograd keeps of the forward of its trunk, under cp=2 and
cp=1.

    python -m benchmarks.context_parallel [--rounds 15] [--steps 3] [--output benchmarks/results]
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Model, fit, parser, write
from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.context_attention.call import ContextCall, context_attend
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

HEAD = 64
TARGETS = {("ring", 2): 1.10, ("gather", 2): 1.10, ("ulysses", 2): 1.15, ("ring", 4): 1.15}


@dataclass(frozen=True)
class Size:
    """Sizes of one attention."""

    cp: int
    length: int
    heads: int
    kv_heads: int


SIZES = (
    *(Size(2, length, 8, 2) for length in (256, 1024, 2048, 4096)),
    Size(2, 2048, 8, 8),
    Size(4, 4096, 8, 2),
)

Step = Callable[[], list[Tensor]]


def _whole(tensors: Sequence[Tensor]) -> Step:
    """Attention of one process; the results are those of all positions."""
    q, k, v, g = tensors
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, g.transpose(1, 2))
        return [x.detach().transpose(1, 2) for x in (out, *grads)]

    return step


def _ours(context: Context, kind: Any, length: int, parts: Sequence[Tensor]) -> Step:
    call = ContextCall(layout=ContextLayout(length, context.cp.size), kind=kind)
    *leaves, g = parts
    leaves = [x.detach().requires_grad_() for x in leaves]

    def step() -> list[Tensor]:
        out = context_attend(context, call, *leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    return step


def _torch(group: Any, method: str, parts: Sequence[Tensor]) -> Step:
    """torch's ring; it has no entrance on CPUs, so its two loops are called as its handlers do."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    q, k, v, g = (x.transpose(1, 2).contiguous() for x in parts)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def step() -> list[Tensor]:
        peer._cp_options.rotate_method = getattr(peer._RotateMethod, method)
        with torch.no_grad():
            out, lse = peer._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
            grads = peer._templated_ring_attention_backward(
                group, 2, backward, g, "grad_out", q, k, v, out, lse, True, dropout_p=0.0
            )
        return [x.transpose(1, 2) for x in (out, *grads[:3])]

    return step


def _parts(layout: ContextLayout, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    chunks = layout.chunks(rank)
    return [torch.cat([x[:, c.start : c.stop] for c in chunks], 1) for x in tensors]


def _expected_bytes(kind: str, size: Size) -> float:
    """Bytes of forward and backward by the formulas; float32, so that ``e = a = 4``."""
    p, n = size.cp, size.length // size.cp
    if kind == "ulysses":
        wide = math.lcm(size.kv_heads, p)
        return 2 * 2 * n * HEAD * 4 * (size.heads + wide) * (p - 1) / p
    block = 2 * n * size.kv_heads * HEAD * 4
    return block * 3 * (p - 1)


def _measure(step: Step, steps: int) -> tuple[float, float]:
    """Seconds per step: CPU of this process, wall."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps


def attention(size: Size, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every variant, round by round; runs on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = ContextConfig(degree=size.cp, kind="ring")
    topology = Topology(Degrees(cp=size.cp), torch.device("cpu"), context=config)
    generator = torch.Generator().manual_seed(0)
    heads = size.heads, size.kv_heads, size.kv_heads, size.heads
    shapes = [(1, size.length, n, HEAD) for n in heads]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    layout = ContextLayout(size.length, size.cp)
    parts = _parts(layout, topology.cp.rank, tensors)
    variants: dict[str, Step] = {"whole": _whole(tensors)}
    for kind in ("ring", "gather", "ulysses"):
        variants[kind] = _ours(topology.context, kind, size.length, parts)
    for method in ("ALL_GATHER", "ALL_TO_ALL"):
        variants[f"torch {method}"] = _torch(topology.cp.group, method, parts)
    _compare(variants, layout, topology, size)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_measure(variants[name], steps))
    return times


def _compare(
    variants: Mapping[str, Step], layout: ContextLayout, topology: Topology, size: Size
) -> None:
    """Check that all variants compute the same, and send what the formulas say."""
    truth = _parts(layout, topology.cp.rank, variants["whole"]())
    for name, step in variants.items():
        if name == "whole":
            continue
        before = topology.cp.meter.bytes
        for mine, true in zip(step(), truth, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
        sent = topology.cp.meter.bytes - before
        if not name.startswith("torch"):
            assert sent == _expected_bytes(name, size), (name, sent)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def attention_rows(
    size: Size, by_rank: Sequence[Mapping[str, Sequence[tuple[float, float]]]]
) -> list[dict[str, Any]]:
    """Lines of the table for one size."""

    def times(name: str, clock: int, merge: Callable[[Sequence[float]], float]) -> list[float]:
        turns = zip(*(rank[name] for rank in by_rank), strict=True)
        return [merge([t[clock] for t in ranks]) for ranks in turns]

    rows = []
    for kind in ("ring", "gather", "ulysses"):
        own = [times(kind, clock, max) for clock in (0, 1)]
        whole = [[t / size.cp for t in times("whole", clock, statistics.fmean)] for clock in (0, 1)]
        row: dict[str, Any] = {
            "kind": kind,
            "cp": size.cp,
            "length": size.length,
            "heads": f"{size.heads}/{size.kv_heads}",
            "CPU ms": f"{statistics.median(own[0]) * 1e3:.1f}",
            "CPU / (whole/cp)": _ratio(own[0], whole[0]),
            "target": f"{TARGETS.get((kind, size.cp), 0) or '-'}" if size.length >= 1024 else "-",
            "wall / (whole/cp)": _ratio(own[1], whole[1]) if size.cp == 2 else "-",
        }
        for method in ("ALL_GATHER", "ALL_TO_ALL"):
            theirs = times(f"torch {method}", 0, max)
            row[f"CPU / torch {method.lower()}"] = _ratio(own[0], theirs) if kind == "ring" else "-"
        row["bytes / formula"] = "1.00"
        rows.append(row)
    return rows


def _step_seconds(cp: int, length: int, config: TransformerConfig, steps: int) -> list[float]:
    """CPU seconds of each counted step on this rank."""
    torch.set_num_threads(1)
    strategy = MegatronStrategy(cp=ContextConfig(degree=cp, kind="ring") if cp > 1 else 1)
    return fit(Model(config), strategy, steps + 6, 1, length, clock=time.process_time)


def _pair_seconds(length: int, config: TransformerConfig, rounds: int) -> float:
    """CPU seconds of attention of a whole sequence in one layer."""
    torch.set_num_threads(1)
    n = config.num_heads
    shapes = [(1, length, heads, config.hidden_size // n) for heads in (n, n, n, n)]
    step = _whole([torch.randn(shape) for shape in shapes])
    times = []
    for _ in range(rounds):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


def step_rows(pool: WorkerPool, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Lines of the table of whole steps."""
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_heads=4, mlp_size=1024, vocab_size=256
    )
    length, ratios, times = 2048, [], []
    for _ in range(rounds):
        seconds = {}
        for cp in (2, 1):
            by_rank = pool.run(2, _step_seconds, cp, length // (3 - cp), config, steps)
            seconds[cp] = max(statistics.median(one) for one in by_rank)
        long, short = (pool.run(1, _pair_seconds, s, config, 5)[0] for s in (length, length // 2))
        # cp=2: half of the pairs of the whole sequence; dp=2: all of a sequence half as long.
        further = config.num_layers * (long / 2 - short)
        ratios.append(seconds[2] / (seconds[1] + further))
        times.append((seconds[2], seconds[1], further))
    cp_s, dp_s, further_s = (statistics.median(t) for t in zip(*times, strict=True))
    return [
        {
            "step of": f"{config.num_layers} x {config.hidden_size}, s={length}",
            "cp=2, CPU ms": f"{cp_s * 1e3:.0f}",
            "dp=2, CPU ms": f"{dp_s * 1e3:.0f}",
            "further pairs, CPU ms": f"{further_s * 1e3:.0f}",
            "ratio": f"{statistics.median(ratios):.2f}",
            "target": "1.10",
        }
    ]


def _kept_bytes(cp: int, length: int, config: TransformerConfig) -> int:
    """Bytes that autograd keeps of one forward, parameters excluded."""
    found: dict[int, int] = {}

    class Counted(Model):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            weights = {p.untyped_storage().data_ptr() for p in self.parameters()}

            def pack(x: Tensor) -> Tensor:
                memory = x.untyped_storage()
                if memory.data_ptr() not in weights:
                    found[memory.data_ptr()] = memory.nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                self.trunk(batch[0])
            return super().training_step(batch, batch_idx)

    strategy = MegatronStrategy(cp=ContextConfig(degree=cp, kind="ring") if cp > 1 else 1)
    fit(Counted(config), strategy, 1, 1, length)
    return sum(found.values())


def memory_rows(pool: WorkerPool) -> list[dict[str, Any]]:
    """Line of the table of activations."""
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_heads=4, mlp_size=1024, vocab_size=256
    )
    split = max(pool.run(2, _kept_bytes, 2, 2048, config))
    [whole] = pool.run(1, _kept_bytes, 1, 2048, config)
    return [
        {
            "activations of the trunk": "4 x 256, s=2048, ring",
            "cp=2, MB a rank": f"{split / 1e6:.1f}",
            "cp=1, MB": f"{whole / 1e6:.1f}",
            "ratio": f"{split / whole:.3f}",
            "target": "0.50 to 0.53",
        }
    ]


def main() -> None:
    """Take turns, print the tables and write them."""
    options = parser(__doc__, steps=3)
    options.add_argument("--rounds", type=int, default=15, help="turns of every variant")
    options.add_argument("--only", choices=["attention", "step"], help="one of the tables")
    chosen = options.parse_args()
    if chosen.only in (None, "attention"):
        rows = []
        for size in SIZES:
            with WorkerPool(size.cp, timeout=900) as pool:
                steps = chosen.steps if size.length <= 1024 else 1
                by_rank = pool.run(size.cp, attention, size, chosen.rounds, steps)
                rows += attention_rows(size, by_rank)
        title = "Attention of a split sequence: forward and backward"
        print(write("context_parallel", title, rows, chosen.output))
    if chosen.only in (None, "step"):
        with WorkerPool(2, timeout=900) as pool:
            memory = memory_rows(pool)
            print(write("context_parallel_memory", "Activations under cp", memory, chosen.output))
            rows = step_rows(pool, min(chosen.rounds, 5), chosen.steps)
            print(write("context_parallel_step", "A step under cp", rows, chosen.output))


if __name__ == "__main__":
    main()
