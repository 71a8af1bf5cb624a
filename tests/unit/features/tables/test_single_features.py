"""What single inputs tell about the label: the label itself is refused, a leak is seen."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from tasks.contracts.data import DatasetSchema, FeatureTables, TableRef
from tasks.contracts.evaluation import FeatureRanking
from tasks.features.checks.single_features import rank_single_features
from tasks.features.config import FeatureConfig
from tasks.features.declared.columns import read_features
from tasks.features.tables.build import EMPTY
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, StagedFolder
from tests.support.data.builders import COLUMNS, dataset, frame, splits

FEATURE = "carrier_stats__landed"


@pytest.fixture(scope="module")
def config() -> FeatureConfig:
    return read_features(PROJECT_ROOT / "feature_repo" / "flights")[1]


def trusting(config: FeatureConfig, *columns: str) -> FeatureConfig:
    spec = config.training_set.model_copy(update={"trusted": columns})
    return config.model_copy(update={"training_set": spec})


def ranked(
    store: ArtifactStore,
    rows: pd.DataFrame,
    config: FeatureConfig,
    columns: DatasetSchema = COLUMNS,
    tables: FeatureTables = EMPTY,
) -> FeatureRanking:
    snapshot = dataset(store, rows, columns).snapshot
    return rank_single_features(snapshot, tables, config, splits(), store)


@pytest.mark.parametrize("made_from", ["label", "text"])
def test_the_label_among_the_inputs_is_refused_before_training(
    store: ArtifactStore, config: FeatureConfig, made_from: str
) -> None:
    rows = frame()
    name = "temp" if made_from == "label" else "dest"
    copied = 3 - 2 * rows["is_late"]
    rows[name] = copied.astype(np.float32) if name == "temp" else copied.map({1: "L", 3: "E"})
    with pytest.raises(DataContractError, match=rf"{name} \(AUC 1.0000\) alone tells the label"):
        ranked(store, rows, config)
    assert not list(store.root.glob("rankings/*"))
    best = ranked(store, rows, trusting(config, name)).features[0]
    assert (best.name, best.trusted, best.score) == (name, True, 1.0)


def test_the_number_to_predict_in_another_unit_is_refused(
    store: ArtifactStore, config: FeatureConfig
) -> None:
    columns = COLUMNS.model_copy(update={"task": "regression", "label": "delay"})
    rows = frame()
    rows["delay"] = np.random.default_rng(1).lognormal(2, 1.5, len(rows))
    assert all(feature.score < 0.1 for feature in ranked(store, rows, config, columns).features)
    rows["temp"] = (32 + 1.8 * rows["delay"]).astype(np.float32)
    with pytest.raises(DataContractError, match=r"temp \(R² (1.0000|0.99)"):
        ranked(store, rows, config, columns)


def test_honest_inputs_are_ranked_by_what_they_tell(
    store: ArtifactStore, config: FeatureConfig
) -> None:
    ranking = ranked(store, frame(), config)
    assert ranking.features[0].name == "late_rate_24h"
    assert 0.6 < ranking.features[0].score < 0.8
    assert ranking.features[0].earlier_score == pytest.approx(0.5, abs=0.05)  # every row anew


@pytest.mark.parametrize("leaks", [True, False])
def test_a_column_of_the_entity_frame_is_looked_at_one_row_earlier_too(
    store: ArtifactStore, config: FeatureConfig, leaks: bool
) -> None:
    """Leaking: 97 of 100 labels. Honest: a level of each carrier, which stays as it is."""
    rows, rng = frame(), np.random.default_rng(3)
    if leaks:
        copied = np.where(rng.random(len(rows)) < 0.03, 1 - rows["is_late"], rows["is_late"])
    else:
        copied = rows["carrier"].map({c: i % 2 for i, c in enumerate(rows["carrier"].unique())})
        rows["is_late"] = (rng.random(len(rows)) < 0.1 + 0.8 * copied).astype(np.int8)
    rows["temp"] = copied.astype(np.float32)

    best = {f.name: f for f in ranked(store, rows, config).features}["temp"]

    assert best.score > 0.85
    assert (best.earlier_score < 0.6) is leaks


@pytest.mark.parametrize(("leaks", "low", "high"), [(True, 0.45, 0.6), (False, 0.8, 1.0)])
def test_what_became_known_with_the_label_tells_nothing_one_row_earlier(
    store: ArtifactStore, config: FeatureConfig, leaks: bool, low: float, high: float
) -> None:
    """Leaking: nine of ten labels. Honest: a level of the carrier that moves slowly."""
    rows, rng = frame(), np.random.default_rng(2)
    level = np.sin(np.arange(len(rows)) / 200)
    if not leaks:
        rows["is_late"] = (rng.random(len(rows)) < 0.5 + 0.5 * level).astype(np.int8)
    flipped = rng.random(len(rows)) < 0.1
    values = np.where(flipped, 1 - rows["is_late"], rows["is_late"]) if leaks else level
    rows[FEATURE] = values.astype(np.float32)
    columns = COLUMNS.model_copy(update={"numeric": (*COLUMNS.numeric, FEATURE)})

    best = ranked(store, rows, config, columns, carrier_stats(store, rows)).features[0]
    assert best.name == FEATURE
    assert best.score > 0.75
    assert low < best.earlier_score < high


def carrier_stats(store: ArtifactStore, rows: pd.DataFrame) -> FeatureTables:
    """The table that the feature was retrieved from: known a minute before each row."""
    table = rows[["carrier", "event_timestamp", FEATURE]].rename(columns={FEATURE: "landed"})
    table["event_timestamp"] -= timedelta(minutes=1)

    def build(folder: StagedFolder) -> TableRef:
        (folder.path / "carrier_stats").mkdir()
        table.to_parquet(folder.path / "carrier_stats" / "201301.parquet", index=False)
        artifact = folder.artifact("carrier_stats")
        return TableRef(name="carrier_stats", artifact=artifact, num_rows=len(table))

    reference = store.build_once("tables", "k", TableRef, build)
    return FeatureTables(version="a" * 32, raw=(), tables=(reference,), sources={})
