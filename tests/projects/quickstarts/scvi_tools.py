"""scvi-tools: a variational autoencoder of counts in cells. It draws samples in every step."""

import copy

import anndata
import numpy as np
import scvi
import torch

from tests.projects.quickstarts.quickstart import Quickstart


def main(run: Quickstart) -> None:
    counts = np.random.default_rng(0).poisson(3.0, (64, 12)).astype(np.float32)
    cells = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0)
    options = run.options(batch_size=run.batch_size(16), train_size=0.75)
    del options["logger"]  # False would keep no history
    with run.part("train") as numbers:
        model.train(max_epochs=8, **options)
        numbers["loss"] = model.trainer.callback_metrics["train_loss"]
    with run.part("load") as numbers:
        folder = str(run.folder / f"model-{model.trainer.global_rank}")
        model.save(folder)
        loaded = scvi.model.SCVI.load(folder, cells)
        numbers["elbo"] = torch.as_tensor(loaded.get_elbo())
    with run.part("predict") as numbers:
        numbers["elbo"] = torch.as_tensor(model.get_elbo())
    with run.part("use") as numbers:
        assert model.get_latent_representation().shape == (64, 4)
        copy.deepcopy(model.module)
    with run.part("resume") as numbers:
        loaded.train(max_epochs=4, **(options | {"strategy": run.strategy()}))
        numbers["loss"] = loaded.trainer.callback_metrics["train_loss"]
