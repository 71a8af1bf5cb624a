"""What a run took is written once, without the runs inside it, and sums to the process's own."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.contracts.hardware import PriceList
from tasks.costs.ledger import CostLedger, Entry
from tasks.costs.meter import RunMeter, Taken
from tasks.kernel.process import tree_cpu_s

BEFORE = datetime.now(UTC) - timedelta(days=1)


class Clock:
    """CPU seconds and joules that a test sets."""

    cpu_s = 100.0

    def __call__(self) -> float:
        return self.cpu_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path) -> CostLedger:
    return CostLedger(f"sqlite:///{tmp_path / 'operation' / 'operation.db'}")


@pytest.fixture
def meter(ledger: CostLedger, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> RunMeter:
    monkeypatch.setenv("FALAJ_OWNER", "team-a")
    return RunMeter(lambda: ledger, lambda: None, clock)


def by_flow(ledger: CostLedger) -> dict[str, Entry]:
    found = ledger.entries(BEFORE)
    assert len({entry.flow for entry in found}) == len(found)  # each run once
    return {entry.flow: entry for entry in found}


def test_a_run_inside_another_is_not_counted_twice(
    meter: RunMeter, ledger: CostLedger, clock: Clock
) -> None:
    meter.begin("a", "pipeline", "a", "flights", "delay")
    clock.cpu_s += 1
    meter.begin("b", "training", "b")
    clock.cpu_s += 10
    meter.end("b", "completed")
    clock.cpu_s += 2
    meter.end("a", "failed")
    found = by_flow(ledger)
    assert {name: each.use.cpu_s for name, each in found.items()} == {"pipeline": 3, "training": 10}
    inner = found["training"]
    assert (inner.root_id, inner.model, inner.use_case) == ("a", "delay", "flights")
    assert (inner.owner, inner.hardware_class, inner.state) == ("team-a", "cpu", "completed")
    assert found["pipeline"].state == "failed"


def test_what_a_killed_run_took_up_to_its_last_entry_stays(
    meter: RunMeter, ledger: CostLedger, clock: Clock
) -> None:
    meter.begin("a", "pipeline", "a")
    clock.cpu_s += 4
    meter.begin("b", "training", "a")  # and here the process is killed
    assert by_flow(ledger)["pipeline"].use.cpu_s == 4
    assert by_flow(ledger)["training"].state == "running"


def test_a_run_that_is_retried_in_its_process_has_one_entry_and_a_strange_end_has_none(
    meter: RunMeter, ledger: CostLedger, clock: Clock
) -> None:
    meter.end("never begun", "completed")
    for _ in range(2):
        meter.begin("a", "pipeline", "a")
        clock.cpu_s += 1
    meter.end("a", "completed")
    assert by_flow(ledger)["pipeline"].use.cpu_s == 2


def test_gpus_count_while_they_are_held_with_their_own_energy(
    meter: RunMeter, ledger: CostLedger
) -> None:
    joules = iter((1000.0, 1500.0))
    meter.begin("a", "training", "a")
    with meter.holding(2, lambda: next(joules)):
        began = time.monotonic()
        while time.monotonic() - began < 0.02:
            pass
    meter.end("a", "completed")
    entry = by_flow(ledger)["training"]
    assert entry.hardware_class == "gpu"
    assert entry.use.gpu_s >= 0.04
    assert entry.use.joules == pytest.approx(500, rel=0.01)
    assert entry.use.amount == pytest.approx(entry.use.gpu_s * 2.5 / 3600)


def test_the_start_of_a_process_counts_to_its_first_run_where_it_was_started_for_it(
    meter: RunMeter, ledger: CostLedger, clock: Clock
) -> None:
    clock.cpu_s = 12.0
    meter.begin("a", "pipeline", "a")
    meter.end("a", "completed")
    clock.cpu_s += 50  # between two runs of one process
    meter.begin("b", "training", "b")
    meter.end("b", "completed")
    found = by_flow(ledger)
    assert (found["pipeline"].use.cpu_s, found["training"].use.cpu_s) == (12, 0)


def test_energy_that_no_meter_saw_is_estimated_and_marked() -> None:
    prices = PriceList(core_hour=3.6, kwh=1.0, watts_per_core=10, currency="OMR")
    use = Taken(seconds=50, cpu_s=100, unmetered_cpu_s=100).priced(prices)
    assert (use.joules, use.estimated, use.currency) == (1000, True, "OMR")
    assert use.amount == pytest.approx(0.1 + 1000 / 3.6e6)
    metered = Taken(cpu_s=100, metered_j=7).priced(prices)
    assert (metered.joules, metered.estimated) == (7, False)


def test_the_tree_has_the_time_of_children_that_live_and_of_those_that_ended() -> None:
    busy = "import time\nwhile time.process_time() < {}: pass\nprint('done', flush=True)\n{}"
    before = tree_cpu_s()
    subprocess.run([sys.executable, "-c", busy.format(0.3, "")], check=True)
    ended = tree_cpu_s() - before
    words = [sys.executable, "-c", busy.format(0.3, "import time; time.sleep(60)")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = tree_cpu_s() - before
        os.kill(child.pid, signal.SIGKILL)
    assert ended >= 0.29
    assert both >= 0.58
