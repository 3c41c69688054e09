"""Degrees of parallelism and the arithmetic that a layout must satisfy.

The mesh axes, outermost to innermost, are ``pp, dp_replicate, dp_shard, cp, tp``; tp neighbours
are adjacent ranks and so share a node. ``dp = dp_replicate * dp_shard`` is never given: it is what
remains of the world after the other axes. How it is divided follows from ``zero``:

====  ===============================  ==========================
zero  dp_replicate                     dp_shard
====  ===============================  ==========================
0     all of dp                        1
1-3   as given (1: no hybrid shards)   dp / dp_replicate
====  ===============================  ==========================

Experts lie over the same ranks in another way: *ep* and *efsdp* are folded out of the *pool*, the
ranks of one stage that hold one copy of its parameters (dp_shard x cp x tp, and where dp_shard is 1
dp_replicate x cp x tp). ep does not multiply the world size.

Everything here is arithmetic on integers and imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megatron.errors import whole_numbers

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost (slowest varying rank) first."""
_DATA = {"dp_replicate", "dp_shard"}


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Size of every mesh axis; the product is the number of processes."""

    pp: int = 1
    """Pipeline stages held by different ranks."""
    dp_replicate: int = 1
    """Data-parallel copies of the (possibly sharded) parameters."""
    dp_shard: int = 1
    """Ranks over which ZeRO shards parameters, gradients or optimizer state."""
    cp: int = 1
    """Parts into which the sequence of one sample is split."""
    tp: int = 1
    """Ranks that share every parallel layer."""
    ep: int = 1
    """Ranks over which the experts of a mixture are spread; they are ranks of the other axes."""
    origin: int = 0
    """Position on pp of global rank 0: that of the last stage, as rank 0 has loggers and decides
    file names (see `coordinates`)."""

    @property
    def dp(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def pool_axes(self) -> tuple[str, ...]:
        """Axes whose ranks experts are spread over: those of one copy of a stage."""
        return ("dp_replicate" if self.dp_shard == 1 else "dp_shard", "cp", "tp")

    @property
    def pool(self) -> int:
        """Number of ranks over which experts can be spread; ``ep * efsdp``."""
        data = self.dp_replicate if self.dp_shard == 1 else self.dp_shard
        return data * self.cp * self.tp

    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)


def divided_axes(sizes: Mapping[str, int]) -> str:
    """Axes that divide anything, as users name them: ``dp`` unless there are copies of shards.

    >>> divided_axes({"cp": 1, "dp_replicate": 1, "dp_shard": 4, "pp": 1, "tp": 2})
    'dp=4 tp=2'
    """
    divided = {axis: size for axis, size in sizes.items() if size > 1}
    names = dict.fromkeys(_DATA, "dp") if len(_DATA & divided.keys()) == 1 else {}
    return " ".join(f"{names.get(axis, axis)}={size}" for axis, size in divided.items())


def divisors(n: int) -> list[int]:
    """All positive divisors of ``n``, ascending; empty for ``n < 1``."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_divisors(n: int, value: int) -> list[int]:
    """The closest divisor of ``n`` below (or equal to) ``value`` and the closest one above it."""
    all_of_them = divisors(n)
    below = [d for d in all_of_them if d <= value][-1:]
    above = [d for d in all_of_them if d > value][:1]
    return below + above


def nearest_multiples(n: int, factor: int) -> list[int]:
    """The closest positive multiples of ``factor`` at or below and above ``n``."""
    low = n // factor * factor
    return [m for m in (low, low + factor) if m > 0 and m != n]


def divisibility_problem(name: str, value: int, degree_name: str, degree: int) -> str | None:
    """Sentence for ``value % degree != 0``, or None when it divides.

    >>> print(divisibility_problem("num_heads", 6, "tp", 4))
    num_heads=6, tp=4: num_heads must be divisible by tp; nearest valid: tp=3 or 6, or num_heads=4 or 8
    """  # noqa: E501 (the doctest shows the whole sentence)
    if degree >= 1 and value % degree == 0:
        return None
    degrees = " or ".join(str(d) for d in nearest_divisors(value, degree))
    values = " or ".join(str(m) for m in nearest_multiples(value, max(degree, 1)))
    return (
        f"{name}={value}, {degree_name}={degree}: {name} must be divisible by {degree_name}; "
        f"nearest valid: {degree_name}={degrees}, or {name}={values}"
    )


def degree_problems(
    world_size: int, *, tp: int, pp: int, cp: int, dp_replicate: int, zero: int, ep: int = 1
) -> list[str]:
    """Problems of a layout on ``world_size`` processes; empty when `infer_degrees` will work."""
    given = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero.dp_replicate": dp_replicate}
    problems = [
        problem.replace("must be", "a degree is")
        for name, value in given.items()
        for problem in whole_numbers(1, **{name: value})
    ]
    if not isinstance(zero, int) or isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        problems.append(
            f"zero={zero!r}: the ZeRO stage is 0, 1, 2 or 3; nearest valid: zero={_clamp(zero)}"
        )
    if problems:
        return problems
    model = tp * pp * cp
    if world_size % model:
        return [_world_problem(world_size, tp=tp, pp=pp, cp=cp)]
    dp = world_size // model
    if zero == 0 and dp_replicate not in (1, dp):
        problems.append(
            f"zero.dp_replicate={dp_replicate}, zero=0: ZeRO 0 replicates over all of dp={dp}; "
            f"nearest valid: dp_replicate=1 or {dp}, or zero=1"
        )
    elif zero and dp % dp_replicate:
        valid = " or ".join(str(d) for d in nearest_divisors(dp, dp_replicate))
        problems.append(
            f"zero.dp_replicate={dp_replicate}, dp={dp}: dp_replicate must divide dp = "
            f"world size {world_size} / ({' * '.join(_set(tp, pp, cp))}); "
            f"nearest valid: dp_replicate={valid}"
        )
    if not problems:
        degrees = infer_degrees(
            world_size, tp=tp, pp=pp, cp=cp, dp_replicate=dp_replicate, zero=zero, ep=ep
        )
        problems += _pool_problems(degrees)
    return problems


def _pool_problems(degrees: Degrees) -> list[str]:
    """Faults of ep: it must divide the ranks that hold one copy of a stage."""
    if degrees.pool % degrees.ep == 0:
        return []
    valid = " or ".join(str(d) for d in nearest_divisors(degrees.pool, degrees.ep))
    ranks = " * ".join(f"{axis}={getattr(degrees, axis)}" for axis in degrees.pool_axes)
    return [
        f"ep={degrees.ep}, {ranks} = {degrees.pool}: ep must divide the ranks that hold one copy "
        f"of a stage; nearest valid: ep={valid}"
    ]


def infer_degrees(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp_replicate: int = 1,
    zero: int = 1,
    ep: int = 1,
) -> Degrees:
    """Complete a legal layout with the data-parallel degrees (see `degree_problems`)."""
    dp = world_size // (tp * pp * cp)
    replicate = dp if zero == 0 else dp_replicate
    return Degrees(pp=pp, dp_replicate=replicate, dp_shard=dp // replicate, cp=cp, tp=tp, ep=ep)


def _clamp(zero: object) -> int:
    try:
        return min(max(int(zero), 0), 3)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return 1


def _world_problem(world_size: int, *, tp: int, pp: int, cp: int) -> str:
    model = tp * pp * cp
    sizes = " or ".join(str(m) for m in nearest_multiples(world_size, model))
    choices = [
        f"tp={t} pp={p}"
        for t in nearest_divisors(world_size, tp)
        for p in nearest_divisors(world_size // t, pp)
        if world_size % (t * p * cp) == 0
    ]
    rest = world_size // (tp * pp)
    if cp > 1 and world_size % (tp * pp) == 0:
        choices = [f"cp={c}" for c in nearest_divisors(rest, cp)]
    hint = f", or {' or '.join(choices[:3])} on {world_size}" if choices else ""
    given = _set(tp, pp, cp)
    product = "*".join(axis.partition("=")[0] for axis in given)
    return (
        f"{', '.join(given)}, devices * num_nodes = {world_size}: {product} = {model} must "
        f"divide the number of processes; nearest valid: {sizes} processes{hint}"
    )


def _set(tp: int, pp: int, cp: int) -> list[str]:
    """Degrees as they are given; that of an axis which is not in use is left out."""
    return [f"tp={tp}", f"pp={pp}", *([f"cp={cp}"] if cp > 1 else [])]
