"""The comparison of detectors of drift: equal false alarms, and delays of what was changed."""

import numpy as np
import pytest

from infra.bench.features import drift_peers
from infra.bench.figures import Figure


def test_a_stream_is_at_risk_until_its_first_false_alarm() -> None:
    calm, alarmed = [False] * 50, [False] * 9 + [True] * 41
    assert drift_peers.alarm_rate([calm, alarmed]) == pytest.approx(1 / 60)
    assert drift_peers.alarm_rate([calm, calm]) == 0


def test_the_limit_is_the_lowest_that_keeps_to_the_rate() -> None:
    draw = np.random.default_rng(0)
    streams = [draw.normal(size=50) for _ in range(8)]
    limit = drift_peers.limit_at(streams)
    lower = max(value for value in np.concatenate(streams) if value < limit)
    assert drift_peers.alarm_rate([each > limit for each in streams]) <= drift_peers.MAX_RATE
    assert drift_peers.alarm_rate([each > lower for each in streams]) > drift_peers.MAX_RATE


def test_an_alarm_that_there_is_without_the_change_too_notices_nothing() -> None:
    assert drift_peers.first_new([False, True, True], [False, True, False]) == 3
    assert drift_peers.first_new([True, True], [True, True, True]) is None


def test_only_a_detector_that_keeps_to_the_bound_of_false_alarms_is_compared_with() -> None:
    ours, slow, rash = (
        drift_peers.Detector(name, rate, [days] * len(drift_peers.KINDS))
        for name, rate, days in (("ours", 0.0, 4), ("slow", 0.01, 8), ("rash", 0.05, 1))
    )
    measured = drift_peers.compared("flights", ours, [slow, rash])
    alarms, delay = (each for each in measured if isinstance(each, Figure))
    assert delay.value == 0.5
    assert "1 of 2 other detectors" in alarms.evidence
    measured = drift_peers.compared("flights", rash, [slow])
    assert not any(each.holds for each in measured if isinstance(each, Figure))
