"""Feature definitions of the traffic use case, read by Feast.

A prediction is made 24 hours before the hour that it is for. Every view holds what was counted and
observed by then.
"""

from datetime import timedelta

from feast import Entity, FeatureService, FeatureView, Field, FileSource, ValueType
from feast.types import Float32, String


def table(name: str, description: str) -> FileSource:
    """Source of one feature table; relative to the offline store's `tables_path`."""
    return FileSource(
        name=f"{name}_table",
        path=name,
        timestamp_field="event_timestamp",
        created_timestamp_column="created",
        description=description,
    )


def floats(*names: str) -> list[Field]:
    """Fields of 32-bit floats."""
    return [Field(name=name, dtype=Float32) for name in names]


# Entities

station = Entity(
    name="station",
    join_keys=["station"],
    value_type=ValueType.STRING,
    description="Counting station beside the road.",
)
slot = Entity(
    name="slot",
    join_keys=["slot"],
    value_type=ValueType.STRING,
    description="Hour of the week, such as `Mon 07`, by the local clock.",
)

# Sources

recent_flow_table = table("recent_flow", "Latest counts of each station, hourly.")
slot_history_table = table("slot_history", "The same hour of the week in the weeks before.")
weather_table = table("weather", "Weather at each station, hourly.")

# Feature views. A TTL is the publication period and what may be missed of it.

recent_flow = FeatureView(
    name="recent_flow",
    entities=[station],
    ttl=timedelta(hours=12),
    schema=floats(
        "volume_1h",
        "volume_3h",
        "volume_24h",
        "volume_7d",
        "ratio_to_day_before",
        "ratio_to_last_week",
    ),
    source=recent_flow_table,
    description="Vehicles an hour: latest count, means up to it, and how the last day compares.",
)
slot_history = FeatureView(
    name="slot_history",
    entities=[station, slot],
    ttl=timedelta(days=15),
    schema=floats("volume_last", "volume_before", "volume_4w", "lowest_4w", "highest_4w"),
    source=slot_history_table,
    description="Vehicles in the same hour of the week: last, the one before, four weeks.",
)
weather = FeatureView(
    name="weather",
    entities=[station],
    ttl=timedelta(hours=12),
    schema=[*floats("celsius", "rain_mm", "clouds_percent"), Field(name="sky", dtype=String)],
    source=weather_table,
    description="Weather at the station: degrees Celsius, millimetres, per cent, one word.",
)

# Feature services

hourly_volume_v1 = FeatureService(
    name="hourly_volume_v1",
    features=[recent_flow, slot_history, weather],
    description="How many vehicles will pass in an hour? Known 24 hours before it begins.",
)
