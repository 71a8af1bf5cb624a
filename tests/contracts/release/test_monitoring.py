"""Monitoring and data docs under a real Prefect API: shown in the UI, told once."""

import pytest
from prefect import flow

from tasks.contracts.data import FeatureMonitoring, FeatureTables
from tasks.evaluation.monitoring.alerts import read_alerts
from tasks.evaluation.task import monitor_features
from tasks.kernel.settings import Settings
from tasks.validation.runner import validate_table
from tasks.validation.task import publish_data_docs
from tests.support.data.stations import CONFIG, KEYS, LATER, after, tables
from tests.support.data.tables import WEEK, people, store_table, suite
from tests.support.services.prefect_platform import shown

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_prefect")]


@flow(name="monitoring-under-test")
def monitoring_flow(made: FeatureTables) -> FeatureMonitoring:
    return monitor_features(made, LATER, KEYS, CONFIG)


@flow(name="docs-under-test")
def docs_flow() -> None:
    publish_data_docs()


def test_a_view_that_stopped_is_shown_and_told_once(settings: Settings) -> None:
    made = tables(settings.store, lambda d: d[d["event_timestamp"] < after(26)])

    first, again = monitoring_flow(made), monitoring_flow(made)

    assert first.num_new_alerts == len(first.alerts) > 0
    assert again == first.model_copy(update={"num_new_alerts": 0})
    events = read_alerts(settings.home)
    assert {event.kind for event in events} == {"freshness", "volume"}
    assert "stations" in str(shown("feature-monitoring")[-1].data)
    assert first.alerts[0] in str(shown("feature-alerts")[-1].data)


def test_the_data_docs_are_linked_in_the_ui(settings: Settings) -> None:
    validate_table(store_table(settings.store, people()), suite(), WEEK, settings.store, "Nothing")

    docs_flow()

    artifact = shown("data-docs")[-1]
    assert (settings.home / "data_docs" / "current" / "index.html").as_uri() in str(artifact.data)
