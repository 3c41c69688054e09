"""Blends of token files train the same under every layout, and packed rows as their documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron import LanguageModel, MegatronStrategy, TokenData
from lightning_megatron.data.tokens.corpus import Corpus
from lightning_megatron.testing import WorkerPool
from tests.data.tokens.corpora import VOCABULARY, bare_corpus, corpus
from tests.parity.jobs import quiet_trainer

MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 16,
}
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Run:
    """What a run reads, and how far it goes."""

    folder: str
    steps: int
    dp: int = 1
    workers: int = 0
    weights: tuple[float, float] = (0.7, 0.3)
    stages: tuple[tuple[int, tuple[float, float]], ...] = ()
    resume: str | None = None
    save: str | None = None
    validates: bool = False


class Seen(L.Callback):
    """The rows that this rank read, and the losses."""

    def __init__(self) -> None:
        self.rows: list[list[list[int]]] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.rows.append(batch["tokens"].tolist())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].clone())


def train(run: Run, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    L.seed_everything(1, verbose=False)
    names = [str(Path(run.folder) / name) for name in ("web", "code")]
    data = TokenData(
        dict(zip(names, run.weights, strict=True)),
        val={"web": names[0], "code": names[1]} if run.validates else None,
        seq_len=16,
        batch_size=GLOBAL_BATCH // run.dp,
        documents=True,
        num_workers=run.workers,
        stages={at: dict(zip(names, weights, strict=True)) for at, weights in run.stages},
    )
    strategy, seen = MegatronStrategy(**options), Seen()
    trainer = quiet_trainer(
        strategy, max_steps=run.steps, max_epochs=-1, callbacks=[seen], use_distributed_sampler=True
    )
    module = LanguageModel(MODEL, schedule="constant", warmup_steps=0)
    trainer.fit(module, data, ckpt_path=run.resume)
    if run.save:
        trainer.save_checkpoint(run.save)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return strategy.data_parallel_rank, seen.rows, metrics, [float(x) for x in seen.losses]


def batches(outcomes: list[Any]) -> list[list[list[int]]]:
    """Global batches, from what the first process of each data-parallel rank read."""
    parts = {rank: rows for rank, rows, *_ in reversed(outcomes)}
    ranks = [parts[rank] for rank in sorted(parts)]
    return [
        [row for group in zip(*step, strict=True) for row in group]
        for step in zip(*ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokens")
    corpus(path / "web", documents=30)
    corpus(path / "code", documents=20, seed=1)
    return str(path)


STAGED = ((20, (0.2, 0.8)),)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, folder: str) -> list[list[list[int]]]:
    """Batches of one process, over several epochs of the blend."""
    return batches(pool.run(1, train, Run(folder, 16, stages=STAGED), {}))


@pytest.mark.parametrize(
    ("dp", "workers", "options"),
    [
        (2, 2, {}),
        (2, 0, {"pp": 2, "num_microbatches": 2}),
    ],
    ids=["dp2", "pp2 dp2"],
)
@pytest.mark.thorough  # the next test looks at the same order by default
def test_order_is_that_of_one_process(
    pool: WorkerPool, folder: str, alone: Any, dp: int, workers: int, options: dict[str, Any]
) -> None:
    run = Run(folder, 16, dp=dp, workers=workers, stages=STAGED)
    world = dp * options.get("pp", 1)
    assert batches(pool.run(world, train, run, options)) == alone


@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.thorough), 11])
def test_resume_under_another_layout(
    pool: WorkerPool, folder: str, alone: Any, tmp_path: Path, stop: int
) -> None:
    saved = str(tmp_path / "saved")
    first = Run(folder, stop, dp=2, workers=2, stages=STAGED, save=saved)
    assert batches(pool.run(2, train, first, {})) == alone[:stop]
    rest = Run(folder, 16, stages=STAGED, resume=saved)
    assert batches(pool.run(1, train, rest, {})) == alone[stop:]


def test_weights_that_change_between_two_runs(
    pool: WorkerPool, folder: str, alone: Any, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    before = pool.run(1, train, Run(folder, 5, save=first), {})
    assert batches(before) == alone[:5]
    other = {"weights": (0.2, 0.8), "dp": 2}
    pool.run(2, train, Run(folder, 9, resume=first, save=second, **other), {})
    # A stage of the run before, by now.
    rest = pool.run(2, train, Run(folder, 16, resume=second, **other), {})
    assert batches(rest) == alone[9:]


def test_several_validation_sets_by_name(pool: WorkerPool, folder: str) -> None:
    (_, _, metrics, _), *_ = pool.run(2, train, Run(folder, 12, dp=2, validates=True), {})
    for name in ("web", "code"):
        assert metrics[f"val_loss/{name}"] > 0
        expected = torch.tensor(metrics[f"val_loss/{name}"]).exp().item()
        assert metrics[f"val_perplexity/{name}"] == pytest.approx(expected)


def test_packed_rows_have_the_loss_of_their_documents(tmp_path: Path) -> None:
    bare_corpus(tmp_path / "a", documents=30, longest=16)
    torch.manual_seed(0)
    module = LanguageModel(MODEL).double()
    module.configure_model()
    module.double()
    total, tokens = torch.zeros(()).double(), 0
    for pack in ("best-fit", "none"):
        data = TokenData(
            str(tmp_path / "a"),
            val=str(tmp_path / "a"),
            seq_len=16,
            pack=pack,
            documents=True,
            num_workers=0,
        )
        data.setup()
        losses = [module._batch_loss(batch) for batch in data.val_dataloader()[0]]
        total, tokens = sum(loss for loss, _ in losses), sum(int(n) for _, n in losses)
        documents = Corpus(tmp_path / "a")
        expected = torch.zeros(()).double()
        for number in range(len(documents)):
            ids = torch.from_numpy(documents.read(number).astype("int64"))
            if len(ids) > 1:
                expected = expected + F.cross_entropy(
                    module(ids[None, :-1])[0], ids[1:], reduction="sum"
                )
        assert tokens == int((documents.lengths - 1).sum())
        assert abs(total - expected) <= 1e-10 * expected
