"""Numbers as people read them."""

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.evaluation import Metric
from tasks.reporting import quantities as q

THERE = datetime(2013, 1, 1, 5, tzinfo=timezone(timedelta(hours=5)))
ANY_NUMBER = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (q.count(336_776), "336,776"),
        (q.decimal(0.75241), "0.752"),
        (q.decimal(-0.75241), f"{q.MINUS}0.752"),
        (q.signed(0.0021, 4), "+0.0021"),
        (q.signed(-0.0021, 4), f"{q.MINUS}0.0021"),
        (q.signed(-0.00001, 3), "0.000"),
        (q.percent(0.23714), f"23.7{q.THIN_SPACE}%"),
        (q.duration(0.4), "0.40 s"),
        (q.duration(47.83), "47.8 s"),
        (q.duration(99.96), "1 min 40 s"),
        (q.duration(204), "3 min 24 s"),
        (q.duration(7_500), "2 h 05 min"),
        (q.milliseconds(0.04123), "0.0412 ms"),
        (q.milliseconds(142.4), "142 ms"),
        (q.significant(14_211.0), "14,200"),
        (q.significant(0.9996), "1.00"),
        (q.significant(0.00009996), "0.000100"),
        (q.significant(4.8e-7, 2), f"4.8{q.TIMES}10⁻⁷"),
        (q.significant(0), "0"),
        (q.size(999), "999 B"),
        (q.size(999_600), "1.00 MB"),
        (q.size(12_400_000), "12.4 MB"),
        (q.factor(0.083), f"0.083{q.TIMES}"),
        (q.plural(1, "row"), "1 row"),
        (q.plural(0, "category", "categories"), "0 categories"),
        (q.short_commit("8970679c4d1b2a77-modified"), "8970679c4d1b-modified"),
        (q.short_commit("unknown"), "unknown"),
        (q.moment(THERE), "2013-01-01 00:00 UTC"),
    ],
)
def test_a_number_is_written_with_its_unit_and_few_digits(text: str, expected: str) -> None:
    assert text == expected


def test_an_interval_that_is_not_finite_is_left_out_and_the_value_stays() -> None:
    metric = Metric(value=0.75, low=math.nan, high=0.8)
    assert q.estimate(metric) == "0.750"
    assert q.estimate(None) == q.MISSING


@given(ANY_NUMBER)
def test_no_number_is_ever_written_as_nan_or_infinity(value: float | None) -> None:
    written = [
        form(value)
        for form in (q.count, q.decimal, q.signed, q.percent, q.duration, q.milliseconds,
                     q.significant, q.size, q.factor)
    ]  # fmt: skip
    assert not any(word in text.lower() for text in written for word in ("nan", "inf"))


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_significant_digits_keep_the_value_within_half_a_percent(value: float) -> None:
    text = q.significant(value).replace(",", "")
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    mantissa, _, power = text.partition(f"{q.TIMES}10")
    seen = float(mantissa) * 10.0 ** int(power.translate(superscripts) or 0)
    assert seen == pytest.approx(value, rel=0.00501)


@given(st.text(max_size=80), st.integers(2, 40))
def test_a_shortened_text_is_never_longer_than_asked(text: str, longest: int) -> None:
    short = q.shortened(text, longest)
    assert len(short) <= longest
    if len(text) <= longest:
        assert short == q.printable(text)
