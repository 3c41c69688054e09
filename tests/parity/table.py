"""The table: modules of the kinds that users write, and the layouts under which they train.

`tests.parity.prove` says what an entry means. To add a module, write its class into one of the
files imported here, or a new one, and enter it below::

    TABLE["strangers/Mine"] = Entry(
        module=strangers.Mine,
        kinds=SPLIT,
        refused={"pp": "what the error of a pipeline says"},
    )

Then ``pytest tests/parity/test_modules.py -k Mine`` runs the jobs that it takes part in, a dozen
modules of one layout each. To add a layout, enter it in `LAYOUTS`. What a run begins with, before a
step, is held by `tests.parity.test_written_weights`, to the bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_megatron import ActivationConfig, CompileConfig, PipelineConfig
from tests.parallel.context_check.strangers import MIXING
from tests.parity import (
    around_steps,
    around_units,
    context_habits,
    context_items,
    epoch_ends,
    expert_habits,
    gradients_by_hand,
    habits,
    plain_modules,
    split_logits,
    strangers,
    users_of_parts,
    users_optimizers,
)
from tests.parity.prove import Entry, Layout

LAYOUTS: dict[str, Layout] = {
    "zero 0": Layout(kind="data parallel", options={"zero": 0}),
    "zero 1": Layout(kind="data parallel", options={"zero": 1}),
    "zero 2": Layout(kind="data parallel", options={"zero": 2}),
    "zero 3": Layout(kind="data parallel", options={"zero": 3}),
    "zero 3 recomputed": Layout(
        kind="units",
        options={"zero": 3, "activations": ActivationConfig(recompute="full")},
        thorough=True,
    ),
    "zero 3 compiled": Layout(
        kind="units",
        options={"zero": 3, "compile": CompileConfig(scope="block", backend="aot_eager")},
        thorough=True,
    ),
    "zero 3 tp": Layout(kind="units", ranks=4, options={"zero": 3, "tp": 2}, thorough=True),
    "zero 3 in parts": Layout(
        kind="units", options={"zero": 3, "num_microbatches": 2}, thorough=True
    ),
    "tp": Layout(kind="tp", options={"tp": 2}),
    "pp": Layout(kind="pp", options={"pp": 2, "num_microbatches": 1}),
    "tp pp": Layout(
        kind="together",
        ranks=4,
        options={"tp": 2, "pp": 2, "num_microbatches": 1},
        thorough=True,
    ),
    "tp pp dp": Layout(
        kind="together",
        ranks=8,
        options={"tp": 2, "pp": 2, "zero": 1, "num_microbatches": 1},
        thorough=True,
    ),
    "one rank in parts": Layout(kind="microbatches", ranks=1, options={"num_microbatches": 4}),
    "zero 2 in parts": Layout(kind="microbatches", options={"zero": 2, "num_microbatches": 2}),
    "1f1b": Layout(kind="schedule", options={"pp": 2, "num_microbatches": 2}),
    "gpipe": Layout(
        kind="schedule",
        ranks=3,
        options={"pp": PipelineConfig(degree=3, schedule="gpipe"), "num_microbatches": 4},
    ),
    "1f1b zero 0": Layout(
        kind="schedule and others",
        ranks=4,
        options={"pp": 2, "num_microbatches": 2, "zero": 0},
        thorough=True,
    ),
    "1f1b zero 3": Layout(
        kind="schedule and others",
        ranks=4,
        options={"pp": 2, "num_microbatches": 2, "zero": 3},
        thorough=True,
    ),
    "1f1b tp": Layout(
        kind="schedule and others",
        ranks=4,
        options={"pp": 2, "tp": 2, "num_microbatches": 1},
        thorough=True,
    ),
    "stage without weights": Layout(
        kind="partition",
        ranks=3,
        options={"pp": PipelineConfig(degree=3, partition=[3, 1, 2]), "num_microbatches": 2},
    ),
    "stage without weights, zero 3": Layout(
        kind="partition",
        ranks=6,
        options={
            "pp": PipelineConfig(degree=3, partition=[3, 1, 2]),
            "num_microbatches": 2,
            "zero": 3,
        },
        thorough=True,
    ),
    "stage with one weight": Layout(
        kind="one weight",
        options={"pp": PipelineConfig(degree=2, partition=[3, 1]), "num_microbatches": 2},
    ),
    "stages": Layout(kind="stages", options={"pp": 2}, thorough=True),
    "stages of a V": Layout(
        kind="stages",
        options={"pp": PipelineConfig(degree=2, schedule="zbv", partition=[1, 1, 1, 1])},
        thorough=True,
    ),
    "stages tp": Layout(
        kind="stages", ranks=4, options={"pp": 2, "tp": 2, "num_microbatches": 2}, thorough=True
    ),
    "tp recomputed zero 3": Layout(
        kind="split logits",
        ranks=4,
        options={
            "tp": 2,
            "activations": ActivationConfig(recompute="selective", blocks=["Block"]),
            "zero": 3,
        },
        thorough=True,
    ),
    "tp cut between up and down": Layout(
        kind="split logits",
        ranks=4,
        options={
            "tp": 2,
            "pp": PipelineConfig(degree=2, schedule="zb-h1", partition=[2, 7]),
            "num_microbatches": 4,
        },
    ),
    "one rank": Layout(kind="one rank", ranks=1, options={}),
    "ep": Layout(kind="experts", options={"ep": 2}),
    "ep zero 0": Layout(kind="experts", options={"ep": 2, "zero": 0}, thorough=True),
    "ep zero 3": Layout(kind="experts", ranks=4, options={"ep": 2, "zero": 3}, thorough=True),
    "ep tp": Layout(kind="experts", ranks=4, options={"ep": 4, "tp": 2, "zero": 2}, thorough=True),
    "experts tp": Layout(kind="experts", options={"tp": 2}, thorough=True),
    "sequence parallel": Layout(kind="sums over tp", options={"tp": 2, "sequence_parallel": True}),
    "sequence parallel zero 1": Layout(
        kind="sums over tp",
        ranks=4,
        options={"tp": 2, "sequence_parallel": True, "zero": 1},
        thorough=True,
    ),
    "sequence parallel zero 3": Layout(
        kind="sums over tp",
        ranks=4,
        options={"tp": 2, "sequence_parallel": True, "zero": 3},
        thorough=True,
    ),
    "router tp": Layout(kind="router", options={"tp": 2, "ep": 2}),
    "router": Layout(kind="router", options={"ep": 2}),
    "ep pp": Layout(
        kind="experts in stages",
        ranks=4,
        options={"ep": 2, "pp": 2, "num_microbatches": 1},
        thorough=True,
    ),
    "cp": Layout(kind="context", options={"cp": 2}),
    "cp zero 3": Layout(kind="context", options={"cp": 2, "zero": 3}),
    "cp tp": Layout(kind="context", ranks=4, options={"cp": 2, "tp": 2}, thorough=True),
    "cp pp": Layout(
        kind="context", ranks=4, options={"cp": 2, "pp": 2, "num_microbatches": 1}, thorough=True
    ),
    "cp 1f1b": Layout(
        kind="context in parts", ranks=4, options={"cp": 2, "pp": 2, "num_microbatches": 2}
    ),
}
"""Layouts by name. Their kinds say what can go wrong."""

SPLIT = ("data parallel", "tp", "pp")
TABLE: dict[str, Entry] = {}
"""Modules by name. A name is that of the file and of the class."""


def enter(
    family: str, modules: dict[str, Any], entry: Callable[..., Entry], **others: dict[str, Any]
) -> None:
    """Enter the modules of a file.

    Args:
        family: name of the file.
        modules: classes by name.
        entry: the entry of a module of which there is nothing to say.
        others: what there is to say of modules, by name.
    """
    assert others.keys() <= modules.keys(), others.keys() - modules.keys()
    for name, module in modules.items():
        TABLE[f"{family}/{name}"] = entry(module=module, **others.get(name, {}))


# Modules with nothing in them for our sake but a PipelineSequential. The classifier has a test of
# its own: where data is parallel, its BatchNorm sees the samples of one rank.
_PLAIN = partial(Entry, trainer={"max_epochs": 2})
_IN_PARTS = {
    "kinds": ("data parallel", "tp", "microbatches"),
    "also": ("one rank in parts", "zero 2 in parts"),
}
_NOT_SPLIT = {"warned": {"tp": r"(?=.*Groups)(?=.*tp=2).*no parallel layers"}}
enter(
    "plain",
    plain_modules.ORDINARY,
    partial(_PLAIN, kinds=("data parallel", "tp")),
    classifier={"kinds": ("tp",)},
    boring=_IN_PARTS,
    tied=_IN_PARTS,
    groups={**_IN_PARTS, **_NOT_SPLIT},
)
_TRUNK = ("data parallel", "tp", "schedule", "schedule and others")
enter(
    "plain",
    plain_modules.PIPELINED,
    partial(_PLAIN, kinds=_TRUNK),
    trunk={"kinds": (*_TRUNK, "partition"), "also": ("stage without weights", "1f1b zero 3")},
    dicts={"also": ("gpipe", "1f1b zero 0")},
    keywords={"also": ("1f1b", "1f1b tp")},
)


# Optimizers of users: around others, across all parameters, with closures and hooks. In the first
# two steps a pipeline finds out what an optimizer does.
_STEPS: dict[str, Any] = {"trainer": {"max_epochs": 2}}
_OWN_STEPS: dict[str, Any] = {"kinds": ("data parallel", "tp"), **_STEPS}
"""Manual optimization, which a pipeline refuses."""
enter(
    "optimizers",
    users_optimizers.OPTIMIZERS,
    partial(Entry, kinds=("data parallel", "tp", "pp", "together"), **_STEPS),
    LooksAhead={"also": ("zero 1",)},
    SumsFromTheStart={"also": ("zero 1", "zero 3")},
    Strays={
        "also": ("zero 3",),
        "refused": dict.fromkeys(("pp", "together"), r"optimizer=Distance, pp=2: .* \(stack\)"),
    },
    SharpnessAware={"also": ("zero 1",)},
    SharpnessByHand=_OWN_STEPS,
    SearchesLine={"also": ("zero 0",), "trainer": {"max_epochs": 1}},
    HookBeforeStepByHand={**_OWN_STEPS, "also": ("zero 1",)},
    HooksOfTrust={"thorough": True},
)
enter(
    "optimizers",
    users_optimizers.STAGES,
    partial(Entry, kinds=("partition",), thorough=True, **_STEPS),
    NormOfShort={"kinds": ("one weight",)},
)


# Modules that look at or write to weights and gradients, as DistributedDataParallel allows.
_KEPT = "zero=2 or lower keeps parameters whole, or .*"


def _whole(words: str, **others: str) -> dict[str, Any]:
    """Of a module that ZeRO 3 refuses with these words."""
    return {"refused": {"zero 3": words, **others}}


_GRADIENTS: dict[str, Any] = {"also": ("zero 0", "zero 3")}
"""Habits that look at gradients, which are whole under ZeRO 0 and cut elsewhere."""
_LOOKS_ANYWHERE: dict[str, Any] = {"also": ("zero 0", "zero 1", "zero 2", "zero 3")}
"""Habits that look at gradients where no hook says so."""
enter(
    "habits",
    habits.HABITS,
    partial(Entry, kinds=("data parallel",), also=("zero 3",), trainer={"max_epochs": 2}),
    # Ranks run units of other sizes and wait for each other; `tests.zero.test_fully_sharded`
    # has those of one size.
    Experts={"without": ("zero 3",)},
    ClipsByHand=_GRADIENTS,
    ClipsValuesByHand=_GRADIENTS,
    LogsGradients=_GRADIENTS,
    LooksAtBatchEnd=_GRADIENTS,
    AddsNoise=_GRADIENTS,
    LooksUnderDecorator=_LOOKS_ANYWHERE,
    LooksDecorated=_LOOKS_ANYWHERE,
    LooksElsewhere=_LOOKS_ANYWHERE,
    Accumulates={
        "kinds": ("data parallel", "microbatches"),
        "also": ("zero 1", "zero 2", "zero 2 in parts"),
        "trainer": {"max_epochs": 2, "accumulate_grad_batches": 2},
    },
    Twice=_GRADIENTS,
    HookEarly=_whole(r"net\.0\.weight: Tensor\.register_hook .*nearest valid: zero=2"),
    HookLate=_whole(r"net\.0\.weight: Tensor\.register_hook .*nearest valid: zero=2"),
    Prunes=_whole(r"net\.0\.weight: it becomes another parameter, weight_orig.*zero=2 or lower"),
    Averages=_whole(r"callbacks=\[EMAWeightAveraging\].*nearest valid: zero of at most 2"),
    AveragesEvenly=_whole(r"callbacks=\[WeightAveraging\].*nearest valid: zero of at most 2"),
    ReducesByHand=_GRADIENTS,
    ZeroRedundancy={
        **_GRADIENTS,
        **_whole(
            "optimizer=ZeroRedundancyOptimizer: .*|ZeroRedundancy: .*full_tensor",
            **dict.fromkeys(("zero 1", "zero 2"), "optimizer=ZeroRedundancyOptimizer: it divides"),
        ),
    },
    GradientPenalty=_whole(rf"create_graph=True: .*{_KEPT}differentiate once"),
)


# What enters units of ZeRO 3 by other ways than their forward.
enter(
    "units",
    around_units.AROUND,
    partial(
        Entry,
        kinds=("data parallel", "units"),
        also=("zero 3",),
        without=("zero 0", "zero 1", "zero 2"),
        trainer={"max_epochs": 2},
    ),
    **dict.fromkeys(
        # No lists of modules that hold others, so nothing to recompute or compile by itself.
        ("ReadsWeights", "Ensemble", "Recurrent"),
        {"without": ("zero 0", "zero 1", "zero 2", "zero 3 recomputed", "zero 3 compiled")},
    ),
    LendsWeights={"also": ("zero 3", "zero 3 recomputed")},
    Scripts={
        "refused": {
            "zero 3 recomputed": r"recompute='full': \w+ has a script.*nearest valid: blocks="
        }
    },
)
TABLE["units/CopiesStages"] = Entry(
    module=around_units.CopiesStages,
    kinds=("data parallel", "pp", "tp", "schedule and others"),
    also=("zero 2", "1f1b zero 3"),
)


# Gradients that the strategy has not asked for, and parameters that only an optimizer knows.
_LOCAL = r"torch\.autograd\.grad of a weight that zero=3 keeps in parts.*zero=2"
_DATA = partial(Entry, kinds=("data parallel",), trainer={"max_epochs": 2})
enter(
    "gradients",
    gradients_by_hand.BACKWARDS,
    _DATA,
    PlainThenClips={"also": ("zero 0", "zero 1", "zero 3")},
    PlainInHook={"kinds": ("data parallel", "microbatches"), "also": ("zero 2 in parts",)},
    KeepsGradients={
        "kinds": ("data parallel", "microbatches", "schedule"),
        "also": ("zero 2 in parts",),
        "without": ("gpipe",),
    },
)
enter(
    "gradients",
    gradients_by_hand.ASSIGNED,
    partial(_DATA, refused={"zero 3": _LOCAL}),
    AssignsThenClips={"also": ("zero 0", "zero 1", "zero 2")},
    CopiesInto={"also": ("zero 0",)},
    ChangesByAssignment={"also": ("zero 1",), "refused": {}},
    AddsGradients={"also": ("zero 1",)},
)
_SUMS: dict[str, Any] = {"also": ("sequence parallel",)}
_SUMS_OF_OWN: dict[str, Any] = {"refused": {"sequence parallel zero 3": _LOCAL}}
enter(
    "gradients",
    gradients_by_hand.ATTENDING,
    partial(Entry, kinds=("sums over tp",), trainer={"max_epochs": 2}, thorough=True),
    PlainThenClipsAttends=_SUMS,
    TwoManualAttends=_SUMS,
    StepsEverySecondAttends=_SUMS,
    KeepsGradientsAttends=_SUMS,
    AssignsAttends=_SUMS_OF_OWN,
    AssignsThenClipsAttends={**_SUMS, **_SUMS_OF_OWN},
    AddsGradientsAttends=_SUMS_OF_OWN,
)
enter(
    "gradients",
    gradients_by_hand.OWN,
    partial(_DATA, kinds=SPLIT, without=("tp",)),
    WeighsLosses={
        "kinds": (*SPLIT, "schedule and others"),
        "also": ("zero 0", "zero 3"),
        "without": (),
    },
    AddsLayer={"also": ("zero 1",)},
)
enter(
    "gradients",
    gradients_by_hand.IN_BACKWARD,
    partial(
        _DATA, kinds=("data parallel", "tp", "microbatches", "schedule"), without=("tp", "gpipe")
    ),
    ClampsInBackward={"also": ("zero 0",), "without": ("gpipe",)},
    StepsInBackward={"also": ("zero 1",)},
)
TABLE["gradients/DifferentiatesAll"] = Entry(
    module=gradients_by_hand.DifferentiatesAll,
    kinds=("data parallel",),
    also=("zero 3",),
    # A norm of the gradient of a rank's own samples is no mean over ranks.
    without=("zero 0", "zero 1", "zero 2"),
    refused={"zero 3": _LOCAL},
)
TABLE["gradients/PerturbsInput"] = Entry(
    module=gradients_by_hand.PerturbsInput,
    kinds=("data parallel", "tp", "microbatches"),
    also=("zero 1", "one rank in parts"),
    refused={"microbatches": r"training_step makes or clears gradients itself"},
)
TABLE["gradients/PenaltyOfTwoCalls"] = Entry(
    module=gradients_by_hand.PenaltyOfTwoCalls,
    kinds=("data parallel",),
    also=("zero 3",),
    refused={"zero 3": rf"create_graph=True: .*{_KEPT}differentiate once"},
)


# Modules of parallel layers, which any layout can hold.
_OF_RANK_0 = "items of the PipelineSequential on pipeline rank 0 leave"
_OF_ALL = r"net\.[\w.]+ is on pipeline rank \d, and with pp=2 a step has the weights of its"


def _staged(words: str, **others: str) -> dict[str, Any]:
    """Of a module that a pipeline refuses with these words."""
    return {"refused": {"pp": words, **others}}


def _on_one_stage(words: str, **others: str) -> dict[str, Any]:
    """The same of one that ends where one stage is, while the others wait for it."""
    return {**_staged(words, **others), "apart": ("pp",)}


_WITH_BOTH = (*SPLIT, "together")
_TOGETHER: dict[str, Any] = {"kinds": _WITH_BOTH, "also": ("tp pp",)}
_TOGETHER_TOO: dict[str, Any] = {"kinds": _WITH_BOTH, "without": ("tp pp",)}
_TWICE = {"trainer": {"max_epochs": 2}}
"""Habits that change at the end of an epoch what the next one does."""
enter(
    "strangers",
    strangers.STRANGERS,
    partial(Entry, kinds=SPLIT),
    LogitsByHand=_TOGETHER,
    ClipsByHand=_TOGETHER,
    Lars={"kinds": _WITH_BOTH},
    Unfreezes={"kinds": _WITH_BOTH, **_TWICE},
    SavesWeights={"kinds": _WITH_BOTH, **_TWICE},
    RateByHand=_TWICE,
    RateOfLoss={**_TOGETHER_TOO, **_TWICE},
    **dict.fromkeys(
        ("ClipsInHook", "NormOfEach", "NormalisesWeights", "HeadOnly", "Gathers"), _TOGETHER_TOO
    ),
    StackedNorms={"also": ("zero 3",)},
    Vectors={"also": ("zero 3",)},
    RecomputedPenalty={"also": ("zero 3",), **_on_one_stage(_OF_ALL)},
    NoisyWeights={"also": ("zero 3",)},
    NormedWeight={
        "refused": {
            "tp": r"net\.down\.weight: a parametrization .* of a parameter that tp=2 slices"
        }
    },
    TensorHooks={
        "also": ("zero 3",),
        "refused": {
            "zero 3": (r"Tensor\.register_hook was called .*under ZeRO 3.*nearest valid: zero=2")
        },
    },
    ByHand=_staged(r"pp=2, automatic_optimization=False"),
    LossesOfBlocks=_on_one_stage(rf"self\.losses: {_OF_RANK_0}"),
    HookedFeatures=_on_one_stage(rf"self\.features: {_OF_RANK_0}"),
    PenaltyOfOne=_on_one_stage(_OF_ALL),
    PenaltyTimesLoss=_on_one_stage(_OF_ALL),
    Penalty=_on_one_stage(_OF_ALL),
)
enter(
    "whole weights",
    strangers.WHOLE,
    partial(Entry, kinds=("tp",), also=("tp", "zero 3")),
    WritesByView={
        "refused": dict.fromkeys(
            ("tp", "zero 3"), r"zero_: writes to a view of a tensor of which each rank holds a part"
        )
    },
    # Under ZeRO 3 the layer's weight is whole where it runs again, and torch says that it differs.
    RecomputesLayers={"also": ("tp",)},
    AdaptiveWeight={"refused": {"zero 3": r"net\.head\.weight: torch\.autograd\.grad .*zero=2"}},
)
enter(
    "strangers",
    strangers.PENALTIES,
    partial(
        Entry,
        kinds=("one weight",),
        apart=("one weight",),
        refused={"one weight": _OF_ALL},
    ),
)


# What steps do with logits that tp splits.
TABLE["logits/NextLetter"] = Entry(
    module=split_logits.NextLetter,
    kinds=("tp", "split logits"),
    also=("tp cut between up and down",),
    # Each data-parallel rank has half of the samples; under a pipeline the last stage notes.
    aside={
        "tp recomputed zero 3": ("notes", "logged"),
        "tp cut between up and down": ("notes",),
    },
    trainer={"num_sanity_val_steps": 0},
    seed=3,
)


# What gets parts of tensors without torch asking their class, as functions for autograd do.
_ONLY_TP: dict[str, Any] = {"kinds": ("tp",)}
_SAVED = {"kinds": ("tp", "pp"), "trainer": {"enable_checkpointing": True}}
_MOVES = r"net\.up\.weight: it becomes another parameter, weight_orig, amid a run"
_PRUNED = {"refused": {"tp": r"net\.up\.weight: pruned, or computed before each forward .*tp=2"}}
enter(
    "parts",
    users_of_parts.USERS,
    partial(Entry, kinds=SPLIT, thorough=True, also=("tp",)),
    **dict.fromkeys(("WeightByFunction", "Recomputes", "Deviation", "TiedHead"), _ONLY_TP),
    **dict.fromkeys(("Centre", "Features"), _SAVED),
    MapsNetwork={
        "kinds": ("tp", "pp"),
        "refused": {"pp": r"PipelineSequential was called within torch\.vmap .*pp=1 and cp=1"},
        "apart": ("pp",),
    },
    NormedNetwork={
        **_ONLY_TP,
        "refused": {"tp": r"tp=2: RMSNorm within torch\.vmap or a transform of torch\.func"},
    },
    OwnKernel={
        **_ONLY_TP,
        "refused": {"tp": r"a function for autograd asks for the memory of a tensor"},
    },
    CompiledModule={"also": ()},
    CompiledBeside={**_ONLY_TP, "also": ()},
    Pruned=_PRUNED,
    OldWeightNorm={**_PRUNED, "also": ()},
    PrunedInHook={**_ONLY_TP, "refused": {"tp": _MOVES}},
    PrunedByCallback={
        "kinds": ("data parallel", "tp"),
        "also": (),
        "refused": dict.fromkeys(("tp", "zero 3"), _MOVES),
    },
    GradientPenalty={
        "kinds": ("data parallel", "tp"),
        "refused": {"zero 3": r"GradientPenalty: a backward needed weights .*create_graph=True"},
    },
    InnerLoop=_ONLY_TP,
)


# What hooks compute at the end of an epoch and after batches.
_EPOCHS = partial(Entry, kinds=("stages",), seed=3)
_SAVING = {"max_epochs": 6, "enable_checkpointing": True}
TABLE |= {
    "epochs/ByHand": _EPOCHS(
        module=epoch_ends.ByHand, also=("stages", "stages of a V"), trainer=_SAVING
    ),
    # Numbers that are logged as such are float32.
    "epochs/BetweenBatches": _EPOCHS(
        module=epoch_ends.BetweenBatches,
        also=("stages",),
        trainer={**_SAVING, "max_epochs": 2},
        tolerance=1e-5,
    ),
    "epochs/CallsTrunk": _EPOCHS(
        module=epoch_ends.CallsTrunk,
        also=("stages",),
        without=("stages of a V", "stages tp"),
        refused={"stages": r"called outside of a step.*train with pp=1"},
    ),
    "epochs/FillsTable": _EPOCHS(
        module=epoch_ends.FillsTable,
        also=("stages",),
        without=("stages of a V", "stages tp"),
        refused={"stages": r"self\.table: .*shared_between_stages = \('table',\)"},
    ),
    "epochs/Draws": _EPOCHS(
        module=epoch_ends.Draws,
        kinds=("pp",),
        warned={"pp": r"self\.generator \(Generator\) is changed by steps inside"},
    ),
    "epochs/NormsBehind": _EPOCHS(module=epoch_ends.NormsBehind, kinds=("pp",)),
    "epochs/Unshareable": _EPOCHS(
        module=epoch_ends.Unshareable,
        also=("stages",),
        without=("stages of a V", "stages tp"),
        refused={"stages": r"self\.calls: a step fills it with what cannot"},
        apart=("stages",),
    ),
}
enter(
    "epochs",
    epoch_ends.FILLING,
    partial(_EPOCHS, also=("stages",), without=("stages of a V", "stages tp")),
)

# What users write around steps: outputs for hooks, metrics, samplers.
_PARTS_OF_BATCHES = ("schedule", "microbatches")
_TOLD = {  # each rank sees its own samples, and a hook their numbers
    "kinds": _PARTS_OF_BATCHES,
    "also": ("1f1b", "one rank in parts"),
    "without": ("zero 2 in parts",),
}
_CUT_ANYHOW = {"kinds": (*_PARTS_OF_BATCHES, "data parallel", "schedule and others")}
_OUTPUTS = partial(Entry, trainer={"num_sanity_val_steps": 0})
enter(
    "outputs",
    around_steps.OUTPUTS,
    partial(_OUTPUTS, **_TOLD),
    # The sum over tokens is a mean to this package.
    CountsTokens={**_CUT_ANYHOW, "aside": dict.fromkeys(_CUT_ANYHOW["kinds"], ("weights",))},
    GathersOutputs=_CUT_ANYHOW,
    NumberOfTrunkForHook={
        "refused": {"schedule": r"training_step.*PipelineSequential returns a number for each"}
    },
    ReturnsUnlike={
        "refused": dict.fromkeys(_PARTS_OF_BATCHES, r"training_step returns more.*not require grad")
    },
)
enter(
    "metrics",
    around_steps.METRICS,
    partial(Entry, kinds=(*_WITH_BOTH, "schedule")),
)
_SAMPLED = partial(Entry, trainer={"use_distributed_sampler": True, "max_epochs": 2})
enter(
    "samplers",
    around_steps.SAMPLERS,
    partial(_SAMPLED, kinds=("one rank", *SPLIT)),
    # Which of the eight come first is not what one process draws.
    Permuted={"aside": dict.fromkeys(("one rank", *SPLIT), ("weights",))},
)

_BY_INPUT = r"input of the PipelineSequential requires a gradient, and is no parameter"
_EVERYWHERE: dict[str, Any] = {
    "kinds": (*SPLIT, *_PARTS_OF_BATCHES, "schedule and others"),
    "also": ("zero 1", "one rank in parts"),
}
enter(
    "around steps",
    around_steps.GRADIENTS,
    partial(Entry, kinds=SPLIT),
    HooksAccumulated=_EVERYWHERE,
    NotesAccumulated={
        "kinds": ("tp", *_PARTS_OF_BATCHES, "data parallel"),
        "trainer": {"accumulate_grad_batches": 2},
        "refused": dict.fromkeys(
            ("data parallel", "zero 2 in parts"),
            r"grad_hook on a parameter, accumulate_grad_batches",
        ),
    },
    GradientPenalty={
        "kinds": ("tp", "pp", "data parallel"),
        "without": ("zero 3",),
        **_on_one_stage(_BY_INPUT),
    },
    Adversarial={"kinds": ("pp",), "thorough": True, **_on_one_stage(_BY_INPUT)},
    Maml={
        "kinds": ("data parallel", "pp"),
        "thorough": True,
        "also": ("zero 3",),
        "apart": ("pp",),
        "refused": {
            "pp": _OF_ALL,
            "zero 3": r"net\.up\.weight: torch\.autograd\.grad .*zero=2 or lower",
        },
    },
    PenaltyByCriterion={"thorough": True, "also": ("zero 3",), **_on_one_stage(_OF_ALL)},
    CompilesBeside={
        "kinds": ("data parallel", "tp", "pp"),
        "also": ("zero 3",),
        **_staged(r"pp=2: parameter 'net.up.weight' is shared between"),
    },
    InTwo={"kinds": ("data parallel",), "also": ("zero 3",)},
    # Data-parallel ranks log numbers of their own samples.
    LogsEach={"kinds": ("tp", "pp")},
    AdoptsDicts=_staged(r"pp=2: the module has no PipelineSequential"),
)


# Mixtures of experts: strangers with one in their net, and what only a mixture invites.
_EP_CUT: dict[str, dict[str, Any]] = {
    name: {"also": ("ep", "ep zero 3")}
    for name in ("StackedNorms", "Vectors", "RecomputedPenalty", "NoisyWeights")
}
_EP_CUT["TensorHooks"] = {
    "refused": {
        "ep zero 3": r"Tensor\.register_hook was called .*under ZeRO 3.*nearest valid: zero=2"
    },
    "also": ("ep zero 3",),
}
_OF_STAGES = {
    name
    for name in strangers.STRANGERS
    if "pp" in {*TABLE[f"strangers/{name}"].refused, *TABLE[f"strangers/{name}"].aside}
}
"""Strangers that are not those of one process under a pipeline, whatever ep is."""
enter(
    "experts",
    {name: partial(expert_habits.mixed, name) for name in expert_habits.MIXED},
    partial(Entry, kinds=("experts",), thorough=True),
    **_EP_CUT,
    ClipsByHand={"also": ("ep zero 3",)},
    ByHand={"also": ("ep",)},
    SavesWeights=_TWICE,
    PenaltyTimesLoss={"also": ("ep tp",)},
    NotesState={"also": ("ep",)},
    Unfreezes=_TWICE,
    RateByHand=_TWICE,
    RateOfLoss=_TWICE,
)
TABLE |= {
    f"experts in stages/{name}": Entry(
        module=partial(expert_habits.mixed, name),
        kinds=("experts in stages",),
        trainer=TABLE[f"experts/{name}"].trainer,
    )
    for name in expert_habits.MIXED
    if name not in _OF_STAGES and name not in _EP_CUT
}
enter(
    "experts",
    expert_habits.OWN,
    partial(Entry, kinds=("experts",)),
    Freezes={**_TWICE, "also": ("ep zero 3",)},
    LooksAtExperts={"also": ("ep zero 3",)},
    Recomputes={"also": ("ep zero 3",)},
    WritesExperts={"also": ("ep zero 3",)},
)
_ONLY_EP = ("ep zero 0", "ep zero 3", "ep tp", "experts tp")
_NEVER = partial(Entry, kinds=("experts",), without=_ONLY_EP)
TABLE |= {
    "experts/Chooses": _NEVER(
        module=expert_habits.Chooses,
        refused={"ep": r"ep=2: ranks \(0, 1\) run different layers with experts"},
    ),
    "experts/Softens": Entry(
        module=expert_habits.Softens, kinds=("experts",), also=("ep", "ep zero 3")
    ),
    "experts/HooksRouter": Entry(
        module=expert_habits.HooksRouter,
        kinds=("router",),
        also=("router", "router tp"),
        warned={"router tp": r"forward hook of a router.*a part of those of tp=2"},
    ),
}


# Trunks whose sequences are split. What a pipeline and ZeRO 3 refuse whatever cp is, they do not
# meet here.
_ONLY_CP: dict[str, Any] = {"without": ("cp zero 3", "cp tp", "cp pp")}
enter(
    "context",
    context_habits.KEPT,
    partial(Entry, kinds=("context",)),
    Ignores={"also": ("cp tp",)},
    PoolsInside={"also": ("cp pp",)},
    ByHand={"without": ("cp pp",)},
    LooksAtGradients={"without": ("cp pp",)},
    Contrasts={"without": ("cp pp",)},
    Attacks={"without": ("cp pp", "cp zero 3")},
)
for _name, _words in {
    "LeavesLosses": r"cp=2: net\.block.* leaves a tensor in losses",
    "Hooks": r"cp=2: net\.norm \(LayerNorm\) has a forward hook",
    "ReadsLate": r"register_hook of the output of a PipelineSequential .*cp > 1",
    "DifferentiatesLate": r"grad of the output of a PipelineSequential",
    "Carries": r"cp=2",
    "OwnAttention": r"cp=2.*net\.block.*scaled_dot_product_attention",
    "OwnPositions": r"cp=2.*net\.places.*arange",
    "PoolsUnawares": r"cp=2.*net\.mean.*mean",
    "NoSplit": r"cp=2: nothing in the module splits the sequence",
}.items():
    TABLE[f"context/{_name}"] = Entry(
        module=getattr(context_habits, _name),
        kinds=("context",),
        refused={"cp": _words},
        **_ONLY_CP,
    )
TABLE["parts/Statistics"] = Entry(
    module=users_of_parts.Statistics,
    kinds=("context",),
    thorough=True,
    refused={"context": r"cp=2: net\.norm \(LayerNorm\) has a forward hook"},
)
TABLE["parts/ContextCentre"] = Entry(
    module=users_of_parts.ContextCentre, kinds=("context",), thorough=True, also=("cp",)
)
TABLE["items/ordinary"] = Entry(
    module=partial(context_items.Network, "ordinary"),
    kinds=("context", "context in parts"),
    also=("cp zero 3",),
    without=("cp tp",),  # its vocabulary does not divide by tp
    tolerance=1e-11,
)
for _name in ("gate", "positions", "convolution", "loss beside"):
    _words = MIXING[_name][1]
    TABLE[f"items/{_name}"] = Entry(
        module=partial(context_items.Network, _name),
        kinds=("context",),
        refused={
            "cp": (
                r"cp=2: net\.blocks\.1 \(.*\) does not act on each position by itself: "
                + _words.replace(".", r"\.")
            )
        },
        **_ONLY_CP,
    )
TABLE["items/cumsum"] = Entry(
    module=partial(context_items.Network, "cumsum"),
    kinds=("context in parts",),
    thorough=True,  # a stage ends alone, and ending the workers takes seconds
    refused={"cp 1f1b": r"cp=2: net\.blocks\.1 \(Applies\) does not act on each"},
    apart=("cp 1f1b",),
)
