"""`lightning-megatron context`: the table of kinds, the choice, mistakes."""

import subprocess
import sys

import pytest

from lightning_megatron.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["context", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seq=131072", "--cp=8", "--heads=32", "--kv-heads=8")
    assert code == 0
    assert out.splitlines() == [
        "131,072 positions over cp=8: 16,384 on each rank, in 32 heads of queries and 8 of keys "
        "and values, bfloat16",
        "ranks of a sequence are on one node",
        "",
        "a layer           sends forward   sends backward   memory beside      waits",
        "ulysses                 280 MiB          280 MiB             0 B     1.3 ms",
        "ring                    448 MiB         1.31 GiB         128 MiB   0.298 ms",
        "ring, ulysses=2         352 MiB          736 MiB         128 MiB    1.04 ms",
        "ring, ulysses=4         304 MiB          432 MiB         128 MiB    1.42 ms",
        "gather                  448 MiB         1.31 GiB         1.5 GiB    2.09 ms",
        "",
        "a hop of a ring is hidden behind products from 556 positions a rank on (450 GB/s, "
        "500 TFLOP/s): it is",
        "order zigzag: 1,073,750,016 to 1,073,750,016 pairs of positions a rank, the most 1 times "
        "the mean",
        "order contiguous: 134,225,920 to 2,013,274,112 pairs of positions a rank, the most "
        "1.87 times the mean",
        "",
        "cp=8: attention takes kind='ring'; a rank would wait in each layer and microbatch: "
        "ulysses 1.3 ms, ring 0.298 ms, gather 2.09 ms",
    ]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--seq=131072", "--cp=16", "--heads=8", "--tp=2", "--window=4096", "--layers=32"]
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert "nodes, 4 ranks on each" in out
    assert "\n32 layers " in out
    assert "\nring, order=contiguous         512 MiB " in out  # one hop of 15
    assert "nearest valid: cp=4, or kind='ring'" in out  # ulysses: 4 heads on 16 ranks
    assert "a hop of a ring is hidden behind products from 20,000 positions a rank on" in out
    _, near, _ = run(capsys, *args, "--gpus-per-node=32", "--bandwidth=100", "--tflops=100")
    assert "from 2,000 positions a rank on (100 GB/s, 100 TFLOP/s): it is\n" in near


def test_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--seq=4096", "--cp=2", "--heads=4", "--device=cpu", "--full")
    assert out.splitlines()[-1] == (
        "cp=2: attention takes kind='ulysses', as nothing is hidden behind products on CPUs"
    )
    assert "waits" not in out
    assert "order contiguous: 8,388,608 to 8,388,608 pairs" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cp=1", "--heads=4"], "cp=1: nothing is split; nearest valid: cp=2"),
        (["--cp=0", "--heads=4"], "cp=0: must be a whole number of at least 1"),
        (["--cp=2", "--heads=6", "--kv-heads=4"], "nearest valid: kv_heads=3 or 6"),
        (["--cp=2", "--heads=6", "--tp=4"], "nearest valid: tp=3 or 6"),
        (["--cp=2", "--heads=4", "--tflops=0"], "tflops=0: must be above 0; nearest valid"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, _, err = run(capsys, "--seq=64", *args)
    assert code == 2
    assert err.startswith("lightning-megatron: ")
    assert message in err


def test_needs_no_torch() -> None:
    code = (
        "import sys; from lightning_megatron.cli import main; "
        "main(['context', '--seq=64', '--cp=2', '--heads=4']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
