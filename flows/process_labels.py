"""Which process runs a flow run: noted as labels of the run, so that a lost one can be told.

Prefect keeps a process id without its host. These labels also name the host, its boot, the
namespace of process ids and the moment the process began, so that neither a restart, nor a
container, nor a reused id is mistaken for the run.

Every deployed flow notes it. A run that was cut off is started again, unless its flow says here
that this would do something twice.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect import get_client

from tasks.kernel.process import ProcessName
from tasks.lineage.task import RECORDED as TOLD

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

HOST, BOOT, SPACE = "falaj.host", "falaj.boot", "falaj.space"
PID, STARTED = "falaj.pid", "falaj.started"
NOT_RETRIED = "falaj.not_retried"
"""Why a run is not started again by itself when it was cut off."""


def note_process(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: write down the process that runs a flow run; its parent's for a flow that it calls."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, own_labels())


def own_labels() -> dict[str, bool | int | float | str]:
    """This process, as labels of a run."""
    mine = ProcessName.of_this()
    return {
        HOST: socket.gethostname(),
        BOOT: mine.boot,
        SPACE: mine.space,
        PID: mine.pid,
        STARTED: mine.start,
    }


def process_of(labels: Mapping[str, Any]) -> ProcessName | None:
    """The process that labels name; None where it is another host's, or there are none."""
    if labels.get(HOST) != socket.gethostname():
        return None
    space = labels.get(SPACE) or ProcessName.of_this().space  # earlier versions noted none
    return ProcessName(
        boot=str(labels[BOOT]), space=str(space), pid=int(labels[PID]), start=int(labels[STARTED])
    )


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
