"""A whole run whose snapshot pins the tables of its refresh, and its steps."""

from datetime import UTC, datetime

from tasks.contracts.data import TablePin
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore
from tasks.lineage.events import FlowRun
from tasks.lineage.steps import Query, Step, conversion_steps, refresh_steps, version_steps
from tests.support.data.builders import changed
from tests.support.reporting.run_records import run_record

STARTED = datetime(2026, 1, 14, 6, 15, tzinfo=UTC)
PARENT = FlowRun(
    "11111111-1111-4111-8111-111111111111",
    "training",
    FlowRun("22222222-2222-4222-8222-222222222222", "pipeline"),
)
COMMIT = "8970679c4d1b2a7790f3a1f6f7e0c5b1d2e3f4a5"
ENTITIES = Query("SELECT * FROM flights", ("flights",))
QUERIES = {
    "carrier_stats": Query("SELECT carrier FROM flights", ("flights",)),
    "origin_stats": Query("SELECT origin FROM flights JOIN weather USING (origin)",
                          ("flights", "weather")),
}  # fmt: skip


def linked_record(store: ArtifactStore) -> RunRecord:
    """The record of the reporting tests, its parts bound to each other as a real run binds them."""
    record = run_record(store)
    refresh, snapshot = record.refresh, record.dataset.snapshot
    tables = tuple(
        TablePin(
            name=ref.name, group=group, sha256=ref.artifact.sha256, num_rows=ref.num_rows
        )
        for group, refs in (("raw", refresh.tables.raw), ("features", refresh.tables.tables))
        for ref in refs
    )  # fmt: skip
    views = tuple(
        view.model_copy(update={"version": pin.version, "definition": pin.definition,
                                "table": pin.table})
        for view in refresh.views
        for pin in [snapshot.pins.views[view.name]]
    )  # fmt: skip
    return changed(record, {"refresh.views": views, "dataset.snapshot.pins.tables": tables})


def steps_of(record: RunRecord) -> list[Step]:
    """Steps of the three flows that make things."""
    return [
        *refresh_steps(record.refresh, QUERIES),
        *version_steps(record.version, record.model, record.dataset, record.evaluation, ENTITIES),
        *conversion_steps(record.version, record.dataset, record.variants),
    ]
