"""Mixtures of experts in ``config.json``: `MixtureConfig` to and from the fields of a family.

Every family has its own names for the same numbers. Options that count in training only (balance,
noise, capacity) are not part of the format, but for the factor of the balance loss: imported models
balance each sequence.
"""

from collections.abc import Mapping
from typing import Any

from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig

BIAS_UPDATE = 0.001
"""DeepSeek-V3's (arXiv 2412.19437, section 4.2), for files with a bias of the choice."""


def mixture_fields(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """Return what ``config.json`` says of the experts of a model; nothing if there are none."""
    experts = config.experts
    if experts is None:
        return {}
    router = experts.router
    fields: dict[str, Any] = {"num_experts_per_tok": experts.top_k}
    if kind == "mixtral":
        return fields | {
            "num_local_experts": experts.num_experts,
            "intermediate_size": config.expert_width,
            "router_aux_loss_coef": router.balance_weight,
        }
    fields |= {"moe_intermediate_size": config.expert_width, "norm_topk_prob": router.normalize}
    if kind == "deepseek_v3":
        return fields | {
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.shared_size // config.expert_width,
            "n_group": router.groups,
            "topk_group": router.top_groups,
            "routed_scaling_factor": router.scale,
            "first_k_dense_replace": experts.first_dense,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "aux_loss_alpha": router.balance_weight,
            "seq_aux": router.balance == "sequence",
        }
    dense = [i for i in range(config.num_layers) if not config.is_mixture(i)]
    # There the last of every ``decoder_sparse_step`` blocks is a mixture.
    even = experts.first_dense == experts.every - 1
    places = {
        "decoder_sparse_step": experts.every if even else 1,
        "mlp_only_layers": [] if even else dense,
    }
    return {
        **fields,
        **places,
        # Newer versions write the second, and read both.
        "num_experts": experts.num_experts,
        "num_local_experts": experts.num_experts,
        "router_aux_loss_coef": router.balance_weight,
    }


def mixture_problems(config: TransformerConfig, kind: str) -> list[str]:
    """Return options of the experts that a family cannot express, beside its fixed ones."""
    experts = config.experts
    if kind != "deepseek_v3" or experts is None:
        return []
    problems = []
    if not experts.router.bias_update:
        problems.append("experts.router.bias_update=0.0: deepseek_v3 has a bias")
    if not experts.shared_size or experts.shared_size % config.expert_width:
        problems.append(
            f"experts.shared_size={experts.shared_size}, experts.mlp_size={config.expert_width}: "
            "deepseek_v3 has shared experts of the size of the others"
        )
    return problems


def read_mixture(given: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    """Read the experts of a ``config.json``.

    Args:
        given: its content, with the defaults of the family.
        kind: the family.

    Returns:
        Fields of `TransformerConfig`, and problems.
    """
    if kind == "mixtral":
        return _read_mixtral(given)
    if kind == "qwen3_moe":
        return _read_qwen(given)
    if kind == "deepseek_v3":
        return _read_deepseek(given)
    return {}, []


def _read_mixtral(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems = []
    if given.get("router_jitter_noise"):
        problems.append(
            f"router_jitter_noise={given['router_jitter_noise']}: noise on the input of the router "
            "is not supported; valid: 0.0"
        )
    experts = MixtureConfig(
        num_experts=given["num_local_experts"],
        top_k=given["num_experts_per_tok"],
        router=RouterConfig(balance_weight=given["router_aux_loss_coef"]),
    )
    return {"experts": experts}, problems


def _read_qwen(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    layers, step = given["num_hidden_layers"], given["decoder_sparse_step"]
    dense = set(given["mlp_only_layers"] or ())
    mixtures = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    first, second = (*mixtures, layers, layers)[:2]
    every = second - first if len(mixtures) > 1 else 1
    if not mixtures or mixtures != list(range(first, layers, every)):
        return {}, [
            f"mlp_only_layers={sorted(dense)}, decoder_sparse_step={step}: mixtures must come at "
            "equal distances, up to the end"
        ]
    experts = MixtureConfig(
        num_experts=given.get("num_experts", given.get("num_local_experts", 128)),
        top_k=given["num_experts_per_tok"],
        mlp_size=given["moe_intermediate_size"],
        first_dense=first,
        every=every,
        router=RouterConfig(
            normalize=given["norm_topk_prob"], balance_weight=given["router_aux_loss_coef"]
        ),
    )
    return {"experts": experts}, []


def _read_deepseek(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    fixed = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    problems = [
        f"{name}={given[name]}: must be {value}"
        for name, value in fixed.items()
        if given.get(name, value) != value
    ]
    width = given["moe_intermediate_size"]
    experts = MixtureConfig(
        num_experts=given["n_routed_experts"],
        top_k=given["num_experts_per_tok"],
        mlp_size=width,
        shared_size=width * (given["n_shared_experts"] or 0),
        first_dense=given["first_k_dense_replace"],
        router=RouterConfig(
            score="sigmoid",
            normalize=given["norm_topk_prob"],
            groups=given["n_group"],
            top_groups=given["topk_group"],
            scale=given["routed_scaling_factor"],
            bias_update=BIAS_UPDATE,
            balance="sequence" if given.get("seq_aux", True) else "batch",
            balance_weight=given["aux_loss_alpha"],
        ),
    )
    return {"experts": experts}, problems
