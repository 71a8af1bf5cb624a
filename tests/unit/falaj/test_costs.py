"""`falaj costs`: sums that are marked, forecasts or why there are none, and a replayed trace."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from falaj.__main__ import main
from tasks.contracts.telemetry import ResourceUse
from tasks.costs.ledger import CostLedger, Entry

NOW = datetime.now(UTC)


def entry(days_ago: int, **changes: Any) -> Entry:
    started = NOW - timedelta(days=days_ago)
    use = ResourceUse(seconds=3600, cpu_s=7200, joules=3.6e6, estimated=days_ago > 5, amount=2.0)
    values: dict[str, Any] = {"run_id": "r", "root_id": "r", "flow": "training"}
    values |= {"use_case": "flights", "model": "delay", "owner": "team-a", "state": "completed"}
    values |= {"started": started, "ended": started, "use": use, "hardware_class": "cpu"}
    return Entry.model_validate(values | changes)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    return tmp_path


def write(home: Path, *entries: Entry) -> None:
    ledger = CostLedger(f"sqlite:///{home / 'operation' / 'operation.db'}")
    ledger.write([(each, None) for each in entries])


def shown(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--home", str(home), "costs", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_sums_forecasts_and_estimates_are_shown(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, *(entry(days) for days in range(1, 21)), entry(2, model="other", owner="team-b"))
    text = shown(home, capsys, "--by", "owner")
    assert "team-a 72000.0 144000.0 0.0 20.0000~ 40.0000 EUR" in text
    assert "team-b 3600.0 7200.0 0.0 1.0000 2.0000 EUR" in text
    assert "total 75600.0" in text
    assert f"{NOW:%Y-%m} costs " in text
    assert "0 complete days of builds are too few to forecast (7)" in text
    assert "estimates for cpu, gpu" in text
    facts = json.loads(shown(home, capsys, "--last", "60h", "--by", "model", "--json"))
    assert {name: use["amount"] for name, use in facts["sums"].items()} == {"delay": 4, "other": 2}


def test_money_of_two_currencies_is_not_added(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dear = entry(1).use.model_copy(update={"currency": "OMR"})
    write(home, entry(2), entry(1, use=dear))
    text = shown(home, capsys)
    assert "training (OMR)" in text
    assert "total" not in text
    assert "not forecast: prices are in EUR, OMR" in text


def test_an_empty_ledger_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run is in the ledger" in shown(home, capsys)


def test_spot_hosts_and_gpus_are_compared_by_recorded_trainings(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu = ResourceUse(seconds=360, cpu_s=400, gpu_s=360, amount=0.5)
    write(home, entry(2), entry(1, hardware_class="gpu", use=on_gpu))
    trace = home / "prices.csv"
    trace.write_text("moment,class,price,evicted\n2026-01-01T00:00Z,cpu,0.25,0\n")
    text = shown(home, capsys, "--trace", str(trace))
    assert "cpu: 1 trainings cost 2.0000 in 1.00 h on demand, 0.5000" in text
    assert "on cpu, in the mean 3600.0 s and 2.0000 EUR; 1 trainings on gpu" in text
