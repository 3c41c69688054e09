"""neuralforecast: NHITS continues series. It imports `pytorch_lightning`, the other package."""

import copy
import os

import lightning_megatron.pytorch_lightning  # noqa: F401 (before the project)
import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from tests.projects.quickstarts.quickstart import Quickstart


def series() -> pd.DataFrame:
    days = pd.date_range("2021-01-01", periods=80)
    return pd.concat(
        pd.DataFrame({"unique_id": str(n), "ds": days, "y": np.sin(np.arange(80) / 5 + n) + 2})
        for n in range(4)
    ).reset_index(drop=True)


def main(run: Quickstart) -> None:
    model = NHITS(
        h=6,
        input_size=12,
        max_steps=20,
        mlp_units=3 * [[16, 16]],
        batch_size=run.batch_size(4),
        **run.options(),
    )
    forecasts = NeuralForecast(models=[model], freq="D")
    with run.part("train") as numbers:
        forecasts.fit(series())
        numbers["loss"] = forecasts.models[0].train_trajectories[-1][1]
    # On several GPUs it predicts on one by itself: every rank wants all forecasts.
    alone = {"devices": 1, "strategy": "auto"}
    with run.part("predict") as numbers:
        forecasts.models[0].trainer_kwargs |= alone
        numbers["mean"] = forecasts.predict()["NHITS"].mean()
    with run.part("load") as numbers:
        folder = str(run.folder / f"saved-{os.environ['RANK']}")
        forecasts.save(folder, overwrite=True)
        loaded = NeuralForecast.load(folder)
        numbers["mean"] = loaded.predict(series())["NHITS"].mean()
    with run.part("use") as numbers:
        copy.deepcopy(forecasts.models[0])
    with run.part("resume") as numbers:
        forecasts.models[0].trainer_kwargs |= run.options()
        forecasts.fit(series())
        numbers["loss"] = forecasts.models[0].train_trajectories[-1][1]
