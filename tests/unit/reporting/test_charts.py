"""Every picture is well-formed, finite, named, and shows the values it was given."""

from __future__ import annotations

import base64
import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts.conversion import VariantLatency
from tasks.contracts.drift import FeatureDrift
from tasks.contracts.evaluation import CurvePoint, Metric
from tasks.contracts.release import ModelVariant
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.charts import (
    Estimate,
    Series,
    calibration_chart,
    curve_chart,
    drift_chart,
    interval_chart,
    latency_chart,
    line_chart,
    trade_chart,
    wilson_interval,
    windows_chart,
)
from tasks.reporting.drawing import as_data_url, canvas, limits
from tasks.reporting.lineage import MOST_BOXES, Column, Place, columns, lineage_chart
from tests.support.data.builders import month
from tests.support.reporting.pages import (
    SVG,
    parsed,
    place,
    texts,
    tipped,
    tips,
    variant,
    width,
)
from tests.support.reporting.run_records import run_record

ANY = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.text(max_size=60)
EVIL = '<script>alert("1")</script>&\x00'


def feature(name: str, *, drifted: bool) -> FeatureDrift:
    return FeatureDrift(
        feature=name, kind="numeric", psi=0.1, psi_noise=0.1, effect=0.5, effect_low=0.4,
        missing_reference=0, missing_current=0, drifted=drifted, evidence="",
    )  # fmt: skip


def test_names_from_the_data_are_text_wherever_they_are_written() -> None:
    with canvas() as drawing:
        drawing.tip(drawing.write(10, 10, EVIL), EVIL)
        drawing.titles(EVIL, "$y_1$")
        root = parsed(drawing.svg(EVIL, EVIL))
    clean = EVIL.replace("\x00", "\ufffd")
    assert root.findtext(f"{SVG}title") == clean == root.findtext(f"{SVG}desc")
    assert texts(root).count(clean) == 2
    assert tips(root) == [clean]
    assert "$y_1$" in texts(root), "a dollar starts no formula"


def test_a_picture_follows_the_page_and_is_the_same_for_the_same_values() -> None:
    drawings = {line_chart("loss", [Series("a", [(1, 2), (2, 3)])], "x", "y") for _ in range(2)}
    assert len(drawings) == 1
    (drawn,) = drawings
    assert "var(--water)" in drawn
    assert not re.search(r"#[0-9a-f]{6}\b", drawn.replace('href="#', "")), "no fixed colour"
    assert not re.search(r"font-family|<style|<metadata|http://(?!www.w3.org)", drawn)


@settings(max_examples=12)
@given(st.lists(st.tuples(ANY, ANY), max_size=12), ANY)
def test_a_line_chart_takes_any_numbers(points: list[tuple[float, float]], best: float) -> None:
    mark = (best, "kept") if math.isfinite(best) else None
    parsed(line_chart("t", [Series("a", points), Series("b", points[:1])], "x", "y", mark=mark))


@settings(max_examples=12)
@given(st.lists(st.builds(CurvePoint, x=ANY, y=ANY, weight=ANY), max_size=8))
def test_a_calibration_chart_takes_any_numbers(points: list[CurvePoint]) -> None:
    parsed(calibration_chart(points))


@settings(max_examples=12)
@given(st.lists(st.builds(Estimate, name=NAMES, value=ANY, low=ANY, high=ANY, note=NAMES),
                max_size=6), st.one_of(st.none(), ANY), st.booleans())  # fmt: skip
def test_an_interval_chart_takes_any_rows(
    rows: list[Estimate], reference: float | None, below: bool
) -> None:
    drawing = interval_chart("t", rows, "x", reference=reference, note_below=below)
    assert len(tips(parsed(drawing))) <= 2 * len(rows)


@settings(max_examples=12)
@given(st.lists(st.builds(FeatureDrift, feature=NAMES, kind=st.just("numeric"), psi=ANY,
                          psi_noise=ANY, effect=ANY, effect_low=ANY, missing_reference=ANY,
                          missing_current=ANY, drifted=st.booleans(), evidence=NAMES), max_size=6),
       st.one_of(st.none(), st.floats(0, 1)))  # fmt: skip
def test_a_drift_chart_takes_any_rows(rows: list[FeatureDrift], threshold: float | None) -> None:
    parsed(drift_chart(rows, threshold))


LATENCIES = st.lists(st.builds(VariantLatency, batch_rows=st.integers(1, 10**6), p50_ms=ANY,
                               p95_ms=ANY, ratio_to_eager=ANY), max_size=3)  # fmt: skip


@settings(max_examples=12)
@given(st.lists(st.builds(variant, NAMES, LATENCIES.map(tuple), st.booleans()), max_size=3))
def test_a_latency_chart_takes_any_rows(variants: list[ModelVariant]) -> None:
    parsed(latency_chart(variants))


@settings(max_examples=12)
@given(st.lists(st.tuples(st.builds(variant, NAMES, st.just(()), st.booleans()),
                          st.floats(1e-9, 1e9), st.builds(Metric, value=ANY, low=ANY, high=ANY)),
                max_size=6))  # fmt: skip
def test_a_trade_takes_any_points(points: list[tuple[ModelVariant, float, Metric]]) -> None:
    parsed(trade_chart("t", [p for p in points if math.isfinite(p[2].value)], "x", "AUC"))


PLACES = st.lists(st.builds(Place, name=NAMES, digest=NAMES, tip=NAMES, dropped=st.booleans()),
                  min_size=1, max_size=40)  # fmt: skip


@settings(max_examples=12)
@given(st.lists(st.builds(Column, title=NAMES, places=PLACES.map(tuple)), min_size=1, max_size=6))
def test_the_lineage_takes_any_things(parts: list[Column]) -> None:
    drawn = sum(min(len(column.places), MOST_BOXES) for column in parts)
    assert len(tips(parsed(lineage_chart(parts)))) == drawn


@pytest.mark.parametrize("length", [1, 20, 300])
def test_a_name_of_any_length_stays_in_its_box(length: int) -> None:
    root = parsed(lineage_chart([Column("views", (Place("w" * length, "a" * 64, ""),))]))
    assert all(len(words) * 7.5 < 152 for words in texts(root))


def test_the_lineage_names_each_version_and_counts_what_does_not_fit(tmp_path: Path) -> None:
    parts = columns(run_record(ArtifactStore(tmp_path)))
    kinds = ["raw files", "tables", "feature views", "snapshot", "model", "variants"]
    assert [column.title for column in parts] == kinds
    words = texts(parsed(lineage_chart(parts)))
    assert {"flights.csv.zip", "route_stats", "c3c3c3c3c3c3", "flight-delay 3"} <= set(words)
    many = Column("views", tuple(Place(f"v{n}", "", "") for n in range(60)))
    assert "and 37 more" in texts(parsed(lineage_chart([many])))


def test_points_are_drawn_where_their_values_say() -> None:
    points = [(1, 0.4), (2, 0.2), (3, math.nan), (4, 0.3)]
    root = parsed(line_chart("loss", [Series("validation", points)], "epoch", "loss"))
    dots = [place(group) for group in tipped(root)]
    assert len(dots) == 3
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.1)
    assert y1 < y3 < y2, "a larger value is drawn higher"


def test_a_curve_starts_and_ends_with_the_line_of_guessing() -> None:
    root = parsed(curve_chart("ROC", Series("c", [(0, 0), (1, 1)]), "x", "y",
                              baseline=((0, 0), (1, 1)), baseline_text="guessing"))  # fmt: skip
    paths = [p.get("d") or "" for p in root.iter(f"{SVG}path")]
    diagonal = [p for p in paths if paths.count(p) == 2]
    assert diagonal


def test_a_drifted_feature_is_known_without_colour() -> None:
    rows = [feature("temp", drifted=True), feature("seats", drifted=False)]
    root = parsed(drift_chart(rows, 0.1))
    assert [words for words in texts(root) if "▲" in words] == ["▲ temp"]


def test_dropped_variants_are_outlined_and_ratios_are_written() -> None:
    variants = [
        variant(name, (VariantLatency(batch_rows=1, p50_ms=ms, p95_ms=ms, ratio_to_eager=0.5),), k)
        for name, ms, k in (("a", 0.1, True), ("b", 1, True), ("c", 10, False))
    ]
    root = parsed(latency_chart(variants))
    bars = [g for g in tipped(root) if "median" in (g.findtext(f"{SVG}title") or "")]
    widths = [width(bar) for bar in bars]
    assert widths[2] - widths[1] == pytest.approx(widths[1] - widths[0], abs=0.1), "logarithmic"
    assert ["stroke-dasharray" in ElementTree.tostring(b, "unicode") for b in bars] == [0, 0, 1]
    assert any("0.50" in text and "eager" in text for text in texts(root))


def test_a_chosen_variant_is_marked_without_colour() -> None:
    points = [
        (variant("one", goals=("bulk",)), 0.1, Metric(value=0.0, low=-0.001, high=0.001)),
        (variant("other", accepted=False), 1.0, Metric(value=-0.01, low=-0.02, high=0.0)),
    ]
    assert {"★ one", "other"} <= set(texts(parsed(trade_chart("trade", points, "ms", "AUC"))))


def test_names_of_equal_variants_do_not_lie_on_each_other() -> None:
    nothing = Metric(value=0.0, low=0.0, high=0.0)
    points = [(variant(f"variant-{n}"), 1.0, nothing) for n in range(12)]
    root = parsed(trade_chart("trade", points, "ms", "AUC"))
    heights = sorted(
        float(element.get("y", "0"))
        for element in root.iter(f"{SVG}text")
        if "variant-" in "".join(element.itertext())
    )
    assert len(heights) == 12
    assert min(b - a for a, b in pairwise(heights)) >= 15


@pytest.mark.parametrize("months", [1, 2, 3, 7, 12, 40, 400])
def test_windows_have_few_marks_however_long_they_are(months: int) -> None:
    root = parsed(windows_chart([("train", month(1, months))]))
    marks = [text for text in texts(root) if re.fullmatch(r"\d{4}-\d\d-\d\d", text)]
    assert 1 <= len(marks) <= 9


def test_a_data_url_is_a_whole_picture_with_its_own_style() -> None:
    url = as_data_url(line_chart("loss", [Series(EVIL, [(1, 2)])], "epoch", "loss"))
    head, body = url.split(",")
    assert head == "data:image/svg+xml;base64"
    root = ElementTree.fromstring(base64.b64decode(body))
    assert "--water" in (root.findtext(f"{SVG}style") or "")
    assert any(e.get("class") == "backdrop" for e in root.iter(f"{SVG}rect"))


@settings(max_examples=12)
@given(st.lists(ANY, max_size=8))
def test_limits_are_never_empty_and_hold_every_drawable_value(values: list[float]) -> None:
    low, high = limits(*values)
    assert math.isfinite(low)
    assert low < high
    assert all(low <= v <= high for v in values if math.isfinite(v) and abs(v) < 1e12)


@settings(max_examples=12)
@given(st.floats(0, 1), st.integers(1, 10**7))
def test_a_wilson_interval_holds_its_rate_and_stays_within_zero_and_one(
    rate: float, rows: int
) -> None:
    low, high = wilson_interval(rate, rows)
    assert 0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1


def test_a_wilson_interval_agrees_with_the_published_one() -> None:
    # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3: 81 of 263.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0.5, 0) == (0.0, 1.0)
