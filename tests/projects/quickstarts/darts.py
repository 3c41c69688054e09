"""darts: N-BEATS continues a series. It imports `pytorch_lightning`, the other package."""

import copy

import lightning_megatron.pytorch_lightning  # noqa: F401 (before the project)
import numpy as np
import torch
from darts import TimeSeries
from darts.models import NBEATSModel

from tests.projects.quickstarts.quickstart import Quickstart, weights


def main(run: Quickstart) -> None:
    series = TimeSeries.from_values(np.sin(np.arange(60) / 4).astype(np.float32))

    def network(name: str) -> NBEATSModel:
        return NBEATSModel(
            input_chunk_length=12,
            output_chunk_length=4,
            num_stacks=1,
            num_blocks=1,
            layer_widths=16,
            n_epochs=2,
            batch_size=run.batch_size(8),
            random_state=1,
            model_name=name,
            work_dir=str(run.folder),
            save_checkpoints=True,
            force_reset=run.ranks == 1,
            pl_trainer_kwargs=run.options(),
        )

    model = network("first")
    with run.part("train") as numbers:
        model.fit(series, val_series=series)
        numbers["loss"] = model.trainer.callback_metrics["val_loss"]
    with run.part("load") as numbers:
        best = NBEATSModel.load_from_checkpoint("first", work_dir=str(run.folder), best=True)
        numbers["weights"] = len(weights(best.model))
    with run.part("predict") as numbers:
        numbers["values"] = torch.from_numpy(model.predict(4).values()).mean()
    with run.part("use") as numbers:
        numbers["weights"] = len(weights(copy.deepcopy(model.model)))
        model.save(str(run.folder / f"saved-{model.trainer.global_rank}.pt"))
    with run.part("resume") as numbers:
        model.fit(series, val_series=series, epochs=1)
        numbers["loss"] = model.trainer.callback_metrics["val_loss"]
