from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.tokens.packing import (
    PACKINGS,
    Packing,
    best_fit,
    concatenated,
    one_each,
)

RANDOM = np.random.default_rng(0).integers(0, 40, 3000)


def rows(packing: Packing) -> list[list[tuple[int, int, int]]]:
    return [packing.row(index) for index in range(len(packing))]


def labels(packing: Packing, lengths: Any) -> list[tuple[int, int]]:
    """Document and place of each token that is a label."""
    return [
        (document, place + 1)
        for row in rows(packing)
        for document, start, stop in row
        for place in range(start, stop)
        if place + 1 < lengths[document]
    ]


@pytest.mark.parametrize("how", PACKINGS)
def test_every_label_is_in_exactly_one_row(how: str) -> None:
    packing = PACKINGS[how](RANDOM, 16)
    found = labels(packing, RANDOM)
    assert sorted(found) == [(d, i) for d, n in enumerate(RANDOM) for i in range(1, n)]
    assert all(sum(stop - start for _, start, stop in row) <= 16 for row in rows(packing))
    assert all(start < stop for row in rows(packing) for _, start, stop in row)


def first_place(lengths: list[int], capacity: int) -> list[int]:
    """Rooms that best-fit decreasing leaves, one document at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else capacity) - length)
    return sorted(rooms)


@pytest.mark.parametrize("capacity", [7, 40, 64])
def test_best_fit_is_that_of_one_document_after_the_other(capacity: int) -> None:
    lengths = [n for n in RANDOM[:300].tolist() if 2 <= n <= capacity]
    packing = best_fit(lengths, capacity)
    rooms = [capacity - sum(stop - start for _, start, stop in row) for row in rows(packing)]
    # No piece is as short as what a room of 1 could take.
    assert sorted(rooms) == first_place(lengths, capacity)


def test_best_fit_cuts_only_what_fits_into_no_row_and_fills_the_rest() -> None:
    lengths = np.random.default_rng(1).lognormal(4.5, 1, 200_000).astype(np.int32)
    packing = best_fit(lengths, 512)
    cut = {document for row in rows(packing) for document, start, _ in row if start}
    assert min(lengths[document] for document in cut) == 514  # 513 have 512 labels
    assert packing.documents_cut == len(cut)
    assert packing.fill > 0.999
    assert concatenated(lengths, 512).documents_cut > 5 * packing.documents_cut


def test_long_documents_fill_rows_and_the_rest_of_them_goes_with_others() -> None:
    assert rows(best_fit([12, 3, 5, 11, 10], 5)) == [
        [(4, 5, 10)],
        [(2, 0, 5)],
        [(1, 0, 3), (0, 10, 12)],
        [(0, 0, 5)],
        [(0, 5, 10)],
        [(3, 0, 5)],  # of 11: the last token is the label of the one before
        [(3, 5, 10)],
        [(4, 0, 5)],
    ]
    assert rows(one_each([12, 1], 5)) == [[(0, 10, 12)], [(0, 0, 5)], [(0, 5, 10)]]
    assert rows(concatenated([3, 0, 4, 5], 5)) == [
        [(0, 0, 3), (2, 0, 2)],
        [(2, 2, 4), (3, 0, 3)],
        [(3, 3, 5)],
    ]


@pytest.mark.parametrize("how", PACKINGS)
def test_nothing_to_pack(how: str) -> None:
    for lengths in ([], [0, 0]):
        packing = PACKINGS[how](np.array(lengths, dtype=np.int32), 8)
        assert (len(packing), packing.tokens, packing.fill) == (0, 0, 0.0)
        with pytest.raises(IndexError):
            packing.row(0)
    assert len(best_fit([1, 1], 8)) == len(one_each([1], 8)) == 0


def test_more_rows_than_16_bits_can_count() -> None:
    packing = best_fit(np.full(70_000, 5), 5)
    assert sorted(packing.documents.tolist()) == list(range(70_000))
    assert np.array_equal(packing.offsets, np.arange(70_001))
