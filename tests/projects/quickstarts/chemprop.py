"""chemprop: a message passing network predicts a property of molecules."""

import copy
import io

import torch
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.projects.quickstarts.quickstart import Quickstart, weights

MOLECULES = [
    *("C" * n for n in range(1, 9)),
    *("C" * n + "O" for n in range(1, 9)),
    *("C" * n + "N" for n in range(1, 9)),
    *("c1ccccc1" + "C" * n for n in range(1, 9)),
]


def molecules(labelled: bool = True) -> data.MoleculeDataset:
    points = [
        data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles))] if labelled else None)
        for smiles in MOLECULES
    ]
    return data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())


def main(run: Quickstart) -> None:
    train, new = molecules(), molecules(labelled=False)
    train.normalize_targets()
    loader = data.build_dataloader(train, batch_size=run.batch_size(8), shuffle=False)
    unlabelled = data.build_dataloader(new, batch_size=run.batch_size(8), shuffle=False)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16)
    )

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, "best-{epoch}", "train_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    first = trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        loaded = models.MPNN.load_from_checkpoint(saver.best_model_path)
        numbers |= weights(loaded)
    with run.part("predict") as numbers:
        numbers["predictions"] = torch.cat(trainer(1, "first").predict(model, unlabelled))
    with run.part("use") as numbers:
        numbers |= weights(model)
        batch = next(iter(unlabelled))
        model.eval()
        numbers["one"] = model(batch.bmg)[:2]
        copied = copy.deepcopy(model)
        numbers["copy"] = copied(batch.bmg)[:2]
        torch.save(model, io.BytesIO())
    with run.part("resume") as numbers:
        resumed = models.MPNN(
            nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16)
        )
        second = trainer(3, "second")
        second.fit(resumed, loader, loader, ckpt_path=saver.last_model_path, weights_only=False)
        numbers["loss"] = second.callback_metrics["val_loss"]
