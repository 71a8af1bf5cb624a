"""The page of one run: a template filled with the record, its pictures and nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tasks.contracts.run import RunRecord
from tasks.reporting import conversion, facts, figures, judgement, quantities, training_cost
from tasks.reporting.checks import Check, StoredArtifact, checks
from tasks.reporting.drawing import STYLE_SHEET

FOLDER = Path(__file__).parent
_UNBROKEN = re.compile(
    rf"\d{{4}}-\d\d-\d\d|(?:[-+{quantities.MINUS}]?[\d.,]+ )?\[[^][<>]{{1,40}}\]"
)
FILTERS = (
    quantities.count,
    quantities.days,
    quantities.decimal,
    quantities.difference,
    quantities.duration,
    quantities.estimate,
    quantities.factor,
    quantities.interval,
    quantities.milliseconds,
    quantities.moment,
    quantities.percent,
    quantities.plural,
    quantities.printable,
    quantities.short_commit,
    quantities.short_digest,
    quantities.shortened,
    quantities.signed,
    quantities.significant,
    quantities.size,
)


def render_page(record: RunRecord, stored: Sequence[StoredArtifact], docs: str) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load.

    Args:
        record: what the run did.
        stored: every artifact that the record names, and whether it is whole.
        docs: where the data docs lie, from the page's folder.
    """
    found: list[Check] = checks(record, stored)
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            facts=facts,
            conversion=conversion,
            judgement=judgement,
            figures=figures,
            training_cost=training_cost,
            stored=stored,
            docs=docs,
            checks=found,
        )
    )


@cache
def page_environment() -> Environment:
    """Templates of this folder, and what they draw and write numbers with."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, sheet in (("chart_style", STYLE_SHEET), ("page_style", FOLDER / "report.css")):
        environment.globals[name] = Markup(sheet.read_text(encoding="utf-8"))
    environment.filters.update({function.__name__: function for function in (*FILTERS, prose)})
    return environment


def prose(text: str) -> Markup:
    """Escaped text in which no line breaks inside a date or an interval."""
    escaped = str(escape(quantities.printable(text)))
    return Markup(_UNBROKEN.sub(r'<span class="nowrap">\g<0></span>', escaped))


def _without_control_characters(value: object) -> object:
    return value if isinstance(value, Markup) else quantities.printable(value)
