from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.telemetry import Diagnosis, Finding
from tasks.training.telemetry.diagnosis import LARGEST_BATCH, diagnose
from tasks.training.telemetry.profiler import ProfileSummary
from tests.support.training.timed_ranks import HOST, JOB, rank


def only(diagnosis: Diagnosis) -> Finding:
    [finding] = diagnosis.findings
    return finding


def test_balanced_ranks_have_nothing_to_change() -> None:
    diagnosis = diagnose([rank(0), rank(1)], HOST, JOB)
    assert diagnosis.findings == ()
    assert diagnosis.summary == (
        "Nothing to change: a step of 10 ms is 90 % computing, 3 % waiting for rows, 7 % "
        "exchanging and 0 % waiting for other ranks."
    )


def test_ranks_that_wait_for_rows_are_input_bound() -> None:
    slow = [rank(n, data_ms=40) for n in range(2)]
    finding = only(diagnose(slow, HOST, replace(JOB, reading_mode="stream")))
    assert finding.kind == "input"
    assert finding.suggestions == {"reading.mode": "memory"}
    assert "80 % of their steps' time, 40 ms a step" in finding.evidence


def test_input_bound_in_memory_has_advice_but_no_setting() -> None:
    finding = only(diagnose([rank(data_ms=40)], HOST, replace(JOB, num_ranks=1)))
    assert finding.suggestions == {}
    assert "in memory already" in finding.advice


def test_a_heavy_exchange_on_one_cpu_host_is_cured_by_one_process() -> None:
    finding = only(diagnose([rank(n, exchange_ms=30) for n in range(2)], HOST, JOB))
    assert finding.kind == "communication"
    assert finding.suggestions == {"launch.ranks": 1, "launch.threads_per_rank": 2}
    assert "30 ms a step for 4.0 MB sent by each rank" in finding.evidence


def test_a_lighter_exchange_is_cured_by_fewer_steps() -> None:
    finding = only(diagnose([rank(n, exchange_ms=4) for n in range(2)], HOST, JOB))
    assert finding.suggestions == {"global_batch_size": 8192}


def test_an_exchange_between_hosts_is_cured_by_compression() -> None:
    facts = replace(JOB, num_hosts=2)
    finding = only(diagnose([rank(n, exchange_ms=30) for n in range(2)], HOST, facts))
    assert finding.suggestions == {"strategy.gradient_compression": "powersgd"}


def test_a_batch_grows_up_to_a_limit() -> None:
    facts = replace(
        JOB, global_batch_size=LARGEST_BATCH, num_hosts=2, gradient_compression="powersgd"
    )
    finding = only(diagnose([rank(n, exchange_ms=30) for n in range(2)], HOST, facts))
    assert finding.suggestions == {}
    assert "cannot grow" in finding.advice


def test_waiting_for_a_slow_rank_is_imbalance_and_no_communication() -> None:
    """The late rank's own exchange is short: so it is not the network that is slow."""
    ranks = [rank(0, exchange_ms=40), rank(1, compute_ms=48)]
    finding = only(diagnose(ranks, HOST, JOB))
    assert finding.kind == "imbalance"
    assert "rank 1 on one takes 5.2 times as long" in finding.evidence
    assert "The host or device of rank 1 is slower" in finding.advice


def test_a_rank_whose_core_is_taken_is_named() -> None:
    ranks = [rank(0, exchange_ms=40), rank(1, compute_ms=48, cpu_share=0.2)]
    finding = only(diagnose(ranks, HOST, JOB))
    assert "got 20 % of a core while it computed (others 100 %)" in finding.evidence
    assert finding.suggestions == {"launch.ranks": 1}


def test_a_taken_core_comes_before_the_exchange_that_it_slows_down() -> None:
    ranks = [rank(0, exchange_ms=90), rank(1, compute_ms=48, exchange_ms=51, cpu_share=0.2)]
    assert [f.kind for f in diagnose(ranks, HOST, JOB).findings] == ["imbalance", "communication"]


def test_a_rank_that_reads_slowly_is_named() -> None:
    ranks = [rank(0, exchange_ms=40), rank(1, data_ms=40)]
    finding = only(diagnose(ranks, HOST, replace(JOB, reading_mode="stream")))
    assert finding.kind == "imbalance"
    assert "Most of it is waiting for rows" in finding.evidence
    assert finding.suggestions == {"reading.mode": "memory"}


def test_a_rank_with_more_rows_is_named() -> None:
    ranks = [rank(n, exchange_ms=4, compute_ms=5, num_rows=50_000) for n in (0, 1)] + [
        rank(2, compute_ms=10, num_rows=100_000)
    ]
    facts = replace(JOB, num_ranks=3, num_cores=3)
    imbalance = next(f for f in diagnose(ranks, HOST, facts).findings if f.kind == "imbalance")
    assert "2.00 times as many rows" in imbalance.evidence
    assert imbalance.suggestions == {"num_shards": 9}


def test_idle_cores_and_unused_bf16_are_told_where_ranks_compute() -> None:
    facts = replace(JOB, num_cores=8, has_bf16=True)
    finding = only(diagnose([rank(0), rank(1)], HOST, facts))
    assert finding.kind == "compute"
    assert finding.suggestions == {
        "launch.ranks": 2, "launch.threads_per_rank": 4, "strategy.precision": "bf16",
    }  # fmt: skip
    assert finding.advice.startswith("Raise launch.threads_per_rank from 1 to 4")


def test_ranks_on_a_crowded_host_are_told_so() -> None:
    finding = only(diagnose([rank(0, cpu_share=0.2), rank(1, cpu_share=0.3)], HOST, JOB))
    assert finding.kind == "compute"
    assert finding.suggestions == {}
    assert "get 25 % of a core each; the host's cores were 90 % busy" in finding.evidence


def test_a_thread_that_waits_for_its_device_is_not_crowded() -> None:
    ranks = [rank(n, cpu_share=0.2) for n in range(2)]
    assert diagnose(ranks, HOST, replace(JOB, device="cuda")).findings == ()


def test_swapping_is_short_memory() -> None:
    host = HOST.model_copy(update={"swapped_in_bytes": 3_000_000_000})
    finding = only(diagnose([rank(0, major_faults=90_000), rank(1)], host, JOB))
    assert finding.kind == "memory"
    assert finding.suggestions == {"strategy.accumulation_steps": 4}
    assert "900 pages a step" in finding.evidence
    assert "3000 MB came back from swap" in finding.evidence


def test_page_faults_without_swap_and_with_free_memory_are_no_finding() -> None:
    """A file that is read through a memory map faults too."""
    assert diagnose([rank(0, major_faults=90_000), rank(1)], HOST, JOB).findings == ()


def profile(matmul: float, optimizer: float, move: float) -> ProfileSummary:
    seconds = {
        "matmul": matmul, "optimizer": optimizer, "move": move, "allocate": 0.0, "exchange": 0.0,
    }  # fmt: skip
    return ProfileSummary.model_validate(
        {"rank": 0, "num_steps": 5, "step_s": 1.0, "seconds": seconds, "top": (), "trace": None}
    )


def test_an_optimizer_that_takes_most_is_memory_bound() -> None:
    finding = only(diagnose([rank(0), rank(1)], HOST, JOB, [profile(0.2, 0.6, 0.2)]))
    assert finding.kind == "memory"
    assert finding.suggestions == {"global_batch_size": 16384}
    assert "the optimizer takes 60 %" in finding.evidence


def test_moving_values_is_cured_by_bf16() -> None:
    facts = replace(JOB, has_bf16=True)
    findings = diagnose([rank(0), rank(1)], HOST, facts, [profile(0.2, 0.05, 0.75)]).findings
    assert [f.kind for f in findings] == ["compute", "memory"]
    assert findings[1].suggestions == {"strategy.precision": "bf16"}


def test_a_run_of_few_steps_is_not_judged() -> None:
    diagnosis = diagnose([rank(0, num_steps=4)], HOST, JOB)
    assert diagnosis.findings == ()
    assert diagnosis.summary.startswith("Too short to be judged: after the first 3 steps, 1 were")


def test_a_rank_that_joined_for_a_few_steps_is_compared_by_step() -> None:
    steady = rank(0)
    late = rank(1, num_steps=13, num_rows=13_312)
    tenth = {
        name: phase.model_copy(update={"steady_s": phase.steady_s * 10 / 97})
        for name, phase in late.phases.items()
    }
    joined = late.model_copy(update={"phases": tenth})
    assert diagnose([steady, joined, rank(2, num_steps=3)], HOST, JOB).findings == ()


def test_no_ranks_are_not_judged() -> None:
    assert "Too short" in diagnose([], HOST, JOB).summary


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


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_the_verdict_depends_on_shares_and_not_on_the_length_of_a_step(factor: float) -> None:
    times_ms = ((0.3, 9.0, 40.0), (0.3, 48.0, 0.7))
    ranks = [rank(n, *(factor * ms for ms in times_ms[n])) for n in range(2)]
    assert only(diagnose(ranks, HOST, JOB)).kind == "imbalance"
