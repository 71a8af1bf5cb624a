"""Which process runs a flow run: noted as labels of the run, so that a lost one can be told.

Prefect keeps a process id without its host. These labels also name the host, its boot, the
namespace of process ids and the moment the process began, so that neither a restart, nor a
container, nor a reused id is mistaken for the run.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect import get_client

from tasks.kernel.process import ProcessName
from tasks.lineage.task import RECORDED as TOLD

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

HOST, BOOT, SPACE = "falaj.host", "falaj.boot", "falaj.space"
PID, STARTED = "falaj.pid", "falaj.started"


def note_whereabouts(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
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


RECORDED: dict[str, Any] = {**TOLD, "on_running": [note_whereabouts, *TOLD["on_running"]]}
"""What a flow's decorator takes to be told in the lineage and to be found when it is lost."""

FOUND: dict[str, Any] = {"on_running": [note_whereabouts]}
"""The same for a flow that is no part of the lineage."""
