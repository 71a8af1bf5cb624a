"""Which process runs a flow run: noted as labels of the run, so that a lost one can be told.

Prefect keeps a process id without its host. These labels also name the host, its boot, the
namespace of process ids and the moment the process began, so that neither a restart, nor a
container, nor a reused id is mistaken for the run.

Every deployed flow notes it. A run that was cut off is started again, unless its flow says here
that this would do something twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect import get_client

from tasks.control.recovery.processes import NOT_RETRIED, own_labels
from tasks.lineage.task import RECORDED as TOLD

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State


def note_process(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: write down the process that runs a flow run; its parent's for a flow that it calls."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, own_labels())


RECORDED: dict[str, Any] = {**TOLD, "on_running": [note_process, *TOLD["on_running"]]}
"""What a flow's decorator takes to be told in the lineage and to be found when it is lost."""

FOUND: dict[str, Any] = {"on_running": [note_process]}
"""The same for a flow that is no part of the lineage."""


def found_but_not_retried(why: str) -> dict[str, Any]:
    """As `FOUND`, for a flow that must not be started again by itself."""
    return {"on_running": [_NoteWhy(why), note_process]}


def not_retried_because(flow: Flow[..., Any]) -> str | None:
    """Why runs of a flow are not started again when they were cut off; None where they are."""
    hooks: list[object] = list(flow.on_running_hooks)
    return next((hook.why for hook in hooks if isinstance(hook, _NoteWhy)), None)


@dataclass(frozen=True)
class _NoteWhy:
    """Hook: write down why a run must not be started again."""

    why: str

    @property
    def __name__(self) -> str:
        return "note_why_not_retried"

    def __call__(self, flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        """See `note_process`."""
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(flow_run.id, {NOT_RETRIED: self.why})
