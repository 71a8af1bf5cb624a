"""Feature definitions of a use case that only the tests have: customers of a small shop."""

from datetime import timedelta

from feast import Entity, FeatureService, FeatureView, Field, FileSource, ValueType
from feast.types import Float64, Int64

customer = Entity(
    name="customer", join_keys=["customer"], value_type=ValueType.STRING, description="Customer."
)
habits_table = FileSource(
    name="habits_table",
    path="habits",
    timestamp_field="event_timestamp",
    created_timestamp_column="created",
    description="What each customer bought in four weeks.",
)
habits = FeatureView(
    name="habits",
    entities=[customer],
    ttl=timedelta(days=60),
    schema=[
        Field(name="orders_28d", dtype=Int64),
        Field(name="items_28d", dtype=Int64),
        Field(name="price_of_an_item", dtype=Float64),
    ],
    source=habits_table,
    description="Orders, items and price of an item in the four weeks up to an order.",
)
order_again_v1 = FeatureService(
    name="order_again_v1", features=[habits], description="Will the customer order again?"
)
