"""Which process runs a flow run: noted as labels of the run, so that a lost one can be told.

Prefect keeps a process id without its host. These labels also name the host, its boot and the
moment the process began, so that neither a restart nor a reused id is mistaken for the run.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from prefect import get_client

from tasks.lineage.task import RECORDED as TOLD
from tasks.recovery.processes import boot_id, started_at

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

HOST, BOOT, PID, STARTED = "falaj.host", "falaj.boot", "falaj.pid", "falaj.started"


def note_whereabouts(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: write down the process that runs a flow run; its parent's for a flow that it calls."""
    labels: dict[str, bool | int | float | str] = {
        HOST: socket.gethostname(),
        BOOT: boot_id(),
        PID: os.getpid(),
        STARTED: started_at(os.getpid()) or 0,
    }
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, labels)


RECORDED: dict[str, Any] = {**TOLD, "on_running": [note_whereabouts, *TOLD["on_running"]]}
"""What a flow's decorator takes to be told in the lineage and to be found when it is lost."""

FOUND: dict[str, Any] = {"on_running": [note_whereabouts]}
"""The same for a flow that is no part of the lineage."""
