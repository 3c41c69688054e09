"""Names and shapes of weights here and in models of the Hugging Face library.

Llama, Qwen and Mistral differ from `Transformer` in names only: both keep the projections apart,
use the same rotary pairing and store ``[out, in]`` matrices. GPT-2 stores ``[in, out]`` matrices
and has queries, keys and values in one. So every tensor there is one or more tensors here,
concatenated along the output dim and perhaps transposed (`Weight`), without the rows of a padded
vocabulary.

`weights_of` lists all tensors of a model, one by one, so that neither direction needs more than one
of them in memory, and missing or superfluous tensors are known before a byte is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import raise_if_any
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import family_of, misfits
from lightning_megatron.models.transformer import Transformer

EMBEDDING, HEAD = "trunk.embedding.tokens.weight", "trunk.head.weight"

_LLAMA_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_GPT2_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.wq attention.wk attention.wv",
    "attn.c_proj": "attention.wo",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
# Tables that some versions store, and which are computed.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Tensor of a Hugging Face model."""

    name: str
    """Name there."""
    shape: tuple[int, ...]
    """Shape there."""
    ours: tuple[str, ...]
    """Names of the tensors here that it consists of, concatenated along dim 0."""
    sizes: tuple[int, ...]
    """Number of rows of each of these tensors."""
    transposed: bool = False
    """Whether it is stored ``[in, out]``."""

    def to_theirs(self, parts: Sequence[Tensor]) -> Tensor:
        """Make the tensor from whole tensors of this package; a view where possible."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        whole = whole.t() if self.transposed else whole
        return whole[: self.shape[0]]

    def to_ours(self, whole: Tensor) -> list[Tensor]:
        """Split the tensor into those of this package; views, unless a vocabulary is padded."""
        rows = whole.t() if self.transposed else whole
        missing = sum(self.sizes) - rows.shape[0]
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
        return list(torch.split(rows, list(self.sizes)))


def weights_of(config: TransformerConfig, model_type: str | None = None) -> list[Weight]:
    """Return all tensors of a model, in the order of the network.

    Args:
        config: sizes of the model.
        model_type: name of the family; the one that fits when None.

    Raises:
        ConfigError: the family cannot express an option.
    """
    kind = family_of(config) if model_type is None else model_type
    raise_if_any([f"model_type={kind}: {problem}" for problem in misfits(config, kind)])
    shapes = shapes_of(config)
    return [
        _weight(name, ours.split(), shapes, config, kind == "gpt2")
        for name, ours in _names(config, kind)
        if all(part in shapes for part in ours.split())
    ]


def shapes_of(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of ``Transformer(config)``, a tied head included."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _names(config: TransformerConfig, kind: str) -> Iterator[tuple[str, str]]:
    """Names there and here of all tensors that a model of this family may have."""
    gpt2 = kind == "gpt2"
    root, blocks = ("transformer", "h") if gpt2 else ("model", "layers")
    yield f"{root}.{'wte' if gpt2 else 'embed_tokens'}.weight", EMBEDDING
    if gpt2:
        yield f"{root}.wpe.weight", "trunk.embedding.positions.weight"
    for i in range(config.num_layers):
        for theirs, ours in (_GPT2_LAYER if gpt2 else _LLAMA_LAYER).items():
            for leaf in ("weight", "bias"):
                here = " ".join(f"trunk.layers.{i}.{part}.{leaf}" for part in ours.split())
                yield f"{root}.{blocks}.{i}.{theirs}.{leaf}", here
    for leaf in ("weight", "bias"):
        yield f"{root}.{'ln_f' if gpt2 else 'norm'}.{leaf}", f"trunk.norm.{leaf}"
    if not config.tied_embeddings:
        yield "lm_head.weight", HEAD


def _weight(
    name: str,
    ours: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    config: TransformerConfig,
    gpt2: bool,
) -> Weight:
    sizes = tuple(shapes[part][0] for part in ours)
    rows = config.num_tokens if ours[0] in (EMBEDDING, HEAD) else sum(sizes)
    shape = (rows, *shapes[ours[0]][1:])
    # GPT-2's Conv1D; tables and norms are stored as here.
    transposed = gpt2 and ".h." in name and len(shape) == 2
    return Weight(
        name=name,
        shape=shape[::-1] if transposed else shape,
        ours=tuple(ours),
        sizes=sizes,
        transposed=transposed,
    )


def match_names(
    weights: Sequence[Weight], found: Iterable[str], *, tied_embeddings: bool
) -> tuple[dict[str, str], list[str]]:
    """Find the tensors of a model among names of a checkpoint.

    A checkpoint of the base model has names without the first part (``h.0.ln_1.weight``).

    Args:
        weights: tensors of the model.
        found: names in the checkpoint.
        tied_embeddings: whether a head is a copy of the table, and not needed.

    Returns:
        The name in the checkpoint of every weight, by its own name; and problems.
    """
    names = [n for n in found if not _COMPUTED.fullmatch(n)]
    if tied_embeddings:
        names = [n for n in names if n != "lm_head.weight"]
    present = set(names)
    matched = {}
    for weight in weights:
        for candidate in (weight.name, weight.name.partition(".")[2]):
            if candidate in present:
                matched[weight.name] = candidate
                break
    missing = [w.name for w in weights if w.name not in matched]
    used = set(matched.values())
    unexpected = [n for n in names if n not in used]
    problems = [f"{n}: the model has this weight, the checkpoint has not" for n in missing]
    problems += [f"{n}: not the name of a weight of this model" for n in unexpected]
    return matched, problems


def from_hugging_face(
    state: Mapping[str, Tensor], config: TransformerConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Weights of a Hugging Face model under the names of `Transformer`, whole and in memory.

    Args:
        state: all weights of the model, by their names there.
        config: sizes of the model.
        model_type: name of the family; the one that fits when None.

    Raises:
        ConfigError: a weight is missing, superfluous or of another shape; lists all.
    """
    weights = weights_of(config, model_type)
    matched, problems = match_names(weights, state, tied_embeddings=config.tied_embeddings)
    problems += [
        f"{w.name}: shape {tuple(state[matched[w.name]].shape)}, the model has {w.shape}"
        for w in weights
        if w.name in matched and tuple(state[matched[w.name]].shape) != w.shape
    ]
    raise_if_any(problems)
    ours: dict[str, Tensor] = {}
    for weight in weights:
        parts = weight.to_ours(state[matched[weight.name]])
        ours |= dict(zip(weight.ours, parts, strict=True))
    if config.tied_embeddings:
        ours[HEAD] = ours[EMBEDDING]
    return ours


def to_hugging_face(
    state: Mapping[str, Tensor], config: TransformerConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Weights of a `Transformer` under the names of a Hugging Face model, whole and in memory.

    Args:
        state: all weights of the model, by the names of `Transformer`.
        config: sizes of the model.
        model_type: name of the family; the one that fits when None.

    Raises:
        ConfigError: the family cannot express the model, or a weight is missing.
    """
    weights = weights_of(config, model_type)
    needed = [name for weight in weights for name in weight.ours]
    raise_if_any([f"{n}: this weight is missing" for n in needed if n not in state])
    return {w.name: w.to_theirs([state[name] for name in w.ours]) for w in weights}
