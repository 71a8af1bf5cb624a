from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.telemetry import Diagnosis, Finding, RankTelemetry
from tasks.training.telemetry.diagnosis import JobFacts, diagnose
from tests.support.training.timed_ranks import HOST, JOB, rank


def only(diagnosis: Diagnosis) -> Finding:
    [finding] = diagnosis.findings
    return finding


@pytest.mark.parametrize(
    ("ranks", "facts", "kind", "suggestions", "evidence"),
    [
        pytest.param(
            [rank(n, data_ms=40) for n in range(2)],
            JOB, "input", {}, "40 ms a step, 80% of it",
            id="rows from files",
        ),
        pytest.param(
            [rank(n, exchange_ms=30) for n in range(2)],
            JOB, "communication", {"launch.ranks": 1, "launch.threads_per_rank": 2},
            "30 ms a step, 76% of it, for 4 MB sent by each rank",
            id="one process needs no exchange",
        ),
        pytest.param(
            [rank(n, exchange_ms=4) for n in range(2)],
            JOB, "communication", {"global_batch_size": 4096}, "",
            id="fewer steps",
        ),
        pytest.param(  # the late rank's own exchange is short: so it is not the network
            [rank(0, exchange_ms=40), rank(1, compute_ms=48)],
            JOB, "imbalance", {}, "rank 1 on one takes 5.2 times as long",
            id="a slow host",
        ),
        pytest.param(
            [rank(0, exchange_ms=40), rank(1, compute_ms=48, cpu_share=0.2)],
            JOB, "imbalance", {"launch.ranks": 1},
            "got 20% of a core",
            id="a taken core",
        ),
        pytest.param(
            [rank(0), rank(1)],
            replace(JOB, num_cores=8, has_bf16=True), "compute",
            {"launch.ranks": 2, "launch.threads_per_rank": 4, "strategy.precision": "bf16"}, "",
            id="idle cores and bf16",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_found_with_what_cures_it(
    ranks: list[RankTelemetry],
    facts: JobFacts,
    kind: str,
    suggestions: dict[str, object],
    evidence: str,
) -> None:
    finding = only(diagnose(ranks, HOST, facts))
    assert (finding.kind, finding.suggestions) == (kind, suggestions)
    assert evidence in finding.evidence


def test_balanced_ranks_have_nothing_to_change() -> None:
    diagnosis = diagnose([rank(0), rank(1)], HOST, JOB)
    assert diagnosis.findings == ()
    assert diagnosis.summary == (
        "Nothing to change: a step of 10 ms is 90% computing, 3% waiting for rows, 7% "
        "exchanging and 0% waiting for other ranks."
    )


def test_a_taken_core_comes_before_the_exchange_that_it_slows_down() -> None:
    ranks = [rank(0, exchange_ms=90), rank(1, compute_ms=48, exchange_ms=51, cpu_share=0.2)]
    assert [f.kind for f in diagnose(ranks, HOST, JOB).findings] == ["imbalance", "communication"]


def test_a_rank_with_more_rows_is_named() -> None:
    ranks = [rank(n, exchange_ms=4, compute_ms=5, num_rows=50_000) for n in (0, 1)] + [
        rank(2, compute_ms=10, num_rows=100_000)
    ]
    facts = replace(JOB, num_ranks=3, num_cores=3)
    imbalance = next(f for f in diagnose(ranks, HOST, facts).findings if f.kind == "imbalance")
    assert "2.00 times as many rows" in imbalance.evidence
    assert imbalance.suggestions == {"num_shards": 9}


def test_swapping_is_short_memory() -> None:
    host = HOST.model_copy(update={"swapped_in_bytes": 3_000_000_000})
    finding = only(diagnose([rank(0, major_faults=90_000), rank(1)], host, JOB))
    assert finding.kind == "memory"
    assert finding.suggestions == {"strategy.accumulation_steps": 4}
    assert "900 pages a step" in finding.evidence
    assert "3000 MB came back from swap" in finding.evidence


times = st.floats(min_value=0, max_value=1e4, allow_nan=False)


@given(st.lists(st.tuples(times, times, times, st.floats(0, 1)), min_size=1, max_size=5))
def test_any_times_give_findings_in_order_with_shares_of_one(
    measured: list[tuple[float, float, float, float]],
) -> None:
    ranks = [
        rank(n, data, compute, exchange, cpu)
        for n, (data, compute, exchange, cpu) in enumerate(measured)
    ]
    diagnosis = diagnose(ranks, HOST, replace(JOB, num_ranks=len(ranks)))
    later = [f.share for f in diagnosis.findings if "launch.ranks" not in f.suggestions]
    assert later == sorted(later, reverse=True)
    kinds = [finding.kind for finding in diagnosis.findings]
    assert len(kinds) == len(set(kinds))
