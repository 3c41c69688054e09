import errno

import pytest

from lightning_megatron.checkpoint.save import write_error as module
from lightning_megatron.checkpoint.save.write_error import write_error
from lightning_megatron.errors import CheckpointError


def chained(inner):
    try:
        try:
            raise inner
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as torch does)
    except RuntimeError as error:
        return error


def test_names_file_error_and_room(tmp_path):
    error = write_error(PermissionError(errno.EACCES, "Permission denied", "/x/y"), tmp_path, 1000)
    assert str(error).startswith("/x/y: [Errno 13] Permission denied (1,000 bytes needed here, ")
    assert str(error).endswith(" free)")


def test_finds_the_error_of_the_system_behind_torchs(tmp_path):
    error = write_error(chained(OSError(errno.EFBIG, "File too large")), tmp_path / "absent", 5)
    assert str(error).startswith("[Errno 27] File too large (5 bytes")


def test_an_obscure_error_on_a_full_disk_is_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_free_bytes", lambda path: 10)
    assert "[Errno 28]" in str(write_error(RuntimeError("unexpected pos"), tmp_path, 11))
    assert "RuntimeError: unexpected" in str(write_error(RuntimeError("unexpected"), tmp_path, 10))


def test_our_own_errors_stay(tmp_path):
    error = CheckpointError("x")
    assert write_error(error, tmp_path, 0) is error


@pytest.mark.parametrize("limit", [100_000])
def test_limit_of_file_size_is_named(pool, tmp_path, limit):
    """The real thing: the system refuses to write on, inside torch's archive writer."""
    text = pool.run(1, _write_beyond, str(tmp_path), limit)[0]
    assert "[Errno 27] File too large" in text
    assert "800,000 bytes needed here" in text


def _write_beyond(path, limit):
    import resource
    import signal
    from pathlib import Path

    import torch

    from lightning_megatron.checkpoint.chunks import whole
    from lightning_megatron.checkpoint.save.dcp_writer import offer, write_shards
    from lightning_megatron.checkpoint.save.write_assignment import plan_in_turn

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        chunks = {"a": whole(torch.zeros(200_000))}
        write_shards(Path(path), plan_in_turn([offer(chunks)])[0], chunks)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return "no error"
