from pathlib import Path

import pytest
import torch

from lightning_megatron.data.text import ByteWindows, TextDataModule, standard_library_files
from lightning_megatron.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * (100 + i))
    return tmp_path


def letters(data: ByteWindows) -> set[int]:
    return set(data.text.tolist()) - {0}


def make(folder: Path, **options: object) -> TextDataModule:
    options = {"seq_len": 16, "batch_size": 4, "val_fraction": 0.2} | options
    module = TextDataModule([str(folder / "*.txt")], **options)  # type: ignore[arg-type]
    module.setup()
    return module


def test_windows_cover_every_label_once() -> None:
    data = ByteWindows(torch.arange(100, dtype=torch.uint8), seq_len=10)
    assert len(data) == 9
    first, second = data[0], data[1]
    assert first["tokens"].tolist() == list(range(10))
    assert first["labels"].tolist() == list(range(1, 11))
    assert first["labels"].dtype is torch.int64
    assert second["tokens"][0] == first["labels"][-1]
    labels = torch.cat([window["labels"] for window in data])
    assert labels.tolist() == list(range(1, 91))
    with pytest.raises(IndexError):
        data[9]


def test_a_window_needs_one_byte_more_than_its_tokens() -> None:
    assert len(ByteWindows(torch.zeros(10, dtype=torch.uint8), seq_len=10)) == 0
    assert len(ByteWindows(torch.zeros(11, dtype=torch.uint8), seq_len=10)) == 1
    assert len(ByteWindows(torch.zeros(0, dtype=torch.uint8), seq_len=10)) == 0


def test_batches_of_both_splits(folder: Path) -> None:
    module = make(folder)
    batch = next(iter(module.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (4, 16)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    for loader in (module.val_dataloader(), module.test_dataloader(), module.predict_dataloader()):
        assert next(iter(loader))["tokens"].shape == (4, 16)


def test_the_split_is_by_file(folder: Path) -> None:
    module = make(folder)
    train, val = module.train_dataloader().dataset, module.val_dataloader().dataset
    assert isinstance(train, ByteWindows)
    assert isinstance(val, ByteWindows)
    assert letters(train) | letters(val) == set(range(65, 75))
    assert not letters(train) & letters(val)
    assert len(letters(val)) == 2


def test_the_seed_decides_split_and_order(folder: Path) -> None:
    def batches(seed: int) -> list[list[int]]:
        loader = make(folder, seed=seed).train_dataloader()
        return [batch["tokens"].flatten().tolist() for batch in loader]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)


def test_shuffling_leaves_the_global_random_stream_alone(folder: Path) -> None:
    loader = make(folder).train_dataloader()
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    next(iter(loader))
    assert torch.rand(()) == expected


def test_max_bytes_stops_reading(folder: Path) -> None:
    module = make(folder, max_bytes=300)
    train, val = module.train_dataloader().dataset, module.val_dataloader().dataset
    assert len(letters(train)) + len(letters(val)) == 3  # type: ignore[arg-type]


def test_setup_reads_once(folder: Path) -> None:
    module = make(folder)
    before = module.train_dataloader().dataset
    module.setup("validate")
    assert module.train_dataloader().dataset is before


def test_standard_library_is_the_default() -> None:
    files = standard_library_files()
    assert files == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    module = TextDataModule(max_bytes=200_000, batch_size=2)
    module.setup("fit")
    assert len(module.train_dataloader()) > 100


def test_patterns_descend_and_do_not_repeat(folder: Path) -> None:
    (folder / "deeper").mkdir()
    (folder / "deeper" / "x.txt").write_text("x" * 500)
    module = TextDataModule([str(folder / "**/*.txt"), str(folder / "0.txt")], 16, 4)
    module.setup()
    train, val = module.train_dataloader().dataset, module.val_dataloader().dataset
    assert letters(train) | letters(val) == {*range(65, 75), ord("x")}  # type: ignore[arg-type]
    total = train.text.numel() + val.text.numel()  # type: ignore[attr-defined]
    assert total == sum(101 + i for i in range(10)) + 501


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": []}, r"files=\[\]"),
        ({"files": ["nothing/*.txt"]}, "nothing.*no such file"),
        ({"files": ["{folder}"]}, r"but a folder; nearest valid"),
        ({"files": ["{folder}/0.txt"]}, "split into training and validation is by file"),
        ({"files": ["{folder}/*.txt"], "seq_len": 2000}, "training text of"),
        ({"files": ["{folder}/*.txt"], "batch_size": 2000}, "at least 2000 are needed"),
        ({"files": ["{folder}/*.txt"], "seq_len": 120}, "validation text of"),
    ],
)
def test_unusable_text_is_explained(folder: Path, options: dict[str, object], message: str) -> None:
    files = [name.format(folder=folder) for name in options.pop("files")]  # type: ignore[attr-defined]
    module = TextDataModule(files, **{"seq_len": 16, "batch_size": 4} | options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        module.setup()


def test_wrong_options_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        TextDataModule(seq_len=0, batch_size=0, num_workers=-1, val_fraction=1.0, max_bytes=0)
    assert len(caught.value.problems) == 5
