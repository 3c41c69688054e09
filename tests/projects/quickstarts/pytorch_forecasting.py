"""pytorch-forecasting: a temporal fusion transformer continues series."""

import copy
import io

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from tests.projects.quickstarts.quickstart import Quickstart, weights


def series() -> pd.DataFrame:
    steps = np.arange(20)
    return pd.concat(
        pd.DataFrame({"step": steps, "series": str(n), "value": np.sin(steps / 3 + n) + 2})
        for n in range(4)
    ).reset_index(drop=True)


def main(run: Quickstart) -> None:
    training = TimeSeriesDataSet(
        series(),
        time_idx="step",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )
    size = run.batch_size(12)
    loader = training.to_dataloader(train=True, batch_size=size, shuffle=False)
    validation = training.to_dataloader(train=False, batch_size=size)

    def network() -> TemporalFusionTransformer:
        return TemporalFusionTransformer.from_dataset(
            training,
            hidden_size=8,
            hidden_continuous_size=8,
            attention_head_size=1,
            dropout=0.0,
            loss=QuantileLoss(),
            optimizer="adam",
            learning_rate=0.01,
            log_interval=-1,
        )

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        options = run.options(default_root_dir=run.folder, callbacks=[saver])
        return pl.Trainer(max_epochs=epochs, gradient_clip_val=0.1, **options)

    model, first = network(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, validation)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        best = TemporalFusionTransformer.load_from_checkpoint(
            saver.best_model_path, weights_only=False
        )
        numbers |= weights(best)
    alone = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1}
    with run.part("predict") as numbers:
        numbers["quantiles"] = best.predict(validation, mode="quantiles", trainer_kwargs=alone)
    with run.part("use") as numbers:
        numbers |= weights(model)
        x, _ = next(iter(validation))
        copied = copy.deepcopy(model).eval()
        numbers["outputs"] = copied(x)["prediction"][:2]
        torch.save(model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(
            network(), loader, validation, ckpt_path=saver.last_model_path, weights_only=False
        )
        numbers["loss"] = second.callback_metrics["val_loss"]
