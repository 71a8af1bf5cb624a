"""Lineage under a real Prefect API: flow runs are told, and no failure of it fails a run."""

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from tasks.contracts.run import RunRecord
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import Settings
from tasks.lineage.journal import Journal
from tasks.lineage.task import RECORDED, record_conversion
from tests.support.reporting.examples import COMMIT, linked_record

pytestmark = pytest.mark.usefixtures("on_prefect")


@pytest.fixture
def home(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OPENLINEAGE_URL", raising=False)
    return settings.home


@flow(name="converting", **RECORDED)
def converting(record: RunRecord) -> str:
    recorded = record_conversion(
        record.version, record.dataset, record.variants, COMMIT, return_state=True
    )
    return str(recorded.type.value)


@flow(name="outer", **RECORDED)
def outer(record: RunRecord) -> str:
    return converting(record)


@flow(name="refused", **RECORDED)
def refused() -> None:
    raise DataContractError("2 of 14 expectations failed")


def told(home: Path) -> list[tuple[str, str]]:
    return [(e["job"]["name"], e["eventType"]) for e in Journal(home / "lineage").events()]


def facets(home: Path, job: str, change: str) -> dict[str, Any]:
    return next(
        e["run"]["facets"]
        for e in Journal(home / "lineage").events()
        if (e["job"]["name"], e["eventType"]) == (job, change)
    )


def test_steps_belong_to_their_flow_run_and_that_to_the_outermost(home: Path) -> None:
    record = linked_record(Settings.from_environment().store)
    assert outer(record) == "COMPLETED"
    kinds = told(home)
    assert kinds[:2] == [("flow.outer", "START"), ("flow.converting", "START")]
    assert kinds[-2:] == [("flow.converting", "COMPLETE"), ("flow.outer", "COMPLETE")]
    assert ("convert.onnx-fp32", "COMPLETE") in kinds
    parent = facets(home, "convert.onnx-fp32", "COMPLETE")["parent"]
    assert parent["job"]["name"] == "flow.converting"
    assert parent["root"]["job"]["name"] == "flow.outer"
    outer(record)
    assert told(home)[len(kinds) :] == [
        ("flow.outer", "START"),
        ("flow.converting", "START"),
        ("flow.converting", "COMPLETE"),
        ("flow.outer", "COMPLETE"),
    ], "the steps are known already"


def test_a_flow_run_that_fails_tells_why(home: Path) -> None:
    with pytest.raises(DataContractError):
        refused()
    assert told(home) == [("flow.refused", "START"), ("flow.refused", "FAIL")]
    message = facets(home, "flow.refused", "FAIL")["errorMessage"]["message"]
    assert "2 of 14 expectations failed" in message


@pytest.mark.slow
def test_lineage_that_cannot_be_written_fails_no_run(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = linked_record(Settings.from_environment().store)
    (home / "lineage").write_text("not a folder")
    assert converting(record) == "FAILED", "the lineage task failed, the flow did not"
    assert "lineage" in caplog.text
