"""Sweep: put right what a crash or a stop has left behind."""

from __future__ import annotations

from prefect import flow

from flows.stages import found_but_not_retried
from tasks.control.recovery.config import RecoveryConfig
from tasks.control.recovery.task import Sweep, sweep_stale_runs


@flow(
    name="recovery-sweep",
    flow_run_name="sweep",
    persist_result=True,
    result_serializer="json",
    **found_but_not_retried("its next run by schedule does the same"),
)
def recovery_sweep_flow(config: RecoveryConfig = RecoveryConfig()) -> Sweep:  # noqa: B008  frozen
    """Put stale runs right: end, free, start again, or tell.

    Args:
        config: When a run counts as lost.
    """
    return sweep_stale_runs(config)
