import contextlib
import io
import os
import pickle
import sys
import zipfile

import pytest
import torch

from lightning_megatron.checkpoint.load.tensor_archive import read_tensor
from lightning_megatron.errors import DamagedCheckpointError


def saved(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def read(content, dtype, shape, rows=None):
    """Read it from the middle of a file."""
    file = io.BytesIO(b"before" + content + b"behind")
    return read_tensor(file, 6, len(content), dtype, shape, rows)


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.float8_e4m3fn),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_what_torch_saves(dtype):
    for shape in ((), (1,), (3, 4), (0, 3), (2, 1, 5), (70000,)):
        tensor = (torch.rand(shape) * 2).to(dtype)
        found = read(saved(tensor), dtype, shape)
        assert found.dtype == dtype
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
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
    assert torch.equal(read(saved(tensor), torch.float32, tuple(tensor.shape)), tensor)


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
def test_reads_rows(tensor, rows):
    content = saved(tensor)
    shape = tuple(tensor.shape)
    assert torch.equal(read(content, tensor.dtype, shape, rows), tensor[slice(*rows)])
    with pytest.raises(DamagedCheckpointError):
        read_tensor(io.BytesIO(content), 1, len(content), tensor.dtype, shape, rows)


def archive(description, numbers=bytes(24), *, compress=zipfile.ZIP_STORED, order=sys.byteorder):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress) as file:
        file.writestr("a/data.pkl", description)
        file.writestr("a/data/0", numbers)
        file.writestr("a/byteorder", order)
        file.writestr("a/version", "3")
    return stream.getvalue()


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
    assert read(archive(description()), torch.float32, (2, 3)).tolist() == [[0.0] * 3] * 2


class Gadget:
    """Runs what it is given when it is unpickled freely."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


OTHER_ORDER = "big" if sys.byteorder == "little" else "little"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(description(shape=(2, 10**12))), "of shape"),
        (archive(description(strides=(10**12, 1))), "exceed its"),
        (archive(description(offset=-8)), "invalid storage offset"),
        (archive(description(offset=10**6)), "exceed its"),
        (archive(description(), bytes(10**6), compress=zipfile.ZIP_DEFLATED), "is compressed"),
        (archive(description(), order=OTHER_ORDER), "-endian"),
        (archive(pickle.dumps(Gadget(os.system, "true"), 2)), "needs more than tensors"),
        (archive(pickle.dumps(Gadget(bytearray, 9), 2)), "holds a bytearray"),
        (archive(b"\x80\x02." * 9), "not the archive"),
        (archive(b"\x85."), "not the archive"),
        (b"PK\5\6" + bytes(18), "not the archive"),
        (bytes(1000), "not a zip file"),
        (b"", "not the archive"),
        (saved({"a": torch.zeros(2, 3)}), "holds a dict"),
        (saved(torch.zeros(3, 2)), r"float32 of shape \(3, 2\)"),
        (saved(torch.zeros(2, 3, dtype=torch.float64)), "float64 of shape"),
        (saved(torch.zeros(2, 3)).replace(b"data/0", b"data/1"), "not the archive"),
    ],
    ids=range(17),
)
def test_anything_else_is_refused(content, message):
    with pytest.raises(DamagedCheckpointError, match=message):
        read(content, torch.float32, (2, 3))


def test_every_truncation_is_refused():
    content = saved(torch.arange(6.0).reshape(2, 3))
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(DamagedCheckpointError):
            read(content[:length], torch.float32, (2, 3))


def test_a_store_that_fails_is_no_damage():
    class Failing(io.BytesIO):
        def readinto(self, buffer):
            raise OSError("lost")

    content = saved(torch.zeros(2))
    with pytest.raises(OSError, match="lost"):
        read_tensor(Failing(content), 0, len(content), torch.float32, (2,))


def test_garbage_does_nothing_worse_than_an_error():
    original = saved(torch.arange(6.0).reshape(2, 3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        content = bytearray(original)
        for position in torch.randint(len(content), (3,), generator=generator).tolist():
            content[position] ^= int(torch.randint(1, 256, (), generator=generator))
        with contextlib.suppress(DamagedCheckpointError):
            assert read(bytes(content), torch.float32, (2, 3)).shape == (2, 3)
