"""Sizes of a decoder-only transformer.

The file imports no torch, so that planning and ``--help`` are quick.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.errors import ConfigError, instances, raise_if_any, whole_numbers
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.layers.size_checks import (
    ATTENTION_BACKENDS,
    GATED,
    Activation,
    AttentionBackend,
    head_problems,
    tp_head_problems,
)
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.nested_fields import from_fields
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.models.yarn_config import YarnConfig
from lightning_megatron.topology.degrees import Degrees, divisibility_problem

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation": ("swiglu", "geglu", "gelu", "gelu_tanh", "relu"),
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rotary", "learned", "alibi"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "attention_backend": ATTENTION_BACKENDS,
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Architecture of a decoder-only transformer; the defaults are Llama's choices.

    Raises:
        ConfigError: sizes do not fit each other; lists all problems.
    """

    vocab_size: int = 256
    """Number of rows of the table of embeddings, and of the head."""
    vocab_padding: int = 0
    """Number of rows at the end of the vocabulary that stand for no token: they make its size
    divisible by tp. They are never predicted, and left out of exports to Hugging Face."""
    hidden_size: int = 256
    """Size of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 8
    """Number of query heads of every block."""
    num_kv_heads: int | None = None
    """Number of key-value heads; that of query heads when None."""
    head_dim: int | None = None
    """Size of each head; ``hidden_size / num_heads`` when None."""
    mlp_size: int | None = None
    """Hidden size of the MLP; when None 4 times ``hidden_size``, and 8/3 times (rounded up to a
    multiple of 64) where the activation is gated, which makes as many parameters."""
    max_seq_len: int = 2048
    """Longest sequence that the model is meant for; the size of the table of learned positions."""
    activation: Activation = "swiglu"
    """Activation of the MLP."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalisation, before attention, before the MLP and after the last block."""
    norm_eps: float = 1e-5
    """Number added to the variance (layernorm) or mean square (rmsnorm)."""
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    """Kind of position embedding; ``alibi`` is scores that fall with the distance."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Scaling of rotary frequencies for long sequences (`layers.rotary.RopeScaling`)."""
    rope_factor: float = 1.0
    """Divisor of rotary frequencies."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies with fewer turns in ``rope_original_length`` are divided in full."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies with more turns in ``rope_original_length`` are kept."""
    rope_original_length: int = 8192
    """llama3, yarn: length of the longest sequence before the frequencies were scaled."""
    yarn: YarnConfig | None = None
    """yarn: its further options; their defaults when None."""
    sliding_window: int | None = None
    """Number of positions that each one sees, itself included; all before it when None."""
    qk_norm: bool = False
    """Whether each head's queries and keys go through an RMS norm of their own (Qwen3)."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    bias: bool = False
    """Whether the attention output, the MLP and a layernorm have a bias."""
    out_bias: bool | None = None
    """Whether the attention output has a bias; as ``bias`` when None."""
    mlp_bias: bool | None = None
    """Whether the MLP has a bias; as ``bias`` when None."""
    tied_embeddings: bool = False
    """Whether the head uses the table of token embeddings."""
    dropout: float = 0.0
    """Dropout on the embeddings and on the output of each half of a block."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""
    latent: LatentSizes | None = None
    """Sizes of multi-head latent attention (`LatentAttention`), which has its own sizes of heads;
    None: ordinary attention."""
    experts: MixtureConfig | None = None
    """Mixtures of experts in place of MLPs; None: MLPs everywhere."""
    attention_backend: AttentionBackend = "sdpa"
    """Kernel of attention (`layers.attention_backends`); results differ by rounding only."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; those that write to the residual stream get
    ``init_std / sqrt(2 * num_layers)`` (GPT-2)."""

    def __post_init__(self) -> None:
        raise_if_any(_own_problems(self))

    @property
    def num_tokens(self) -> int:
        """Number of different tokens: the vocabulary without its padding."""
        return self.vocab_size - self.vocab_padding

    @property
    def has_out_bias(self) -> bool:
        """Whether the attention output has a bias."""
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP has a bias."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of the queries and keys of each head."""
        if self.latent is not None:
            return self.latent.key_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mlp_width(self) -> int:
        """Hidden size of the MLP."""
        if self.mlp_size is not None:
            return self.mlp_size
        if self.activation in GATED:
            return -(-8 * self.hidden_size // (3 * 64)) * 64
        return 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """Hidden size of each expert; 0 without experts."""
        if self.experts is None:
            return 0
        return self.mlp_width if self.experts.mlp_size is None else self.experts.mlp_size

    @property
    def num_mixtures(self) -> int:
        """Number of blocks with a mixture of experts in place of the MLP."""
        return sum(self.is_mixture(block) for block in range(self.num_layers))

    def is_mixture(self, block: int) -> bool:
        """Whether the block with this index has a mixture of experts in place of the MLP."""
        return self.experts is not None and self.experts.is_at(block)

    def problems(self, degrees: Degrees) -> list[str]:
        """Reasons why the model cannot be split over ``degrees``."""
        divided = [("vocab_size", self.vocab_size, "tp")]
        if self.num_mixtures < self.num_layers:
            divided.insert(0, ("mlp_size", self.mlp_width, "tp"))
        if self.experts is not None:
            divided.append(("experts.num_experts", self.experts.num_experts, "ep"))
            if self.experts.shared_size:
                divided.append(("experts.shared_size", self.experts.shared_size, "tp"))
        return tp_head_problems(self.num_heads, self.kv_heads, degrees.tp) + [
            problem
            for name, value, axis in divided
            if (problem := divisibility_problem(name, value, axis, getattr(degrees, axis)))
        ]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "TransformerConfig":
        """Return the sizes of a known model, with some of them changed.

        Args:
            name: name of a preset (`preset_names`).
            **overrides: fields of this class.

        Raises:
            ConfigError: the preset or a field is unknown.

        Example:
            >>> TransformerConfig.preset("llama3-8b", num_layers=2).hidden_size
            4096
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name).lower(), PRESETS, n=1, cutoff=0.0)
            raise ConfigError(
                f"preset={name}: there is no such model; valid: {', '.join(PRESETS)}; nearest "
                f"valid: {near[0]!r}"
            )
        return cls.from_fields({**PRESETS[name], **overrides})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], prefix: str = "") -> "TransformerConfig":
        """Return the sizes in a mapping, as ``dataclasses.asdict`` and YAML have them.

        Args:
            fields: values by name; those of `experts` and `latent` may be mappings as well.
            prefix: option that holds the mapping, for messages.

        Raises:
            ConfigError: a field is unknown, or sizes do not fit each other.
        """
        return from_fields(cls, fields, prefix)


def preset_names() -> tuple[str, ...]:
    """Return the names that `TransformerConfig.preset` knows."""
    return tuple(PRESETS)


def _own_problems(config: TransformerConfig) -> list[str]:
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    others = ("mlp_size", "max_seq_len", "sliding_window", "rope_original_length")
    counts = {name: getattr(config, name) for name in sizes + others}
    problems = whole_numbers(1, **{name: x for name, x in counts.items() if x is not None})
    problems += [
        f"{name}={getattr(config, name)}: must be one of {', '.join(valid)}"
        for name, valid in _CHOICES.items()
        if getattr(config, name) not in valid
    ]
    problems += [
        f"{name}={value}: must lie in [0, 1); nearest valid: {name}=0.0"
        for name in ("dropout", "attention_dropout")
        if not 0.0 <= (value := getattr(config, name)) < 1.0
    ]
    if config.rope_factor <= 0:
        problems.append(
            f"rope_factor={config.rope_factor}: must be positive; nearest valid: rope_factor=1.0"
        )
    if config.rope_low_freq_factor >= config.rope_high_freq_factor:
        problems.append(
            f"rope_low_freq_factor={config.rope_low_freq_factor}, rope_high_freq_factor="
            f"{config.rope_high_freq_factor}: the first must be smaller; nearest valid: 1.0 and 4.0"
        )
    parts = {"experts": MixtureConfig, "latent": LatentSizes, "yarn": YarnConfig}
    given = {name: (getattr(config, name), kind) for name, kind in parts.items()}
    problems += instances(**{name: pair for name, pair in given.items() if pair[0] is not None})
    if problems:
        return problems
    if not 0 <= config.vocab_padding < config.vocab_size:
        problems.append(
            f"vocab_padding={config.vocab_padding}, vocab_size={config.vocab_size}: the padding "
            "is a part of the vocabulary; nearest valid: vocab_padding=0"
        )
    if config.yarn is not None:
        problems += config.yarn.problems()
        if config.rope_scaling != "yarn":
            problems.append(
                f"yarn given with rope_scaling={config.rope_scaling}: it would have no effect; "
                "nearest valid: rope_scaling=yarn"
            )
    if config.experts is not None:
        problems += config.experts.problems(config.num_layers)
        if config.has_mlp_bias:
            problems.append(
                "mlp_bias=True with experts: experts have no bias; nearest valid: mlp_bias=False"
            )
    if config.latent is not None:
        return problems + _latent_problems(config)
    problems += head_problems(
        config.hidden_size, config.num_heads, config.kv_heads, config.head_dim
    )
    if config.positions == "rotary" and config.head_size % 2:
        problems.append(
            f"head_dim={config.head_size}, positions=rotary: rotary embedding turns pairs of "
            f"channels, so head_dim must be even; nearest valid: head_dim={config.head_size + 1}"
        )
    return problems


def _latent_problems(config: TransformerConfig) -> list[str]:
    """Faults of the options of a model with latent attention, which has a choice of its own."""
    fixed = {"positions": "rotary", "qk_norm": False, "qkv_bias": False, "has_out_bias": False}
    problems = [
        f"{name.removeprefix('has_')}={getattr(config, name)} with latent: must be {value}; "
        f"nearest valid: {name.removeprefix('has_')}={value}"
        for name, value in fixed.items()
        if getattr(config, name) != value
    ]
    problems += [
        f"{name}={value} with latent: heads have the sizes of latent; nearest valid: {name}=None"
        for name in ("num_kv_heads", "head_dim")
        if (value := getattr(config, name)) is not None
    ]
    return problems
