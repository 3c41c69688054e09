"""`lightning-megatron doctor`: whether this machine is fit to train, with a remedy for each fault.

It checks versions, devices, names and ports, the disk for checkpoints, system limits, optional
packages and, with a few processes of its own, the speed of collectives. Each check is a function
that returns findings. Nothing is changed; files written for a measurement are deleted. The exit
code is 0 if all is well, 1 if something might be better, 2 if training will fail.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warning", "bad"]

GIB = 1 << 30

MALICIOUS = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
"""Releases that carried foreign code."""
_SUPPORTED = {"torch": ((2, 11), (2, 16)), "lightning": ((2, 6, 4), (2, 7))}
"""Versions from the first on, and below the second; a test holds them against pyproject.toml."""
_EXTRAS = {
    "flash_attn": ("gpu", 'attention_backend="flash"'),
    "transformer_engine": ("gpu", "FP8 and attention by Transformer Engine"),
    "transformers": ("hf", "tokenizers of Hugging Face models"),
    "prometheus_client": ("monitor", "PrometheusEndpoint"),
    "tensorboard": ("monitor", "TensorBoardLogger"),
    "matplotlib": ("monitor", "schedule --png"),
}
_FILES = 4096
_WRITE_BYTES = 64 << 20


_CODES = {"ok": 0, "warning": 1, "bad": 2}
_SIGNS = {"ok": "ok     ", "warning": "WARNING", "bad": "BAD    "}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer."""

    name: str
    level: Level = "ok"
    text: str
    remedy: str = ""


def doctor(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `doctor`.

    Returns:
        The exit code: 0, or that of the worst finding (1 a warning, 2 a fault).
    """
    options = _parser().parse_args(list(args))
    questions: list[Callable[[], Iterable[Finding]]] = [
        versions,
        devices,
        lambda: names_and_ports(options.port),
        lambda: disk(options.directory),
        limits,
        extras,
    ]
    if options.processes:
        questions.append(lambda: bandwidth(options.processes, options.timeout))
    findings = []
    for question in questions:
        for finding in question():
            findings.append(finding)
            if not options.json:
                print(_line(finding), flush=True)
    worst = max(findings, key=lambda finding: _CODES[finding.level]).level
    if options.json:
        json.dump({"level": worst, "findings": [asdict(f) for f in findings]}, sys.stdout, indent=2)
        print()
    return _CODES[worst]


def _line(finding: Finding) -> str:
    line = f"{_SIGNS[finding.level]}  {finding.name}: {finding.text}"
    if finding.remedy and finding.level != "ok":
        line += f"\n         -> {finding.remedy}"
    elif finding.remedy:
        line += f" ({finding.remedy})"
    return line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-megatron doctor",
        description="Say whether this machine is fit to train, and what to do where it is not.",
    )
    add = parser.add_argument
    add("--directory", type=Path, default=Path(), help="where checkpoints are to be")
    add("--port", type=int, default=29500, help="on which rank 0 is to listen")
    add("--processes", type=int, default=2, help="to measure collectives with; 0 leaves it out")
    add("--timeout", type=float, default=90.0, help="seconds that this may take")
    add("--json", action="store_true", help="print an object instead of lines")
    return parser


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers a version begins with."""
    found = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def versions() -> Iterator[Finding]:
    """Packages that we know not to work, or to do harm."""
    for package in ("torch", "lightning", "pytorch-lightning"):
        found = _installed(package)
        if found in MALICIOUS.get(package, ()):
            yield Finding(
                name=package,
                level="bad",
                text=f"{found} is a malicious release, which ran foreign code when imported",
                remedy="uninstall it at once, change every credential that this machine could "
                f'read, then: pip install "{package}>=2.6.4,<2.7"',
            )
        elif package in _SUPPORTED:
            yield _supported(package, found)


def _supported(package: str, found: str | None) -> Finding:
    low, high = _SUPPORTED[package]
    wanted = f"{package}>={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
    remedy = f'pip install "{wanted}"'
    if found is None:
        return Finding(name=package, level="bad", text="not installed", remedy=remedy)
    if not low <= _numbers(found) < high:
        text = f"{found} is outside of what is supported, {wanted}"
        return Finding(name=package, level="bad", text=text, remedy=remedy)
    return Finding(name=package, text=found)


def extras() -> Iterator[Finding]:
    """Packages that some options need; none of them is missed until it is asked for."""
    for module, (extra, use) in _EXTRAS.items():
        there = find_spec(module) is not None
        text = "installed" if there else f"not installed; needed for {use}"
        # flash-attn and Transformer Engine import torch when they are built.
        isolation = "--no-build-isolation " if extra == "gpu" else ""
        remedy = "" if there else f"pip install {isolation}'lightning-megatron[{extra}]'"
        yield Finding(name=module, text=text, remedy=remedy)


def devices() -> Iterator[Finding]:
    """Accelerators that torch sees, and those that it does not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(name="cores", text=f"{cores} for this process")
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        yield _no_torch("devices", error)
        return
    if not torch.cuda.is_available():
        if list(Path("/dev").glob("nvidia[0-9]*")):
            yield Finding(
                name="devices",
                level="bad",
                text="there is a GPU, but torch does not see it",
                remedy="install the torch build of your CUDA version; compare nvidia-smi with "
                "python -c 'import torch; print(torch.version.cuda)'",
            )
        else:
            yield Finding(name="devices", text="no GPU: CPU processes over gloo")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        text = f"{about.name}, {about.total_memory / GIB:.0f} GiB"
        yield Finding(name=f"cuda:{index}", text=text)
    if not dist.is_nccl_available():
        yield Finding(
            name="nccl",
            level="bad",
            text="this torch has no NCCL",
            remedy="install a build of torch with CUDA for Linux",
        )


def _no_torch(name: str, error: Exception) -> Finding:
    return Finding(
        name=name,
        level="bad",
        text=f"not looked at, as torch cannot be imported: {error}",
        remedy="install the torch of this platform: https://pytorch.org/get-started",
    )


def names_and_ports(port: int) -> Iterator[Finding]:
    """Whether processes could find each other."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        yield Finding(name="host name", text=f"{host} is {address}")
    except OSError as error:
        yield Finding(
            name="host name",
            level="warning",
            text=f"{host} has no address ({error.strerror})",
            remedy=f"add '127.0.0.1 {host}' to /etc/hosts; over several nodes, the address that "
            "the others reach",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            yield Finding(name="port", text=f"{port} is free")
        except OSError as error:
            yield Finding(
                name="port",
                level="warning",
                text=f"{port} cannot be used ({error.strerror})",
                remedy="torchrun --standalone, or another --master-port",
            )


def disk(directory: Path) -> Iterator[Finding]:
    """Room for checkpoints, and how fast they will be written."""
    name = f"disk of {directory}"
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding(
            name=name,
            level="bad",
            text=f"cannot be looked at: {error.strerror}",
            remedy="--directory DIR: where checkpoints are to be",
        )
        return
    level: Level = "bad" if free < GIB else "warning" if free < 10 * GIB else "ok"
    remedy = "make room: a checkpoint takes 12 bytes a parameter with AdamW, and two must fit"
    text = f"{free / GIB:.1f} GiB free"
    yield Finding(name=name, level=level, text=text, remedy=remedy if level != "ok" else "")
    if free < 4 * _WRITE_BYTES:
        return
    try:
        rate = _write_rate(directory)
    except OSError as error:
        yield Finding(
            name="writing",
            level="bad",
            text=f"{directory}: {error.strerror}",
            remedy="another --directory, or its permissions",
        )
        return
    slow = rate < 0.05
    yield Finding(
        name="writing",
        level="warning" if slow else "ok",
        text=f"{rate:.2f} GB/s with fsync",
        remedy='CheckpointConfig(mode="async"), so that training does not wait' if slow else "",
    )


def _write_rate(directory: Path) -> float:
    """GB/s of one file, down to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as file:
        begun = time.perf_counter()
        for _ in range(_WRITE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _WRITE_BYTES / (time.perf_counter() - begun) / 1e9


def limits() -> Iterator[Finding]:
    """Limits of the system for a process."""
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        small = shared.free < GIB
        yield Finding(
            name="/dev/shm",
            level="warning" if small else "ok",
            text=f"{shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free",
            remedy="docker run --shm-size=8g, or --ipc=host: batches of DataLoader workers and "
            "asynchronous saves go through it"
            if small
            else "",
        )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _FILES
    yield Finding(
        name="open files",
        level="warning" if few else "ok",
        text=f"{files} at most" if files >= 0 else "no limit",
        remedy=f"ulimit -n {min(most, 65536) if most > 0 else 65536}" if few else "",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/dev/infiniband").exists()
    held = infiniband and 0 <= locked < GIB
    yield Finding(
        name="locked memory",
        level="warning" if held else "ok",
        text="no limit" if locked < 0 else f"{locked / (1 << 20):.0f} MiB at most",
        remedy="ulimit -l unlimited: InfiniBand registers its buffers" if held else "",
    )


def bandwidth(processes: int, limit_s: float = 90.0) -> Iterator[Finding]:
    """All-reduce between processes of this machine, which are started and ended here."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield _no_torch("bandwidth", error)
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = "nccl" if gpus >= processes else "gloo"
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        started = [_start(backend, rank, processes, folder) for rank in range(processes)]
        try:
            deadline = time.monotonic() + limit_s
            ended = [p.communicate(timeout=max(deadline - time.monotonic(), 0)) for p in started]
        except subprocess.TimeoutExpired:
            yield _no_bandwidth(backend, f"no result within {limit_s:.0f} s", gpus)
            return
        finally:
            for process in started:
                process.kill()
                process.wait()
    failed = [(output[1], p.returncode) for output, p in zip(ended, started, strict=True)]
    for text, code in failed:
        if code:
            last = (text.strip().splitlines() or [f"exit code {code}"])[-1]
            yield _no_bandwidth(backend, last, gpus)
            return
    yield _measured(backend, processes, ended[0][0])


def _start(backend: str, rank: int, processes: int, folder: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "lightning_megatron.cli.bandwidth"]
    return subprocess.Popen(
        [*program, backend, str(rank), str(processes), folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _measured(backend: str, processes: int, output: str) -> Finding:
    from lightning_megatron.cli.bandwidth import LARGE_BYTES

    seconds = json.loads(output.strip().splitlines()[-1])
    rate, delay = LARGE_BYTES / seconds["large_s"] / 1e9, seconds["small_s"] * 1e6
    slow = rate < (1.0 if backend == "nccl" else 0.05)
    return Finding(
        name="bandwidth",
        level="warning" if slow else "ok",
        text=f"{backend}, {processes} processes: all-reduce of 16 MiB at {rate:.2f} GB/s, of 8 "
        f"bytes in {delay:.0f} us",
        remedy="nvidia-smi topo -m shows how the GPUs are connected"
        if slow and backend == "nccl"
        else "are other programs running? OMP_NUM_THREADS=1 with a process per core"
        if slow
        else "",
    )


def _no_bandwidth(backend: str, why: str, gpus: int) -> Finding:
    remedy = (
        "NCCL_DEBUG=INFO says what it tries; NCCL_P2P_DISABLE=1 avoids direct copies"
        if gpus
        else "is the loopback interface up? (ip link show lo)"
    )
    return Finding(name="bandwidth", level="bad", text=f"{backend}: {why}", remedy=remedy)
