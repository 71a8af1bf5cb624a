"""The journal says of each run of a flow that it begins, and how it ended."""

from pathlib import Path

import pytest
from prefect import flow

from flows.stages import FOUND
from tasks.governance.journal import Journal
from tasks.kernel.errors import DataContractError


@flow(name="journalled", **FOUND)
def journalled_flow(value: str | None) -> str:
    """A run that a value lets pass."""
    if value is None:
        raise DataContractError("tail number N14228 is null")
    return value


@pytest.mark.usefixtures("on_prefect")
def test_a_runs_begin_end_and_kind_of_error_are_there_and_no_value_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    journalled_flow("x")
    with pytest.raises(DataContractError):
        journalled_flow(None)
    _, *lines = Journal(tmp_path / "audit").lines()
    acts = [(line.content["outcome"], line.content.get("error")) for line in lines]
    assert acts == [
        ("begun", None),
        ("completed", None),
        ("begun", None),
        ("failed", "DataContractError"),
    ]
    assert len({line.content["flow_run"] for line in lines}) == 2
    assert not any(b"N14228" in line.text for line in lines)
