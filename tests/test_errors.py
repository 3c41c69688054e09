"""What a script prints that ends with an error of the package: nothing here imports torch."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.errors import CheckpointError, ConfigError, MegatronError, MissingRanksError

SCRIPT = """\
import sys
before = sys.excepthook
from lightning_megatron.errors import ConfigError, DamagedCheckpointError
assert sys.excepthook is before
try:
    raise ConfigError("x=0: caught")
except ValueError as error:
    print(error)
{action}
"""


def start(
    action: str, folder: Path, *options: str, stdin: int | None = None, **variables: str
) -> "subprocess.Popen[str]":
    (script := folder / "script.py").write_text(SCRIPT.format(action=action))
    return subprocess.Popen(
        [sys.executable, *options, str(script)],
        env={**os.environ, **variables},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    printed, said = process.communicate(timeout=240)
    assert printed == "x=0: caught\n"
    return process.returncode, said.splitlines()


def test_the_text_alone_with_the_line_that_led_to_it(tmp_path: Path) -> None:
    code, lines = end(start('raise ConfigError(["x=1: wrong", "y=2: wrong"])', tmp_path))
    assert code == 2
    assert lines[:3] == ["lightning-megatron: 2 options are wrong:", "  1. x=1: wrong", lines[2]]
    assert lines[3].startswith(f"  ({tmp_path}/script.py:9; LIGHTNING_MEGATRON_TRACEBACK=1")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("options", "variables"), [((), {"LIGHTNING_MEGATRON_TRACEBACK": "1"}), (("-i",), {})]
)
def test_tracebacks_where_they_are_wanted(
    options: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    """And in an interactive session."""
    process = start(
        'raise DamagedCheckpointError("bits")',
        tmp_path,
        *options,
        stdin=subprocess.DEVNULL,
        **variables,
    )
    _, lines = end(process)
    assert lines[0] == "Traceback (most recent call last):"
    assert "lightning_megatron.errors.DamagedCheckpointError: bits" in lines


def test_errors_of_others_are_left_to_the_hook_before(tmp_path: Path) -> None:
    action = (
        "sys.excepthook.__class__\n"
        "class Mine(ValueError): pass\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise Mine('boom')\n"
    )
    code, lines = end(start(action, tmp_path))
    assert code == 1
    assert sum(line.startswith("Traceback") for line in lines) == 2
    assert lines[-1] == "Mine: boom"


def test_rank_0_speaks(tmp_path: Path) -> None:
    """The launcher ends the others with it; who is not ended was alone, and speaks as well."""
    told = 'error = ConfigError("x=1: wrong")\nerror.told_by_rank_0 = {}\nraise error'
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    alone = start(told.format(False), tmp_path / "a", RANK="3")
    quiet = start(told.format(True), tmp_path / "b", LOCAL_RANK="1")
    code, lines = end(alone)
    assert (code, lines[0]) == (2, "lightning-megatron, rank 3: x=1: wrong")
    assert quiet.stdout is not None
    assert quiet.stdout.readline() == "x=0: caught\n"  # on a busy machine it may have just begun
    assert quiet.poll() is None
    quiet.send_signal(signal.SIGTERM)
    printed, said = quiet.communicate(timeout=240)
    assert (quiet.returncode, printed, said) == (-signal.SIGTERM, "", "")


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    """One rank's text stands before torchrun's own summary."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    # torchrun ends the other rank with the first, however far that has come.
    both = (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / f'here_{os.environ[\"RANK\"]}').touch()\n"
        "while len(list(folder.glob('here_*'))) < 2: time.sleep(0.01)\n"
    )
    action = f'{both}error = ConfigError("x=1: wrong")\nerror.told_by_rank_0 = True\nraise error'
    process = start(action, tmp_path, *torchrun)
    printed, said = process.communicate(timeout=240)
    assert printed == 2 * "x=0: caught\n"
    assert process.returncode == 1  # torchrun's own
    assert said.count("x=1: wrong") == 1
    assert said.index("x=1: wrong") < said.index("ChildFailedError")
    assert "script.py FAILED" in said
    assert "exitcode  : 2" in said


def test_errors_keep_their_kind_and_cross_processes() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(CheckpointError, RuntimeError)
    for error in (ConfigError(["a", "b"]), CheckpointError("c"), MissingRanksError("d", [1])):
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, MegatronError)
        assert (type(copy), str(copy)) == (type(error), str(error))
