"""Data that is not ours: what cannot be used is refused before training, with column and cure."""

from pathlib import Path

import pandas as pd
import pytest

from tasks.features.access.store import load_definitions, open_store
from tasks.kernel.errors import ConfigurationError, DataContractError
from tests.support.data.shop import Shop, orders


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_infinite_features_are_refused_unless_they_are_declared(shop: Shop) -> None:
    rows = orders()
    rows.loc[rows["customer"] == "c07", "items"] = 0
    shop.write("orders", rows)
    with pytest.raises(DataContractError, match=r"price_of_an_item is infinite.* nullif\("):
        shop.tables()
    declared = "suite: feature_habits, unbounded: [price_of_an_item]"
    shop.replace("use_case.yaml", "suite: feature_habits", declared)
    assert shop.tables().tables[0].num_rows == 600


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("habits", "sum(amount)", "1e300 * sum(amount)", "price_of_an_item is infinite, or beyond"),
        ("entities", "amount::FLOAT", "(amount / 0)::FLOAT", "amount is infinite"),
    ],
)
def test_numbers_that_no_model_takes_are_refused(
    shop: Shop, file: str, old: str, new: str, told: str
) -> None:
    shop.replace(f"sql/{file}.sql", old, new)
    with pytest.raises(DataContractError, match=told):
        shop.entities()


@pytest.mark.parametrize(
    ("label", "seen"),
    [
        ("CASE WHEN items > 2 THEN 'yes' ELSE 'no' END", "'no'"),
        ("items", "'3'"),
        ("ordered", "2024-"),
    ],
)
def test_a_label_other_than_0_and_1_is_refused_with_column_values_and_cure(
    shop: Shop, label: str, seen: str
) -> None:
    shop.replace("sql/entities.sql", "    NULL::", f"    {label} AS target,\n    NULL::")
    shop.replace("use_case.yaml", "label: again", "label: target")
    with pytest.raises(DataContractError, match=r"label target of .*::INTEGER") as refused:
        shop.entities()
    assert seen in str(refused.value)


def test_a_label_of_several_classes_is_their_number_and_no_other_value_passes(shop: Shop) -> None:
    size = "CASE WHEN items > 3 THEN 'large' WHEN items > 1 THEN 'middle' ELSE 'small' END"
    shop.replace("sql/entities.sql", "    NULL::", f"    {size} AS target,\n    NULL::")
    classes = "task: multi-class\n    classes: [small, middle, large]\n    label: target"
    shop.replace("use_case.yaml", "label: again", classes)
    snapshot = shop.training_set()
    assert snapshot.columns.classes == ("small", "middle", "large")
    assert sum(snapshot.class_shares.values()) == pytest.approx(1)
    labels = pd.read_parquet(shop.store.path(snapshot.data))["target"]
    assert (labels == 1).mean() == pytest.approx(snapshot.class_shares["middle"])
    shop.replace("use_case.yaml", "[small, middle, large]", "[small, middle, huge]")
    with pytest.raises(DataContractError, match=r"'large' \(\d+ rows\); expected small, middle"):
        shop.entities()


def test_a_moment_that_is_text_is_told_with_its_cure(shop: Shop) -> None:
    shop.replace("sql/entities.sql", "ordered + INTERVAL 1 HOUR AS", "ordered::VARCHAR AS")
    with pytest.raises(ConfigurationError, match="event_timestamp::TIMESTAMPTZ"):
        shop.entities()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ttl=timedelta", "til=timedelta", r"definitions\.py .* TypeError in line \d+.*til"),
        (
            "ttl=timedelta(days=60)",
            "ttl=timedelta(days=60",
            r"definitions\.py .* SyntaxError in line \d+",
        ),
        (
            "from feast.types",
            "from feast.typen",
            r"definitions\.py .* ModuleNotFoundError in line \d+.*feast\.typen",
        ),
        ("days=60", "days=-60", "feature view habits has ttl -60 days"),
    ],
)
def test_definitions_that_cannot_be_used_are_told_with_file_and_line_or_view(
    shop: Shop, old: str, new: str, told: str
) -> None:
    shop.replace("definitions.py", old, new)
    with pytest.raises(ConfigurationError, match=told):
        load_definitions(shop.repo)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"price_of_an_item"', '"price_of_a_item"', "habits_table.*no column price_of_a_item"),
        ('    created_timestamp_column="created",\n', "", "habits_table.*created_timestamp_column"),
    ],
)
def test_a_source_that_does_not_fit_its_table_is_refused_before_it_is_applied(
    shop: Shop, old: str, new: str, told: str
) -> None:
    shop.replace("definitions.py", old, new)
    with pytest.raises(ConfigurationError, match=told):
        shop.training_set()
    assert open_store(shop.settings.features_home, shop.repo).list_feature_views() == []


def test_a_service_that_is_registered_and_no_longer_defined_is_refused(shop: Shop) -> None:
    shop.training_set()
    shop.replace("definitions.py", '"order_again_v1"', '"order_again_v2"')
    with pytest.raises(ConfigurationError, match=r"order_again_v1' is not defined.*order_again_v2"):
        shop.training_set()
