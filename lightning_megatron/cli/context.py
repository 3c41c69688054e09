"""`lightning-megatron context`: what splitting sequences over cp costs, for each kind of exchange.

It computes, so it needs no model, no process group and no torch. The formulas are those of
`lightning_megatron.layers.context_choice`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_megatron.errors import ConfigError, raise_if_any, whole_numbers
from lightning_megatron.layers.context_choice import (
    AttentionSizes,
    ContextCost,
    Hardware,
    choose,
    cost,
    overlap_tokens,
    pairs,
    refusal,
)
from lightning_megatron.layers.size_checks import tp_head_problems
from lightning_megatron.topology.context_layout import ContextLayout, ContextOrder
from lightning_megatron.topology.degrees import divisibility_problem, divisors

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def context(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `context`.

    Returns:
        The exit code: 0, or 2 for a mistake of the user.
    """
    options = _parser().parse_args(list(args))
    try:
        raise_if_any(_problems(options))
    except ConfigError as error:
        print(f"lightning-megatron: {error}", file=sys.stderr)
        return 2
    print("\n".join(_report(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron context",
        description="Say what each way to exchange a sequence that is split over cp costs, and "
        "which one is taken.",
    )
    add = parser.add_argument
    add("--seq", type=int, required=True, help="positions of a whole sequence")
    add("--cp", type=int, required=True, help="ranks over which it is split")
    add("--heads", type=int, required=True, help="heads of queries of the model")
    add("--kv-heads", type=int, help="heads of keys and values; default: as many")
    add("--head-dim", type=int, default=128, help="size of a head; default 128")
    add("--batch", type=int, default=1, help="sequences of a microbatch; default 1")
    add("--dtype", choices=_BYTES, default="bfloat16", help="number format; default bfloat16")
    add("--window", type=int, help="positions that each one sees, with a sliding window")
    add("--full", action="store_true", help="attention without a causal mask")
    add("--layers", type=int, default=1, help="layers of attention of a rank; default 1")
    add("--tp", type=int, default=1, help="tensor parallelism, which splits heads; default 1")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device; default cuda")
    default = Hardware()
    add("--gpus-per-node", type=int, default=8, help="default 8")
    add(
        "--bandwidth",
        type=float,
        default=default.link / 1e9,
        help="GB/s that a rank sends inside of its node; default 450 (NVLink)",
    )
    add(
        "--network",
        type=float,
        default=default.network / 1e9,
        help="GB/s that a rank sends to other nodes; default 50 (a port of 400 Gbit/s each)",
    )
    add(
        "--tflops",
        type=float,
        default=default.flops / 1e12,
        help="1e12 operations per second that attention reaches; default 500",
    )
    return parser


def _problems(options: argparse.Namespace) -> list[str]:
    """Faults of the options, each with the nearest valid choice."""
    counts = ("seq", "cp", "heads", "head_dim", "batch", "layers", "tp", "gpus_per_node")
    given = {name: getattr(options, name) for name in counts}
    for name in ("kv_heads", "window"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    found = whole_numbers(1, **given)
    found += [
        f"{name}={getattr(options, name):g}: must be above 0; "
        f"nearest valid: {name}={_parser().get_default(name):g}"
        for name in ("bandwidth", "network", "tflops")
        if not getattr(options, name) > 0
    ]
    if not found and options.cp == 1:
        found.append("cp=1: nothing is split; nearest valid: cp=2")
    if found:
        return found
    kv_heads = options.kv_heads or options.heads
    grouped = divisibility_problem("heads", options.heads, "kv_heads", kv_heads)
    return [grouped] if grouped else tp_head_problems(options.heads, kv_heads, options.tp)


def _sizes(options: argparse.Namespace) -> AttentionSizes:
    kv_heads = options.kv_heads or options.heads
    return AttentionSizes(
        cp=options.cp,
        heads=options.heads // options.tp,
        kv_heads=max(1, kv_heads // options.tp),
        head_dim=options.head_dim,
        length=options.seq,
        batch=options.batch,
        element_bytes=_BYTES[options.dtype],
        causal=not options.full,
        window=options.window,
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    return Hardware(
        flops=options.tflops * 1e12,
        link=options.bandwidth * 1e9,
        network=options.network * 1e9,
        ranks_per_node=min(options.cp, max(1, options.gpus_per_node // options.tp)),
    )


def _report(options: argparse.Namespace) -> Iterator[str]:
    sizes, hardware = _sizes(options), _hardware(options)
    local = ContextLayout(options.seq, options.cp).local
    yield (
        f"{options.seq:,} positions over cp={options.cp}: {local:,} on each rank, in "
        f"{sizes.heads} heads of queries and {sizes.kv_heads} of keys and values, {options.dtype}"
    )
    near = hardware.ranks_per_node
    spread = "one node" if near == options.cp else f"nodes, {near} ranks on each"
    yield f"ranks of a sequence are on {spread}"
    yield ""
    yield from _table(options, sizes, hardware)
    yield ""
    if options.device == "cuda":
        yield from _overlap(options, sizes, hardware)
    yield from _balance(options)
    yield ""
    yield choose(sizes, device=options.device, hardware=hardware).reason


def _table(options: argparse.Namespace, sizes: AttentionSizes, hardware: Hardware) -> Iterator[str]:
    """Rows of costs, per rank and microbatch, of all layers; what a kind cannot do below it."""
    layers = options.layers
    of = "a layer" if layers == 1 else f"{layers} layers"
    timed = "waits" if options.device == "cuda" else ""
    head = (of, "sends forward", "sends backward", "memory beside", timed)
    rows, refused = [head], []
    for name, ulysses, order in _ways(options):
        kind = name.partition(",")[0]
        why = refusal(kind, heads=sizes.heads, cp=sizes.cp, ulysses=ulysses)  # type: ignore[arg-type]
        if why is not None:
            refused.append(why)
            continue
        found: ContextCost = cost(kind, replace(sizes, order=order), hardware, ulysses)  # type: ignore[arg-type]
        both = _amount(layers * found.forward_bytes), _amount(layers * found.backward_bytes)
        waits = f"{1e3 * layers * found.waits:.3g} ms" if options.device == "cuda" else ""
        # Memory is that of one layer: the next one uses it again.
        rows.append((name, *both, _amount(found.extra_bytes), waits))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        first = row[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "   ".join([first, *others]).rstrip()
    yield from refused


def _ways(options: argparse.Namespace) -> Iterator[tuple[str, int | None, ContextOrder]]:
    """Names of all kinds, with the ranks of a ring that exchange heads, and the order."""
    yield "ulysses", None, "zigzag"
    yield "ring", None, "zigzag"
    if options.window is not None and not options.full:
        yield "ring, order=contiguous", None, "contiguous"
    for ulysses in divisors(options.cp)[1:-1]:
        yield f"ring, ulysses={ulysses}", ulysses, "zigzag"
    yield "gather", None, "zigzag"


def _overlap(
    options: argparse.Namespace, sizes: AttentionSizes, hardware: Hardware
) -> Iterator[str]:
    inside = hardware.ranks_per_node == options.cp
    speed = hardware.link if inside else hardware.network
    limit = overlap_tokens(sizes, hardware.flops, speed)
    state = "it is" if sizes.local >= limit else "it is not"
    yield (
        f"a hop of a ring is hidden behind products from {limit:,.0f} positions a rank on "
        f"({speed / 1e9:g} GB/s, {options.tflops:g} TFLOP/s): {state}"
    )


def _balance(options: argparse.Namespace) -> Iterator[str]:
    """Pairs of positions of the ranks in both orders."""
    orders: tuple[ContextOrder, ...] = ("zigzag", "contiguous")
    for order in orders:
        layout = ContextLayout(options.seq, options.cp, order)
        found = [
            pairs(layout, rank, causal=not options.full, window=options.window)
            for rank in range(options.cp)
        ]
        most = max(found) * options.cp / sum(found)
        yield (
            f"order {order}: {min(found):,} to {max(found):,} pairs of positions a rank, "
            f"the most {most:.3g} times the mean"
        )


def _amount(size: float) -> str:
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size:.0f} B"
