"""The two names of Lightning are one, and what is told of it."""

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import lightning.fabric.utilities.seed
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron._lightning.package_names import UNITING, other_package, unite_names

NAMES = ("pytorch_lightning", "lightning_fabric")


@pytest.fixture
def apart() -> Iterator[None]:
    """The names mean nothing before the test and after it."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
            del sys.modules[name]

    before = sys.meta_path[:]
    forget()
    yield
    sys.meta_path[:] = before
    forget()


@pytest.mark.usefixtures("apart")
def test_unite_names(caplog: pytest.LogCaptureFixture) -> None:
    spec = pl.__spec__
    assert unite_names()
    assert unite_names()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        assert import_module("pytorch_lightning") is pl
        callbacks = import_module("pytorch_lightning.callbacks.model_checkpoint")
        seed = import_module("lightning_fabric.utilities.seed")
    assert callbacks.ModelCheckpoint is ModelCheckpoint
    assert seed is lightning.fabric.utilities.seed
    assert pl.__spec__ is spec
    told = [record for record in caplog.records if "means lightning.pytorch" in record.message]
    assert len(told) == 1
    assert other_package("pytorch_lightning") is None
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.nowhere"):
        import_module("pytorch_lightning.nowhere")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("apart")
def test_the_other_package_came_first(name: str) -> None:
    other = sys.modules[name] = ModuleType(name)
    finders = sys.meta_path[:]
    assert other_package(name) is other
    assert "import lightning_megatron.pytorch_lightning" in UNITING
    assert not unite_names()
    assert sys.meta_path == finders
