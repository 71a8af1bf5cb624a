"""The status page in a real browser, served as the admin listener serves it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.config import ObservabilityConfig
from serving.errors import BadRequestError, OverloadedError
from serving.interfaces import Pages, VersionState
from serving.observability.metrics import Source
from serving.observability.status import Observability
from tests.support.services.browser import browser, needs_browser
from tests.support.services.listeners import Answer, Asked, http_listener
from tests.support.serving.builders import MODEL, STATES, batch, call

ODD = "<img src=x onerror=alert(1)>"


@contextmanager
def served(pages: Pages) -> Iterator[str]:
    """The pages on a listener of their own; what is not there is a 404."""

    def answer(asked: Asked) -> Answer:
        page = pages.get(asked.path)
        return (200, *page()) if page else (404, "text/plain", b"no such page")

    with http_listener(answer) as url:
        yield url


def observability(
    states: list[VersionState] | None = None, sources: tuple[Source, ...] = ()
) -> Observability:
    return Observability(
        ObservabilityConfig(), states=lambda: STATES if states is None else states, sources=sources
    )


def with_traffic(made: Observability) -> Observability:
    """A minute of requests."""
    for number in range(60):
        for _ in range(20 + (number * 7) % 13):
            made.counting.served(batch(call(0.0021), call(0.004)))
        for _ in range(3 + number % 4):
            made.counting.served(batch(call(0.0035), version="4", track="candidate"))
        made.counting.served(batch(call(0.005), version="4", track="shadow"))
    return made


def troubled() -> Observability:
    states = [
        VersionState(
            MODEL, "3", "UNAVAILABLE", "its golden batch differs by 0.31, expected at most 1e-4"
        ),
        VersionState(MODEL, "4", "READY", "", ("candidate",), "onnx-fp32", "cpu", "onnxruntime"),
        VersionState(ODD, "1", "LOADING"),
    ]
    numbers = {"written": 4182, "dropped": 0}
    rows = {("weather", "fresh"): 100, ("weather", "stale"): 0}
    log = Source("log", lambda: dict(numbers))
    reads = Source("entities", lambda: {"freshness": dict(rows)})
    made = with_traffic(observability(states, (log, reads)))
    numbers["dropped"], rows["weather", "stale"] = 17, 41
    for _ in range(212):
        made.counting.refused(call(), OverloadedError("full"))
    made.counting.refused(call(), BadRequestError("no"))
    return made


def told(made: Observability) -> dict[str, Any]:
    kind, body = made.pages["/status.json"]()
    assert kind == "application/json"
    return dict(json.loads(body))


def test_the_status_says_versions_traffic_and_latency() -> None:
    status = told(with_traffic(observability()))
    (model,) = status["models"]
    stable, candidate, shadow = model["slots"]
    assert (stable["slot"], stable["version"], candidate["version"]) == ("stable", "3", "4")
    assert stable["share"] + candidate["share"] == pytest.approx(1)
    assert shadow["share"] is None
    version = model["versions"][0]
    assert version["p50_ms"] == pytest.approx(3, rel=0.6)
    assert version["p50_ms"] < version["p99_ms"]
    assert status["notices"] == []


def test_trouble_is_told_in_sentences() -> None:
    notices = " | ".join(told(troubled())["notices"])
    for words in (
        "flight-delay has no ready version in track stable",
        "version 3: its golden batch differs",
        "212 calls of flight-delay (stable) refused: overloaded",
        "log dropped 17 entries",
        "41 rows were read with values of weather that are too old",
    ):
        assert words in notices
    assert "bad_request" not in notices, "a client's own fault needs nobody's attention"


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_is_whole_in_every_width_and_light(
    tmp_path: Path, width: int, scheme: str
) -> None:
    made = troubled()
    with served(made.pages) as url, browser(tmp_path) as page:
        page.set_size(width, 900)
        page.prefer(scheme)
        page.open(f"{url}/status")
        page.wait_for_text(MODEL, "NEEDS ATTENTION", "212", "onnx-fp32", ODD)
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.value("[...document.querySelectorAll('th')].every(th => th.scope)")
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(246, 244, 238)") == (scheme == "light")
        assert page.console == []


@needs_browser
def test_the_page_follows_what_happens_and_says_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.status.REFRESH_S", 0.3)
    states = [STATES[0]]
    made = with_traffic(observability(states))
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
