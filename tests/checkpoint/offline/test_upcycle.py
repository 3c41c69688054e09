"""A mixture of experts made of a dense model begins with its logits."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_megatron import LanguageModel, MegatronStrategy
from lightning_megatron.build.init import materialize
from lightning_megatron.checkpoint.offline.huggingface.transformer import load_transformer
from lightning_megatron.checkpoint.offline.upcycle import upcycle
from lightning_megatron.cli import main
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import quiet_trainer

CONFIG = TransformerConfig(
    vocab_size=48, hidden_size=32, num_layers=3, num_heads=4, mlp_size=40, tied_embeddings=True
)
TOKENS = torch.randint(48, (4, 9), generator=torch.Generator().manual_seed(0))


class Losses(pl.Callback):
    """Losses of all steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def _fit(
    model: LanguageModel, strategy: Any, ckpt_path: str | None = None, save: str | None = None
) -> list[float]:
    losses = Losses()
    trainer = quiet_trainer(strategy, max_epochs=3, callbacks=[losses])
    rows = TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:])
    trainer.fit(model, DataLoader(rows, batch_size=4), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return losses.found


def _train_dense(path: str) -> list[float]:
    strategy = MegatronStrategy(pp=2, microbatch_size=2)
    return _fit(LanguageModel(CONFIG, lr=1e-2), strategy, save=path)


def _train_mixture(path: str, options: dict[str, Any]) -> list[float]:
    return _fit(LanguageModel(path), MegatronStrategy(**options), ckpt_path=path)


@pytest.fixture(scope="module")
def dense(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("upcycle") / "dense.ckpt")
    pool.run(2, _train_dense, path)
    return path


def _logits(path: str | Path) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_transformer(path).eval()(TOKENS)
    return logits


def test_the_logits_are_those_of_the_dense_model(
    pool: WorkerPool, dense: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "mixture.ckpt")
    options = "experts=4,top_k=2,first_dense=1,router.balance_weight=0.02"
    assert main(["convert", "--upcycle", options, dense, target]) == 0
    mixture = load_transformer(target)
    experts = mixture.config.experts
    assert experts is not None
    assert (experts.num_experts, experts.first_dense) == (4, 1)
    assert (experts.router.balance_weight, mixture.config.num_mixtures) == (0.02, 2)
    torch.testing.assert_close(_logits(target), _logits(dense), rtol=1e-12, atol=1e-12)
    with torch.device("meta"):
        fresh = Transformer(mixture.config)
    materialize(fresh, seed=0, device="cpu")
    for name, weight in mixture.state_dict().items():
        if "router" in name:  # as in a new model, where there is nothing to copy
            assert torch.equal(weight, fresh.state_dict()[name].double())
    (alone,), spread = (
        pool.run(world, _train_mixture, target, {"ep": world, "zero": zero})
        for world, zero in ((1, 0), (2, 1))
    )
    for found in spread:
        assert found == pytest.approx(alone, rel=1e-10)
    assert alone[-1] < alone[0]


def test_noise_makes_experts_different(dense: str, tmp_path: Path) -> None:
    plain, noisy, again = (str(tmp_path / name) for name in ("plain", "noisy", "again"))
    arguments = ["convert", "--upcycle", "experts=4"]
    assert main([*arguments, dense, plain]) == 0
    for path, more in ((noisy, []), (again, ["--overwrite"])):
        assert main([*arguments, "--noise", "0.1", "--seed", "3", *more, dense, path]) == 0
    before, after = load_transformer(plain).state_dict(), load_transformer(noisy).state_dict()
    repeated = load_transformer(again).state_dict()
    assert all(torch.equal(value, repeated[name]) for name, value in after.items())
    name = "trunk.layers.0.mlp.experts.down"
    moved = after[name] - before[name]
    assert float(moved.std() / before[name].std()) == pytest.approx(0.1, rel=0.1)
    assert len({float(matrix.sum()) for matrix in after[name]}) == 4
    assert len({float(matrix.sum()) for matrix in before[name]}) == 1


def test_files_of_limited_size_make_the_same_model(dense: str, tmp_path: Path) -> None:
    experts = MixtureConfig(num_experts=5)
    upcycle(dense, tmp_path / "one", experts)
    upcycle(dense, tmp_path / "many", experts, max_shard_bytes=25_000)
    one, many = (load_transformer(tmp_path / name).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(value, many[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("experts=4,top_k=2,shared_size=8", "experts.shared_size=8: .*shared_size=0"),
        ("experts=4,router.normalize=false", "router.normalize=False: .*must add up to 1"),
        ("experts=4,router.noise=0.1", "experts.router.noise=0.1: .*noise=0.0"),
        ("router=1,router.scale=2", "router is given as a value and as options"),
        ("experts=4,mlp_size=8", "experts.mlp_size=8: .*no copy"),
        ("experts=4,topk=2", "--upcycle topk: MixtureConfig has no such field.*top_k"),
        ("top_k=9", "top_k=9, num_experts=8"),
        ("4", "--upcycle 4: must be NAME=VALUE"),
    ],
)
def test_what_would_not_begin_as_the_dense_model_is_refused(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert main(["convert", "--upcycle", options, dense, str(tmp_path / "x")]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "x").exists()


def test_a_mixture_is_not_made_twice(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--upcycle", "experts=4", dense, str(tmp_path / "a")]) == 0
    again = ["convert", "--upcycle", "experts=4", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(again) == 2
    assert "has experts already" in capsys.readouterr().err
    assert main(["convert", "--noise", "0.1", dense, str(tmp_path / "x.ckpt")]) == 2
    assert "--noise: not used" in capsys.readouterr().err
