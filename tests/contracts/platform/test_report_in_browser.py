"""The report in a real browser, and its tasks under a real Prefect API."""

import base64
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prefect import flow

from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.reporting.page import write_report
from tasks.reporting.task import publish_report
from tests.support.reporting.run_records import hostile_record, run_record
from tests.support.services.browser import Page, browser, needs_browser
from tests.support.services.prefect_platform import shown

pytestmark = pytest.mark.slow
SECTIONS = ("result", "figures", "loop", "data", "training", "judging", "conversion", "drift",
            "promotion", "lineage", "provenance")  # fmt: skip
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
HIDDEN = "[...document.querySelectorAll('.card')].filter(c => c.offsetHeight <= 20).length"
LINEAGE = "getComputedStyle(document.querySelector('.origins')).display"


def show(page: Page, record: RunRecord, store: ArtifactStore, folder: Path) -> str:
    """Open the record's report; what was written."""
    file = write_report(record, store, folder).latest_path
    page.open(file.as_uri())
    page.wait("location.protocol === 'file:' && document.readyState === 'complete'", "the report")
    return file.read_text(encoding="utf-8")


@needs_browser
@pytest.mark.parametrize("make", [run_record, hostile_record])
def test_the_page_opens_without_complaint_asks_for_nothing_and_fits_a_telephone(
    tmp_path: Path, make: Callable[[ArtifactStore], RunRecord]
) -> None:
    store = ArtifactStore(tmp_path / "state" / "artifacts")
    record = make(store)
    with browser(tmp_path) as page:
        written = show(page, record, store, tmp_path / "reports")
        assert page.console == []
        assert page.value("performance.getEntriesByType('resource').map(e => e.name)") == []
        shown = page.value("[...document.querySelectorAll('section')].map(s => s.id)")
        assert set(SECTIONS) <= set(shown)
        assert page.value("document.querySelectorAll('svg').length") == written.count("<svg") > 5
        assert page.value("document.scripts.length") == 0
        assert record.question.replace("\x00", "\ufffd") in page.value("document.body.textContent")
        page.set_size(400, 2000)
        found = [page.value(each) for each in (OVERFLOW, HIDDEN, LINEAGE)]
    assert found == [0, 0, "block"]  # only tables and charts scroll


@flow(name="report-under-test")
def report_flow(record: RunRecord) -> None:
    publish_report(record)


@pytest.mark.usefixtures("on_prefect")
def test_the_report_and_its_pictures_show_in_the_prefect_ui(settings: Settings) -> None:
    report_flow(run_record(settings.store))
    assert (settings.reports / "latest" / "report.html").is_file()
    assert "Promoted: version 3" in str(shown("run-report")[-1].data)
    for key in ("calibration", "roc", "learning-curve"):
        head, body = str(shown(f"picture-{key}")[-1].data).split(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(body)).tag.endswith("svg")
