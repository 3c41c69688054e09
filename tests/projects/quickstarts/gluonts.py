"""gluonts: DeepAR continues series. Its loader draws windows at random, without end, on each rank.

`train_model` ends by reading its own best checkpoint with `torch.load`.
"""

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gluonts.dataset.common import ListDataset
from gluonts.model.predictor import Predictor
from gluonts.torch import DeepAREstimator
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.projects.quickstarts.quickstart import Quickstart


def series() -> ListDataset:
    steps = np.arange(120)
    return ListDataset(
        [{"start": "2021-01-01", "target": np.sin(steps / 5 + n) + 2.0} for n in range(4)],
        freq="D",
    )


def main(run: Quickstart) -> None:
    def estimator(epochs: int, saver: ModelCheckpoint) -> DeepAREstimator:
        options: dict[str, Any] = run.options(
            max_epochs=epochs, default_root_dir=run.folder, callbacks=[saver]
        )
        return DeepAREstimator(
            freq="D",
            prediction_length=6,
            context_length=12,
            num_layers=1,
            hidden_size=8,
            lags_seq=[1, 2, 7],
            dropout_rate=0.0,
            num_batches_per_epoch=8,
            batch_size=run.batch_size(32),
            lr=1e-2,
            trainer_kwargs=options,
        )

    saver = ModelCheckpoint(run.folder / "own", save_last=True)
    with run.part("train") as numbers:
        output = estimator(4, saver).train_model(series(), series())
        numbers["loss"] = output.trainer.callback_metrics["val_loss"]
    with run.part("load") as numbers:
        folder = run.folder / f"predictor-{output.trainer.global_rank}"
        folder.mkdir()
        output.predictor.serialize(folder)
        loaded = Predictor.deserialize(Path(folder))
        numbers["means"] = means(loaded)
    with run.part("predict") as numbers:
        numbers["means"] = means(output.predictor)
    with run.part("use") as numbers:
        copy.deepcopy(output.trained_net)
        torch.save(output.trained_net.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        second = ModelCheckpoint(run.folder / "second")
        resumed = estimator(5, second).train_model(
            series(), series(), ckpt_path=saver.last_model_path
        )
        numbers["loss"] = resumed.trainer.callback_metrics["val_loss"]


def means(predictor: Predictor) -> torch.Tensor:
    """Of all forecasts."""
    return torch.tensor(np.mean([forecast.mean for forecast in predictor.predict(series())]))
