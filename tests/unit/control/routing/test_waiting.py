"""A stage that was given to a pool whose workers are gone."""

from __future__ import annotations

import logging
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled, State

from tasks.control.config import RoutingConfig
from tasks.control.routing import task
from tasks.control.routing.task import StageOrder


class NobodyWorks:
    """An API that knows one scheduled run, and no worker."""

    def __init__(self) -> None:
        self.state: State[Any] = Scheduled()

    def read_flow_run(self, run: UUID) -> FlowRun:
        return FlowRun.model_construct(id=run, name="green-hare", state=self.state)

    def read_workers_for_work_pool(self, pool: str) -> list[object]:
        return []

    def set_flow_run_state(self, run: UUID, state: State[Any]) -> None:
        self.state = state


def test_a_stage_that_nobody_takes_says_what_it_waits_for_until_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task, "get_run_logger", lambda: logging.getLogger("a-run"))
    monkeypatch.setattr(task, "LOG_EVERY_S", 0.1)
    monkeypatch.setattr(task, "QUICK_POLL_S", 0.01)
    api = NobodyWorks()
    order = StageOrder("training", "train", {}, RoutingConfig(), "delay", "")
    stage = task._Stage(order, cast(SyncPrefectClient, api))
    _, untaken_s = stage._follow(api.read_flow_run(uuid4()), "gpu", 0.25)
    assert untaken_s is not None
    assert api.state.is_cancelled()
    said = [r.getMessage() for r in caplog.records if "no worker of work pool 'gpu'" in r.message]
    assert 1 <= len(said) <= 3
    assert "to take green-hare" in said[0]
