"""Lightning warns in the words that `_lightning.warnings` looks for."""

import warnings
from typing import Any

import pytest

from lightning_megatron._lightning.warnings import hide_pytree_warning, hide_resuming_warning
from tests._lightning.running import Module, On, make_trainer


def test_hide_pytree_warning() -> None:
    from lightning.pytorch.utilities._pytree import _tree_flatten

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hide_pytree_warning()
        _tree_flatten(3)
    assert found == []


@pytest.mark.parametrize("hides", [False, True])
def test_hide_resuming_warning(hides: bool) -> None:
    saved: list[dict[str, Any]] = []
    note = On(on_train_batch_end=lambda trainer, _: saved.append(trainer.fit_loop.state_dict()))
    make_trainer(note).fit(Module())
    trainer = make_trainer(max_epochs=2)
    trainer.fit_loop.load_state_dict(saved[0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if hides:
            hide_resuming_warning()
        trainer.fit(Module())
    assert any("not resumable" in str(one.message) for one in found) is not hides
