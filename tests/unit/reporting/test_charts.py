"""Every picture is well-formed, finite, named, and shows the values it was given."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.evaluation import CurvePoint
from tasks.contracts.run import StageTime
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.axes import Linear, Logarithmic, domain, powers_around, round_up, tick_step
from tasks.reporting.charts import (
    Mark,
    Series,
    calibration_chart,
    curve_chart,
    line_chart,
    wilson_interval,
)
from tasks.reporting.lineage import (
    MOST_BOXES,
    Column,
    Place,
    columns,
    lineage_chart,
    lineage_chart_upright,
)
from tasks.reporting.loop import loop_chart, loop_chart_upright, time_bar, windows_chart
from tasks.reporting.rankings import (
    Effect,
    Estimate,
    Latency,
    effect_chart,
    interval_chart,
    latency_chart,
)
from tasks.reporting.svg import as_data_url, label, tag, text_width
from tests.support.data.builders import month
from tests.support.reporting.pages import SVG, marks, parsed, texts
from tests.support.reporting.run_records import run_record

ANY = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.text(max_size=60)
EVIL = '<script>alert("1")</script>&\x00'


def test_names_from_the_data_are_text_in_attributes_and_content() -> None:
    drawn = tag("text", EVIL, title=EVIL)
    assert "<script" not in drawn
    assert "\x00" not in drawn
    assert ElementTree.fromstring(str(drawn)).text == EVIL.replace("\x00", "\ufffd")


def test_a_number_that_is_not_finite_is_never_written_into_an_attribute() -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        tag("circle", cx=math.nan)


def test_a_hover_text_does_not_replace_the_words() -> None:
    assert texts(
        ElementTree.fromstring(f'<svg xmlns="{SVG[1:-1]}">{label("a", 0, 0, tip="b")}</svg>')
    ) == ["a"]


@given(st.lists(st.tuples(ANY, ANY), max_size=12), ANY)
def test_a_line_chart_takes_any_numbers(points: list[tuple[float, float]], best: float) -> None:
    mark = Mark(best, "kept") if math.isfinite(best) else None
    parsed(line_chart("t", [Series("a", points), Series("b", points[:1], 2)], "x", "y", mark=mark))


@given(st.lists(st.builds(CurvePoint, x=ANY, y=ANY, weight=ANY), max_size=8))
def test_a_calibration_chart_takes_any_numbers(points: list[CurvePoint]) -> None:
    parsed(calibration_chart("t", points))


@given(st.lists(st.builds(Estimate, name=NAMES, value=ANY, low=ANY, high=ANY, note=NAMES),
                max_size=6), st.one_of(st.none(), ANY), st.booleans())  # fmt: skip
def test_an_interval_chart_takes_any_rows(
    rows: list[Estimate], reference: float | None, below: bool
) -> None:
    drawing = interval_chart("t", rows, "x", reference=reference, note_below=below)
    root = parsed(drawing)
    assert len(marks(root, "dot")) <= len(rows)


@given(st.lists(st.builds(Effect, name=NAMES, size=ANY, low=ANY, drifted=st.booleans(),
                          columns=st.just(("1", "2")), tip=NAMES), max_size=6),
       st.one_of(st.none(), st.floats(0, 1)))  # fmt: skip
def test_an_effect_chart_takes_any_rows(rows: list[Effect], threshold: float | None) -> None:
    parsed(effect_chart("t", rows, ("a", "b"), threshold=threshold))


@given(st.lists(st.builds(Latency, variant=NAMES, batch_rows=st.integers(1, 10**6), p50_ms=ANY,
                          p95_ms=ANY, ratio=ANY, kept=st.booleans()), max_size=6))  # fmt: skip
def test_a_latency_chart_takes_any_rows(rows: list[Latency]) -> None:
    parsed(latency_chart("t", rows))


@given(st.lists(st.builds(StageTime, stage=NAMES, seconds=ANY, reused=st.booleans()), max_size=20))
def test_the_loop_takes_any_stages(stages: list[StageTime]) -> None:
    for drawing in (loop_chart(stages, "again"), loop_chart_upright(stages, "again")):
        assert len(marks(parsed(drawing), "basin")) == len(stages)
    time_bar(stages)


PLACES = st.lists(st.builds(Place, name=NAMES, digest=NAMES, tip=NAMES, dropped=st.booleans()),
                  min_size=1, max_size=40)  # fmt: skip


@given(st.lists(st.builds(Column, title=NAMES, places=PLACES.map(tuple)), min_size=1, max_size=6))
def test_the_lineage_takes_any_things(parts: list[Column]) -> None:
    drawn = sum(min(len(column.places), MOST_BOXES) for column in parts)
    root = parsed(lineage_chart(parts))
    boxes = marks(root, "node")
    assert len(boxes) == drawn
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    corners = [
        [float(box.get(side) or 0) for side in ("x", "y", "width", "height")] for box in boxes
    ]
    for x, y, wide, high in corners:
        assert 0 < x < x + wide < width
        assert 0 < y < y + high <= height
    for n, (x, y, wide, high) in enumerate(corners):
        for other_x, other_y, _, _ in corners[:n]:
            assert abs(other_x - x) > wide or abs(other_y - y) > high, "boxes do not overlap"
    assert len(marks(parsed(lineage_chart_upright(parts)), "basin")) == len(parts)


@pytest.mark.parametrize("length", [1, 20, 300])
def test_a_name_of_any_length_stays_in_its_box(length: int) -> None:
    root = parsed(lineage_chart([Column("views", (Place("w" * length, "a" * 64, ""),))]))
    assert all(text_width(words) < 152 for words in texts(root))


def test_the_lineage_names_each_version_and_counts_what_does_not_fit(tmp_path: Path) -> None:
    parts = columns(run_record(ArtifactStore(tmp_path)))
    kinds = ["raw files", "tables", "feature views", "snapshot", "model", "variants"]
    assert [column.title for column in parts] == kinds
    words = texts(parsed(lineage_chart(parts)))
    assert {"flights.csv.zip", "route_stats", "c3c3c3c3c3c3", "flight-delay 3"} <= set(words)
    assert len(marks(parsed(lineage_chart(parts)), "dropped")) == 1
    many = Column("views", tuple(Place(f"v{n}", "", "") for n in range(60)))
    assert "and 37 more" in texts(parsed(lineage_chart([many])))


def test_points_are_drawn_where_their_values_say() -> None:
    points = [(1, 0.4), (2, 0.2), (3, math.nan), (4, 0.3)]
    root = parsed(line_chart("loss", [Series("validation", points)], "epoch", "loss"))
    xs = [float(e.get("cx", "")) for e in marks(root, "dot")]
    ys = [float(e.get("cy", "")) for e in marks(root, "dot")]
    assert len(xs) == 3
    assert xs[2] - xs[1] == pytest.approx(2 * (xs[1] - xs[0]), abs=0.1)
    assert ys[0] < ys[2] < ys[1], "a larger value is drawn higher"


def test_a_curve_runs_from_corner_to_corner() -> None:
    drawing = curve_chart("ROC", [Series("c", [(0, 0), (1, 1)])], "x", "y",
                          baseline=((0, 0), (1, 1)), baseline_text="guessing")  # fmt: skip
    root = parsed(drawing)
    (line,) = [e for e in root.iter(f"{SVG}polyline")]
    guess = next(e for e in marks(root, "baseline") if e.get("y1") != e.get("y2"))
    ends = [point.split(",") for point in (line.get("points") or "").split()]
    assert [float(v) for v in ends[0]] == pytest.approx(
        [float(guess.get(k, "")) for k in ("x1", "y1")], abs=0.1
    )


def test_a_drifted_feature_is_told_apart_without_colour() -> None:
    rows = [Effect("temp", 0.6, 0.5, True, ()), Effect("seats", 0.05, 0.04, False, ())]
    root = parsed(effect_chart("drift", rows, (), threshold=0.1))
    assert texts(root).count("▲") == 1
    widths = [float(e.get("width", "")) for e in marks(root, "s2")]
    assert widths[1] / widths[0] == pytest.approx(0.5 / 0.6, abs=0.01), "solid to the lower bound"


def test_latency_bars_are_logarithmic_and_dropped_ones_outlined() -> None:
    rows = [Latency(n, 1, p, p, 0.5, k) for n, p, k in (("a", 0.1, True), ("b", 1, True),
                                                         ("c", 10, False))]  # fmt: skip
    root = parsed(latency_chart("latency", rows))
    widths = [float(e.get("width", "")) for e in root.iter(f"{SVG}rect")]
    assert widths[2] - widths[1] == pytest.approx(widths[1] - widths[0], abs=0.1)
    assert len(marks(root, "dropped")) == 1
    assert any("0.50" in text and "eager" in text for text in texts(root))


def test_a_stage_says_its_time_and_whether_it_was_reused() -> None:
    stages = [StageTime(stage="refresh", seconds=1.9, reused=True),
              StageTime(stage="train", seconds=96.2, reused=False)]  # fmt: skip
    root = parsed(loop_chart(stages, "stable"))
    assert {"refresh", "1.90 s", "reused", "train", "96.2 s", "ran", "stable"} <= set(texts(root))
    assert len(marks(root, "reused")) == 2, "basin and numeral"


@pytest.mark.parametrize("months", [1, 2, 3, 7, 12, 40, 400])
def test_windows_have_few_marks_however_long_they_are(months: int) -> None:
    root = parsed(windows_chart([("train", month(1, months))]))
    assert 1 <= len(marks(root, "tick")) <= 9


def test_a_data_url_is_a_whole_picture_with_its_own_style() -> None:
    url = as_data_url(line_chart("loss", [Series(EVIL, [(1, 2)])], "epoch", "loss"))
    head, body = url.split(",")
    assert head == "data:image/svg+xml;base64"
    root = ElementTree.fromstring(base64.b64decode(body))
    assert "--water" in (root.findtext(f"{SVG}style") or "")
    assert any(e.get("class") == "backdrop" for e in root.iter(f"{SVG}rect"))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_lie_inside_and_are_as_few_as_asked(low: float, span: float, wanted: int) -> None:
    scale = Linear(low, low + span, 0, 1000, num_ticks=wanted)
    if scale.high - scale.low > 1e-9 * max(1, abs(low)):
        ticks = [value for value, _ in scale.ticks()]
        step = tick_step(scale.low, scale.high, wanted)
        assert len(ticks) <= wanted + 1
        assert all(low - step / 100 <= t <= low + span + step / 100 for t in ticks)


@given(st.lists(ANY, max_size=8))
def test_a_domain_is_never_empty_and_holds_every_drawable_value(values: list[float]) -> None:
    low, high = domain(values)
    assert math.isfinite(low)
    assert low < high
    assert all(low <= v <= high for v in values if math.isfinite(v) and abs(v) < 1e12)
    first, last = powers_around(values)
    assert 0 < first < last
    assert Logarithmic(first, last, 0, 100).ticks()


def test_an_axis_from_zero_ends_at_a_tick() -> None:
    assert round_up(0.62) == pytest.approx(0.8)
    assert round_up(math.nan) == 1.0


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
