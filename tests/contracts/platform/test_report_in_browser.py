"""The report in a real browser, and its tasks under a real Prefect API."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.testing.utilities import prefect_test_harness

from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.reporting.files import write_report
from tasks.reporting.task import publish_report
from tests.support.reporting.run_records import hostile_record, run_record

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)
SECTIONS = ("result", "figures", "loop", "data", "training", "judging", "conversion", "drift",
            "promotion", "lineage", "provenance")  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing leaves the machine, not even by mistake
)  # fmt: skip


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page."""

    dom: str
    console: list[str]
    requests: set[str]
    """Addresses outside the file that the page itself asked for."""


def visit(page: Path, scratch: Path, *flags: str) -> Visit:
    """Open a local page, without network, and come back with what happened."""
    assert BROWSER is not None
    log = scratch / "net.json"
    command = [BROWSER, *FLAGS, f"--user-data-dir={scratch / 'profile'}", f"--log-net-log={log}",
               *flags, "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    # The browser's own attempts (updates, time) carry the initiator "not an origin".
    events = [e.get("params", {}) for e in json.loads(log.read_text())["events"]]
    asked = {e["url"] for e in events if e.get("initiator") == "null" and "url" in e}
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Visit(done.stdout, console, {url for url in asked if not url.startswith("file:")})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "state" / "artifacts")


@needs_browser
@pytest.mark.parametrize("make", [run_record, hostile_record])
def test_the_page_opens_without_complaint_and_asks_for_nothing(
    tmp_path: Path, store: ArtifactStore, make: object
) -> None:
    assert callable(make)
    record = make(store)
    seen = visit(write_report(record, store, tmp_path / "reports").latest_path, tmp_path)
    assert seen.console == []
    assert seen.requests == set()
    for section in SECTIONS:
        assert f'<section id="{section}"' in seen.dom
    written = (tmp_path / "reports" / "latest" / "report.html").read_text(encoding="utf-8")
    assert seen.dom.count("<svg") == written.count("<svg") > 5
    assert "<script" not in seen.dom
    assert html.escape(record.question, quote=False).replace("\x00", "\ufffd") in seen.dom


@needs_browser
def test_the_check_itself_sees_errors_and_outside_requests(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>missing()</script>')
    seen = visit(page, tmp_path)
    assert seen.requests == {"http://127.0.0.1:9/x.png"}
    assert any("missing is not defined" in line for line in seen.console)


MEASURE = """<!doctype html><body><script>
const frame = document.createElement("iframe");
frame.style = "border:0;height:2000px;width:" + WIDTH + "px";
frame.onload = () => {
  const page = frame.contentDocument, shown = (e) => !!e && e.getBoundingClientRect().height > 20;
  const style = frame.contentWindow.getComputedStyle(page.body);
  document.title = JSON.stringify({
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    hidden: [...page.querySelectorAll(".card")].filter((c) => !shown(c)).length,
    lineage: frame.contentWindow.getComputedStyle(page.querySelector(".origins")).display,
    ground: style.backgroundColor, ink: style.color,
  });
};
frame.srcdoc = PAGE;
document.body.append(frame);
</script>"""


def measured(page: Path, scratch: Path, width: int, *flags: str) -> dict[str, object]:
    """Layout of the page in a frame of `width` pixels."""
    text = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    probe = scratch / f"probe-{width}.html"
    program = MEASURE.replace("WIDTH", str(width)).replace("PAGE", text)
    probe.write_text(program, encoding="utf-8")
    dom = visit(probe, scratch, "--virtual-time-budget=10000", *flags).dom
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title, dom[:2000]
    found = json.loads(html.unescape(title[1]))
    assert isinstance(found, dict)
    return found


def brightness(colour: object) -> float:
    """Mean of red, green and blue of a computed colour, 0 to 1."""
    channels = [int(c) for c in re.findall(r"\d+", str(colour))[:3]]
    return sum(channels) / 765


@needs_browser
@pytest.mark.parametrize("make", [run_record, hostile_record])
def test_a_telephone_shows_everything_and_only_tables_and_charts_scroll(
    tmp_path: Path, store: ArtifactStore, make: object
) -> None:
    assert callable(make)
    page = write_report(make(store), store, tmp_path / "reports").page_path
    found = measured(page, tmp_path, 400)
    assert found["overflow"] == 0
    assert found["hidden"] == 0
    assert found["lineage"] == "block"


@needs_browser
def test_a_wide_dark_screen_gets_light_words_on_a_dark_ground(
    tmp_path: Path, store: ArtifactStore
) -> None:
    page = write_report(run_record(store), store, tmp_path / "reports").page_path
    light = measured(page, tmp_path, 1280)
    dark = measured(page, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert light["lineage"] == dark["lineage"] == "flex"
    assert brightness(light["ground"]) > 0.9 > 0.3 > brightness(light["ink"])
    assert brightness(dark["ground"]) < 0.15 < 0.8 < brightness(dark["ink"])


@pytest.fixture(scope="module")
def prefect_api() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@flow(name="report-under-test")
def report_flow(record: RunRecord) -> None:
    publish_report(record)


@pytest.mark.usefixtures("prefect_api")
def test_the_report_and_its_pictures_show_in_the_prefect_ui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    settings = Settings.from_environment()
    report_flow(run_record(settings.store))
    assert (settings.reports / "latest" / "report.html").is_file()
    assert "Promoted: version 3" in artifact("run-report")
    for key in ("calibration", "roc", "learning-curve"):
        head, body = artifact(f"picture-{key}").split(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(body)).tag.endswith("svg")


def artifact(key: str) -> str:
    """Data of the newest artifact with this key."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    assert isinstance(found[-1].data, str)
    return found[-1].data
