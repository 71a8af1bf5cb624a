"""The page of a search: what was tried, what came out, and what the best trial is."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from tasks.contracts.training import StudyRecord
from tasks.kernel.files import write_atomically
from tasks.reporting import search_charts
from tasks.reporting.page import FOLDER, page_environment
from tasks.reporting.svg import STYLE_SHEET

PAGE, FACTS = "search.html", "search.json"
MOST_ROWS = 500


def gallery(record: StudyRecord) -> dict[str, Markup]:
    """The pictures that the Prefect UI shows too, by key."""
    drawn = {
        "history": search_charts.history_chart("Optimisation history", record),
        "curves": search_charts.curves_chart("Learning curves", record),
        "parallel": search_charts.parallel_chart("Parallel coordinates", record),
    }
    if record.importance:
        drawn["importance"] = search_charts.importance_chart("Importance of the fields", record)
    return drawn


def render_search_page(record: StudyRecord) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load."""
    states = [trial.state for trial in record.trials]
    template = page_environment().get_template("search.html.j2")
    return template.render(
        record=record,
        best=next((t for t in record.trials if t.number == record.best), None),
        counts={state: states.count(state) for state in ("complete", "pruned", "failed")},
        num_repeats=sum(trial.repeats is not None for trial in record.trials),
        seconds=sum(trial.seconds for trial in record.trials),
        ranked=sorted(
            record.trials, key=lambda t: (t.state != "complete", -(t.quality or 0), t.number)
        )[:MOST_ROWS],
        pictures=gallery(record),
        slices=list(search_charts.slice_charts(record)),
        spoken=search_charts.spoken,
        chart_style=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
        page_style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
    )


def write_search_page(record: StudyRecord, folder: Path) -> Path:
    """Write `<folder>/<study>/search.html` and, before it, the same facts as `search.json`.

    The same record gives the same files, so it can be repeated.

    Raises:
        StorageError: the disk refused a write.
    """
    target = folder / record.study
    write_atomically(target / FACTS, record.model_dump_json(indent=1) + "\n")
    write_atomically(target / PAGE, render_search_page(record))
    return target / PAGE
