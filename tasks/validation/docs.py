"""Data docs: every kept validation result as a page of Great Expectations, and an index of them.

The pages come from Great Expectations' own renderer. What it would load from other hosts (styles,
scripts, pictures) is taken out, so that a page opened anywhere asks nobody for anything; a small
style sheet takes its place. A page is named by the digest of its result and made once.
"""

import html
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import digest_of, locked, write_atomically
from tasks.kernel.settings import ArtifactStore, send
from tasks.validation.outcome import SuiteOutcome, read_outcome

FOLDER = "data_docs"
CURRENT = "current"
INDEX = "index.html"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1200px;padding:24px;color:#17262c}
table{border-collapse:collapse;width:100%;margin:12px 0}td,th{border-bottom:1px solid #e4e1d8;
padding:6px 12px 6px 0;text-align:left;vertical-align:top}.bad{color:#b3341c;font-weight:600}
.good{color:#0b6788}a{color:#0b6788}nav,.navbar{display:none}ul{padding-left:20px}
.badge{background:#d9ebf1;border-radius:4px;padding:1px 6px}code{font-size:.92em}
"""
_OUTSIDE = re.compile(
    r"<script\b[^>]*\bsrc=[\"']https?://[^>]*>\s*</script>|<link\b[^>]*\bhref=[\"']https?://[^>]*>"
    r"|<img\b[^>]*\bsrc=[\"']https?://[^>]*>|<iframe\b.*?</iframe>"
    r"|\burl\(\s*[\"']?https?://[^)]*\)",
    re.IGNORECASE | re.DOTALL,
)
_FAR_LINK = re.compile(r"(<a\b[^>]*?)\bhref=[\"']https?://[^\"']*[\"']", re.IGNORECASE)


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
        send(root)
    return Site(root / INDEX, len(outcomes))


def render_page(outcome: SuiteOutcome) -> str:
    """One validation result as Great Expectations shows it, without anything from outside."""
    # Imported here: a site without a new page needs none of it.
    from great_expectations.core.expectation_validation_result import (
        expectationSuiteValidationResultSchema,
    )
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view.view import DefaultJinjaPageView

    total, good = len(outcome.results), sum(result["success"] for result in outcome.results)
    validation = expectationSuiteValidationResultSchema.load(
        {
            "success": outcome.passed,
            "suite_name": outcome.suite,
            "results": list(outcome.results),
            "statistics": {
                "evaluated_expectations": total,
                "successful_expectations": good,
                "unsuccessful_expectations": total - good,
                "success_percent": 100 * good / max(total, 1),
            },
            "meta": {
                "run_id": {
                    "run_name": str(outcome.window),
                    "run_time": outcome.window.end.isoformat(),
                },
                "active_batch_definition": {"batch_identifiers": {}},
                "great_expectations_version": outcome.great_expectations_version,
            },
        }
    )
    document = ValidationResultsPageRenderer().render(validation)
    view: Any = DefaultJinjaPageView()
    page = without_outside(str(view.render(document)))
    return page.replace("</head>", f"<style>{STYLE}</style></head>", 1).replace(
        "<body>", f"<body>{_head(outcome)}", 1
    )


def without_outside(page: str) -> str:
    """A page that loads nothing from other hosts and leads to none."""
    return _FAR_LINK.sub(r"\1", _OUTSIDE.sub("", page))


def render_index(entries: Sequence[tuple[str, SuiteOutcome]]) -> str:
    """All results in a table, refused ones first, then the newest windows."""
    ordered = sorted(entries, key=lambda e: (e[1].passed, -e[1].window.end.timestamp(), e[1].suite))
    rows = "".join(
        f"<tr><td><a href='{name}'>{html.escape(outcome.suite)}</a></td>"
        f"<td>{html.escape(outcome.subject)}</td><td>{html.escape(str(outcome.window))}</td>"
        f"<td>{outcome.num_rows:,}</td><td>{outcome.num_judged}</td>"
        f"<td>{len(outcome.with_status('warned'))}</td><td>{_result(outcome)}</td></tr>"
        for name, outcome in ordered
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Data docs</title>"
        f"<style>{STYLE}</style></head><body><h1>Data docs</h1><table><thead><tr><th>Suite</th>"
        "<th>Checked</th><th>Window</th><th>Rows</th><th>Expectations</th><th>Warnings</th>"
        f"<th>Result</th></tr></thead><tbody>{rows}</tbody></table></body></html>\n"
    )


def _head(outcome: SuiteOutcome) -> str:
    warnings = [f"warning: {check.sentence}" for check in outcome.with_status("warned")]
    faults = [*outcome.looks_like, *outcome.faults, *warnings]
    items = "".join(f"<li>{html.escape(fault)}</li>" for fault in faults)
    return (
        f"<p><a href='{INDEX}'>All results</a></p><h1>{html.escape(outcome.suite)} on "
        f"{html.escape(outcome.subject)}: {_result(outcome)}</h1><p>{outcome.num_rows:,} rows, "
        f"{html.escape(str(outcome.window))}</p><ul>{items}</ul>"
    )


def _result(outcome: SuiteOutcome) -> str:
    return (
        "<span class='good'>passed</span>" if outcome.passed else "<span class='bad'>refused</span>"
    )


def _outcomes(store: ArtifactStore) -> dict[str, SuiteOutcome]:
    """Page to result. Equal results have one page; those of another release have none."""
    found = {}
    for kind in ("validations", "failed_validations"):
        for folder in store.folders(kind):
            with suppress(ArtifactError, FileNotFoundError):
                file = store.file(folder, "validation.json")
                found[f"{digest_of(file)[:24]}.html"] = read_outcome(file)
    return found
