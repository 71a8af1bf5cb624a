"""A training under a lease uses the leased cores, and its processes are known by the lease."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.contracts.training import EpochMetrics
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import applied, processes_of_lease
from tests.support.ranks.runs import config, train

LEASE = "test-of-leased-cores"
LAST = max(os.sched_getaffinity(0))


@pytest.mark.slow
def test_all_processes_of_a_training_stay_on_the_leased_cores(tmp_path: Path) -> None:
    seen: dict[int, set[int]] = {}

    def look(_: EpochMetrics) -> None:
        for pid in processes_of_lease(LEASE):
            try:
                seen[pid] = os.sched_getaffinity(pid)
            except ProcessLookupError:  # it has just ended
                continue

    with applied(Grant(cores=(LAST,)), LEASE):
        model = train(tmp_path, config(max_epochs=2, patience=2), on_epoch=look)
    assert len(seen) >= 4, "two ranks and their guards"
    assert set(map(frozenset, seen.values())) == {frozenset({LAST})}
    assert model.num_ranks == 2
    assert processes_of_lease(LEASE) == []
