"""`kill -9` while saving: the newest checkpoint is always whole, and nothing stays behind."""

import os

import pytest

from tests.checkpoint.save.kills import kill_job

KILLS = int(os.environ.get("LM_TEST_KILLS", "50"))
"""Of all cases together."""


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("sync", 1),
        ("async", 2),
        pytest.param("async", 1, marks=pytest.mark.thorough),
        pytest.param("sync", 2, marks=pytest.mark.thorough),
    ],
)
def test_killed_at_random_times_while_saving(pool, tmp_path, mode, size):
    directory = tmp_path / "run"
    directory.mkdir()
    kills = -(-KILLS // 4)
    seed = 10 * size + len(mode)
    (seen,) = pool.run(1, kill_job, directory, mode, size, kills, seed, timeout=240 + kills)
    assert seen["kills"] == kills
    assert seen["steps"] > 3
    assert seen["torn"] > 0, "no kill was in the midst of a save"
