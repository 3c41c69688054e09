"""`lightning-megatron doctor`: what is wrong is found, with a remedy, and the exit code says so."""

import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli import doctor, main
from lightning_megatron.cli.doctor import Finding


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--directory", str(tmp_path), "--processes", "2"])
    answer = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warning": 1, "bad": 2}[answer["level"]]
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert found["torch"]["level"] == found["lightning"]["level"] == "ok"
    assert "all-reduce of 16 MiB at" in found["bandwidth"]["text"]
    assert "GB/s with fsync" in found["writing"]["text"]
    assert {"host name", "port", "open files", "cores", "/dev/shm", "matplotlib"} <= found.keys()
    assert all(f["remedy"] for f in answer["findings"] if f["level"] != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_malicious_release(
    release: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: release)
    findings = by_name(doctor.versions())
    assert findings["lightning"].level == "bad"
    assert "credential" in findings["lightning"].remedy
    assert main(["doctor", "--processes", "0"]) == 2
    assert f"BAD      lightning: {release}" in capsys.readouterr().out


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


@pytest.mark.parametrize("package", doctor._SUPPORTED)
def test_supported_versions_are_those_that_are_admitted(package: str) -> None:
    low, high = (".".join(map(str, bound)) for bound in doctor._SUPPORTED[package])
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"{package}>={low},<{high}"' in project


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = by_name(doctor.names_and_ports(taken.getsockname()[1]))["port"]
    assert finding.level == "warning"
    assert "--standalone" in finding.remedy


def test_host_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    finding = by_name(doctor.names_and_ports(0))["host name"]
    assert finding.level == "warning"
    assert "/etc/hosts" in finding.remedy


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [missing] = doctor.disk(tmp_path / "none")
    assert missing.level == "bad"
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=1 << 29))
    assert next(iter(doctor.disk(tmp_path))).level == "bad"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=1 << 31))
    assert next(iter(doctor.disk(tmp_path))).level == "warning"

    def refuse(directory: Path) -> float:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor, "_write_rate", refuse)
    written = by_name(doctor.disk(tmp_path))["writing"]
    assert (written.level, "Read-only" in written.text) == ("bad", True)


def test_few_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        finding = by_name(doctor.limits())["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.level == "warning"
    assert finding.remedy.startswith("ulimit -n")


def test_collectives_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of processes that hang, and the report comes in time."""
    started: list[Any] = []

    def sleep(*args: Any) -> Any:
        process = doctor.subprocess.Popen(
            ["sleep", "3600"],
            stdout=doctor.subprocess.PIPE,
            stderr=doctor.subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    monkeypatch.setattr(doctor, "_start", sleep)
    [finding] = doctor.bandwidth(2, limit_s=0.3)
    assert (finding.level, "no result within" in finding.text) == ("bad", True)
    assert all(process.poll() is not None for process in started)
    assert not any(os.path.exists(f"/proc/{process.pid}") for process in started)
