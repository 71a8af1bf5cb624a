"""How a run that the controller started has ended, by the place that its claim names."""

import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from flows import decision
from tasks.control.retraining.records import Order, RunEnd, StartedAction
from tasks.kernel.files import machine_id
from tasks.kernel.process import ProcessName
from tasks.kernel.settings import Settings

KNOWN = UUID(int=1)


def end(tmp_path: Path, kind: str, place: str) -> str | None:
    started = StartedAction.model_validate({"kind": kind, "run_id": str(uuid4()), "place": place})
    settings = Settings.from_environment({"FALAJ_HOME": str(tmp_path)})
    seen: RunEnd | None = decision.FlowStarter(settings).end(MagicMock(Order), started)
    return seen.state if seen else None


@pytest.mark.parametrize(
    ("place", "state"),
    [
        ("{host} {boot} {space} {pid} {start}", None),
        ("{host} {boot} {space} {pid} 1", decision.LOST),
        ("{host} {boot} pid:[1] {pid} 1", None),
        ("{host} another-boot pid:[1] {pid} {start}", decision.LOST),
        ("elsewhere {boot} {space} {pid} 1", None),
        ("{host} another-boot {space} {machine} {pid} {start}", decision.LOST),
        ("{host} another-boot {space} another-machine {pid} {start}", None),
        # of earlier releases, without a namespace
        ("{host} {boot} {pid} {start}", None),
        ("{host} {boot} {pid} 1", decision.LOST),
    ],
)
def test_a_run_in_a_process_is_lost_where_that_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, state: str | None
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    mine = ProcessName.of_this().model_dump() | {"machine": machine_id(tmp_path)}
    named = place.format(host=socket.gethostname(), **mine)
    assert end(tmp_path, "in_process", named) == state


@pytest.mark.parametrize(
    ("place", "state"),
    [
        (f"pipeline/pipeline {KNOWN}", "deleted"),
        (f"pipeline/pipeline {UUID(int=2)}", None),
        ("pipeline/pipeline", "deleted"),  # of earlier releases, without an id
    ],
)
def test_a_run_that_is_not_there_was_deleted_where_its_deployment_is_of_this_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, state: str | None
) -> None:
    def only(known: UUID | None) -> Callable[[UUID], None]:
        def read(asked: UUID) -> None:
            if asked != known:
                raise ObjectNotFound(httpx.HTTPError("404"))

        return read

    client = MagicMock(read_flow_run=only(None), read_deployment=only(KNOWN))
    client.__enter__.return_value = client
    monkeypatch.setattr(decision, "get_client", lambda **_: client)
    assert end(tmp_path, "deployment", place) == state
