# SPDX-License-Identifier: Apache-2.0
"""Prints the findings of `cocodiff doctor` as a table or as JSON, and returns an exit status."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from cocodiff_compile import __version__
from cocodiff_compile.devices.installed import installed_here
from cocodiff_compile.lab.doctor.examine import Finding, Host, examine
from cocodiff_compile.ranks.launch.launchers import find_launch


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="report what this machine has, what would be used, and what would fail",
        description="The exit status is 0 if ranks can run here, and 1 if a problem prevents it. "
        "Under a launcher the first rank prints, and so does every other rank with a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="print findings as JSON")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(parsed: argparse.Namespace) -> int:
    findings = examine(Host(installed_here(), os.environ))
    is_ok = all(finding.status != "problem" for finding in findings)
    launch = find_launch(os.environ) if is_ok else None
    if launch is None or launch.rank == 0:
        print(_as_json(findings, is_ok) if parsed.json else _as_table(findings, is_ok))
    return 0 if is_ok else 1


def _as_json(findings: Sequence[Finding], is_ok: bool) -> str:
    data = {
        "cocodiff": __version__,
        "ok": is_ok,
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(data, indent=1)


def _as_table(findings: Sequence[Finding], is_ok: bool) -> str:
    lines = [f"cocodiff {__version__}"]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        status = f"{finding.status}: " if finding.status in ("warning", "problem") else ""
        first, *more = textwrap.wrap(f"{status}{finding.text}", 98 - width)
        lines.append(f"{finding.what:<{width}}  {first}")
        lines += [f"{'':<{width}}  {line}" for line in more]
    lines.append("ranks can run here" if is_ok else "ranks cannot run here: see the problems")
    return "\n".join(lines)
