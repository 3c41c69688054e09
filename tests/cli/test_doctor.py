"""`lightning-megatron doctor`: what is wrong is found, with a remedy, and the exit code says so."""

import json
import resource
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lightning_megatron.cli import doctor, main
from lightning_megatron.cli.doctor import Finding
from lightning_megatron.launch import interfaces


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--directory", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warning": 1, "bad": 2}[answer["level"]]
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert found["torch"]["level"] == found["lightning"]["level"] == "ok"
    assert {"lightning-megatron", "devices", "interface", "open files", "matplotlib"} <= set(found)
    assert f"disk of {tmp_path}" in found
    assert all(f["remedy"] for f in answer["findings"] if f["level"] != "ok")
    assert "\nPython version: " in answer["torch"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes seconds."""
    monkeypatch.setattr(doctor, "_environment", lambda: "report of torch")
    monkeypatch.setattr(doctor, "optional", lambda: [])


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
@pytest.mark.usefixtures("quick")
def test_malicious_release(
    release: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: release)
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["report of torch", ""]
    text = f"{release} is a malicious release, which ran foreign code when imported"
    place = lines.index(f"BAD      lightning: {text}")
    assert lines[place + 1].startswith("         -> uninstall it at once")
    assert "credential" in lines[place + 1]


@pytest.mark.parametrize(
    ("package", "release", "level"),
    [
        ("torch", "2.10.1+cpu", "bad"),
        ("torch", "2.11.0", "ok"),
        ("torch", "2.15.0+cu132", "ok"),
        ("torch", "2.16.0", "bad"),
        ("lightning", "2.6.1", "bad"),
        ("lightning", "2.6.4", "ok"),
        ("lightning", "2.7.0", "bad"),
    ],
)
def test_versions(package: str, release: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda asked: release)
    assert by_name(doctor.versions())[package].level == level


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: "" if name == "fsspec" else real(name))
    found = by_name(doctor.versions())
    assert found["fsspec"].text.startswith("not installed; >=")
    assert (found["fsspec"].level, found["numpy"].level) == ("bad", "ok")
    assert found["fsspec"].remedy.startswith('pip install "fsspec>=')


@pytest.mark.usefixtures("quick")
def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 2
    assert "BAD      devices: torch cannot be imported" in capsys.readouterr().out


def test_optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = {"broken_kernels": ("gpu", "a"), "no_such": ("hf", "b"), "json.tool": ("hf", "c")}
    monkeypatch.setattr(doctor, "_OPTIONAL", packages)
    broken, missing, there = doctor.optional()
    assert broken.level == "warning"
    assert broken.text == "installed, but not usable for a: undefined symbol: _ZN3c10"
    assert "--no-build-isolation 'lightning-megatron[gpu]'" in broken.remedy
    assert missing == Finding(
        "no_such", "not installed; needed for b", remedy="pip install 'lightning-megatron[hf]'"
    )
    assert there == Finding("json", "usable")


def test_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_names", lambda: ["lo", "eth0", "eth1"])
    monkeypatch.setattr(interfaces, "leading_to", lambda host: None)
    assert doctor.interface().level == "warning"
    assert 'ConnectionConfig(bind="NAME")' in doctor.interface().remedy
    monkeypatch.setattr(interfaces, "leading_to", lambda host: interfaces.Place("eth1", "10.0.0.1"))
    assert doctor.interface().text == "eth1 between nodes, lo for a run on this one alone"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert doctor.interface().text.startswith("eth0 between nodes")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert doctor.interface() == Finding(
        "interface",
        "GLOO_SOCKET_IFNAME=ib0, but this machine has lo, eth0, eth1",
        "bad",
        "unset GLOO_SOCKET_IFNAME",
    )


def test_a_host_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert doctor.interface().text


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, missing = doctor.limits(tmp_path / "none")
    assert (missing.level, missing.name) == ("bad", f"disk of {tmp_path / 'none'}")
    usage = doctor.shutil.disk_usage(tmp_path)
    for gib, level in ((5, "warning"), (50, "ok")):
        free = usage._replace(free=gib << 30)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: free)
        *_, disk = doctor.limits(tmp_path)
        assert (disk.level, f"{gib}.0 GiB free" in disk.text) == (level, True)


def test_few_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        finding = by_name(doctor.limits(tmp_path))["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.level == "warning"
    assert finding.remedy.startswith("ulimit -n")


def test_settings_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    queues, allocator = doctor.gpu_settings()
    assert "not set, which means 8 queues" in queues.text
    assert queues.remedy.endswith("export CUDA_DEVICE_MAX_CONNECTIONS=32")
    assert allocator.remedy == "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    queues, allocator = doctor.gpu_settings()
    assert queues.remedy == "CUDA_DEVICE_MAX_CONNECTIONS=32, unless something needs this order"
    assert allocator == Finding("allocator", "expandable_segments:True")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert next(doctor.gpu_settings()).remedy == ""
