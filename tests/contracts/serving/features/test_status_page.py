"""The status page in a real browser, served as the admin listener serves it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadRequestError, OverloadedError
from serving.interfaces import Pages, VersionState
from serving.observability.config import ObservabilityConfig
from serving.observability.metrics import Source
from serving.observability.observers import Observability
from serving.observability.status import STEP_S
from tasks.contracts.base import TimeWindow
from tasks.contracts.drift import DriftResult
from tasks.control.retraining.config import RetrainingPolicy
from tasks.control.retraining.evidence import Evidence
from tasks.control.retraining.ledger import Ledger
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tests.support.services.browser import Page, browser, needs_browser
from tests.support.serving.builders import MODEL, STATES, batch, call

ODD = "<img src=x onerror=alert(1)>"


@contextmanager
def served(pages: Pages) -> Iterator[str]:
    """The pages on a listener of their own; what is not there is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            kind, body = page() if page else ("text/plain", b"no such page")
            self.send_response(200 if page else 404)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def evidence(result: DriftResult, drifted: tuple[str, ...]) -> Evidence:
    end = datetime(2013, 11, 22, 5, tzinfo=UTC)
    return Evidence(
        result=result,
        window=TimeWindow(start=end - timedelta(days=28), end=end),
        version=3,
        num_features=69,
        num_drifted=len(drifted),
        drifted=drifted,
        prediction_drifted=False,
        prediction_effect_low=0.01,
        num_labelled=1000,
        champion_age_days=3.0,
        former_version=None,
        former_difference=None,
        sentences=("it moved",),
    )


def without_drift(home: Path) -> Settings:
    return Settings(home=home, feature_repo=PROJECT_ROOT / "feature_repo" / "flights")


def settings_with(home: Path, result: DriftResult, drifted: tuple[str, ...]) -> Settings:
    settings = without_drift(home)
    ledger = Ledger(settings.metadata_url)
    ledger.store_result(MODEL, "flights", evidence(result, drifted), RetrainingPolicy())
    return settings


def observability(
    settings: Settings,
    states: list[VersionState] | None = None,
    sources: tuple[Source, ...] = (),
) -> Observability:
    made = Observability(
        settings,
        ObservabilityConfig(),
        states=lambda: STATES if states is None else states,
        sources=sources,
    )
    made._drift.look([MODEL])
    return made


def with_traffic(made: Observability, num_points: int = 60) -> Observability:
    """Points of the last minutes, as a process that answers would have kept them."""
    for number in range(num_points):
        for _ in range(20 + (number * 7) % 13):
            made.counting.served(batch(call(0.0021), call(0.004)))
        for _ in range(3 + number % 4):
            made.counting.served(batch(call(0.0035), version="4", track="candidate"))
        made.counting.served(batch(call(0.005), version="4", track="shadow"))
        made._history.note()
    points = made._history._points
    now = points[-1].moment
    for number, point in enumerate(reversed(points)):  # not all of one moment
        object.__setattr__(point, "moment", now - number * STEP_S)
    return made


def entities(stale: int = 0) -> Source:
    freshness = {
        "weather": {"fresh": 4180 - stale, "stale": stale, "missing": 2, "ahead": 0},
        "carrier_stats": {"fresh": 4182, "stale": 0, "missing": 0, "ahead": 0},
    }
    return Source("entities", lambda: {"reads": 3100, "shared": 612, "freshness": freshness})


def fine(home: Path) -> Observability:
    log = Source("log", lambda: {"written": 4182, "dropped": 0})
    settings = settings_with(home, DriftResult.STABLE, ())
    return with_traffic(observability(settings, sources=(log, entities())))


def troubled(home: Path) -> Observability:
    states = [
        VersionState(
            MODEL, "3", "UNAVAILABLE", "its golden batch differs by 0.31, expected at most 1e-4"
        ),
        VersionState(MODEL, "4", "READY", "", ("candidate",), "onnx-fp32", "cpu", "onnxruntime"),
        VersionState(ODD, "1", "LOADING"),
    ]
    numbers = {"written": 4182, "dropped": 0}
    stale = {"fresh": 100, "stale": 0}
    log = Source("log", lambda: dict(numbers))
    reads = Source("entities", lambda: {"freshness": {"weather": dict(stale)}})
    names = ("weather__temp", "origin_stats__late_rate_24h")
    settings = settings_with(home, DriftResult.RETRAIN, names)
    made = with_traffic(observability(settings, states, (log, reads)))
    numbers["dropped"], stale["stale"] = 17, 41
    for _ in range(212):
        made.counting.refused(call(), OverloadedError("full"))
    made.counting.refused(call(), BadRequestError("no"))
    return made


def told(made: Observability) -> dict[str, Any]:
    kind, body = made.pages["/status.json"]()
    assert kind == "application/json"
    return dict(json.loads(body))


def test_the_status_says_versions_traffic_latency_and_result(tmp_path: Path) -> None:
    status = told(fine(tmp_path))
    (model,) = status["models"]
    stable, candidate, shadow = model["slots"]
    assert (stable["slot"], stable["version"], candidate["version"]) == ("stable", "3", "4")
    assert stable["share"] + candidate["share"] == pytest.approx(1)
    assert shadow["share"] is None
    assert len(stable["points"]) == 60
    version = model["versions"][0]
    assert version["p50_ms"] == pytest.approx(3, rel=0.6)
    assert version["p50_ms"] < version["p99_ms"]
    assert model["drift"]["verdict"] == "stable"
    assert status["notices"] == []


def test_trouble_is_told_in_sentences(tmp_path: Path) -> None:
    notices = " | ".join(told(troubled(tmp_path))["notices"])
    for words in (
        "flight-delay has no ready version in track stable",
        "version 3: its golden batch differs",
        "212 calls of flight-delay (stable) refused: overloaded",
        "log dropped 17 entries",
        "41 rows were read with values of weather that are too old",
        "the newest drift check says retrain",
    ):
        assert words in notices
    assert "bad_request" not in notices, "a client's own fault needs nobody's attention"


def test_looking_for_results_makes_no_database(tmp_path: Path) -> None:
    observability(without_drift(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


@needs_browser
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_whole_in_every_width_and_light(
    tmp_path: Path, width: int, scheme: str
) -> None:
    made = troubled(tmp_path / "home")
    with served(made.pages) as url, browser(tmp_path) as page:
        page.set_size(width, 900)
        page.prefer(scheme)
        page.open(f"{url}/status")
        page.wait_for_text(MODEL, "NEEDS ATTENTION", "212", "retrain", "onnx-fp32", ODD)
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.value("[...document.querySelectorAll('th')].every(th => th.scope)")
        assert page.value("[...document.querySelectorAll('svg')].every(s => s.ariaLabel)")
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 244, 238)") == (scheme == "light")
        assert least_contrast(page) >= 4.5
        assert page.console == []


CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const shows = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
    && e.getBoundingClientRect().width && !['SCRIPT', 'STYLE'].includes(e.tagName);
  return Math.min(...[...document.querySelectorAll('body *')].filter(shows).map(e => {
    const ink = light(parse(getComputedStyle(e).color)), paper = light(ground(e));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
})()"""


def least_contrast(page: Page) -> float:
    """The smallest contrast of any text with the ground that it stands on."""
    return float(page.value(CONTRAST))


@needs_browser
def test_the_page_follows_what_happens_and_says_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.status.REFRESH_S", 0.3)
    states = [STATES[0]]
    made = with_traffic(observability(without_drift(tmp_path / "home"), states))
    with browser(tmp_path) as page:
        with served(made.pages) as url:
            page.open(f"{url}/status")
            page.wait_for_text("version 3", "None since the start")
            states.append(VersionState(MODEL, "5", "LOADING"))
            page.wait_for_text("loading")
            made.counting.refused(call(), OverloadedError("full"))
            page.wait_for_text("overloaded")
            assert page.console == []
        page.wait_for_text("not answered since")


@pytest.mark.slow
@needs_browser
def test_a_process_without_models_says_so(tmp_path: Path) -> None:
    made = observability(without_drift(tmp_path / "home"), [])
    with served(made.pages) as url, browser(tmp_path) as page:
        page.open(f"{url}/status")
        page.wait_for_text("No model is loaded")
        assert page.console == []
