from typing import Any

import pytest
import torch.distributed as dist

from lightning_megatron.launch.store_list import StoreList


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def filled(store: Any, *texts: str, most: int | None = None) -> StoreList:
    made = StoreList(store, "news", most=most)
    for text in texts:
        made.append(text)
    return made


def test_each_reader_sees_each_entry_once(store: Any) -> None:
    writer = filled(store, "a", "b")
    late = StoreList(store, "news", from_now=True)
    assert writer.new() == ["a", "b"]
    writer.append("c")
    assert [writer.new(), writer.new(), late.new()] == [["c"], [], ["c"]]


def test_an_entry_that_is_being_written_is_read_later(store: Any) -> None:
    reader = filled(store, "a")
    number = store.add("news", 1)
    filled(store, "c")
    assert reader.new() == ["a", "c"]
    store.set(f"news/{number}", "b")
    assert reader.new() == ["b"]


def test_an_entry_whose_writer_died_can_be_forgotten(store: Any) -> None:
    reader = filled(store)
    number = store.add("news", 1)
    assert reader.new() == []
    reader.forget_unwritten()
    store.set(f"news/{number}", "b")
    assert reader.new() == []


def test_entries_beyond_the_most_are_only_counted(store: Any) -> None:
    assert filled(store, "a", "b", "c", most=2).new() == ["a", "b"]
    assert store.add("news", 0) == 3
