"""The baseline model: scikit-learn's gradient boosting on the same rows, columns and windows.

A model that does not reach it has not learned what the data gives without effort.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import sklearn
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, DataSplits, ValidatedDataset
from tasks.contracts.evaluation import BaselineModel
from tasks.evaluation.config import BaselineModelConfig
from tasks.evaluation.scoring import (
    BASELINE_MODEL_SCORE,
    input_columns,
    joined,
    named_scores,
    read_batches,
)
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

logger = logging.getLogger(__name__)

BATCH_ROWS = 32_768
PATIENCE = 15  # trees without a better validation loss to the end
MAX_ROWS = 500_000  # of a window, a seeded sample; bounds memory
MAX_CATEGORIES = 254  # of one column: scikit-learn takes 255 bins, one is for missing
Float32Array = NDArray[np.float32]


def score_baseline_model(
    dataset: ValidatedDataset, splits: DataSplits, config: BaselineModelConfig, store: ArtifactStore
) -> BaselineModel:
    """Fit gradient boosting on the training window, and score the test window with it.

    The validation window chooses the number of trees. Nothing of the test window is used.

    Raises:
        DataContractError: a window has no rows, a label is null, or only one label occurs.
        ArtifactError: the snapshot is absent or damaged.
        StorageError: the disk refused a write.
    """
    snapshot = dataset.snapshot
    key = content_key(
        "yardstick",
        code_digest(__file__),
        sklearn.__version__,
        snapshot.data.sha256,
        splits,
        config,
    )

    def build(folder: StagedFolder) -> BaselineModel:
        encoding = CategoryEncoding(snapshot.columns)
        model = _fit(dataset, splits, encoding, config, store)
        scores = joined(_scored(model, encoding, dataset, splits.test, store), dataset, splits.test)
        scores.to_parquet(folder.path / "scores.parquet", index=False)
        return BaselineModel(
            name=f"gradient boosting (scikit-learn {sklearn.__version__}, {model.n_iter_} trees)",
            snapshot_sha256=snapshot.data.sha256,
            splits=splits,
            scores=folder.artifact("scores.parquet"),
        )

    return store.build_once("baseline-models", key, BaselineModel, build)


@dataclass
class CategoryEncoding:
    """Numbers for category values, learned from training rows; anything else is missing (NaN)."""

    columns: DatasetSchema
    values: dict[str, list[Any]] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)

    def learn(self, rows: pd.DataFrame) -> None:
        """Number the values of each category column, the most frequent first.

        A column without any known value among these rows, perhaps a sample, is held constant:
        scikit-learn finds no bins for it.
        """
        for name in self.columns.categorical:
            counts = rows[name].value_counts().sort_index()
            frequent = counts.sort_values(ascending=False, kind="stable").index
            self.values[name] = list(frequent[:MAX_CATEGORIES])
        self.unknown = np.flatnonzero(rows[list(input_columns(self.columns))].isna().all()).tolist()

    def matrix(self, rows: pd.DataFrame) -> Float32Array:
        """Features of `rows`, categories first, shape (rows, features)."""
        codes = [
            pd.Categorical(rows[name], categories=self.values[name]).codes.astype(np.float32)
            for name in self.columns.categorical
        ]
        numbers = rows[list(self.columns.numeric)].to_numpy(np.float32, na_value=np.nan)
        matrix: Float32Array = np.column_stack([*codes, numbers])
        categories = matrix[:, : len(codes)]
        categories[categories < 0] = np.nan
        matrix[:, self.unknown] = 0
        return matrix


def _fit(
    dataset: ValidatedDataset,
    splits: DataSplits,
    encoding: CategoryEncoding,
    config: BaselineModelConfig,
    store: ArtifactStore,
) -> Any:
    columns = dataset.snapshot.columns
    train = _sample(dataset, splits.train, store)
    encoding.learn(train)
    features, labels = encoding.matrix(train), _labels(train, columns, splits.train)
    del train  # the frame and the matrix together are the peak of memory
    chosen_on = _sample(dataset, splits.validation, store)
    is_number = columns.task == "regression"
    kind = HistGradientBoostingRegressor if is_number else HistGradientBoostingClassifier
    model = kind(
        max_iter=config.max_iterations,
        learning_rate=0.1,
        max_leaf_nodes=31,
        min_samples_leaf=config.min_leaf_rows,
        l2_regularization=1.0,
        categorical_features=list(range(len(columns.categorical))) or None,
        early_stopping=True,
        n_iter_no_change=PATIENCE,
        random_state=0,
    )
    model.fit(
        features,
        labels,
        X_val=encoding.matrix(chosen_on),
        y_val=_labels(chosen_on, columns, splits.validation),
    )
    logger.info("baseline model: %d trees on %d rows", model.n_iter_, len(labels))
    return model


def _sample(dataset: ValidatedDataset, window: TimeWindow, store: ArtifactStore) -> pd.DataFrame:
    """Rows of a window, or a seeded sample where there are more than `MAX_ROWS`."""
    columns = dataset.snapshot.columns
    labels = read_batches(dataset, window, [columns.label], store, BATCH_ROWS)
    num_rows = sum(len(frame) for frame in labels)
    if num_rows > MAX_ROWS:
        logger.info("baseline model: %d of %d rows of %s, sampled", MAX_ROWS, num_rows, window)
    chosen = np.random.default_rng(0).choice(num_rows, min(num_rows, MAX_ROWS), replace=False)
    keep = np.isin(np.arange(num_rows), chosen)
    wanted, narrow = [columns.label, *input_columns(columns)], dict.fromkeys(columns.numeric, "f4")
    parts, seen = [], 0
    for frame in read_batches(dataset, window, wanted, store, BATCH_ROWS):
        parts.append(frame[keep[seen : seen + len(frame)]].astype(narrow))
        seen += len(frame)
    return joined(parts, dataset, window)


def _labels(rows: pd.DataFrame, columns: DatasetSchema, window: TimeWindow) -> NDArray[Any]:
    labels = rows[columns.label].to_numpy(dtype=np.float64, na_value=np.nan)
    nulls, kinds = int(np.isnan(labels).sum()), np.unique(labels[~np.isnan(labels)])
    is_number = columns.task == "regression"
    wanted = list(range(columns.num_labels))
    fits = np.isfinite(kinds).all() if is_number else list(kinds) == wanted
    if nulls or not fits:
        raise DataContractError(
            f"label {columns.label!r} in {window} has {nulls:,} nulls and the values "
            f"{kinds[:5].tolist()} in {len(rows):,} rows; expected "
            f"{'a finite number in each' if is_number else f'{wanted}, all present'}. The baseline "
            "model was not fitted"
        )
    return labels if is_number else labels.astype(np.int8)


def _scored(
    model: Any,
    encoding: CategoryEncoding,
    dataset: ValidatedDataset,
    window: TimeWindow,
    store: ArtifactStore,
) -> Any:
    columns = dataset.snapshot.columns
    wanted = [columns.row_id, *input_columns(columns)]
    for frame in read_batches(dataset, window, wanted, store, BATCH_ROWS):
        features = encoding.matrix(frame)
        if columns.task == "regression":
            scores = model.predict(features)
        else:
            scores = model.predict_proba(features)
            scores = scores if columns.classes else scores[:, 1]
        named = named_scores(columns, BASELINE_MODEL_SCORE, scores)
        yield pd.DataFrame({columns.row_id: frame[columns.row_id], **named})


def read_scores(baseline_model: BaselineModel, store: ArtifactStore) -> pd.DataFrame:
    """Row id and `yardstick_score` (of classes `_0` and so on) of the test rows, in order."""
    scores: pd.DataFrame = pq.read_table(store.path(baseline_model.scores)).to_pandas()
    return scores
