"""What the tests on GPUs share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def reproducible_products() -> Iterator[None]:
    """Let cuBLAS be deterministic, which it reads when the device's first product begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
