"""What adoption relies on in transformers, family by family, against the version that is installed.

`contract.json` holds names of parameters, styles, items of the pipeline, and the attributes that
tell the heads of an attention, in the version that is locked. A test that fails here says in a line
what another version has changed in a family; ``python -m tests.adoption.test_contract`` writes the
file anew, whose diff is the whole of it. When the other tests of `tests/adoption` hold with that
version, the file goes in with the locks that have it.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import output_capturing

from lightning_megatron.adoption.caches import given_cache, without_cache
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
CONTRACT = json.loads(FILE.read_text())
LOCKS = Path(__file__).parents[2] / "locks"
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


def change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """One line on what differs; an empty one if nothing does."""
    found = []
    for kind in before:
        old, new = (_pairs(each[kind]) for each in (before, now))
        for word, names in (
            ("gone", [name for name in old if name not in new]),
            ("new", [name for name in new if name not in old]),
            ("other", [name for name in old if name in new and old[name] != new[name]]),
        ):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found += [f"{kind} {word}: {names[0]}{more}"] if names else []
    return "; ".join(found)


def _pairs(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {name: place for place, name in enumerate(part)}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_as_adoption_knows_it(family):
    assert family in CONTRACT["families"], "python -m tests.adoption.test_contract adds it"
    found = change(CONTRACT["families"][family], observed(family))
    if found:
        versions = f"transformers {transformers.__version__}, not {CONTRACT['transformers']}"
        pytest.fail(f"{family}: {found} ({versions})", pytrace=False)


def test_contract_is_of_the_locked_version():
    texts = [file.read_text() for file in LOCKS.glob("torch-*.txt")]
    locked = {
        version for text in texts for version in re.findall(r"(?m)^transformers==(\S+)", text)
    }
    assert CONTRACT["transformers"] == max(locked, key=Version)  # an older one is for Python 3.10


def test_a_change_is_named():
    before = {"parameters": ["a", "b"], "styles": {"q": "colwise", "k": "colwise"}}
    now = {"parameters": ["a", "c"], "styles": {"q": "rowwise", "k": "rowwise"}}
    assert (
        change(before, now) == "parameters gone: b; parameters new: c; styles other: q and 1 more"
    )
    assert not change(now, now)


def test_places_in_transformers_that_adoption_names():
    assert Conv1D.__module__ == "transformers.pytorch_utils"
    assert PreTrainedModel.__module__ == "transformers.modeling_utils"
    assert is_huggingface(FAMILIES["llama"].build())
    assert output_capturing._active_collector.get() is None
    assert {"sdpa", "flash_attention_2"} <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    names = list(inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"dropout", "scaling"} <= set(names)


def test_a_cache_is_given_by_a_name_that_adoption_knows():
    for model in sorted({family.model for family in FAMILIES.values()}):
        names = inspect.signature(getattr(transformers, model).forward).parameters
        caches = [name for name in names if given_cache({name: "a cache"})]
        assert len(caches) == ("use_cache" in names), model
        assert without_cache(dict.fromkeys(names, "given"))[caches[0]] is None if caches else True


if __name__ == "__main__":
    families = {family: observed(family) for family in FAMILIES}
    known = {"transformers": transformers.__version__, "families": families}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
