"""Feature definitions of a use case that only the tests have: figures of energy, weekly."""

from datetime import timedelta

from feast import Entity, FeatureService, FeatureView, Field, FileSource, ValueType
from feast.types import Float32

series = Entity(
    name="series", join_keys=["series"], value_type=ValueType.STRING, description="Weekly figure."
)
trend_table = FileSource(
    name="trend_table",
    path="trend",
    timestamp_field="event_timestamp",
    created_timestamp_column="created",
    description="How each figure has moved, weekly.",
)
trend = FeatureView(
    name="trend",
    entities=[series],
    ttl=timedelta(days=15),
    schema=[
        Field(name=name, dtype=Float32)
        for name in ("change_1w", "change_before", "change_4w", "against_year")
    ],
    source=trend_table,
    description="Changes of a weekly figure as shares of it.",
)
weekly_rise_v1 = FeatureService(
    name="weekly_rise_v1",
    features=[trend],
    description="Will the figure be higher in the coming week?",
)
