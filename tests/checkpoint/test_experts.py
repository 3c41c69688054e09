"""Checkpoints of experts that ranks share go to other layouts, formats and modules, and back."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_megatron
from lightning_megatron import CheckpointConfig, MegatronStrategy, PipelineSequential
from lightning_megatron.checkpoint import (
    convert_to_lightning,
    export_safetensors,
    import_lightning,
    load_from_checkpoint,
    load_full_state_dict,
    load_tensor,
    read_manifest,
)
from lightning_megatron.layers import (
    ColumnParallelLinear,
    MixtureOfExperts,
    RouterConfig,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.jobs import quiet_trainer

SPREAD: dict[str, Any] = {"ep": 2, "tp": 2, "zero": 2}
UP = "trunk.layers.0.mix.experts.up"
BIAS = "trunk.layers.1.mix.router.bias"


class Block(nn.Module):
    """Adds the output of a mixture."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        router = RouterConfig(score="sigmoid", bias_update=0.1)
        self.mix = MixtureOfExperts(6, 4, num_experts, shared_size=4, router=router)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x)
        return out


class Mixture(L.LightningModule):
    """Built in configure_model; predicts a token by itself."""

    def __init__(self, num_experts: int = 4, frozen: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_experts = num_experts
        self.frozen = frozen
        self.loss = VocabParallelCrossEntropy()

    def configure_model(self) -> None:
        if hasattr(self, "trunk"):
            return
        self.trunk = PipelineSequential(
            embedding=VocabParallelEmbedding(12, 6),
            layers=[Block(self.num_experts) for _ in range(2)],
            head=ColumnParallelLinear(6, 12),
        )
        self.trunk.layers[0].mix.experts.requires_grad_(not self.frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.loss(self.trunk(batch[0]), batch[0])
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trunk(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.1)


class Edits(Mixture):
    """Stores twice the experts, and halves what it finds."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stack = checkpoint["state_dict"][UP]
        checkpoint["state_dict"][UP] = stack * 2
        checkpoint["first"] = float(stack[0].sum())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state[UP] = state[UP] / 2
        assert checkpoint["first"] == float(state[UP][0].sum())


def batches() -> Any:
    return DataLoader(TensorDataset(torch.arange(96).view(16, 6) % 12), batch_size=2)


class Saves(L.Callback):
    """Saves after each step, while there are paths left."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step <= len(self.paths):
            trainer.save_checkpoint(self.paths[trainer.global_step - 1])


def train(
    options: dict[str, Any],
    *,
    paths: tuple[Path, ...] = (),
    source: Path | None = None,
    max_steps: int = 2,
    kind: type[Mixture] = Mixture,
    **of_module: Any,
) -> dict[str, Any]:
    """Train from the start or from ``source``, and save after each step; the gathered weights."""
    L.seed_everything(3, verbose=False)
    trainer = quiet_trainer(
        MegatronStrategy(**options),
        max_steps=max_steps,
        callbacks=[Saves(paths)],
        precision="32-true",
    )
    module = kind(**of_module)
    trainer.fit(module, batches(), ckpt_path=source)
    return lightning_megatron.gather(module)


def train_job(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return train(options, **more)


def validate_job(options: dict[str, Any], source: Path) -> dict[str, Any]:
    module = Mixture()
    trainer = quiet_trainer(MegatronStrategy(**options), precision="32-true")
    trainer.validate(module, batches(), ckpt_path=source, verbose=False)
    return lightning_megatron.gather(module)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def saved(
    pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of four ranks, and the weights that they have gathered."""
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    [weights, *others] = pool.run(4, train_job, SPREAD, {"paths": (path,), "max_steps": 1})
    for other in others:
        assert_same(other, weights)
    assert weights[UP].shape == (4, 4, 6)
    assert weights[BIAS].shape == (4,)
    return path, weights


def test_reads_as_whole_tensors(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, weights = saved
    assert {"tp": 2, "ep": 2}.items() <= read_manifest(path).layout.items()
    assert_same(load_full_state_dict(path), weights)
    assert_same(load_from_checkpoint(Mixture, path).state_dict(), weights)
    assert torch.equal(load_tensor(path, UP, 3), weights[UP][3])
    export_safetensors(path, tmp_path / "a.safetensors")
    assert_same(load_file(tmp_path / "a.safetensors"), weights)


def test_goes_to_lightnings_own_format_and_back(
    pool: WorkerPool, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, weights = saved
    convert_to_lightning(path, tmp_path / "plain.ckpt")
    assert_same(Mixture.load_from_checkpoint(tmp_path / "plain.ckpt").state_dict(), weights)
    import_lightning(tmp_path / "plain.ckpt", tmp_path / "again.ckpt")
    layouts: list[dict[str, Any]] = [{"ep": 2, "zero": 3}, {"tp": 2}]
    for source, layout in zip((tmp_path / "again.ckpt", path), layouts, strict=True):
        for found in pool.run(2, validate_job, layout, source):
            assert_same(found, weights)


def test_is_saved_in_the_background_and_what_has_not_changed_once(
    pool: WorkerPool, tmp_path: Path
) -> None:
    paths = (tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    save = CheckpointConfig(mode="async", incremental=True, on_error="raise")
    options = {"ep": 2, "checkpoint": save}
    last = pool.run(2, train_job, options, {"paths": paths, "frozen": True})[0]
    links = {file.stat().st_nlink for file in paths[1].glob("*.distcp")}
    assert 2 in links
    assert_same(load_full_state_dict(paths[1]), last)
    for found in pool.run(2, train_job, {"ep": 2}, {"source": paths[0], "frozen": True}):
        assert_same(found, last)


def test_another_number_of_experts_is_refused_by_name(
    pool: WorkerPool, saved: tuple[Path, dict[str, Any]]
) -> None:
    with pytest.raises(WorkerError, match="nearest valid.*num_experts=4 instead of 8"):
        pool.run(2, train_job, {"ep": 2}, {"source": saved[0], "num_experts": 8})


def test_hooks_see_and_change_whole_stacks(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saving: dict[str, Any] = {"kind": Edits, "paths": (path,), "max_steps": 1}
    weights = pool.run(2, train_job, {"ep": 2, "zero": 2}, saving)[0]
    assert torch.equal(load_tensor(path, UP), 2 * weights[UP])
    loading: dict[str, Any] = {"kind": Edits, "source": path, "max_steps": 1}
    for found in pool.run(2, train_job, {"ep": 2, "zero": 3}, loading):
        assert_same(found, weights)
