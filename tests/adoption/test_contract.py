"""What adoption relies on in transformers, family by family, against the version that is installed.

`contract.json` holds names of parameters, styles, items of the pipeline, and the attributes that
tell the heads of an attention. A test that fails here names what a new version of transformers has
changed. When the other tests of `tests/adoption` hold with it, write the file anew by
``python -m tests.adoption.test_contract``.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import output_capturing

from lightning_megatron.adoption.heads import (
    GROUPS,
    HEAD_SIZES,
    KV_COUNTS,
    QUERY_COUNTS,
    WIDTHS,
    head_size,
)
from lightning_megatron.adoption.huggingface import is_huggingface, plan_of
from lightning_megatron.adoption.own_plans import OWN_PLANS
from lightning_megatron.adoption.plan import AdoptionPlan
from tests.adoption.families import FAMILIES

FILE = Path(__file__).with_name("contract.json")
RELIED_ON = (*HEAD_SIZES, *QUERY_COUNTS, *KV_COUNTS, *GROUPS, *WIDTHS)


def observed(family: str) -> dict[str, Any]:
    """What a family has, with ``*`` for numbers of layers; of plans, those of transformers."""
    model: Any = FAMILIES[family].build()
    plan = AdoptionPlan() if model.config.model_type in OWN_PLANS else plan_of(model)
    attentions = {type(m).__name__: m for m in model.modules() if head_size(m) is not None}
    return {
        "parameters": sorted({_general(name) for name, _ in model.named_parameters()}),
        "styles": {_general(name): style for name, style in sorted(plan.styles.items())},
        "items": list(dict.fromkeys(map(_general, plan.items))),
        "blocks": sorted({_general(name) for name in plan.blocks}),
        "attention": {name: _heads(m) for name, m in sorted(attentions.items())},
    }


def _general(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _heads(module: nn.Module) -> dict[str, int]:
    values = vars(module)
    return {name: values[name] for name in RELIED_ON if isinstance(values.get(name), int)}


def changes(family: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences on what differs."""
    found = []
    for kind in before:
        old, new = (_pairs(each[kind]) for each in (before, now))
        found += [f"{family}: {kind}: {n} = {old[n]} is gone" for n in old if n not in new]
        found += [f"{family}: {kind}: {n} = {new[n]} is new" for n in new if n not in old]
        found += [
            f"{family}: {kind}: {name} was {old[name]} and is {new[name]}"
            for name in old
            if name in new and old[name] != new[name]
        ]
    return found


def _pairs(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {name: place for place, name in enumerate(part)}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_as_adoption_knows_it(family):
    contract = json.loads(FILE.read_text())
    assert family in contract["families"], "python -m tests.adoption.test_contract adds it"
    found = changes(family, contract["families"][family], observed(family))
    told = f"transformers {transformers.__version__}, {contract['transformers']} was known:"
    assert not found, "\n".join([told, *found])


def test_a_change_is_named():
    before = {"parameters": ["a", "b"], "styles": {"q": "colwise"}}
    now = {"parameters": ["a", "c"], "styles": {"q": "rowwise"}}
    assert changes("llama", before, now) == [
        "llama: parameters: b = 1 is gone",
        "llama: parameters: c = 1 is new",
        "llama: styles: q was colwise and is rowwise",
    ]


def test_places_in_transformers_that_adoption_names():
    assert Conv1D.__module__ == "transformers.pytorch_utils"
    assert PreTrainedModel.__module__ == "transformers.modeling_utils"
    assert is_huggingface(FAMILIES["llama"].build())
    assert output_capturing._active_collector.get() is None
    assert {"sdpa", "flash_attention_2"} <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    names = list(inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"dropout", "scaling"} <= set(names)


if __name__ == "__main__":
    families = {family: observed(family) for family in FAMILIES}
    known = {"transformers": transformers.__version__, "families": families}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
