"""A use case that declares its features: returns of a mail-order shop, said once in one file."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from tasks.features.config import FeatureConfig
from tests.support.data import shop

ORDERS: dict[str, Any] = {
    "name": "orders",
    "uri": "raw/orders.csv",
    "time_column": "ordered",
    "key": ["order_id"],
    "null_text": "",
    "columns": {
        "order_id": "BIGINT",
        "customer": "VARCHAR",
        "ordered": "TIMESTAMPTZ",
        "channel": "VARCHAR",
        "amount": "DOUBLE",
        "gift": "BOOLEAN",
        "returned": "BOOLEAN",
    },
}
CUSTOMERS: dict[str, Any] = {
    "name": "customers",
    "uri": "raw/customers.csv",
    "key": ["customer"],
    "null_text": "",
    "columns": {"customer": "VARCHAR", "town": "VARCHAR", "age": "BIGINT"},
}
HABITS: dict[str, Any] = {
    "name": "habits",
    "from": "orders",
    "entity_keys": ["customer"],
    "known_after": "15m",
    "aggregates": ["count() over 7d, 4w", "mean(amount) over 7d", "last(channel)", "last(gift)"],
}
TRAINING_SET: dict[str, Any] = {
    "from": "orders",
    "label": "returned",
    "label_known_after": "14d",
    "predict_after": "1h",
}
FEATURES: dict[str, Any] = {
    "raw_tables": [ORDERS, CUSTOMERS],
    "feature_tables": [
        HABITS,
        {"name": "customers", "from": "customers", "entity_keys": ["customer"]},
    ],
    "training_set": TRAINING_SET,
}
USE_CASE: dict[str, Any] = {
    "name": "mail-order",
    "question": "Will this order be sent back?",
    "features": FEATURES,
    "splits": {
        "start": "2024-01-01",
        "validation": "2024-05-01",
        "test": "2024-06-01",
        "end": "2024-07-01",
    },
}


def features(**changes: Any) -> FeatureConfig:
    """The features of the use case, with some parts of them changed."""
    return FeatureConfig.model_validate({**FEATURES, **changes})


def write_use_case(folder: Path, **changes: Any) -> Path:
    """The use case as a project of one file; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "use_case.yaml").write_text(yaml.safe_dump({**USE_CASE, **changes}))
    return folder


def write_rows(project: Path) -> pd.DataFrame:
    """Half a year of orders by forty customers, and these; returns the orders."""
    rng = np.random.default_rng(5)
    num_rows = 900
    seconds = np.sort(rng.integers(0, 182 * 86400, num_rows))
    moments = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(seconds, unit="s")
    customers = rng.integers(0, 40, num_rows)
    orders = pd.DataFrame(
        {
            "order_id": np.arange(num_rows),
            "customer": [f"c{n:02d}" for n in customers],
            "ordered": moments.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "channel": rng.choice(["web", "shop"], num_rows),
            "amount": np.round(rng.gamma(3, 20, num_rows), 2),
            "gift": rng.random(num_rows) < 0.2,
            "returned": rng.random(num_rows) < 0.1 + 0.5 * (customers % 4 == 0),
        }
    )
    (project / "raw").mkdir()
    orders.to_csv(project / "raw" / "orders.csv", index=False)
    shop.customers().to_csv(project / "raw" / "customers.csv", index=False)
    return orders
