"""Checks of the layers' names and sizes; arithmetic only, so that planning imports no torch."""

from typing import Literal

from lightning_megatron.topology.degrees import Degrees, divisibility_problem, nearest_divisors

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]
"""Activations of an MLP; the first two are gated (a second projection multiplies the first)."""

GATED: tuple[Activation, ...] = ("swiglu", "geglu")
"""Activations with a gate."""

AttentionBackend = Literal["auto", "sdpa", "flash", "flex", "te", "reference"]
"""Kernels that compute attention (`layers.attention_backends`)."""

ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = (
    "auto",
    "sdpa",
    "flash",
    "flex",
    "te",
    "reference",
)
"""All activations."""


def head_problems(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None
) -> list[str]:
    """Problems of the numbers of attention heads among themselves."""
    problems = []
    if head_dim is None:
        problems.append(divisibility_problem("hidden_size", hidden_size, "num_heads", num_heads))
    problems.append(divisibility_problem("num_heads", num_heads, "num_kv_heads", num_kv_heads))
    return [p for p in problems if p]


def tp_head_problems(num_heads: int, num_kv_heads: int, tp: int) -> list[str]:
    """Problems of splitting attention heads over ``tp`` ranks.

    >>> tp_head_problems(8, 2, 4)
    []
    >>> tp_head_problems(12, 3, 2)
    ['num_kv_heads=3, tp=2: one must be a multiple of the other; nearest valid: tp=1 or 3']
    """
    problems = [divisibility_problem("num_heads", num_heads, "tp", tp)]
    if num_kv_heads % tp and tp % num_kv_heads:
        valid = " or ".join(str(d) for d in nearest_divisors(num_kv_heads, tp))
        problems.append(
            f"num_kv_heads={num_kv_heads}, tp={tp}: one must be a multiple of the other; "
            f"nearest valid: tp={valid}"
        )
    return [p for p in problems if p]


def vocabulary_problems(vocab_size: int, degrees: Degrees) -> list[str]:
    """Problems of splitting a vocabulary over tp."""
    problem = divisibility_problem("vocab_size", vocab_size, "tp", degrees.tp)
    return [problem] if problem else []
