"""Where documents are, and that packed ones are computed as in rows of their own."""

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.packed_documents import (
    bounds,
    documents_of,
    numbered,
    restarted_positions,
)
from lightning_megatron.layers.rotary import Rotary


def test_documents_of_lengths():
    found = documents_of([[2, 3], [4], [], [5]], 5)
    assert found.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0] * 5, [0] * 5]
    with pytest.raises(ConfigError, match=r"lengths\[1\]=\[2, 4\], s=5: .*nearest valid: s=6"):
        documents_of([[5], [2, 4]], 5)


def test_equal_neighbours_are_one_document():
    documents = torch.tensor([[7, 7, 3, 7, 7], [2, 2, 2, 2, 2]])
    assert numbered(documents).tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    assert restarted_positions(documents).tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    found = bounds(documents)
    assert found.sizes == [2, 1, 2, 5]
    assert found.longest == 5
    assert found.starts.tolist() == [0, 2, 3, 5, 10]
    assert found.starts.dtype == torch.int32


def test_what_is_known_of_documents_is_found_again_when_they_change():
    documents = torch.tensor([[0, 0, 1]])
    first = bounds(documents)
    assert bounds(documents) is first
    documents[0, 1] = 1
    assert bounds(documents).sizes == [1, 2]
    assert numbered(documents).tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_document_is_computed_as_in_a_row_of_its_own(backend, window):
    torch.manual_seed(0)
    layer = CausalSelfAttention(16, 4, 2, rotary=Rotary(4), window=window).double()
    layer.backend = backend
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    sizes = [[30, 5, 29], [63, 1]]
    found = layer(x, documents=documents_of(sizes, 64))
    for row, (of_row, lengths) in enumerate(zip(found, sizes, strict=True)):
        for y, part in zip(of_row.split(lengths), x[row].split(lengths), strict=True):
            torch.testing.assert_close(y, layer(part[None])[0], rtol=1e-12, atol=1e-12)


def test_positions_that_are_given_count():
    torch.manual_seed(0)
    layer = CausalSelfAttention(16, 4, rotary=Rotary(4)).double()
    x, documents = torch.randn(1, 5, 16, dtype=torch.float64), documents_of([[2, 3]], 5)
    restarted = layer(x, torch.tensor([0, 1, 0, 1, 2]), documents=documents)
    assert torch.equal(layer(x, documents=documents), restarted)
    scaled = layer(x, 2 * torch.arange(5), documents=documents)
    assert not torch.allclose(scaled, restarted)


def test_documents_that_do_not_fit_are_refused():
    layer = CausalSelfAttention(16, 4)
    with pytest.raises(ConfigError, match=r"shape \(1, 5\): .*\[2, 5\].*nearest valid"):
        layer(torch.randn(2, 5, 16), documents=documents_of([[5]], 5))
