"""A cache that a caller gives, by the names that versions of transformers have for it."""

import pytest

from lightning_megatron.adoption.caches import given_cache, without_cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_given_cache_is_found_and_left_out_by_either_name(name: str) -> None:
    cache = object()
    arguments = {"input_ids": 1, name: cache}
    assert given_cache(arguments) is cache
    assert given_cache({"input_ids": 1, name: None}) is None
    assert without_cache(arguments) == {"input_ids": 1, name: None}
