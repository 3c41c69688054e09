"""pytorch-tabular: a network for rows of tables. It imports `pytorch_lightning`.

Its options are plain values, so the strategy is a name. A batch is the whole table, as its loader
shuffles. What was loaded trains on without the state of the optimizer.
"""

import copy
import io

import numpy as np
import pandas as pd
import torch

import lightning_megatron.pytorch_lightning  # noqa: F401 (before pytorch_tabular)
from lightning_megatron import CheckpointConfig, MegatronStrategy
from tests.projects.quickstarts.quickstart import Quickstart, weights

# isort: split
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

ROWS = 32


def table() -> pd.DataFrame:
    x = np.random.default_rng(1).normal(size=(ROWS, 2))
    kinds = np.array(["a", "b"])[(x[:, 0] > 0).astype(int)]
    return pd.DataFrame({"x": x[:, 0], "y": x[:, 1], "kind": kinds, "target": x.sum(1)})


def strategy(run: Quickstart) -> str:
    """Name of the run's strategy."""
    known = run.strategy()
    if isinstance(known, str):
        return known
    if run.name != "zero=3":
        return f"megatron_{run.name.replace('=', '_')}"
    files = CheckpointConfig(format="file")
    StrategyRegistry.register("zero_3_in_files", MegatronStrategy, zero=3, checkpoint=files)
    return "zero_3_in_files"


def main(run: Quickstart) -> None:
    options = run.options(strategy=strategy(run))
    del options["accelerator"], options["devices"], options["logger"]
    model = TabularModel(
        data_config=DataConfig(
            target=["target"], continuous_cols=["x", "y"], categorical_cols=["kind"]
        ),
        model_config=CategoryEmbeddingModelConfig(
            task="regression", layers="8-4", batch_norm_continuous_input=False, seed=1
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=run.batch_size(ROWS),
            max_epochs=4,
            accelerator="cpu",
            devices=run.ranks,
            checkpoints_path=str(run.folder / "own"),
            seed=1,
            trainer_kwargs=options,
        ),
        verbose=False,
    )
    with run.part("train") as numbers:
        trainer = model.fit(train=table(), validation=table())
        numbers["loss"] = trainer.callback_metrics["valid_loss"]
        numbers |= weights(model.model)
    saved = str(run.folder / "saved")
    with run.part("load") as numbers:
        model.save_model(saved)
        run.barrier()
        loaded = TabularModel.load_model(saved)
        numbers |= weights(loaded.model)
    with run.part("predict") as numbers:
        numbers["values"] = loaded.predict(table()).to_numpy()
    with run.part("use") as numbers:
        numbers |= weights(copy.deepcopy(model.model))
        numbers["values"] = model.predict(table()).to_numpy()
        torch.save(model.model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        trainer = loaded.train(loaded.model, loaded.datamodule, max_epochs=2)
        numbers["loss"] = trainer.callback_metrics["valid_loss"]
        numbers |= weights(loaded.model)
