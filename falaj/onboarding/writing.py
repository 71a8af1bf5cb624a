"""The files of a project, as `falaj init` proposes them: short, with what each line is for."""

import math
import os
from datetime import timedelta
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from falaj.onboarding.inspection import Rows
from falaj.onboarding.proposal import Proposal
from tasks.features.declared.aggregates import interval, span
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import USE_CASE_FILE

ALL = "everyone"
"""Entity of a history that is of all rows."""


def files_of(rows: Rows, proposal: Proposal, folder: Path) -> dict[str, str]:
    """Path in the project to text; `use_case.yaml` is the last, for it makes a folder a project."""
    table, uri = rows.table, rows.table.uri
    source = table.name if proposal.entity else f"all_{table.name}"
    clock: dict[str, object] = {"time_zone": rows.zone} if rows.zone != "UTC" else {}
    if proposal.horizon:
        wait = span(proposal.horizon) + span(proposal.known_after)
        clock["label_hours"] = math.ceil(wait / timedelta(hours=1))
    question = f"What will {proposal.label} be"
    if proposal.task == "classification":
        question = f"Will it be that {proposal.meaning}"
    if proposal.classes:
        question = f"Which {proposal.label} will it be"
    values = {
        "p": proposal,
        "table": table,
        "uri": uri if "://" in uri else os.path.relpath(uri, folder),
        "zone": rows.zone,
        "time": rows.time.name,
        "source": source,
        "entity": proposal.entity or ALL,
        "question": question + (f", {proposal.horizon} ahead?" if proposal.horizon else "?"),
        "clock": clock,
        "splits": dict(zip(("start", "validation", "test", "end"), proposal.days, strict=True)),
        "ahead": interval(span(proposal.horizon)) if proposal.horizon else "",
    }
    templates = {} if proposal.entity else {f"sql/{source}.sql": "all_rows.sql.j2"}
    templates |= {"sql/targets.sql": "targets.sql.j2"} if proposal.horizon else {}
    ignored = {".gitignore": ".falaj/\n"} if len(templates) < 2 else {}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"flow": _flow, "wrapped": _wrapped}
    templates[USE_CASE_FILE] = "use_case.yaml.j2"
    return ignored | {
        file: environment.get_template(name).render(values) for file, name in templates.items()
    }


def write_project(files: dict[str, str], folder: Path, data: str) -> None:
    """Write the files into a folder that is new, or holds nothing but the data.

    Raises:
        ConfigurationError: something else is in the folder. Nothing was written.
    """
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in there if str(folder / name) != data and name != ".falaj"]
    if others or folder.is_file():
        raise ConfigurationError(
            f"{folder} holds {', '.join(sorted(others)[:5]) or 'something'} already; name a folder "
            "that is new, or holds the data alone. Nothing was written"
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)


def _flow(value: object, width: int = 10_000) -> str:
    """A value in one line of YAML, or in as many as a width needs."""
    text = yaml.safe_dump(
        list(value) if isinstance(value, tuple) else value,
        default_flow_style=True,
        width=width,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip()


def _wrapped(value: dict[str, str]) -> str:
    text = _flow(dict(value), 82)
    indented = text.replace("\n", "\n" + " " * 8)
    return f"\n        {indented}" if "\n" in text else f" {text}"
