"""Every name that a package offers is there, and is what its own file defines."""

from importlib import import_module

import pytest

PACKAGES = ("", ".layers", ".optim", ".data", ".checkpoint")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_can_be_imported(package: str) -> None:
    module = import_module(f"lightning_megatron{package}")
    for name in module.__all__:
        home = import_module(f"{module.__name__}.{module._HOMES.get(name, 'errors')}")
        assert getattr(module, name) is getattr(home, name), name
    assert set(module._HOMES) <= set(module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ColumnParalelLinear'"):
        _ = module.ColumnParalelLinear


def test_names_that_a_newcomer_tries() -> None:
    from lightning_megatron import LinearCrossEntropy, Muon, TextDataModule, TransformerConfig
    from lightning_megatron.layers import ColumnParallelLinear, VocabParallelCrossEntropy, whole
    from lightning_megatron.optim import AdamW

    for found in (LinearCrossEntropy, Muon, TextDataModule, TransformerConfig, AdamW):
        assert isinstance(found, type)
    assert issubclass(LinearCrossEntropy, ColumnParallelLinear)
    assert callable(VocabParallelCrossEntropy())
    assert whole([1]) == [1]
