"""`lightning-megatron doctor`: what this machine has, and what will go wrong, with a remedy.

The first part is the report of `torch.utils.collect_env`. The findings behind it are what torch
does not know: versions that this package admits, optional packages, the network interface,
limits of the system and room for checkpoints. Nothing is changed. The exit code is 0 if all is
well, 1 if something might be better, 2 if training will fail.
"""

import argparse
import json
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_megatron import env
from lightning_megatron.launch import interfaces

MALICIOUS = ("2.6.2", "2.6.3")
"""Releases of Lightning that carried foreign code."""
_OPTIONAL = {
    "flash_attn": ("gpu", 'attention_backend="flash"'),
    "transformer_engine.pytorch": ("gpu", 'attention_backend="te", FP8 by Transformer Engine'),
    "torchao": ("torchao", "FP8 by torchao"),
    "transformers": ("hf", "models and tokenizers of Hugging Face"),
    "prometheus_client": ("monitor", "PrometheusEndpoint"),
    "tensorboard": ("monitor", "TensorBoardLogger"),
    "matplotlib": ("monitor", "schedule --png"),
}
"""Extra and purpose of each optional package."""
_GIB = 1 << 30
_FILES = 4096
_QUEUES = 32
"""Most queues of a GPU; a rank has a stream for each of a dozen communicators."""
_CODES = {"ok": 0, "warning": 1, "bad": 2}


class Finding(NamedTuple):
    """One answer."""

    name: str
    text: str
    level: Literal["ok", "warning", "bad"] = "ok"
    remedy: str = ""


def doctor(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `doctor`.

    Returns:
        The exit code: 0, or that of the worst finding (1 a warning, 2 a fault).
    """
    parser = argparse.ArgumentParser(
        prog="lightning-megatron doctor",
        description="Say what this machine has, what will go wrong, and what to do about it.",
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="where checkpoints are to be"
    )
    parser.add_argument("--json", action="store_true", help="print an object instead of lines")
    options = parser.parse_args(list(args))
    environment = _environment()
    findings = [*versions(), *devices(), *optional(), interface(), *limits(options.directory)]
    worst = max((finding.level for finding in findings), key=_CODES.__getitem__)
    if options.json:
        found = [finding._asdict() for finding in findings]
        print(json.dumps({"level": worst, "findings": found, "torch": environment}, indent=2))
        return _CODES[worst]
    print(environment + "\n")
    for name, text, level, remedy in findings:
        print(f"{level if level == 'ok' else level.upper():<7}  {name}: {text}")
        if remedy:
            print(f"         -> {remedy}")
    return _CODES[worst]


def _environment() -> str:
    try:
        from torch.utils.collect_env import get_pretty_env_info

        return str(get_pretty_env_info())  # type: ignore[no-untyped-call]
    except Exception as error:  # it also runs a dozen programs of the system
        return f"No report of torch.utils.collect_env: {error}"


def versions() -> Iterator[Finding]:
    """This package and those that it requires, in the versions that it admits."""
    for package in ("lightning", "pytorch-lightning"):
        if (found := _installed(package)) in MALICIOUS:
            text = f"{found} is a malicious release, which ran foreign code when imported"
            remedy = "uninstall it at once, and change every credential this machine could read"
            yield Finding(package, text, "bad", remedy)
    try:
        from packaging.requirements import Requirement

        yield Finding("lightning-megatron", version("lightning-megatron"))
        required = [Requirement(line) for line in requires("lightning-megatron") or ()]
    except ImportError as error:  # also of a package that is not installed
        remedy = "pip install lightning-megatron, with what it depends on"
        yield Finding("versions", f"not looked at: {error}", "bad", remedy)
        return
    for needed in required:
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            found = _installed(needed.name)
            if found and needed.specifier.contains(found, prereleases=True):
                yield Finding(needed.name, found)
            else:
                text = f"{found or 'not installed'}; {needed.specifier} is supported"
                yield Finding(needed.name, text, "bad", f'pip install "{needed}"')


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def devices() -> Iterator[Finding]:
    """A torch that cannot be imported, or that does not see a GPU that is there."""
    try:
        import torch

        from lightning_megatron._torch.devices import cuda_devices
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        remedy = "install the torch of this platform: https://pytorch.org/get-started"
        yield Finding("devices", f"torch cannot be imported: {error}", "bad", remedy)
        return
    gpus = cuda_devices()
    if gpus and not torch.distributed.is_nccl_available():
        remedy = "install a build of torch with CUDA for Linux"
        yield Finding("devices", f"{gpus} GPUs, but this torch has no NCCL", "bad", remedy)
    elif not gpus and any(Path("/dev").glob("nvidia[0-9]*")):
        remedy = "install the torch build of your CUDA version, which nvidia-smi names"
        yield Finding("devices", "there is a GPU, but torch does not see it", "bad", remedy)
    else:
        text = f"{gpus} GPUs, over NCCL" if gpus else "no GPU: CPU processes over gloo"
        yield Finding("devices", text)
    if gpus:
        yield from gpu_settings()


def gpu_settings() -> Iterator[Finding]:
    """Variables that CUDA and torch's allocator read once, and whose defaults are for one GPU."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    queues = "kernels of streams that share a queue wait for each other"
    if found := env.gpu_queues():
        low = found.isdecimal() and int(found) < _QUEUES
        remedy = f"{name}={_QUEUES}, unless something needs this order" if low else ""
        yield Finding(name, f"{found} queues for the streams of all communicators", remedy=remedy)
    else:
        text = f"not set, which means 8 queues; {queues}"
        yield Finding(name, text, remedy=f"over several GPUs: export {name}={_QUEUES}")
    settings = env.allocator_settings()
    if "expandable_segments" in settings:
        yield Finding("allocator", settings)
    else:
        text = settings or "default settings: blocks of varying size leave gaps"
        remedy = "export PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield Finding("allocator", text, remedy=remedy)


def optional() -> Iterator[Finding]:
    """Packages that some options need; none of them is missed until it is asked for."""
    for module, (extra, use) in _OPTIONAL.items():
        name = module.partition(".")[0]
        # flash-attn and Transformer Engine import torch when they are built.
        isolation = "--no-build-isolation " if extra == "gpu" else ""
        install = f"pip install {isolation}'lightning-megatron[{extra}]'"
        if find_spec(name) is None:
            yield Finding(name, f"not installed; needed for {use}", remedy=install)
            continue
        try:
            import_module(module)
        except Exception as error:  # built for another torch, or without a library
            text = f"installed, but not usable for {use}: {error}"
            yield Finding(name, text, "warning", f"{install} --force-reinstall --no-deps")
        else:
            yield Finding(name, "usable on GPUs" if extra == "gpu" else "usable")


def interface() -> Finding:
    """Network interface on which gloo and NCCL listen in a run over several nodes."""
    names, chosen = interfaces.interface_names(), env.chosen_interface()
    if chosen is not None and not set(chosen.split(",")) <= set(names):
        text = f"GLOO_SOCKET_IFNAME={chosen}, but this machine has {', '.join(names)}"
        return Finding("interface", text, "bad", "unset GLOO_SOCKET_IFNAME")
    place = interfaces.leading_to(socket.gethostname())
    if chosen is None and place is None:
        text = f"none of {', '.join(names)} is known to lead to other machines"
        remedy = 'over several nodes: ConnectionConfig(bind="NAME"), or NCCL_SOCKET_IFNAME'
        return Finding("interface", text, "warning", remedy)
    between = chosen or (place and place.interface)
    here = interfaces.loopback()
    return Finding("interface", f"{between} between nodes, {here} for a run on this one alone")


def limits(directory: Path) -> Iterator[Finding]:
    """Limits of the system for a process, and room for checkpoints."""

    def limit(name: str, text: str, low: bool, remedy: str) -> Finding:
        return Finding(name, text, "warning", remedy) if low else Finding(name, text)

    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        text = f"{shared.free / _GIB:.1f} of {shared.total / _GIB:.1f} GiB free"
        remedy = "docker run --shm-size=8g, or --ipc=host: DataLoader workers and saves need it"
        yield limit("/dev/shm", text, shared.free < _GIB, remedy)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} at most" if files >= 0 else "no limit"
    remedy = f"ulimit -n {min(most, 65536) if most > 0 else 65536}"
    yield limit("open files", text, 0 <= files < _FILES, remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{locked / (1 << 20):.0f} MiB at most" if locked >= 0 else "no limit"
    held = Path("/dev/infiniband").exists() and 0 <= locked < _GIB
    yield limit("locked memory", text, held, "ulimit -l unlimited: InfiniBand needs it")
    name = f"disk of {directory}"
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding(name, str(error.strerror), "bad", "--directory DIR that is there")
        return
    remedy = "make room: a checkpoint takes 12 bytes a parameter with AdamW, and two must fit"
    yield limit(name, f"{free / _GIB:.1f} GiB free", free < 10 * _GIB, remedy)
