"""Every picture is well-formed, finite, named, and shows the values it was given."""

import base64
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts.data import MonitoredFeature, MonitoredPeriod
from tasks.contracts.evaluation import CurvePoint, Metric, ValueBand
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.charts import (
    Estimate,
    Series,
    calibration_chart,
    curve_chart,
    feature_charts,
    interval_chart,
    line_chart,
    observed_chart,
    residual_chart,
    trade_chart,
    wilson_interval,
)
from tasks.reporting.drawing import canvas, limits
from tasks.reporting.gallery import as_data_url
from tests.support.data.builders import month
from tests.support.reporting.pages import SVG, parsed, place, texts, tipped, tips
from tests.support.reporting.run_records import regression_record

ANY = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.text(max_size=60)
EVIL = '<script>alert("1")</script>&\x00'


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


@settings(max_examples=12)
@given(st.lists(st.builds(CurvePoint, x=ANY, y=ANY, weight=ANY), max_size=8))
def test_a_calibration_chart_takes_any_numbers(points: list[CurvePoint]) -> None:
    parsed(calibration_chart(points))


@settings(max_examples=12)
@given(st.lists(st.builds(Estimate, name=NAMES, value=ANY, low=ANY, high=ANY, note=NAMES),
                max_size=6), ANY)  # fmt: skip
def test_an_interval_chart_takes_any_rows(rows: list[Estimate], reference: float) -> None:
    drawing = interval_chart("t", rows, "x", (reference, "all"))
    assert len(tips(parsed(drawing))) <= 2 * len(rows)


@settings(max_examples=12)
@given(st.lists(st.tuples(ANY, ANY), max_size=8))
def test_a_curve_takes_any_numbers(points: list[tuple[float, float]]) -> None:
    parsed(curve_chart("ROC", Series("c", points), "x", "y", ((0, 0), (1, 1))))


@pytest.mark.parametrize("value", [None, 0.0, -1e300, 5e-324, math.inf, math.nan, 12.5])
def test_features_over_time_take_any_numbers(value: float | None) -> None:
    periods = tuple(
        MonitoredPeriod.model_construct(
            start=month(number).start, low=value, median=value, high=value, null_rate=0, num_rows=1
        )
        for number in (1, 2)
    )
    one = MonitoredFeature.model_construct(
        view=EVIL, feature="level", psi=value, ks=0.0, drifted=True, periods=periods
    )
    assert len(tips(parsed(feature_charts([one] * 4)))) == 4


def test_pictures_of_numbers_are_drawn_whatever_came_out(tmp_path: Path) -> None:
    report = regression_record(ArtifactStore(tmp_path)).evaluation
    lost = Metric(value=math.nan, low=math.nan, high=math.nan)
    odd = {
        "observed": (ValueBand(x=math.nan, low=0, mean=0, high=0, num_rows=1),),
        "residuals": (CurvePoint(x=0.0, y=1e-38, weight=0.0),),
        "overall": report.overall.model_copy(update={"bias": lost}),
    }
    for changes in ({"observed": (), "residuals": ()}, odd):
        changed = report.model_copy(update=changes)
        parsed(observed_chart(changed))
        parsed(residual_chart(changed))


def test_points_are_drawn_where_their_values_say() -> None:
    points = [(1, 0.4), (2, 0.2), (3, math.nan), (4, 0.3)]
    root = parsed(line_chart("loss", [Series("validation", points)], "epoch", "loss"))
    dots = [place(group) for group in tipped(root)]
    assert len(dots) == 3
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.1)
    assert y1 < y3 < y2, "a larger value is drawn higher"


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


def test_a_wilson_interval_agrees_with_the_published_one() -> None:
    # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3: 81 of 263.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0.5, 0) == (0.0, 1.0)


def test_a_variant_stands_at_its_cost_and_its_change_whatever_the_interval() -> None:
    rows = [(0.1, Estimate("a", 0.0, math.nan, 0.0, "kept")), (3.0, Estimate("b", -0.1, -0.2, 0.0))]
    drawing = parsed(trade_chart("Trade", "ms", "AUC change", rows))
    (left, high), (right, low) = (place(dot) for dot in tipped(drawing))
    assert (left < right, high < low) == (True, True)  # y counts downwards
    assert {"a", "b", "AUC change"} <= set(texts(drawing))
