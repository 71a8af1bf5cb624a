"""Shares at a real Envoy: split, stickiness, mirrors, and what restarts leave of them."""

import math
import threading
import time
from collections import Counter

import httpx
import pytest

from tasks.kernel.errors import TransientError
from tests.support.host.processes import wait_until
from tests.support.serving.edges import INFER, MODEL, Edge

NUM_CLIENTS = 250


def tracks(edge: Edge, client: httpx.Client, subjects: range) -> dict[int, str]:
    """Track that answers each subject."""
    return {
        number: client.post(INFER, json={}, headers=edge.bearer(f"u{number}")).json()["slot"]
        for number in subjects
    }


def is_plausible(count: int, total: int, share: float) -> bool:
    """Five standard deviations of a binomial count: wrong once in two million."""
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


def test_a_sticky_share_grows_without_taking_clients_away(edge: Edge, client: httpx.Client) -> None:
    candidates = []
    for share in (0.1, 0.2):
        edge.traffic.set_shares(MODEL, share, 0)
        found = tracks(edge, client, range(NUM_CLIENTS))
        assert found == tracks(edge, client, range(20)) | {
            n: track for n, track in found.items() if n >= 20
        }
        chosen = {n for n, track in found.items() if track == "candidate"}
        assert is_plausible(len(chosen), NUM_CLIENTS, share)
        candidates.append(chosen)
    assert candidates[0] < candidates[1]


def test_no_request_is_lost_while_shares_change(edge: Edge, client: httpx.Client) -> None:
    headers = edge.bearer("steady", f"infer:{MODEL}")
    key = {"x-api-key": edge.key("steady")[0]}
    wait_until(
        lambda: client.post(INFER, json={}, headers=key).status_code == 200, "the key is known"
    )
    found: Counter[tuple[int, str]] = Counter()
    over = threading.Event()

    def ask() -> None:
        with edge.client() as own:
            while not over.is_set():
                answer = own.post(INFER, json={}, headers=key)
                found[answer.status_code, answer.json().get("slot", "")] += 1

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    for number in range(20):
        edge.traffic.set_shares(MODEL, number % 2, 0.5)
        answer = client.post(INFER, json={}, headers=headers)
        assert answer.json()["slot"] == ("candidate" if number % 2 else "stable")
    over.set()
    for asker in askers:
        asker.join()
    assert {status for status, _ in found} == {200}
    assert {track for _, track in found} == {"stable", "candidate"}


def test_mirrored_requests_say_that_they_are_and_clients_see_stable(
    edge: Edge, client: httpx.Client
) -> None:
    edge.traffic.set_shares(MODEL, 0, 0.5)
    total = 200
    body = b"y" * 1000
    for number in range(total):
        headers = edge.bearer(f"m{number}")
        answer = client.post(INFER, content=body, headers=headers)
        assert answer.json()["slot"] == "stable"
    counted = edge.admin.stats(r"cluster\.http-shadow\.upstream_rq_total")
    sent = counted["cluster.http-shadow.upstream_rq_total"]

    def shadows() -> list[str]:
        return [s.headers["x-request-id"] for s in list(edge.upstream.seen) if s.track == "shadow"]

    wait_until(lambda: len(shadows()) >= min(sent, total // 4), "mirrored requests came")
    wait_until(lambda: is_plausible(len(shadows()), total, 0.5), "half of them came")
    stable = {s.headers["x-request-id"] for s in edge.upstream.seen if s.track == "stable"}
    assert set(shadows()) <= stable
    assert len(shadows()) == len(set(shadows()))
    assert {s.num_bytes for s in edge.upstream.seen} == {len(body)}


def test_shares_outlive_a_kill_of_envoy_and_are_kept_while_it_is_down(
    edge: Edge, client: httpx.Client
) -> None:
    edge.traffic.set_shares(MODEL, 0.3, 0)
    before = tracks(edge, client, range(60))
    assert set(before.values()) == {"stable", "candidate"}
    edge.stop(kill=True)
    edge.start()  # Envoy went with its parent, else it would hold the lock
    assert tracks(edge, client, range(60)) == before
    edge.stop()
    with pytest.raises(TransientError, match="shares are kept"):
        edge.traffic.set_shares(MODEL, 1.0, 0)
    edge.start()
    assert set(tracks(edge, client, range(10)).values()) == {"candidate"}


def test_the_server_restarts_during_a_canary_and_answers_again(
    edge: Edge, client: httpx.Client
) -> None:
    edge.traffic.set_shares(MODEL, 0.5, 0)
    before = tracks(edge, client, range(30))
    edge.upstream.stop()
    started = time.monotonic()
    answer = client.post(INFER, json={}, headers=edge.bearer("u1"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]
    edge.upstream.start()
    assert time.monotonic() - started < 60
    wait_until(
        lambda: client.post(INFER, json={}, headers=edge.bearer("u1")).status_code == 200,
        "the edge reaches the server again",
    )
    assert tracks(edge, client, range(30)) == before


def test_a_failed_answer_is_not_asked_for_twice(edge: Edge, client: httpx.Client) -> None:
    edge.upstream.fail_with = 503
    answer = client.post(INFER, json={}, headers=edge.bearer("once"))
    assert answer.status_code == 503
    assert len(edge.upstream.seen) == 1
