"""darts: N-BEATS continues series. It imports `pytorch_lightning`.

Its Trainer has a plugin that reads checkpoints, and knows the classes in them.
"""

import copy
import io

import numpy as np
import torch

import lightning_megatron.pytorch_lightning  # noqa: F401 (before darts)
from tests.projects.quickstarts.quickstart import Quickstart, weights

# isort: split
from darts import TimeSeries
from darts.models import NBEATSModel


def series() -> list[TimeSeries]:
    steps = np.arange(40, dtype=np.float32)
    return [TimeSeries.from_values(np.sin(steps / 3 + n) + 2) for n in range(4)]


def main(run: Quickstart) -> None:
    def network(name: str) -> NBEATSModel:
        return NBEATSModel(
            input_chunk_length=8,
            output_chunk_length=4,
            num_stacks=2,
            num_blocks=1,
            num_layers=1,
            layer_widths=8,
            n_epochs=2,
            batch_size=run.batch_size(12),
            random_state=1,
            model_name=name,
            work_dir=str(run.folder),
            save_checkpoints=True,
            pl_trainer_kwargs=run.options(),
        )

    def fit(model: NBEATSModel, **options: int) -> None:
        order = {"shuffle": False}  # darts takes it out
        model.fit(series(), val_series=series(), dataloader_kwargs=order, verbose=False, **options)

    model = network("first")
    with run.part("train") as numbers:
        fit(model)
        numbers["loss"] = model.trainer.callback_metrics["val_loss"]
        numbers |= weights(model.model)
    alone = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "devices": 1}
    with run.part("load") as numbers:
        best = NBEATSModel.load_from_checkpoint("first", str(run.folder), trusted=True)
        numbers |= weights(best.model)
    with run.part("predict") as numbers:
        model.save(str(run.folder / "saved"))
        loaded = NBEATSModel.load(str(run.folder / "saved"), alone, trusted=True)
        numbers["values"] = values(loaded)
    with run.part("use") as numbers:
        numbers |= weights(copy.deepcopy(model.model))
        model.trainer_params |= {**alone, "strategy": "auto"}
        numbers["values"] = values(model)
        torch.save(model.model.state_dict(), io.BytesIO())
    with run.part("resume") as numbers:
        resumed = NBEATSModel.load_from_checkpoint(
            "first", str(run.folder), best=False, trusted=True
        )
        fit(resumed, epochs=3)
        numbers["loss"] = resumed.trainer.callback_metrics["val_loss"]
        numbers |= weights(resumed.model)


def values(model: NBEATSModel) -> np.ndarray:
    """Of all forecasts."""
    return np.stack([each.values() for each in model.predict(4, series=series())])
