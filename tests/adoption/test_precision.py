"""Number formats of adopted models: the losses of one process, to the rounding of the format."""

import functools
import math

import lightning as L
import pytest
import torch
import transformers

from lightning_megatron import Fp8Precision, MegatronStrategy
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.testing import WorkerError
from tests.adoption.harness import Training, fit

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "use_cache": False,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"intermediate_size": 96}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 16,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"intermediate_size": 96, "num_local_experts": 4},
    ),
}
THOROUGH = pytest.mark.thorough


class Losses(L.Callback):
    """Notes the loss of each batch, and the layers that multiply in FP8."""

    def __init__(self):
        self.found = []
        self.low = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].detach().float())
        self.low = sum(getattr(m, "gemm", None) is not None for m in module.modules())


def _model(family, **options):
    model, config, sizes = FAMILIES[family]
    own = getattr(transformers, config)(**{**SIZES, **sizes, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return getattr(transformers, model)(own).float()


def _precision(kind):
    if not kind.startswith("fp8"):
        return {"precision": kind}
    own = kind == "fp8 of unmodified"
    recipe = "tensorwise" if own else kind.partition(" ")[2]
    plugin = Fp8Precision(recipe, keep_first=0, keep_last=0, plain_linear=own)
    return {"plugins": [plugin]}


def _losses(family, kind, layout, world, adopted=True):
    """Train; returns the mean losses of the batches, and how many layers multiply in FP8."""
    model = _model(family)
    if adopted:
        adopt(model)
    others = math.prod(getattr(x, "degree", x) for a, x in layout.items() if a in ("tp", "pp"))
    noted = Losses()
    strategy = MegatronStrategy(**layout)
    module = Training(model, "causal", world // others)
    fit(module, strategy, world, callbacks=[noted], **_precision(kind))
    return [float(strategy.reduce(loss)) for loss in noted.found], noted.low


@functools.cache
def _plain(family, kind):
    """Losses of the unmodified model in plain Lightning."""
    noted = Losses()
    fit(Training(_model(family), "causal"), "auto", 1, callbacks=[noted], precision=kind)
    return [float(loss) for loss in noted.found]


LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 zb-h1": (2, {"pp": PipelineConfig(degree=2, schedule="zb-h1")}),
    "zero3": (2, {"zero": 3}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 ep2": (2, {"tp": 2, "ep": 2}),
    "ep2": (2, {"ep": 2}),
}
LOW = [
    ("llama", "bf16-mixed", "pp2", False),
    ("llama", "bf16-mixed", "tp2 pp2", True),
    ("llama", "bf16-true", "tp2", False),
    ("llama", "bf16-true", "zero3", True),
    ("llama", "bf16-true", "tp2 sp", True),
    ("gpt2", "bf16-mixed", "tp2", True),
    ("mixtral", "bf16-mixed", "tp2 ep2", False),
    ("mixtral", "bf16-true", "ep2", True),
]


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    [pytest.param(*row, marks=[THOROUGH] * slow) for *row, slow in LOW],
)
def test_low_precision_is_that_of_plain_lightning(pool, family, kind, layout):
    world, options = LAYOUTS[layout]
    found, _ = pool.run(world, _losses, family, kind, options, world)[0]
    expected = _plain(family, kind)
    assert found == pytest.approx(expected, rel=4e-3)
    assert expected != pytest.approx(_plain(family, "32-true"), rel=1e-6)  # it is low


EIGHT = [
    ("llama", "tensorwise", "tp2", False),
    ("llama", "delayed", "tp2 pp2", True),
    ("llama", "rowwise", "tp2 sp", True),
    ("llama", "blockwise", "pp2 zb-h1", False),
    ("llama", "mxfp8", "zero3", True),
    ("gpt2", "tensorwise", "tp2", True),
    ("mixtral", "tensorwise", "tp2 ep2", False),
    ("mixtral", "delayed", "ep2", True),
]


@pytest.mark.parametrize(
    ("family", "recipe", "layout"),
    [pytest.param(*row, marks=[THOROUGH] * slow) for *row, slow in EIGHT],
)
def test_fp8_is_close_to_one_process(pool, family, recipe, layout):
    world, options = LAYOUTS[layout]
    alone = {"num_microbatches": 4} if "pp" in options else {}
    expected, layers = pool.run(1, _losses, family, f"fp8 {recipe}", alone, 1)[0]
    counts = {"llama": 7, "gpt2": 4, "mixtral": 5}  # those of a layer
    assert layers == 2 * counts[family]
    ranks = pool.run(world, _losses, family, f"fp8 {recipe}", options, world)
    assert all(low > 0 for _, low in ranks)
    assert ranks[0][0] == pytest.approx(expected, rel=5e-3)
    assert expected != pytest.approx(_plain(family, "bf16-mixed"), rel=1e-6)


def test_fp8_of_an_adopted_model_is_that_of_the_unmodified_one(pool):
    found, layers = pool.run(1, _losses, "llama", "fp8 tensorwise", {}, 1)[0]
    expected, plain = pool.run(1, _losses, "llama", "fp8 of unmodified", {}, 1, adopted=False)[0]
    assert layers == plain == 14
    assert found == pytest.approx(expected, rel=1e-6)


def test_experts_of_other_arithmetic_are_refused_by_name(pool):
    said = r"Fp8Precision: .*layers.0.mlp.experts computes its experts .*nearest valid: exclude="
    with pytest.raises(WorkerError, match=said):
        pool.run(2, _losses, "gpt-oss", "fp8 tensorwise", {"ep": 2}, 2)
