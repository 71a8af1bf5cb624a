"""The way in: begin a project from a file, and check one before anything is trained."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from falaj.context import AsJson, Here
from falaj.loop import row

if TYPE_CHECKING:
    from falaj.onboarding.checks import CheckReport
    from falaj.onboarding.findings import Finding

NUM_LEADING = 3


def check(*, as_json: AsJson = False, context: Here) -> int:
    """Find mistakes in a project without training; changes nothing.

    Looks at use_case.yaml, the raw files, every query on a sample, keys, splits, gates, and for
    leaks of the future. Exit code 0: no error, 2: the use case is wrong, 4: the data is.

    Args:
        as_json: Print the findings as JSON.
    """
    from falaj.onboarding.checks import check_project
    from falaj.onboarding.findings import exit_code

    report = check_project(context.settings.feature_repo)
    findings = sorted(report.findings, key=lambda finding: finding.severity)
    if as_json:
        facts = {
            "project": report.name,
            "findings": [finding.facts() for finding in findings],
            "splits": report.splits,
            "leading": [{"input": name, "score": score} for name, score in report.leading],
            "seconds": report.seconds,
        }
        lines = [json.dumps(facts, indent=1, default=str)]
    else:
        lines = _described(report, findings)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return exit_code(findings)


def _described(report: CheckReport, findings: list[Finding]) -> list[str]:
    errors = sum(finding.severity == "error" for finding in findings)
    lines = [line for finding in findings for line in (*finding.lines(), "")]
    for split in report.splits:
        share = f", mean of the label {split['mean']:.3g}" if split["rows"] else ""
        lines.append(
            row(str(split["name"]), f"{split['rows']:,} rows{share}, {split['days']} days")
        )
    if report.leading:
        best = ", ".join(f"{name} ({score:.3f})" for name, score in report.leading[:NUM_LEADING])
        lines.append(row("Alone", f"{best} tell most about the label by themselves"))
    seconds = sum(report.seconds.values())
    found = f"{errors} error(s), {len(findings) - errors} warning(s)" if findings else "no mistake"
    return [*lines, row("Checked", f"{report.name} in {seconds:.1f} s: {found}")]
