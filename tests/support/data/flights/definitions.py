"""Feature definitions of the flights use case, read by Feast.

A prediction is made two hours before the scheduled departure. Every view holds what is known by
then: static records, weather observed, and outcomes of flights that had already landed.
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


def over(horizons: tuple[str, ...], *names: str) -> list[Field]:
    """One float field for every name and horizon."""
    return floats(*(f"{name}_{horizon}" for horizon in horizons for name in names))


# Entities


def entity(name: str, key: str, description: str) -> Entity:
    """An entity whose key is text."""
    return Entity(name=name, join_keys=[key], value_type=ValueType.STRING, description=description)


carrier = entity("carrier", "carrier", "Airline, two-letter IATA code.")
origin = entity("origin", "origin", "Airport of departure, FAA code.")
destination = entity("destination", "dest", "Airport of arrival, FAA code.")
plane = entity("plane", "tailnum", "Aircraft, tail number.")

# Sources

carrier_table = table("carrier_stats", "Rolling outcomes by carrier, hourly.")
origin_table = table("origin_stats", "Rolling outcomes by origin, hourly.")
destination_table = table("destination_stats", "Rolling outcomes by destination, hourly.")
route_table = table("route_stats", "Rolling outcomes by route, daily.")
plane_history_table = table("plane_history", "Latest outcomes of each plane, at each landing.")
planes_table = table("planes", "Civil register.")
weather_table = table("weather", "Observations at the origin, hourly.")

# Feature views. A TTL is the publication period and what may be missed of it, or the time for which
# the value says something.

ROLLING = ("landed", "arr_delay", "dep_delay", "late_rate")

carrier_stats = FeatureView(
    name="carrier_stats",
    entities=[carrier],
    ttl=timedelta(hours=6),
    schema=over(("3h", "6h", "24h", "7d"), *ROLLING),
    source=carrier_table,
    description="How a carrier's landed flights did: count, mean delays in minutes, share late.",
)
origin_stats = FeatureView(
    name="origin_stats",
    entities=[origin],
    ttl=timedelta(hours=6),
    schema=over(("1h", "3h", "6h", "24h"), *ROLLING),
    source=origin_table,
    description="How flights out of an airport that had landed did.",
)
destination_stats = FeatureView(
    name="destination_stats",
    entities=[destination],
    ttl=timedelta(hours=6),
    schema=over(("6h", "24h", "7d"), *ROLLING),
    source=destination_table,
    description="How flights to an airport that had landed did.",
)
route_stats = FeatureView(
    name="route_stats",
    entities=[origin, destination],
    ttl=timedelta(days=2),
    schema=over(("7d", "28d"), "landed", "arr_delay", "late_rate"),
    source=route_table,
    description="How flights of a route that had landed did.",
)
plane_history = FeatureView(
    name="plane_history",
    entities=[plane],
    ttl=timedelta(days=28),
    schema=floats("last_arr_delay", "last_dep_delay", "arr_delay_2d", "landed_7d", "arr_delay_7d"),
    source=plane_history_table,
    description="A plane's latest landings: delays in minutes.",
)
planes = FeatureView(
    name="planes",
    entities=[plane],
    ttl=timedelta(0),
    schema=[
        *floats("age_years", "seats", "engines"),
        Field(name="manufacturer", dtype=String),
        Field(name="engine_type", dtype=String),
    ],
    source=planes_table,
    description="A plane's record in the civil register; no TTL.",
)
weather = FeatureView(
    name="weather",
    entities=[origin],
    ttl=timedelta(hours=7),
    schema=floats(
        "temp",
        "dewp",
        "humid",
        "wind_dir",
        "wind_speed",
        "wind_gust",
        "precip",
        "pressure",
        "visib",
    ),
    source=weather_table,
    description="Weather at the origin: Fahrenheit, per cent, miles an hour, inches, millibars.",
)

# Feature services

flight_delay_v1 = FeatureService(
    name="flight_delay_v1",
    features=[
        carrier_stats,
        origin_stats,
        destination_stats,
        route_stats,
        plane_history,
        planes,
        weather,
    ],
    description="Will a flight arrive more than 15 minutes late? Known two hours before departure.",
)
