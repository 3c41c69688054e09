"""Tensor parallelism: our layers against torch's `parallelize_module`, eager, on small layers.

Both sides run the same four blocks, from the same weights, in the same two processes, one round of
one after one round of the other; before timing, their outputs and input gradients are compared. The
peer is `nn.Linear` and `nn.RMSNorm` under the usual plan (`ColwiseParallel`, `RowwiseParallel`, and
for sequence parallelism `SequenceParallel` and `PrepareModuleInput` once for q, k and v and once
for gate and up). Ours includes the sum over tp of the norms' gradients under sequence parallelism.

A step is one forward and one backward; there is no optimizer. Small layers on CPU are the case in
which what surrounds the arithmetic costs most: dispatch, autograd nodes, number of collectives.

    python -m benchmarks.tensor_parallel [--rounds 15] [--steps 10] [--output benchmarks/results]
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

TARGET = 0.6
BLOCKS = 4
HEADS = 4
SHAPES = {64: (2, 16), 256: (2, 32)}
"""Batch and sequence by hidden size."""


class PeerMLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.gate = nn.Linear(h, 4 * h, bias=False)
        self.up = nn.Linear(h, 4 * h, bias=False)
        self.down = nn.Linear(4 * h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PeerAttention(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.head_dim = h // HEADS
        self.rotary = Rotary(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)) for y in (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k = self.rotary(q, k)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class PeerBlock(nn.Module):
    def __init__(self, h: int, attention: bool) -> None:
        super().__init__()
        if attention:
            self.attention_norm = nn.RMSNorm(h, eps=1e-5)
            self.attention = PeerAttention(h)
        self.mlp_norm = nn.RMSNorm(h, eps=1e-5)
        self.mlp = PeerMLP(h)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "attention"):
            x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MLPBlock(nn.Module):
    """Our block without attention."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.mlp_norm = RMSNorm(h, 1e-5)
        self.mlp = MLP(h, 4 * h, "swiglu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mlp_norm(x))


def _our_block(h: int, attention: bool) -> nn.Module:
    if not attention:
        return MLPBlock(h)
    config = TransformerConfig(hidden_size=h, num_heads=HEADS, mlp_size=4 * h)
    return TransformerBlock(config, Rotary(h // HEADS))


def _plan(attention: bool, sequence: bool) -> dict[str, Any]:
    out = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=out),
    }
    if attention:
        plan |= {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
        plan["attention.wo"] = RowwiseParallel(output_layouts=out)
    if sequence:
        for name in ("attention", "mlp") if attention else ("mlp",):
            plan[f"{name}_norm"] = SequenceParallel()
            plan[name] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return plan


def _peer(h: int, attention: bool, sequence: bool, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(PeerBlock(h, attention) for _ in range(BLOCKS)))
    for block in model:
        parallelize_module(block, mesh, _plan(attention, sequence))
    return model


def _ours(h: int, attention: bool, topology: Topology) -> tuple[nn.Module, list[nn.Parameter]]:
    """Our model with the peer's weights, and the parameters whose gradients are summed over tp."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(PeerBlock(h, attention) for _ in range(BLOCKS)))
    model = nn.Sequential(*(_our_block(h, attention) for _ in range(BLOCKS)))
    model.load_state_dict(plain.state_dict())
    summed = []
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            layer.distribute(topology)
            shards = layer.tensor_shards.items()
            summed += [getattr(layer, name) for name, shard in shards if shard.sum_gradients]
    return model, summed


def _step(model: nn.Module, x: Tensor, summed: list[nn.Parameter], group: Any) -> Callable[[], Any]:
    upstream = torch.ones_like(x)

    def step() -> tuple[Tensor, Tensor | None]:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.backward(upstream)
        if summed:
            grads = [p.grad for p in summed if p.grad is not None]
            flat = torch.cat(grads)
            dist.all_reduce(flat, group=group)
            parts = flat.split([g.numel() for g in grads])
            torch._foreach_copy_(grads, list(parts))
        return y.detach(), x.grad

    return step


def _measure(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Milliseconds per step: wall, and CPU of this process."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps * 1e3, (time.process_time() - cpu) / steps * 1e3


def run_case(h: int, attention: bool, sequence: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Compare one configuration; runs on both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = Topology(Degrees(tp=2), torch.device("cpu"), sequence_parallel=sequence)
    batch, length = SHAPES[h]
    torch.manual_seed(1)
    x = torch.randn(batch, length, h)
    x = (x.chunk(2, 1)[topology.tp.rank].contiguous() if sequence else x).requires_grad_()
    model, summed = _ours(h, attention, topology)
    group = topology.tp.group
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    contestants = {
        "ours": _step(model, x, summed, group),
        "peer": _step(_peer(h, attention, sequence, mesh), x, [], group),
    }
    for mine, theirs in zip(contestants["ours"](), contestants["peer"](), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for step in contestants.values():
        _measure(step, 3)
    for _, (name, step) in itertools.product(range(rounds), contestants.items()):
        times[name].append(_measure(step, steps))
    result: dict[str, Any] = {
        "blocks": f"{BLOCKS} x ({'attention + ' if attention else ''}MLP)",
        "hidden": h,
        "tokens": f"{batch} x {length}",
        "sequence_parallel": sequence,
    }
    for i, clock in enumerate(("wall", "cpu")):
        ours, peer = (statistics.median(t[i] for t in times[n]) for n in ("ours", "peer"))
        ratios = [a[i] / b[i] for a, b in zip(times["ours"], times["peer"], strict=True)]
        result |= {
            f"ours_{clock}_ms": ours,
            f"peer_{clock}_ms": peer,
            f"{clock}_ratio": statistics.median(ratios),
        }
    return result


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| blocks | hidden | tokens | sequence parallel | ours ms | peer ms | ratio (wall) "
        "| ratio (CPU time) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['blocks']} | {r['hidden']} | {r['tokens']} | "
        f"{'yes' if r['sequence_parallel'] else 'no'} | {r['ours_wall_ms']:.2f} | "
        f"{r['peer_wall_ms']:.2f} | {r['wall_ratio']:.2f} | {r['cpu_ratio']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="tp=2 against torch's parallelize_module")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of each side per round")
    parser.add_argument("--output", type=Path, help="folder for tensor_parallel.json and .md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    with WorkerPool(2, timeout=600) as pool:
        for h, attention, sequence in itertools.product(SHAPES, (False, True), (False, True)):
            results = pool.run(2, run_case, h, attention, sequence, options.rounds, options.steps)
            rows.append(results[0])
            print(_table(rows[-1:]).splitlines()[-1], flush=True)
    about = (
        f"Step time (forward and backward, float32) of {BLOCKS} blocks under tp=2, ours against "
        f"torch's parallelize_module in eager mode; at most {TARGET} is the target. torch "
        f"{torch.__version__}, gloo, two processes of one thread each on {os.cpu_count()} cores "
        f"({platform.machine()}) with a load average of {load:.1f} before the run, Python "
        f"{platform.python_version()}; medians of {options.rounds} alternating rounds of "
        f"{options.steps} steps, ratios taken round by round."
    )
    print(f"\n{about}\n\n{_table(rows)}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        stem = options.output / "tensor_parallel"
        stem.with_suffix(".json").write_text(
            json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
        )
        stem.with_suffix(".md").write_text(
            f"# Tensor parallelism on small layers\n\n{about}\n\n{_table(rows)}\n"
        )


if __name__ == "__main__":
    main()
