import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from lightning_megatron.checkpoint.chunks import model_chunks
from lightning_megatron.checkpoint.collective_io import save_directory
from lightning_megatron.checkpoint.offline.export import (
    convert_to_lightning,
    export_safetensors,
    load_from_checkpoint,
)
from lightning_megatron.errors import CheckpointError
from lightning_megatron.topology.degrees import Degrees


class Network(pl.LightningModule):
    """Built in configure_model, tied, with a configuration object among its hyper-parameters."""

    def __init__(self, width, degrees=None, activation=None, **other):
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.degrees = Degrees(**degrees) if isinstance(degrees, dict) else degrees
        self.activation = activation
        self.layers = None
        self.seen = None

    def configure_model(self):
        if self.layers is None:
            self.layers = nn.ModuleList([nn.Linear(self.width, self.width) for _ in range(2)])
            self.layers[1].weight = self.layers[0].weight

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["epoch"]


@pytest.fixture
def saved(tmp_path):
    module = Network(3, degrees=Degrees(tp=2), activation=len)
    module.configure_model()
    state = {
        "epoch": 4,
        "global_step": 9,
        "pytorch-lightning_version": pl.__version__,
        "hyper_parameters": dict(module.hparams),
    }
    save_directory(tmp_path / "a.ckpt", model_chunks(module), state)
    return tmp_path / "a.ckpt", module


def assert_same_weights(module, other):
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_load_from_checkpoint_of_a_directory(saved):
    path, module = saved
    loaded = load_from_checkpoint(Network, path)
    assert (loaded.width, loaded.degrees, loaded.activation) == (3, Degrees(tp=2), None)
    assert loaded.seen == 4
    assert_same_weights(module, loaded)
    assert load_from_checkpoint(Network, path, activation=abs).activation is abs


def test_load_from_checkpoint_moves_to_the_device(saved):
    assert load_from_checkpoint(Network, saved[0], "meta").device.type == "meta"


def test_load_from_checkpoint_of_another_width_fails(saved):
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Network, saved[0], width=5)


def test_load_from_checkpoint_not_strict(saved):
    class More(Network):
        def configure_model(self):
            super().configure_model()
            self.more = nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"more\.weight"):
        load_from_checkpoint(More, saved[0])
    assert_same_weights(saved[1], load_from_checkpoint(More, saved[0], strict=False))


def test_converted_file_is_a_stock_checkpoint(saved, tmp_path):
    path, module = saved
    convert_to_lightning(path, tmp_path / "plain.ckpt")
    for loaded in (
        Network.load_from_checkpoint(tmp_path / "plain.ckpt"),
        load_from_checkpoint(Network, tmp_path / "plain.ckpt"),
    ):
        assert (loaded.width, loaded.degrees) == (3, Degrees(tp=2))
        assert_same_weights(module, loaded)
    torch.load(tmp_path / "plain.ckpt", weights_only=True)


def test_exported_safetensors_is_the_plain_state_dict(saved, tmp_path):
    path, module = saved
    export_safetensors(path, tmp_path / "w.safetensors")
    other = Network(3)
    other.configure_model()
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert_same_weights(module, other)


def test_export_without_aliases_in_another_format(saved, tmp_path):
    path, module = saved
    export_safetensors(path, tmp_path / "w.safetensors", dtype=torch.bfloat16, aliases=False)
    state = load_file(tmp_path / "w.safetensors")
    assert state.keys() == {"layers.0.weight", "layers.0.bias", "layers.1.bias"}
    assert torch.equal(state["layers.0.bias"], module.layers[0].bias.bfloat16())
    other = Network(3)
    other.configure_model()
    load_model(other, tmp_path / "w.safetensors")


def test_missing_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_from_checkpoint(Network, tmp_path / "none.ckpt")
