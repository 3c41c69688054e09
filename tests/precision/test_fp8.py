"""`Fp8Precision`: which layers it takes, and the same training in every layout."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron import (
    ConfigError,
    Fp8Precision,
    MegatronStrategy,
    PipelineConfig,
    ShardingConfig,
)
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.precision.fp8_gemm import DelayedGemm
from lightning_megatron.precision.fp8_recipes import RECIPES, device_problems, offload_problems
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.layers.parity import make_topology
from tests.parity.jobs import (
    GlobalBatches,
    Outcome,
    Recorder,
    quiet_trainer,
    whole_parameters,
)
from tests.parity.reference import Data

CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=64, num_layers=4, num_heads=4, mlp_size=96, max_seq_len=16
)
SHALLOW = replace(CONFIG, num_layers=2)
STEPS = 3
"""The second has scales that follow from the first, the third weights from such scales."""


class Model(GlobalBatches):
    def __init__(self, steps: int, config: TransformerConfig = CONFIG) -> None:
        super().__init__(Data(steps=steps, lengths=(16,)).batches())
        self.config = config

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model, self.loss = Transformer(self.config), VocabParallelCrossEntropy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def train_job(recipe: str, options: dict[str, Any], backend: str = "torch") -> Outcome:
    L.seed_everything(3, verbose=False)
    strategy, recorder = MegatronStrategy(**options), Recorder(1)
    chosen: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe != "bf16":
        plugin = Fp8Precision(recipe, backend, keep_first=0, keep_last=0)  # type: ignore[arg-type]
        chosen = {"plugins": [plugin]}
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder],
        gradient_clip_val=10.0,
        **{"precision": None, **chosen},
    )
    trainer.fit(Model(STEPS, SHALLOW))
    losses = [float(strategy.reduce(loss.float())) for loss in recorder.losses]
    return Outcome(losses, recorder.norms)


def train_all(
    options: dict[str, Any], recipes: Sequence[str] = tuple(RECIPES)
) -> dict[str, Outcome]:
    return {recipe: train_job(recipe, options) for recipe in recipes}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    """One process with two microbatches: what shares a scale is then the same in all layouts."""
    found: dict[str, Outcome] = pool.run(1, train_all, {"num_microbatches": 2})[0]
    return found


def close(found: Outcome, expected: Outcome, tolerances: tuple[float, float]) -> None:
    for ours, theirs, tolerance in zip(
        (found.losses, found.norms), (expected.losses, expected.norms), tolerances, strict=True
    ):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=0)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"tp": 2, "num_microbatches": 2}),
    "tp=2 sequence parallel": (2, {"tp": 2, "sequence_parallel": True, "num_microbatches": 2}),
    "pp=2 zb-h1": (2, {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2}),
    "dp=2 zero 3": (2, {"zero": 3}),
    "cp=2 zero 3": (2, {"cp": 2, "zero": 3}),
    "pp=2 zbv": (2, {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2}),
    "tp=2 pp=2": (
        4,
        {"tp": 2, "pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2},
    ),
}

COVERED: dict[str, tuple[str, ...]] = {
    "tp=2": ("tensorwise", "delayed"),
    "tp=2 sequence parallel": ("rowwise", "blockwise", "mxfp8"),
    "pp=2 zb-h1": ("rowwise", "delayed"),
    "dp=2 zero 3": ("delayed",),
    "cp=2 zero 3": ("tensorwise",),
    "pp=2 zbv": ("tensorwise", "blockwise", "mxfp8"),
    "tp=2 pp=2": ("tensorwise", "blockwise", "mxfp8"),
}
"""Recipes of each layout."""
BOTH = "tp=2 pp=2"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n == BOTH)) for n in LAYOUTS]
)
def test_is_close_to_one_process(pool: WorkerPool, alone: dict[str, Outcome], name: str) -> None:
    """To the rounding of the bfloat16 around the FP8 products."""
    world, options = LAYOUTS[name]
    for by_recipe in pool.run(world, train_all, options, COVERED[name]):
        for recipe, outcome in by_recipe.items():
            close(outcome, alone[recipe], (3e-3, 3e-2))


def test_every_recipe_meets_tensor_and_pipeline_parallelism() -> None:
    for axis in ("tp=2", "pp=2"):
        names = [name for name in COVERED if axis in name and name != BOTH]
        met = {recipe for name in names for recipe in COVERED[name]}
        assert met == set(RECIPES), axis


def test_training_is_close_to_bfloat16_and_not_equal(
    pool: WorkerPool, alone: dict[str, Outcome]
) -> None:
    bf16 = pool.run(1, train_job, "bf16", {"num_microbatches": 2})[0]
    for outcome in alone.values():
        close(outcome, bf16, (1e-2, 0.1))
        assert outcome.norms[0] != bf16.norms[0]


def torchao_job(options: dict[str, Any]) -> Outcome:
    return train_job("tensorwise", options, backend="torchao")


@pytest.mark.parametrize(
    "name", ["tp=2", "pp=2 zbv", pytest.param(BOTH, marks=pytest.mark.thorough)]
)
def test_torchao_trains_as_torch_does(
    pool: WorkerPool, alone: dict[str, Outcome], name: str
) -> None:
    """Pipeline, backward in two parts and tp around products of another package."""
    world, options = LAYOUTS[name]
    for outcome in pool.run(world, torchao_job, options):
        close(outcome, alone["tensorwise"], (3e-3, 3e-2))


def chosen_job(arguments: dict[str, Any]) -> tuple[list[str], str]:
    plugin = Fp8Precision(**arguments)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_megatron.precision.fp8").addHandler(handler)
    trainer = quiet_trainer(MegatronStrategy(), precision=None, plugins=[plugin], max_steps=1)
    module = Model(1)
    names: list[str] = []

    def look(*_: Any) -> None:
        modules = module.named_modules()
        names.extend(n for n, m in modules if getattr(m, "gemm", None) is not None)

    module.on_train_batch_end = look  # type: ignore[method-assign]
    trainer.fit(module)
    del module.on_train_batch_end
    # A second run, in another precision, is not to inherit it.
    assert not any(getattr(m, "gemm", None) for m in module.modules())
    again = quiet_trainer(MegatronStrategy(), precision="bf16-mixed", max_steps=1)
    again.fit(module)
    assert not any(getattr(m, "gemm", None) for m in module.modules())
    return names, "\n".join(lines)


def test_ends_and_head_are_left_out(pool: WorkerPool) -> None:
    names, said = pool.run(1, chosen_job, {})[0]
    assert {name.split(".")[3] for name in names} == {"1", "2"}
    assert len(names) == 2 * 7
    assert said == ""


def test_layers_are_chosen_by_pattern(pool: WorkerPool) -> None:
    given = {"recipe": "mxfp8", "keep_first": 2, "include": ["*.head"], "exclude": ["*.mlp.*"]}
    names, said = pool.run(1, chosen_job, given)[0]
    assert names == [f"model.trunk.layers.2.attention.{n}" for n in ("wq", "wk", "wv", "wo")] + [
        "model.trunk.head"
    ]
    assert "Fp8Precision(recipe='mxfp8') is emulated" in said


def test_a_gpu_without_units_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device, capability = torch.device("cuda", 0), [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    layout: Any = SimpleNamespace(
        module=Odd(),
        data=Odd(),
        topology=SimpleNamespace(device=device),
        transforms=SimpleNamespace(sharding=ShardingConfig(stage=1)),
    )
    with pytest.raises(ConfigError, match=r"A card \(8\.0\) has no FP8 units.*nearest valid"):
        Fp8Precision("rowwise").prepare(layout)
    assert device_problems("blockwise", "te", device) != []
    assert device_problems("blockwise", "torch", device) == [], "is emulated"
    capability[1] = 9
    assert device_problems("rowwise", "torch", device) == []


def test_shards_in_host_memory_are_not_gathered_in_fp8() -> None:
    """FSDP2 would look for the way to send them on a copy that does not know it."""
    [problem] = offload_problems("fp8", True, torch.device("cuda"))
    assert "zero.offload_parameters=True" in problem
    assert "nearest valid: gather='bf16'" in problem
    assert offload_problems("bf16", True, torch.device("cuda")) == []
    assert offload_problems("fp8", False, torch.device("cuda")) == []
    assert offload_problems("fp8", True, torch.device("cpu")) == []


def scales_job(recipe: str, world: int) -> list[tuple[float, ...]]:
    """Scales of input, weight and gradient of a column and a row layer, with its own parts."""
    topology = make_topology(world)
    size, rank = topology.tp.size, topology.tp.rank
    draw = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.rand(16, 32, generator=draw) for _ in range(3))
    weight, grad = weight.t(), grad[:, :32]
    x[0, 31], weight[31, 0], weight[0, 15], grad[0, 31] = 3.0, 5.0, 7.0, 9.0
    found = []
    for kind in (ColumnParallelLinear, RowParallelLinear):
        gemm: Any = Fp8Precision(recipe)._gemm(kind(16, 32), topology)  # type: ignore[arg-type]
        column = kind is ColumnParallelLinear
        features = x[:, :16] if column else x
        matrix = weight if column else weight.t()
        part = slice(rank * 32 // size, (rank + 1) * 32 // size)
        given = features if column else features[:, part]
        mine = matrix[part] if column else matrix[:, part]
        upstream = grad[:, part] if column else grad[:, :16]
        for _ in range(2):  # the second time delayed scales come from the first
            _, kept = gemm.output(given, mine)
            gradient = gemm.prepare_gradient(upstream, kept)
            found.append((*(float(scale) for scale in kept), float(gradient.scale)))
            if isinstance(gemm, DelayedGemm):
                amax = gemm.current.clone()
                if topology.tp.group is not None:
                    dist.all_reduce(amax, dist.ReduceOp.MAX, group=topology.tp.group)
                gemm.advance(amax)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_tp_splits_has_the_scale_of_the_whole(pool: WorkerPool, recipe: str) -> None:
    """The largest elements of input, weight and gradient lie on one rank."""
    [alone] = pool.run(1, scales_job, recipe, 1)
    assert alone[0][2] == pytest.approx(9.0 / 57344)
    for found in pool.run(2, scales_job, recipe, 2):
        assert found == alone


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 12), nn.Linear(16, 16)) for _ in range(3)
        )


def test_sizes_that_do_not_fit_are_named() -> None:
    chosen, misfits = Fp8Precision(plain_linear=True)._choose(Odd())
    assert list(chosen) == ["blocks.1.1"]
    assert misfits == ["blocks.1.0 12 x 16"]
    assert Fp8Precision()._choose(Odd()) == ({}, [])


def history_job(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Histories after two steps, and of a run that goes on from there under another layout."""
    L.seed_everything(3, verbose=False)
    plugin = Fp8Precision("delayed", history=3)
    trainer = quiet_trainer(
        MegatronStrategy(**options), precision=None, plugins=[plugin], max_steps=2
    )
    trainer.fit(Model(2))
    path = directory / "a.ckpt"
    trainer.save_checkpoint(path)
    state = plugin.state_dict()
    later = Fp8Precision("delayed", history=3)
    again = quiet_trainer(
        MegatronStrategy(num_microbatches=2, **({"tp": 2} if "pp" in options else {})),
        precision=None,
        plugins=[later],
        max_steps=2,
    )
    again.fit(Model(2), ckpt_path=str(path))
    assert later.state_dict() == state
    return state


def test_histories_are_in_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    one = pool.run(1, history_job, tmp_path / "1", {"num_microbatches": 2})[0]
    two = pool.run(2, history_job, tmp_path / "2", {"pp": 2, "num_microbatches": 2})
    histories = one["amax_history"]
    assert len(histories) == 2 * 7
    assert two[0] == two[1]
    assert two[0]["amax_history"].keys() == histories.keys()
    for name, rows in histories.items():
        assert len(rows) == 2
        torch.testing.assert_close(
            torch.tensor(two[0]["amax_history"][name]), torch.tensor(rows), rtol=0.1, atol=0
        )


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="4 options are wrong") as caught:
        Fp8Precision("fp4", "cuda", keep_first=-1, history=0)  # type: ignore[arg-type]
    assert "recipe='fp4': must be one of tensorwise" in str(caught.value)


def test_names_that_match_nothing_and_gathering_of_nothing_are_refused(pool: WorkerPool) -> None:
    given = {"include": ["*.haed"], "exclude": ["*.mlp.*"]}
    with pytest.raises(WorkerError, match=r"include='\*\.haed': no layer .* valid: '.*head'"):
        pool.run(1, chosen_job, given)
    with pytest.raises(WorkerError, match="gather='fp8', zero=0: .* nearest valid: zero=1"):
        pool.run(1, gather_job, {"zero": 0}, "fp8")


def gather_job(options: dict[str, Any], gather: str, later: bool = False) -> tuple[Outcome, int]:
    """Training, and the bytes that a rank sent over the data-parallel axis.

    A run that follows in another precision finds weights that are gathered as they are.
    """
    L.seed_everything(3, verbose=False)
    strategy, recorder = MegatronStrategy(**options), Recorder(1)
    plugin = Fp8Precision(keep_first=0, keep_last=0, gather=gather)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        strategy, callbacks=[recorder], precision=None, plugins=[plugin], gradient_clip_val=10.0
    )
    module = Model(2, SHALLOW)
    trainer.fit(module)
    sent = strategy.topology.batch.meter.bytes
    weights = whole_parameters(module.model, strategy.topology)
    if later:
        other = MegatronStrategy(**options)
        quiet_trainer(other, precision="bf16-mixed").fit(module)
        assert other.topology.batch.meter.bytes > 0
    return Outcome([float(x) for x in recorder.losses], recorder.norms, weights), sent


@pytest.mark.parametrize(
    ("world", "options", "gathers"),
    [
        (2, {"zero": 3}, 2),
        (2, {"zero": 1, "num_microbatches": 2}, 1),
        pytest.param(
            *(4, {"zero": 3, "tp": 2, "num_microbatches": 2}, 4), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_gathering_in_fp8_changes_no_bit(
    pool: WorkerPool, world: int, options: dict[str, Any], gathers: int
) -> None:
    wide = pool.run(world, gather_job, options, "bf16")
    low = pool.run(world, gather_job, options, "fp8", options == {"zero": 3})
    for (expected, more), (found, less) in zip(wide, low, strict=True):
        assert found.losses == expected.losses
        assert found.norms == expected.norms
        for name, weight in expected.weights.items():
            assert torch.equal(found.weights[name], weight), name
        # A byte less for each element of the blocks' matrices, of which dp=2 ranks send half each.
        sizes = [
            w.numel() for name, w in expected.weights.items() if "layers" in name and w.ndim == 2
        ]
        per_gather = sum(sizes) // 2 // options.get("tp", 1)
        assert more - less == gathers * 2 * per_gather


def test_shards_of_unequal_size_are_gathered_in_fp8(pool: WorkerPool) -> None:
    """64 rows on three ranks."""
    (wide, _), *_ = pool.run(3, gather_job, {"zero": 3}, "bf16")
    for low, _ in pool.run(3, gather_job, {"zero": 3}, "fp8"):
        assert low.norms == wide.norms
        assert all(torch.equal(low.weights[name], weight) for name, weight in wide.weights.items())


def test_only_whole_tensors_are_gathered_in_fp8() -> None:
    for arguments in ({"recipe": "rowwise"}, {"backend": "torchao"}):
        with pytest.raises(ConfigError, match="gather='fp8'.*nearest valid: recipe='tensorwise'"):
            Fp8Precision(gather="fp8", **arguments)  # type: ignore[arg-type]
