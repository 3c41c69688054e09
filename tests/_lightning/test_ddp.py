"""Lightning asks for a DDPStrategy where, and of what, `_lightning.ddp` says."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_megatron._lightning.ddp import SeenAsDDP, is_compiled
from tests._lightning.running import Module


class Divides(SeenAsDDP):
    divides = True

    @property
    def divides_by_all(self) -> bool:
        return self.divides


def test_seen_as_ddp() -> None:
    Divides.__abstractmethods__ = frozenset()  # nothing else of a strategy is asked for
    one, other = Divides.__new__(Divides), Divides.__new__(Divides)
    other.divides = False
    assert isinstance(one, DDPStrategy)
    assert not isinstance(other, DDPStrategy)
    assert isinstance(one, Divides)
    assert isinstance(other, Divides)
    assert isinstance(one, Strategy)
    assert not Divides.__subclasses__()
    real: Any = DDPStrategy(find_unused_parameters=True, broadcast_buffers=False)
    assert real._ddp_kwargs == dict(one._ddp_kwargs)


def test_nobody_else_in_lightning_asks() -> None:
    """A further question would have to be read, and answered as well."""
    root = Path(lightning.__path__[0]) / "pytorch"
    files = (path for path in root.rglob("*.py") if path.parent.name != "strategies")
    asking = {str(path.relative_to(root)) for path in files if "DDPStrategy" in path.read_text()}
    assert asking == {
        "utilities/compile.py",
        "trainer/connectors/accelerator_connector.py",
    }


@pytest.mark.thorough
def test_is_compiled_as_torch_leaves_it() -> None:
    from lightning.pytorch.utilities.compile import from_compiled

    assert is_compiled(from_compiled(torch.compile(Module())))  # type: ignore[arg-type]


def test_is_compiled() -> None:
    assert not is_compiled(Module())
