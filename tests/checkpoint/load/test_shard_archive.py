import contextlib
import io
import pickle
import warnings
import zipfile

import pytest
import torch

from lightning_megatron.checkpoint.load.shard_archive import read_rows, read_tensor
from lightning_megatron.errors import DamagedCheckpointError


def saved(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return bytearray(stream.getvalue())


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 3), (2, 1, 5), (70000,)])
def test_reads_what_torch_saves(dtype, shape):
    tensor = (torch.rand(shape) * 2).to(dtype)
    found = read_tensor(saved(tensor), dtype, shape)
    assert found.dtype == dtype
    assert torch.equal(
        found.view(torch.uint8) if shape else found, tensor.view(torch.uint8) if shape else tensor
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0)[3:8],
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.tensor([5.0]).expand(1000),
        torch.nn.Linear(2, 3).weight.detach(),
    ],
)
def test_reads_views(tensor):
    assert torch.equal(read_tensor(saved(tensor), torch.float32, tuple(tensor.shape)), tensor)


@pytest.mark.parametrize("rows", [(0, 1), (1, 3), (0, 3)])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(3, 2, 4),
        torch.arange(24.0).reshape(4, 2, 3).permute(2, 1, 0),
        torch.arange(30.0)[6:].reshape(3, 8),
        torch.arange(3, dtype=torch.uint8),
    ],
)
def test_reads_rows_from_the_middle_of_a_file(tensor, rows):
    content = saved(tensor)
    file = io.BytesIO(b"before" + content + b"behind")
    found = read_rows(file, 6, len(content), tensor.dtype, tuple(tensor.shape), rows)
    assert torch.equal(found, tensor[slice(*rows)])
    with pytest.raises(DamagedCheckpointError):
        read_rows(file, 5, len(content), tensor.dtype, tuple(tensor.shape), rows)


def archive(description, numbers=bytes(24), *, compress=zipfile.ZIP_STORED, twice=False):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second record of one name
        file.writestr("a/data.pkl", description)
        for _ in range(1 + twice):
            file.writestr("a/data/0", numbers)
    return bytearray(stream.getvalue())


def description(shape=(2, 3), strides=(3, 1), offset=0):
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2, 3)))) as file:
        text = file.read("archive/data.pkl")

    def tuple_of(pair):
        ints = b"".join(pickle.dumps(n, 2)[2:-1] for n in pair)
        return ints + b"\x86"

    assert b"QK\x00K\x02K\x03\x86" in text
    text = text.replace(
        b"QK\x00K\x02K\x03\x86", b"Q" + pickle.dumps(offset, 2)[2:-1] + tuple_of(shape)
    )
    return text.replace(b"K\x03K\x01\x86", tuple_of(strides))


def test_the_forgery_itself_is_good():
    assert read_tensor(archive(description()), torch.float32, (2, 3)).tolist() == [[0.0] * 3] * 2


class Gadget:
    def __reduce__(self):
        return bytearray, (10**12,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(description(shape=(2, 10**12))), "shape"),
        (archive(description(strides=(10**12, 1))), "24 bytes for element"),
        (archive(description(strides=(-1, 1))), "described by"),
        (archive(description(offset=1)), "24 bytes for element 6"),
        (archive(description(), bytes(23)), "23 bytes"),
        (archive(description(), bytes(10**6), compress=zipfile.ZIP_DEFLATED), "is compressed"),
        (archive(description(), twice=True), "two records"),
        (archive(pickle.dumps(Gadget(), 2)), "made by"),
        (archive(pickle.dumps(Gadget(), 4)), "opcode"),
        (archive(b"cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "made by os system"),
        (archive(b"\x80\x02." * 9), "not the archive"),
        (archive(b"\x85."), "ends early"),
        (archive(b"K\x01\x85t."), "not the archive"),
        (archive(bytes(1 << 17)), "a description of"),
        (bytearray(b"PK\5\6" + bytes(18)), "not the archive"),
        (bytearray(1000), "not a zip file"),
        (bytearray(), "not the archive"),
        (saved({"a": torch.zeros(2, 3)}), "opcode"),
        (saved(torch.zeros(3, 2)), "shape"),
        (saved(torch.zeros(2, 3)).replace(b"data/0", b"data/1"), "data/0"),
    ],
    ids=range(20),
)
def test_anything_else_is_refused(content, message):
    with pytest.raises(DamagedCheckpointError, match=message):
        read_tensor(content, torch.float32, (2, 3))


def test_every_truncation_is_refused():
    content = saved(torch.arange(6.0).reshape(2, 3))
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(DamagedCheckpointError):
            read_tensor(content[:length], torch.float32, (2, 3))


def test_garbage_does_nothing_worse_than_an_error():
    original = saved(torch.arange(6.0).reshape(2, 3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        content = bytearray(original)
        for position in torch.randint(len(content), (3,), generator=generator).tolist():
            content[position] ^= int(torch.randint(1, 256, (), generator=generator))
        with contextlib.suppress(DamagedCheckpointError):
            assert read_tensor(content, torch.float32, (2, 3)).shape == (2, 3)
