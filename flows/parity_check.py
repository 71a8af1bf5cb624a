"""Check parity: does the online store give what historical retrieval gives?"""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.whereabouts import FOUND
from tasks.features.checks.reports import ParityReport
from tasks.features.task import compare_online_with_offline
from tasks.kernel.errors import FeatureStoreError


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


def difference(report: ParityReport) -> FeatureStoreError:
    """What a person is told where online and offline are not the same."""
    more = "More of them are in artifact feature-parity-differences; " * bool(report.examples)
    return FeatureStoreError(
        f"online and offline features of {report.feature_service}: {report.verdict}. "
        f"{'. '.join(report.evidence)}. {more}`python -m falaj features rebuild VIEW` writes a "
        "view online again from its table"
    )
