"""The controller's budget in money and the ledger of costs, on SQLite and on PostgreSQL."""

from datetime import UTC, datetime, timedelta

import pytest

from tasks.contracts.telemetry import ResourceUse
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.records import Outcome, StartedAction
from tasks.costs.ledger import CostLedger, Entry
from tests.support.control import builders
from tests.support.control.controller import Controller, Runs

POLICY = RetrainingPolicy(cool_down_hours=0, max_runs_per_week=1000, max_cost_per_month=5.0)


def entry(root_id: str, amount: float, model: str = builders.MODEL) -> Entry:
    now = datetime.now(UTC)
    return Entry(
        run_id=f"a stage of {root_id}",
        root_id=root_id,
        flow="training",
        use_case=builders.USE_CASE,
        model=model,
        owner="team-a",
        hardware_class="cpu",
        state="completed",
        started=now,
        ended=now,
        use=ResourceUse(seconds=1, cpu_s=2, joules=3, amount=amount),
    )


class Here(Runs):
    """A platform that runs each action in the process of the one who asks."""

    def start(self, order: object) -> StartedAction | None:
        started = super().start(order)
        return started and started.model_copy(update={"kind": "in_process"})


def test_an_entry_is_renewed_and_read_as_it_was_written(url: str) -> None:
    ledger = CostLedger(url)
    first, second = entry("a", 1.0), entry("b", 2.0)
    numbers = ledger.write([(first, None), (second, None)])
    renewed = first.model_copy(update={"use": ResourceUse(cpu_s=9), "state": "failed"})
    assert ledger.write([(renewed, numbers[0])]) == numbers[:1]
    assert sorted(ledger.entries(first.started), key=lambda e: e.run_id) == [renewed, second]
    assert ledger.entries(second.started + timedelta(seconds=1)) == []


@pytest.mark.parametrize(
    ("platform", "amounts", "outcome"),
    [
        (Runs, {"run-0": 3.0}, Outcome.ACTS),
        (Runs, {"run-0": 5.0}, Outcome.BUDGET),
        (Runs, {"a run by hand": 50.0}, Outcome.ACTS),
        (Here, {"the run around it": 5.0}, Outcome.BUDGET),
    ],
)
def test_the_money_of_earlier_retrainings_decides(
    url: str, platform: type[Runs], amounts: dict[str, float], outcome: Outcome
) -> None:
    controller, ledger = Controller(url, POLICY), CostLedger(url)
    controller.runs = platform()
    assert controller.see(builders.stale(0)) == [Outcome.ACTS]
    ledger.write([(entry(root, amount), None) for root, amount in amounts.items()])
    ledger.write([(entry("run-9", 50.0, model="another"), None)])
    controller.end_runs()
    controller.champion = 2
    assert controller.see(builders.stale(1, version=2)) == [outcome]
    reason = controller.ledger.decisions(limit=1)[0].reason
    assert ("cost 5.00 in the last 30 days, allowed 5" in reason) == (outcome is Outcome.BUDGET)
