"""neuralforecast: NHITS continues series. It imports `pytorch_lightning`.

Trained models are saved by `NeuralForecast.save`, and train on after `load`, without the state of
the optimizer.
"""

import copy
import io
from typing import Any

import numpy as np
import pandas as pd
import torch

import lightning_megatron.pytorch_lightning  # noqa: F401 (before neuralforecast)
from tests.projects.quickstarts.quickstart import Quickstart, weights

# isort: split
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from pytorch_lightning.callbacks import ModelCheckpoint


def series() -> pd.DataFrame:
    steps = np.arange(40)
    return pd.concat(
        pd.DataFrame({"unique_id": str(n), "ds": steps, "y": np.sin(steps / 3 + n) + 2})
        for n in range(4)
    ).reset_index(drop=True)


def main(run: Quickstart) -> None:
    alone = {"strategy": "auto", "devices": 1}
    saver = ModelCheckpoint(run.folder / "own", monitor="ptl/val_loss", save_last=True)

    model = NHITS(
        h=4,
        input_size=8,
        max_steps=20,
        val_check_steps=5,
        learning_rate=1e-2,
        batch_size=run.batch_size(4),
        windows_batch_size=None,  # all, which is not random
        mlp_units=3 * [[8, 8]],
        random_seed=1,
        **run.options(enable_checkpointing=True, callbacks=[saver]),
    )
    forecast = NeuralForecast(models=[model], freq=1)
    with run.part("train") as numbers:
        forecast.fit(series(), val_size=4)
        [model] = forecast.models  # a copy
        numbers["loss"] = model.metrics["ptl/val_loss"]
        numbers |= weights(model)
    with run.part("load") as numbers:
        numbers |= weights(
            NHITS.load_from_checkpoint(run.folder / "own" / "last.ckpt", weights_only=False)
        )
    with run.part("predict") as numbers:
        path = str(run.folder / "saved")
        forecast.save(path)  # the first rank
        run.barrier()
        loaded = NeuralForecast.load(path)
        loaded.models[0].trainer_kwargs |= alone
        numbers["values"] = values(loaded)
    with run.part("use") as numbers:
        numbers |= weights(copy.deepcopy(model))
        model.trainer_kwargs |= alone  # a Trainer of several processes returns parts
        numbers["values"] = values(forecast)
        torch.save(model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        further = NeuralForecast.load(path)
        [resumed] = further.models
        options: dict[str, Any] = run.options()
        resumed.trainer_kwargs |= options
        further.fit(series(), val_size=4)
        numbers["loss"] = resumed.metrics["ptl/val_loss"]
        numbers |= weights(resumed)


def values(forecast: NeuralForecast) -> np.ndarray:
    """Of all forecasts."""
    return forecast.predict()["NHITS"].to_numpy()
