"""Data docs: every kept validation result as a page of Great Expectations, and an index of them.

The pages come from Great Expectations' own renderer. What it would load from other hosts (styles,
scripts, pictures) is taken out, so that a page opened anywhere asks nobody for anything; a small
style sheet takes its place. A page is named by the digest of its result and made once.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import digest_of, locked, write_atomically
from tasks.kernel.settings import ArtifactStore, send
from tasks.validation.outcome import SuiteOutcome, read_outcome

FOLDER = "data_docs"
CURRENT = "current"
INDEX = "index.html"
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
    page = page.replace("</head>", f"{_parts().look()}</head>", 1)
    return page.replace("<body>", f"<body>{_parts().head(outcome, INDEX)}", 1)


def without_outside(page: str) -> str:
    """A page that loads nothing from other hosts and leads to none."""
    return _FAR_LINK.sub(r"\1", _OUTSIDE.sub("", page))


def render_index(entries: Sequence[tuple[str, SuiteOutcome]]) -> str:
    """All results in a table, refused ones first, then the newest windows."""
    ordered = sorted(entries, key=lambda e: (e[1].passed, -e[1].window.end.timestamp(), e[1].suite))
    return f"{_parts().index(ordered)}\n"


@cache
def _parts() -> Any:
    """What stands around the pages of Great Expectations, and their index."""
    folder = Path(__file__).parent
    templates = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    templates.globals["style"] = Markup((folder / "docs.css").read_text(encoding="utf-8"))
    return templates.get_template("docs.html.j2").module


def _outcomes(store: ArtifactStore) -> dict[str, SuiteOutcome]:
    """Page to result. Equal results have one page; those of another release have none."""
    found = {}
    for kind in ("validations", "failed_validations"):
        for folder in store.folders(kind):
            with suppress(ArtifactError, FileNotFoundError):
                file = store.file(folder, "validation.json")
                found[f"{digest_of(file)[:24]}.html"] = read_outcome(file)
    return found
