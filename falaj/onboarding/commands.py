"""The way in: begin a project from a file, and check one before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.context import Here, Shown, row
from falaj.onboarding.findings import Finding, exit_code
from falaj.setup import Template, copy_example

if TYPE_CHECKING:
    from falaj.onboarding.checks import CheckReport


def check(*, context: Here) -> Shown:
    """Find mistakes in a project without training; changes nothing.

    Looks at use_case.yaml, the raw files, every query on a sample, keys, splits, gates, and for
    leaks of the future. Exit code 0: no error, 2: the use case is wrong, 4: the data is.

    Examples:
        falaj check
        falaj check --project shop --json
    """
    from falaj.onboarding.checks import check_project

    report = check_project(context.settings.feature_repo)
    findings = sorted(report.findings, key=lambda finding: finding.severity)
    facts = {
        "project": report.name,
        "findings": [finding.facts() for finding in findings],
        "splits": report.splits,
        "leading": [{"input": name, "score": score} for name, score in report.leading],
        "seconds": report.seconds,
    }
    return Shown(facts, _described(report, findings), exit_code(findings))


def _described(report: CheckReport, findings: list[Finding]) -> list[str]:
    errors = sum(finding.severity == "error" for finding in findings)
    lines = [line for finding in findings for line in (*finding.lines(), "")]
    for split in report.splits:
        share = f", mean of the label {split['mean']:.3g}" if split["rows"] else ""
        lines.append(
            row(str(split["name"]), f"{split['rows']:,} rows{share}, {split['days']} days")
        )
    if report.leading:
        best = ", ".join(f"{name} ({score:.3f})" for name, score in report.leading[:3])
        lines.append(row("Alone", f"{best} tell most about the label by themselves"))
    found = f"{errors} error(s), {len(findings) - errors} warning(s)" if findings else "no mistake"
    return [*lines, row("Checked", f"{report.name} in {report.seconds:.1f} s: {found}")]


def init(
    folder: Path,
    /,
    *,
    data: str | None = None,
    label: str | None = None,
    time: str | None = None,
    key: str | None = None,
    template: Template = "table",
    label_known_after: str | None = None,
    horizon: str | None = None,
    time_zone: str | None = None,
    context: Here,
) -> list[str]:
    """Begin a project from a file: propose task, types, keys, features and windows.

    Args:
        folder: New folder of the project; its name is that of the use case.
        data: A CSV, Parquet or JSON file, a folder of such, a pattern in quotes, or an address:
            s3://bucket/folder/*.parquet, postgresql://user@host/database/table, https://...
        label: Column to predict: yes or no, 0 or 1, true or false, or a number.
        time: Column that says when a row happened (default: the only one with times).
        key: Column that histories are of, such as the customer (default: a guess).
        template: `table`: each row is a prediction. `events`: the same of a log, with windows of
            hours. `timeseries`: the label some time ahead. `flights`, `traffic`: shipped examples.
        label_known_after: So long after its row's time a label is known, such as 30d.
        horizon: Of a time series: so far ahead the prediction is, such as 24h.
        time_zone: Zone of times that are written without one (default: UTC).

    With --yes nothing is asked; what only you can know is assumed, and said.

    Examples:
        falaj init shop --data orders.parquet --label churned --time ordered_at --key customer
        falaj init cases --template flights
    """
    from falaj.onboarding.project import begin
    from falaj.onboarding.proposal import Wishes

    if template in ("flights", "traffic"):
        copy_example(template, folder)
        return [row("Written", f"{folder}, a copy of the example {template}")]
    ask = None if context.assume_yes or not sys.stdin.isatty() else input
    wishes = Wishes(label, time, key, template, label_known_after, horizon, time_zone, ask)
    return begin(folder.resolve(), data, wishes)
