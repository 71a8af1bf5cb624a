"""Sweep: put right what a crash or a stop has left behind; `python -m flows.recovery` watches.

A scheduled sweep alone would cost a process each time, so it can be rare only. The watch checks
every few seconds from one small process, and runs the flow `recovery-sweep` when there is something
to be done, so that every repair is seen in the Prefect UI. It ends on SIGTERM, and survives a
server that is away.
"""

import logging
import signal
import threading

import httpx
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from pydantic import ValidationError

from flows.stages import found_but_not_retried
from tasks.control.config import RecoveryConfig
from tasks.control.recovery import task as recovery
from tasks.kernel.errors import TransientError


@flow(
    name="recovery-sweep",
    flow_run_name="sweep",
    **found_but_not_retried("its next run by schedule does the same"),
)
def recovery_sweep_flow(config: RecoveryConfig = RecoveryConfig()) -> recovery.Sweep:  # noqa: B008  frozen
    """Put stale runs right: end, free, start again.

    Args:
        config: When a run counts as lost.
    """
    return recovery.sweep_stale_runs(config)


LOOK_EVERY_S = 15.0
logger = logging.getLogger("tasks.control.recovery.watch")


def watch(stop: threading.Event) -> None:
    """Look and repair until `stop` is set."""
    with get_client(sync_client=True) as client:
        while not stop.is_set():
            try:
                _look(client)
            except ObjectNotFound as exc:
                logger.warning("what was looked at is deleted (%s); looking again", exc)
            except (httpx.HTTPError, PrefectHTTPStatusError, TransientError) as exc:
                logger.warning("the Prefect API does not answer (%s); looking again", exc)
            stop.wait(LOOK_EVERY_S)


def _look(client: SyncPrefectClient) -> None:
    """One cycle."""
    config = limits(client)
    leaking = any(slot.taken > slot.num_holders for slot in recovery.slot_facts(client))
    if recovery.find_repairs(client, config) or leaking or recovery.find_dead_task_runs(client):
        recovery_sweep_flow(config)


def limits(client: SyncPrefectClient) -> RecoveryConfig:
    """What the deployment of the sweep is given; the defaults where there is none."""
    try:
        given = client.read_deployment_by_name("recovery-sweep/recovery-sweep").parameters
    except ObjectNotFound:
        return RecoveryConfig()
    try:
        return RecoveryConfig.model_validate(given.get("config", {}))
    except ValidationError as exc:  # edited by hand, or of another release
        logger.warning("the limits of the recovery sweep's deployment are wrong: %s", exc)
        return RecoveryConfig()


def main() -> None:
    """Look for lost runs until a signal ends it."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # A sweep takes a moment, and the thread of heartbeats would delay its end by a second.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        watch(stop)


if __name__ == "__main__":
    main()
