"""Data docs: every kept validation result as a page, and an index of them.

A page asks no other host for anything. It is named by the digest of its result and made once.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import digest_of, locked, write_atomically
from tasks.kernel.settings import ArtifactStore
from tasks.validation.outcome import SuiteOutcome, read_outcome

FOLDER = "data_docs"
CURRENT = "current"
INDEX = "index.html"
HEAD = ("Expectation", "Columns", "Says", "Observed", "Outcome")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1200px;padding:24px;color:#17262c}
table{border-collapse:collapse;width:100%;margin:12px 0}td,th{border-bottom:1px solid #e4e1d8;
padding:6px 12px 6px 0;text-align:left;vertical-align:top}.bad{color:#b3341c;font-weight:600}
.good{color:#0b6788}a{color:#0b6788}ul{padding-left:20px}
"""


@dataclass(frozen=True)
class Site:
    """The data docs as they are now: the page that leads to all others, and how many these are."""

    index: Path
    num_pages: int


def build_site(store: ArtifactStore, home: Path) -> Site:
    """Bring the data docs up to date with the kept results.

    Safe to repeat, and to break off: finished pages are kept, and the index is written last. Of
    runs that end at one time one does it after the other.

    Args:
        store: keeps results under `validations` and `failed_validations`.
        home: state folder; the site is in `data_docs/current/`.

    Raises:
        StorageError: the disk refused a write; finished pages stay.
    """
    root = home / FOLDER / CURRENT
    with locked(root.with_name("lock")):
        outcomes = _outcomes(store)
        for name, outcome in outcomes.items():
            if not (root / name).exists():
                write_atomically(root / name, render_page(outcome))
        write_atomically(root / INDEX, render_index(list(outcomes.items())))
        for page in root.glob("*.html"):
            if page.name not in (INDEX, *outcomes):
                page.unlink()
    return Site(root / INDEX, len(outcomes))


def render_page(outcome: SuiteOutcome) -> str:
    """One validation result: what is wrong, then every expectation with what was seen."""
    warnings = [f"warning: {check.sentence}" for check in outcome.with_status("warned")]
    faults = [*outcome.looks_like, *outcome.faults, *warnings]
    title = f"{outcome.suite} on {outcome.subject}"
    return _page(
        title,
        f"<p><a href='{INDEX}'>All results</a></p><h1>{html.escape(title)}: {_result(outcome)}</h1>"
        f"<p>{outcome.num_rows:,} rows, {html.escape(str(outcome.window))}</p>"
        f"<ul>{''.join(f'<li>{html.escape(fault)}</li>' for fault in faults)}</ul>"
        + _table([[html.escape(text) for text in row.values()] for row in outcome.rows()], HEAD),
    )


def render_index(entries: Sequence[tuple[str, SuiteOutcome]]) -> str:
    """All results in a table, refused ones first, then the newest windows."""
    ordered = sorted(entries, key=lambda e: (e[1].passed, -e[1].window.end.timestamp(), e[1].suite))
    rows = [
        [
            f"<a href='{name}'>{html.escape(outcome.suite)}</a>",
            html.escape(outcome.subject),
            html.escape(str(outcome.window)),
            f"{outcome.num_rows:,}",
            str(outcome.num_judged),
            str(len(outcome.with_status("warned"))),
            _result(outcome),
        ]
        for name, outcome in ordered
    ]
    head = ("Suite", "Checked", "Window", "Rows", "Expectations", "Warnings", "Result")
    return _page("Data docs", f"<h1>Data docs</h1>{_table(rows, head)}")


def _page(title: str, body: str) -> str:
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """A table of cells that are HTML already."""
    lines = ["".join(f"<th>{name}</th>" for name in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _result(outcome: SuiteOutcome) -> str:
    return (
        "<span class='good'>passed</span>" if outcome.passed else "<span class='bad'>refused</span>"
    )


def _outcomes(store: ArtifactStore) -> dict[str, SuiteOutcome]:
    """Page to result. Equal results have one page; those of another release have none."""
    found = {}
    for kind in ("validations", "failed_validations"):
        for file in sorted((store.root / kind).glob("[!.]*/validation.json")):
            with suppress(ArtifactError):
                found[f"{digest_of(file)[:24]}.html"] = read_outcome(file)
    return found
