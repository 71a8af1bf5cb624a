"""The files of a project, as `falaj init` proposes them: short, with what each line is for."""

from __future__ import annotations

import math
import os
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from textwrap import indent
from zoneinfo import ZoneInfo

import yaml

from falaj.onboarding.inspection import Rows
from falaj.onboarding.proposal import Proposal
from tasks.features.declared.aggregates import interval, span
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import USE_CASE_FILE

ALL = "everyone"
"""Entity of a history that is of all rows."""
STAGED = "series"
WIDTH = 90
LONG_WAIT = timedelta(days=2)
NEWEST = timedelta(days=30)


def files_of(rows: Rows, proposal: Proposal, folder: Path) -> dict[str, str]:
    """Path in the project to text; `use_case.yaml` is the last, for it makes a folder a project."""
    files = {}
    source = rows.table.name if proposal.entity else STAGED
    if not proposal.entity:
        files["sql/series.sql"] = _staged(rows, proposal)
    if proposal.template == "timeseries":
        files["sql/targets.sql"] = _targets(proposal, source)
    if len(files) < 2:
        files[".gitignore"] = ".falaj/\n"
    files[USE_CASE_FILE] = _use_case(rows, proposal, folder, source)
    return files


def write_project(files: dict[str, str], folder: Path, data: Path) -> None:
    """Write the files into a folder that is new, or holds nothing but the data.

    Raises:
        ConfigurationError: something else is in the folder. Nothing was written.
    """
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in there if folder / name != data and name != ".falaj"]
    if others or folder.is_file():
        raise ConfigurationError(
            f"{folder} holds {', '.join(sorted(others)[:5]) or 'something'} already; name a folder "
            "that is new, or holds the data alone. Nothing was written"
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)


def _use_case(rows: Rows, proposal: Proposal, folder: Path, source: str) -> str:
    table, entity = rows.table, proposal.entity or ALL
    uri = Path(table.uri)
    lines = [
        f"# Proposed by `falaj init` from {uri.name}; `falaj check` finds mistakes.",
        f"name: {proposal.name}",
        f"question: {_question(proposal)}",
        "",
        "features:",
        "  raw_tables:",
        f"    - name: {table.name}",
        f"      uri: {_flow(os.path.relpath(uri, folder))}",
        f"      time_column: {table.time_column} # when a row happened",
    ]
    if table.time_zone:
        lines.append(f"      time_zone: {table.time_zone} # of times written without a zone")
    lines.append(f"      key: {_flow(list(proposal.key))} # names one row")
    if table.null_text != ("",):
        lines.append(f"      null_text: {_flow(list(table.null_text))} # stand for a missing value")
    else:
        lines.append('      null_text: ""')
    if table.rename:
        lines += _wrapped("rename", dict(table.rename), 6)
    lines += _wrapped("columns", dict(table.columns), 6)
    if not proposal.entity:
        moment = f"time_column: {table.time_column}, key: {_flow(list(proposal.key))}"
        lines += ["  staging:", f"    - {{name: {STAGED}, sql: sql/series.sql, {moment}}}"]
    lines += [
        "  feature_tables: # what is known of each at its newest row",
        "    - name: history",
        f"      from: {source}",
        f"      entity_keys: [{entity}]",
        f"      known_after: {proposal.known_after} # so long after its time a row is in the store",
        "      aggregates:",
        *(f"        - {text}" for text in proposal.aggregates),
        "  training_set:",
        *_training_set(proposal, source),
        "",
        *_windows(proposal),
    ]
    if proposal.evaluation:
        lines.append(f"evaluation: {_flow(proposal.evaluation)} # the test rows are few")
    return "\n".join(lines) + "\n"


def _question(proposal: Proposal) -> str:
    if proposal.template == "timeseries":
        return f"What will {proposal.label} be, {proposal.horizon} ahead?"
    is_class = proposal.task == "classification"
    return f"Will it be that {proposal.meaning}?" if is_class else f"What will {proposal.label} be?"


def _training_set(proposal: Proposal, source: str) -> list[str]:
    if proposal.template == "timeseries":
        return [
            "    task: regression",
            "    sql: sql/targets.sql # whom to predict for, when, and the label",
            "    label: target",
            f"    label_definition: {proposal.label}, {proposal.horizon} after the prediction",
            f"    baseline: {proposal.baseline} # the plainest prediction",
        ]
    lines = [f"    from: {source} # each row is a prediction, made at its time"]
    if proposal.task == "regression":
        lines.append("    task: regression")
    lines += [
        f"    label: {_flow(proposal.label)}",
        f"    label_definition: {_flow(proposal.meaning)}",
        f"    label_known_after: {proposal.label_known_after} # after the row's time",
        f"    ignore: {_flow(proposal.ignore)} # add what becomes known after the row's time",
    ]
    return lines


def _windows(proposal: Proposal) -> list[str]:
    names = ("start", "validation", "test", "end")
    days = ", ".join(f"{name}: {day}" for name, day in zip(names, proposal.days, strict=True))
    clock: dict[str, str | int] = {"time_zone": proposal.zone} if proposal.zone != "UTC" else {}
    if proposal.template == "timeseries":
        wait = span(proposal.horizon) + span(proposal.known_after)
        clock["label_hours"] = math.ceil(wait / timedelta(hours=1))
    lines = [f"clock: {_flow(clock)}"] if clock else []
    lines.append(f"splits: {{{days}}} # each ends where the next begins")
    wait = span(proposal.label_known_after)
    if wait > LONG_WAIT:
        test, end = (_midnight(day, proposal.zone) for day in proposal.days[2:])
        known = end - timedelta(days=math.ceil(wait / timedelta(days=1)))
        start = max(test, known - max(NEWEST, (known - test) / 6))
        lines.append(f"current: {{start: {start:%Y-%m-%dT%H:%MZ}, end: {known:%Y-%m-%dT%H:%MZ}}}")
        lines[-1] += " # newest with known labels"
    return lines


def _midnight(day: date, zone: str) -> datetime:
    return datetime.combine(day, time.min, ZoneInfo(zone)).astimezone(UTC)


def _staged(rows: Rows, proposal: Proposal) -> str:
    return (
        f"-- All rows of {rows.table.name} as one series.\n"
        f"SELECT *, 'all' AS {ALL}\nFROM {rows.table.name}\n"
    )


def _targets(proposal: Proposal, source: str) -> str:
    moment, entity = proposal.time, proposal.entity or ALL
    ahead = interval(span(proposal.horizon))
    local = f"timezone('{proposal.zone}', {moment} + {ahead})"
    return f"""\
-- At every row of a series: what will the value be, {proposal.horizon} later?
SELECT
    {entity}::VARCHAR || strftime({moment}, ' %Y%m%dT%H%M') AS row_id,
    {moment} AS event_timestamp,
    {entity},
    dayname({local}) AS weekday,
    strftime({local}, '%H') AS hour,
    extract(doy FROM {local})::FLOAT AS day_of_year,
    (any_value({proposal.label}) OVER later)::DOUBLE AS target,
    CASE WHEN any_value({proposal.label}) OVER later IS NULL THEN 'no value then' END AS excluded,
FROM {source}
WINDOW later AS (
    PARTITION BY {entity} ORDER BY {moment}
    RANGE BETWEEN {ahead} FOLLOWING AND {ahead} FOLLOWING
)
QUALIFY {moment} >= getvariable('window_start')
  AND {moment} < getvariable('window_end')
"""


def _flow(value: object) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").strip()


def _wrapped(name: str, value: dict[str, str], depth: int) -> list[str]:
    """Names and values in as few lines as they need."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=WIDTH - depth, allow_unicode=True, sort_keys=False
    ).strip()
    if len(text) + depth + len(name) < WIDTH:
        return [f"{' ' * depth}{name}: {text}"]
    return [f"{' ' * depth}{name}:", *indent(text, " " * (depth + 2)).splitlines()]
