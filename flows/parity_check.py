"""Check parity: does the online store give what historical retrieval gives?"""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.whereabouts import FOUND
from tasks.features.reports import ParityReport
from tasks.features.task import compare_online_with_offline


@flow(
    name="parity-check",
    flow_run_name="parity-{config.name}",
    persist_result=True,
    result_serializer="json",
    **FOUND,
)
def parity_check_flow(config: PipelineConfig) -> ParityReport:
    """Compare a sample of entities online and offline, at the moments the online store stands for.

    Args:
        config: The use case; its training set names the feature service, `features.parity` the
            sample.
    """
    return compare_online_with_offline(config.features)
