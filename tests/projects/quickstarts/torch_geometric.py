"""PyTorch Geometric: a graph network classifies graphs."""

import copy
import io

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

from tests.projects.quickstarts.quickstart import Quickstart, weights


class Network(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.convs = nn.ModuleList([GCNConv(4, width), GCNConv(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, graphs: Data) -> Tensor:
        x = graphs.x
        for conv in self.convs:
            x = conv(x, graphs.edge_index).relu()
        return self.head(global_mean_pool(x, graphs.batch))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch), batch.y)

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch), batch.y)
        self.log("val_loss", loss, batch_size=batch.num_graphs, sync_dist=True)

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def graphs() -> list[Data]:
    return [
        Data(
            x=torch.randn(5 + n % 3, 4),
            edge_index=torch.randint(0, 5, (2, 12)),
            y=torch.tensor([n % 2]),
        )
        for n in range(32)
    ]


def main(run: Quickstart) -> None:
    loader = DataLoader(graphs(), batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        return pl.Trainer(max_epochs=epochs, callbacks=[saver], **run.options())

    model, first = Network(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers["loss"] = first.callback_metrics["val_loss"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Network.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        numbers["predictions"] = torch.cat(first.predict(model, loader))
    with run.part("use") as numbers:
        numbers |= weights(model)
        numbers["outputs"] = copy.deepcopy(model)(next(iter(loader)))[:2]
        torch.save(model, io.BytesIO())
    with run.part("resume") as numbers:
        second = trainer(3, "second")
        second.fit(Network(), loader, loader, ckpt_path=saver.last_model_path)
        numbers["loss"] = second.callback_metrics["val_loss"]
