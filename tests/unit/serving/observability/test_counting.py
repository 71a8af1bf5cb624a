"""What is counted, and what Prometheus reads of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import BadRequestError, OverloadedError, UnauthorizedError, UnknownModelError
from serving.observability.metrics import Counting, Metrics, Source, Times, percentile_s
from tests.support.serving.builders import MODEL, STATES, batch, call

SERVED = {
    "model": MODEL,
    "version": "3",
    "variant": "openvino-f32",
    "slot": "stable",
    "hardware": "cpu",
}


@pytest.fixture
def counting() -> Counting:
    return Counting(lambda model: model == MODEL)


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What a scraper reads: sample name to labels and value."""
    content_type, body = metrics.page()
    assert content_type.startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_answers_rows_batches_and_times_are_counted_by_what_answered(counting: Counting) -> None:
    counting.served(batch(call(0.002), call(0.003, num_rows=5)))
    counting.served(batch(call(0.004), version="4", track="candidate"))
    seen = samples(Metrics(counting, lambda: STATES))
    assert seen["falaj_answered_requests_total"][0] == (SERVED, 2)
    assert seen["falaj_answered_rows_total"][0] == (SERVED, 6)
    assert seen["falaj_batches_total"][0] == (SERVED, 1)
    assert len(seen["falaj_answered_requests_total"]) == 2
    count = dict(map(_by_track, seen["falaj_request_seconds_count"]))
    assert count == {"stable": 2, "candidate": 1}
    total = dict(map(_by_track, seen["falaj_request_seconds_sum"]))
    assert 0.005 <= total["stable"] < 1
    waited = dict(map(_by_track, seen["falaj_queue_seconds_sum"]))
    assert waited["stable"] >= 0.0015, "the oldest call waited until its batch began"


def _by_track(sample: tuple[dict[str, str], float]) -> tuple[str, float]:
    return sample[0]["slot"], sample[1]


def test_refusals_and_fall_overs_are_counted_by_reason(counting: Counting) -> None:
    counting.refused(call(), OverloadedError("full"))
    counting.refused(call(), OverloadedError("full"))
    counting.refused(call(track="candidate"), BadRequestError("no"))
    counting.served(batch(call(), fell_over_from="openvino_ir"))
    seen = samples(Metrics(counting, lambda: []))
    refused = {(v["slot"], v["reason"]): n for v, n in seen["falaj_refused_requests_total"]}
    assert refused == {("stable", "overloaded"): 2, ("candidate", "bad_request"): 1}
    assert seen["falaj_fell_over_batches_total"][0][0]["from"] == "openvino_ir"


def test_names_that_clients_make_up_become_no_series(counting: Counting) -> None:
    for number in range(50):
        made_up = call(model=f"made-up-{number}")
        counting.refused(made_up, UnknownModelError("no such model"))
        counting.refused(made_up, UnauthorizedError("nobody"))
    assert counting.refused_calls == {
        ("(unknown)", "stable", "unknown_model"): 50,
        ("(unknown)", "stable", "unauthorized"): 50,
    }


def test_other_components_of_the_process_are_shown_too(counting: Counting) -> None:
    def read() -> dict[str, Any]:
        freshness = {("weather", "fresh"): 5, ("weather", "stale"): 1}
        refused = {"over loaded": 7}
        return {"dropped": 3, "waiting": 2, "refused": refused, "freshness": freshness, "empty": {}}

    source = Source("entities", read, frozenset({"waiting"}), {"freshness": ("view", "state")})
    seen = samples(Metrics(counting, lambda: STATES, [source]))
    assert seen["falaj_entities_dropped_total"] == [({}, 3)]
    assert seen["falaj_entities_waiting"] == [({}, 2)]
    assert seen["falaj_entities_refused_total"] == [({"kind": "over loaded"}, 7)]
    assert ({"view": "weather", "state": "stale"}, 1) in seen["falaj_entities_freshness_total"]
    assert {labels["version"] for labels, _ in seen["falaj_model_version"]} == {"3", "4"}
    assert seen["process_resident_memory_bytes"][0][1] > 0


@given(
    seconds=st.lists(st.floats(2e-4, 9.0), min_size=1, max_size=200),
    share=st.sampled_from([0.5, 0.95, 0.99]),
)
def test_percentiles_are_right_to_the_width_of_a_class(seconds: list[float], share: float) -> None:
    times = Times()
    for one in seconds:
        times.add(one)
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    found = percentile_s(times.counts, share)
    assert exact / 1.25 <= found <= exact * 1.25
