import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_megatron
from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.module import LanguageModel
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.split_tensor import SplitTensor
from tests.parity.jobs import batch_share, quiet_trainer

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 16,
}


def make(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(SIZES, **options)
    model.configure_model()
    return model


def batches(count: int = 6, as_dict: bool = True) -> DataLoader[Any]:
    tokens = torch.randint(32, (2 * count, 9), generator=torch.Generator().manual_seed(1))
    pairs = [(row[:-1], row[1:]) for row in tokens]
    data: list[Any] = [{"tokens": a, "labels": b} for a, b in pairs] if as_dict else pairs
    return DataLoader(data, batch_size=2)


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**defaults | options)


@pytest.mark.parametrize("as_dict", [True, False])
def test_trains_and_logs(tmp_path: Path, as_dict: bool) -> None:
    model = make(lr=1e-2, warmup_steps=2)
    run = trainer(tmp_path, max_epochs=8, enable_checkpointing=False)
    run.fit(model, batches(as_dict=as_dict), batches(as_dict=as_dict))
    logged = run.callback_metrics
    assert logged["train_loss"] < math.log(32) - 0.3
    assert logged["val_perplexity"] == pytest.approx(logged["val_loss"].exp().item())
    run.test(model, batches(), verbose=False)
    assert run.callback_metrics["test_perplexity"] == pytest.approx(
        run.callback_metrics["test_loss"].exp().item()
    )


def test_loaders_that_are_given_have_no_names_of_a_datamodule(tmp_path: Path) -> None:
    data = pl.LightningDataModule.from_datasets(batches().dataset)
    data.val_names = ["web", "code"]  # type: ignore[attr-defined]
    data.val_dataloader = lambda: [batches(1), batches(1)]  # type: ignore[method-assign]
    model, run = make(), trainer(tmp_path, max_steps=1, enable_checkpointing=False)
    [web, code] = run.validate(model, datamodule=data)
    assert ("val_loss/web" in web, "val_loss/code" in code) == (True, True)
    found = run.validate(model, [batches(1), batches(2), batches(3)])
    assert [f"val_loss/dataloader_idx_{i}" in metrics for i, metrics in enumerate(found)] == [
        True
    ] * 3


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = make()
    batch = next(iter(batches()))
    expected = torch.nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    )
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    torch.testing.assert_close(model.training_step(batch, 0), expected)


def test_optimizer_and_schedule(tmp_path: Path) -> None:
    model = make(lr=0.5, warmup_steps=4, weight_decay=0.3, betas=(0.8, 0.9), min_lr_ratio=0.1)
    rates: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    run = trainer(tmp_path, max_epochs=2, enable_checkpointing=False, callbacks=[Watch()])
    run.fit(model, batches())
    groups = run.optimizers[0].param_groups
    decays = {group["weight_decay"]: {p.ndim for p in group["params"]} for group in groups}
    assert decays == {0.3: {2}, 0.0: {1}}
    assert groups[0]["betas"] == (0.8, 0.9)
    assert len(rates) == 12
    assert rates[0] == pytest.approx(0.5 / 4)
    assert max(rates) == pytest.approx(0.5)
    assert groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "lr"),
    [
        ("adamw-bfloat16", "cosine", 1e-2),
        ("adamw-int8", "stable-decay", 1e-2),
        ("muon", "inverse-sqrt", 1e-2),
        ("lion", "constant", 3e-3),
        ("adafactor", "constant", 1e-1),
    ],
)
def test_optimizers_and_schedules_by_name(
    tmp_path: Path, optimizer: Any, schedule: Any, lr: float
) -> None:
    model = make(lr=lr, warmup_steps=2, optimizer=optimizer, schedule=schedule, min_lr_ratio=0.1)
    run = trainer(tmp_path, max_epochs=5, enable_checkpointing=False)
    run.fit(model, batches())
    assert run.callback_metrics["train_loss"] < math.log(32) - 0.15
    assert type(run.optimizers[0]).__name__.lower() == optimizer.partition("-")[0]
    ends = {"constant": 1.0, "inverse-sqrt": (2 / 30) ** 0.5}
    rate = run.optimizers[0].param_groups[0]["lr"] / lr
    assert rate == pytest.approx(ends.get(schedule, 0.1))
    copy = LanguageModel(**model.hparams)
    assert (copy.optimizer, copy.schedule) == (optimizer, schedule)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make(optimizer="adamw-int4", schedule="cosin")
    assert "nearest valid: 'adamw-int8'" in str(caught.value)
    assert "nearest valid: 'cosine'" in str(caught.value)


def test_configure_model_builds_once() -> None:
    model = make()
    trunk = model.trunk
    model.configure_model()
    assert model.trunk is trunk
    assert "trunk.layers.1.attention.wo.weight" in dict(model.named_parameters())


def test_config_by_name_object_or_mapping() -> None:
    assert LanguageModel().config == TransformerConfig.preset("tiny")
    config = TransformerConfig(**SIZES)
    assert LanguageModel(config).config is config
    assert LanguageModel(SIZES).config == config


EXPERTS = {"num_experts": 4, "router": {"z_loss": 0.5}}


def test_experts_in_a_mapping() -> None:
    model = LanguageModel({**SIZES, "experts": EXPERTS})
    assert model.config.experts is not None
    assert model.config.experts.router.z_loss == 0.5
    assert LanguageModel(**model.hparams).config == model.config
    with pytest.raises(ConfigError, match="config.experts.router.zloss: .*z_loss"):
        LanguageModel({**SIZES, "experts": {"num_experts": 4, "router": {"zloss": 0.5}}})


@pytest.mark.parametrize("chunked", [False, True])
def test_padding_goes_to_no_expert(chunked: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel({**SIZES, "experts": EXPERTS}, chunked_loss=chunked)
    model.configure_model()
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = next(iter(batches()))
    mask = torch.ones_like(batch["tokens"], dtype=torch.bool)
    mask[:, 5:] = False
    batch["labels"][~mask] = -100
    loss = model.training_step({**batch, "token_mask": mask}, 0)
    router: Any = model.get_submodule("trunk.layers.0.mlp.router")
    assert router.statistics.counts_e.sum() == 2 * mask.sum()
    torch.testing.assert_close(loss, model.training_step(batch, 0))  # causal: nobody sees padding
    alone = model.predict_step({**batch, "token_mask": mask}, 0) if not chunked else None
    if alone is not None:
        torch.testing.assert_close(alone[:, :5], model.predict_step(batch, 0)[:, :5])


def test_hyperparameters_are_plain_and_rebuild_the_module() -> None:
    model = make(lr=0.25, z_loss=0.5)
    copy = LanguageModel(**model.hparams)
    assert copy.config == model.config
    assert (copy.lr, copy.loss.z_loss) == (0.25, 0.5)
    assert isinstance(model.hparams["config"], dict)


def test_predicts_logits(tmp_path: Path) -> None:
    model = make()
    out: Any = trainer(tmp_path).predict(model, batches(count=1))
    assert out[0].shape == (2, 8, 32)
    tokens = next(iter(batches()))["tokens"]
    assert torch.equal(model.predict_step(tokens, 0), model(tokens))


def predict_split() -> tuple[Tensor, Tensor]:
    model = make().double().eval()
    tokens = next(iter(batches()))["tokens"]
    whole = model.predict_step(tokens, 0)
    dist.init_process_group("gloo")
    topology = Topology(Degrees(tp=2), torch.device("cpu"))
    for module in model.modules():
        if hasattr(module, "distribute"):
            module.distribute(topology)
    assert isinstance(model(tokens), SplitTensor)
    return whole, model.predict_step(tokens, 0)


def test_predicts_whole_logits_under_tp(pool: WorkerPool) -> None:
    for whole, gathered in pool.run(2, predict_split):
        torch.testing.assert_close(gathered, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"min_lr_ratio": 2.0}, "nearest valid: min_lr_ratio=1.0"),
        ({"config": {"hidden": 4}}, "config.hidden: TransformerConfig has no such field"),
        ({"config": {"num_head": 4}}, "config.num_head: .*nearest valid: config.num_heads"),
        ({"config": "huge"}, "preset=huge"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LanguageModel(**options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.zeros(1, 2)}, "a dict with .'input_ids'."),
        (torch.zeros(1, 2), "Tensor"),
        ([torch.zeros(1, 2)], "list"),
    ],
)
def test_a_foreign_batch_is_explained(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().training_step(batch, 0)


@pytest.mark.parametrize("padding", [0, 3])
def test_chunked_loss_is_the_same_loss(padding: int) -> None:
    tokens = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(
            SIZES | {"vocab_padding": padding}, chunked_loss=chunked, z_loss=0.01
        ).double()
        model.configure_model()
        model.double()
        loss, count = model._batch_loss((tokens, tokens))
        assert count == tokens.numel()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert model(tokens).shape == (3, 12, 32)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunked", [False, True])
def test_documents_of_a_batch_do_not_see_each_other(chunked: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(SIZES, chunked_loss=chunked)
    model.configure_model()
    rows = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    apart = [{name: value[:, part] for name, value in batch.items()} for part in _PARTS]
    expected = sum(model._batch_loss(part)[0] for part in apart)
    documents = torch.tensor([[5, 5, 5, 2, 2, 2, 2, 2]])
    found, count = model._batch_loss(batch | {"documents": documents})
    assert count == 8
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(model._batch_loss(batch)[0], found)
    logits = model.predict_step(batch | {"documents": documents}, 0)
    torch.testing.assert_close(logits[:, 3:], model.predict_step(apart[1]["tokens"], 0))


_PARTS = (slice(0, 3), slice(3, 8))


class Uneven(LanguageModel):
    """Labels most of which are -100 on some ranks, in some microbatches."""

    def train_dataloader(self) -> Any:
        topology = getattr(self.trainer.strategy, "_topology", None)
        size, rank = (1, 0) if topology is None else (topology.batch.size, topology.batch.rank)
        found = []
        for step in range(3):
            rows = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
            labels = rows[:, 1:].clone()
            for row, kept in enumerate((8, 8, 5, 1, 0, 0, 3, 1)):
                labels[row, kept:] = -100
            found.append(batch_share((rows[:, :-1], labels), size, rank))
        return DataLoader(found, batch_size=None)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def train_unevenly(
    options: dict[str, Any] | None, chunked: bool
) -> tuple[dict[str, Tensor], dict[str, float], list[float]]:
    pl.seed_everything(1, verbose=False)
    module = Uneven(SIZES, chunked_loss=chunked, z_loss=0.01)
    module.configure_model()  # the same weights under every strategy
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    strategy = "auto" if options is None else MegatronStrategy(**options)
    run = quiet_trainer(strategy, max_epochs=1, callbacks=[Watch()], num_sanity_val_steps=0)
    run.fit(module)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return lightning_megatron.gather(module), logged, losses


UNEVEN: dict[str, tuple[int, dict[str, Any], bool]] = {
    "dp 2": (2, {"zero": 1}, False),
    "dp 2 in microbatches": (2, {"zero": 2, "microbatch_size": 1}, True),
    "pp 2": (2, {"pp": 2, "num_microbatches": 4}, False),
    "tp 2 in microbatches": (2, {"tp": 2, "microbatch_size": 3}, False),
}


@pytest.fixture(scope="module")
def unevenly_alone(pool: WorkerPool) -> Any:
    """What plain Lightning gives in one process."""
    return pool.run(1, train_unevenly, None, False)[0]


@pytest.mark.parametrize("layout", UNEVEN)
def test_every_token_counts_alike(pool: WorkerPool, unevenly_alone: Any, layout: str) -> None:
    ranks, options, chunked = UNEVEN[layout]
    weights, logged, losses = unevenly_alone
    found = pool.run(ranks, train_unevenly, options, chunked)
    for ours, ours_logged, _ in found:
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=name)
        names = ["val_loss"] if layout.startswith("dp") else list(logged)
        assert [ours_logged[n] for n in names] == pytest.approx([logged[n] for n in names], 1e-10)
    of_ranks = torch.tensor([seen for _, _, seen in found]).mean(0)
    assert of_ranks.tolist() == pytest.approx(losses, rel=1e-6)
