"""Plans of decoders: an embedding, blocks, a norm, a head."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_megatron.adoption.plan import AdoptionPlan, expanded


def decoder_plan(
    model: nn.Module,
    styles: Mapping[str, str],
    *,
    embedding: str = "embed_tokens",
    blocks: str = "layers",
    norm: str = "norm",
    head: str = "lm_head",
) -> AdoptionPlan:
    """Return the plan of a decoder of transformers, with any head or none.

    Args:
        model: the model.
        styles: style by pattern of names in the base model.
        embedding: name of the token embedding in the base model.
        blocks: name of the list of blocks in the base model.
        norm: name of the last norm in the base model.
        head: name of the language-model head in the model.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    prefix = f"{base}." if base and hasattr(model, base) else ""
    patterns = {prefix + name: style for name, style in styles.items()}
    patterns[prefix + embedding] = "embedding_rowwise"
    stack: Any = model.get_submodule(prefix + blocks)
    names = [f"{prefix}{blocks}.{index}" for index in range(len(stack))]
    items = [prefix + embedding, *names, prefix + norm]
    if isinstance(getattr(model, head, None), nn.Linear):
        patterns[head] = "colwise_gather_output"
        items.append(head)
    return AdoptionPlan(styles=expanded(model, patterns), items=items, blocks=names)
