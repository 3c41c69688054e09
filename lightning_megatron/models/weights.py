"""Names and shapes of weights here and in models of the Hugging Face library.

Llama, Qwen and Mistral differ from `Transformer` in names only: both keep the projections apart,
use the same rotary pairing and store ``[out, in]`` matrices. GPT-2 stores ``[in, out]`` matrices
and has queries, keys and values in one; Phi-3 has these, and gate and up, in one. So every tensor
there is one or more tensors here, concatenated along the output dim and perhaps transposed
(`Weight`), without the rows of a padded vocabulary. Files hold each expert's matrices apart; here
they are slices of one tensor (`Weight.expert`).

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
_PHI3_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": "attention.wq attention.wk attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "mlp.gate mlp.up",
    "mlp.down_proj": "mlp.down",
}
_LATENT_LAYER = {
    **{theirs: ours for theirs, ours in _LLAMA_LAYER.items() if theirs != "self_attn.q_norm"},
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
}
_GPT2_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.wq attention.wk attention.wv",
    "attn.c_proj": "attention.wo",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_MIXTRAL_EXPERT = {"w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_MIXTURE = {
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
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
    expert: int | None = None
    """Index in the tensor here of the expert whose matrix it is; None: it is no expert's."""
    num_experts: int = 0
    """Number of experts in that tensor."""
    turned: tuple[int, int] | None = None
    """Rows of a head, and how many at its end rotary embedding turns, where those that turn
    together are neighbours there (DeepSeek); here the second of each pair is in the second half."""
    keeps_dtype: bool = False
    """Whether its dtype does not follow that of the model."""

    def own(self, tensor: Tensor) -> Tensor:
        """Return what belongs to it of a whole tensor of this package; a view."""
        return tensor if self.expert is None else tensor[self.expert]

    def to_theirs(self, parts: Sequence[Tensor]) -> Tensor:
        """Make the tensor from those of this package (`own`); a view where possible."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        whole = whole.t() if self.transposed else whole
        if self.turned is not None:
            whole = _reordered(whole, self.turned, 2)
        return whole[: self.shape[0]]

    def to_ours(self, whole: Tensor) -> list[Tensor]:
        """Split the tensor into those of this package; views, unless a vocabulary is padded."""
        rows = whole.t() if self.transposed else whole
        if self.turned is not None:
            rows = _reordered(rows, self.turned, self.turned[1] // 2)
        missing = sum(self.sizes) - rows.shape[0]
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
        return list(torch.split(rows, list(self.sizes)))


def _reordered(rows: Tensor, turned: tuple[int, int], step: int) -> Tensor:
    """Read the turned rows of every head as a matrix with ``step`` rows, and write its columns.

    With two rows, halves become pairs; with half as many rows as there are, the other way round.
    """
    (size, last), columns = turned, rows.shape[1:]
    heads = rows.reshape(-1, size, *columns)
    kept, end = heads[:, : size - last], heads[:, size - last :]
    end = end.reshape(len(heads), step, -1, *columns).transpose(1, 2).reshape(end.shape)
    return torch.cat((kept, end), dim=1).flatten(0, 1)


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
    dense = [
        _weight(name, ours.split(), shapes, config, kind == "gpt2")
        for name, ours in _names(config, kind)
        if all(part in shapes for part in ours.split())
    ]
    return [*dense, *_expert_weights(config, kind, shapes)]


def shapes_of(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of ``Transformer(config)``, a tied head included."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _names(config: TransformerConfig, kind: str) -> Iterator[tuple[str, str]]:
    """Names there and here of all tensors that a model of this family may have."""
    gpt2 = kind == "gpt2"
    layers = {"gpt2": _GPT2_LAYER, "phi3": _PHI3_LAYER, "deepseek_v3": _LATENT_LAYER}
    layer = layers.get(kind, _LLAMA_LAYER)
    root, blocks = ("transformer", "h") if gpt2 else ("model", "layers")
    yield f"{root}.{'wte' if gpt2 else 'embed_tokens'}.weight", EMBEDDING
    if gpt2:
        yield f"{root}.wpe.weight", "trunk.embedding.positions.weight"
    for i in range(config.num_layers):
        for theirs, ours in layer.items():
            for leaf in ("weight", "bias"):
                here = " ".join(f"trunk.layers.{i}.{part}.{leaf}" for part in ours.split())
                yield f"{root}.{blocks}.{i}.{theirs}.{leaf}", here
        if config.is_mixture(i):
            yield from _mixture_names(f"{root}.{blocks}.{i}", f"trunk.layers.{i}", kind)
    for leaf in ("weight", "bias"):
        yield f"{root}.{'ln_f' if gpt2 else 'norm'}.{leaf}", f"trunk.norm.{leaf}"
    if not config.tied_embeddings:
        yield "lm_head.weight", HEAD


def _mixture_names(theirs: str, ours: str, kind: str) -> Iterator[tuple[str, str]]:
    """Names of what a mixture holds beside its experts."""
    for there, here in _MIXTURE.items():
        name = there.replace("mlp.", "block_sparse_moe.") if kind == "mixtral" else there
        yield f"{theirs}.{name}.weight", f"{ours}.{here}.weight"
    yield f"{theirs}.mlp.gate.e_score_correction_bias", f"{ours}.mlp.router.bias"


def _expert_weights(
    config: TransformerConfig, kind: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Weight]:
    place, names = "mlp.experts", _EXPERT
    if kind == "mixtral":
        place, names = "block_sparse_moe.experts", _MIXTRAL_EXPERT
    for i in filter(config.is_mixture, range(config.num_layers)):
        for theirs, name in names.items():
            ours = f"trunk.layers.{i}.mlp.experts.{name}"
            count, rows, columns = shapes[ours]
            for expert in range(count):
                yield Weight(
                    name=f"model.layers.{i}.{place}.{expert}.{theirs}.weight",
                    shape=(rows, columns),
                    ours=(ours,),
                    sizes=(rows,),
                    expert=expert,
                    num_experts=count,
                )


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
        turned=_turned(ours[0], config),
        keeps_dtype=ours[0].endswith(".router.bias"),
    )


def _turned(ours: str, config: TransformerConfig) -> tuple[int, int] | None:
    """Rows of a head and turned ones among them, of projections to queries or keys of a latent."""
    if config.latent is None:
        return None
    queries = "wq" if config.latent.q_rank is None else "q_up"
    sizes = {queries: config.latent.key_dim, "kv_down": config.latent.cached}
    size = sizes.get(ours.split(".")[-2])
    return None if size is None else (size, config.latent.rope_dim)


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
        state: all weights of the model, by their names in files. Experts may also be stacked, as
            the modules of the library hold them since version 5 (``experts.gate_up_proj``).
        config: sizes of the model.
        model_type: name of the family; the one that fits, and whose names these are, when None.

    Raises:
        ConfigError: a weight is missing, superfluous or of another shape; lists all.
    """
    if model_type is None and any(".qkv_proj." in name for name in state):
        model_type = "phi3"  # whose options are those of Llama
    weights = weights_of(config, model_type)
    if config.experts is not None:
        state = _unstacked(state, any(".block_sparse_moe." in w.name for w in weights))
    matched, problems = match_names(weights, state, tied_embeddings=config.tied_embeddings)
    problems += [
        f"{w.name}: shape {tuple(state[matched[w.name]].shape)}, the model has {w.shape}"
        for w in weights
        if w.name in matched and tuple(state[matched[w.name]].shape) != w.shape
    ]
    raise_if_any(problems)
    ours: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for weight in weights:
        parts = weight.to_ours(state[matched[weight.name]])
        if weight.expert is None:
            ours |= dict(zip(weight.ours, parts, strict=True))
        else:
            stacks.setdefault(weight.ours[0], []).append(parts[0])
    ours |= {name: torch.stack(matrices) for name, matrices in stacks.items()}
    if config.tied_embeddings:
        ours[HEAD] = ours[EMBEDDING]
    return ours


def _unstacked(state: Mapping[str, Tensor], mixtral: bool) -> dict[str, Tensor]:
    """Name what is stacked in the library's modules as in files; views."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        block, at, leaf = name.rpartition(".mlp.experts.")
        place = ".block_sparse_moe.experts." if mixtral else at
        gate, up, down = ("w1", "w3", "w2") if mixtral else tuple(_EXPERT)
        if not at or leaf not in ("gate_up_proj", "down_proj"):
            named = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name
            found[named] = value
            continue
        parts = {down: value}
        if leaf == "gate_up_proj":
            parts = dict(zip((gate, up), value.chunk(2, dim=1), strict=True))
        for part, stack in parts.items():
            for expert, matrix in enumerate(stack.unbind()):
                found[f"{block}{place}{expert}.{part}.weight"] = matrix
    return found


def to_hugging_face(
    state: Mapping[str, Tensor], config: TransformerConfig, model_type: str | None = None
) -> dict[str, Tensor]:
    """Weights of a `Transformer` under the names of a model's files, whole and in memory.

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
    return {w.name: w.to_theirs([w.own(state[name]) for name in w.ours]) for w in weights}
