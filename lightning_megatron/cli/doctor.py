"""`lightning-megatron doctor`: whether this machine is fit to train, and what to do where not.

It looks at versions, devices, names and ports, the disk for checkpoints, what the system grants,
optional packages, and, with a few processes of its own, at the speed of their collectives. The exit
code is 0 where all is well, 1 where something might be better, 2 where training will fail.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_megatron.cli import doctor_checks as examination
from lightning_megatron.cli.doctor_checks import Finding

_CODES = {"ok": 0, "warning": 1, "bad": 2}
_SIGNS = {"ok": "ok     ", "warning": "WARNING", "bad": "BAD    "}


def doctor(args: Sequence[str]) -> int:
    """Run the subcommand.

    Args:
        args: the command line after `doctor`.

    Returns:
        The exit code: 0, or that of the worst finding (1 a warning, 2 a fault).
    """
    options = _parser().parse_args(list(args))
    questions: list[Callable[[], Iterable[Finding]]] = [
        examination.versions,
        examination.devices,
        lambda: examination.names_and_ports(options.port),
        lambda: examination.disk(options.directory),
        examination.limits,
        examination.extras,
    ]
    if options.processes:
        questions.append(lambda: examination.bandwidth(options.processes, options.timeout))
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
