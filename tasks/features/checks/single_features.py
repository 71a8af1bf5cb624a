"""How well each input tells the label all by itself, and how well it did one row earlier.

An input that alone tells the label is the label, or was made from it. One that carries nearly all
of what is to be known, and hardly any of it in the row before, became known with the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts import data
from tasks.contracts.evaluation import FeatureRanking, SingleFeature
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import names, parquet, sql_name, sql_text
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.stats.ranked import METRICS, RankedRows

NUM_LEADING = 3
NUM_BINS = 64
PRIOR_ROWS = 10.0
TELLS_THE_LABEL = 0.999
"""Score from which an input counts as the label itself, whatever bounds the gates have."""
MIN_ROWS = 100
"""With fewer test rows a score near 1 may be chance."""
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


def rank_single_features(
    snapshot: data.FeatureSnapshot,
    tables: data.FeatureTables,
    config: FeatureConfig,
    splits: data.DataSplits,
    store: ArtifactStore,
) -> FeatureRanking:
    """The inputs that tell most about the label by themselves, learned in training, judged on test.

    Args:
        snapshot: the training set.
        tables: what it was retrieved from, for the values one row earlier.
        config: keys of the feature tables, and which inputs are trusted.
        splits: training and test window.
        store: holds all of these, and takes the ranking.

    Raises:
        DataContractError: an input is the label, or was made from it.
    """
    trusted = config.training_set.trusted
    key = content_key(code_digest(__file__), snapshot.data.sha256, splits, trusted, tables.version)

    def build(folder: StagedFolder) -> FeatureRanking:
        rows = SingleScores(store.path(snapshot.data), snapshot.columns, splits)
        columns = snapshot.columns
        scores = {c: rows.score(c) for c in (*columns.categorical, *columns.numeric)}
        _check_none_is_the_label(scores, rows, trusted)
        leading = sorted(scores, key=lambda c: -scores[c])[:NUM_LEADING]
        return FeatureRanking(
            features=tuple(
                SingleFeature(
                    name=column,
                    score=scores[column],
                    earlier_score=_score_before(column, rows, tables, config, store),
                    trusted=column in trusted,
                )
                for column in leading
            )
        )

    return store.build_once("rankings", key, FeatureRanking, build)


def _check_none_is_the_label(
    scores: dict[str, float], rows: SingleScores, trusted: Sequence[str]
) -> None:
    telling = [c for c, s in scores.items() if s >= TELLS_THE_LABEL and c not in trusted]
    if not telling or rows.num_test < MIN_ROWS:
        return
    shown = ", ".join(f"{column} ({rows.measure} {scores[column]:.4f})" for column in telling[:5])
    raise DataContractError(
        f"{shown} alone tells the label {rows.label} on {rows.num_test:,} test rows: it is the "
        "label, or was made from it, and will not be known when a prediction is asked for. Take it "
        "out of the feature service or the entity frame; where it truly is known by then, name it "
        "among `trusted` of the training set. Nothing was trained"
    )


class SingleScores:
    """Labels of the training and the test rows of a file, and the scores of single columns."""

    def __init__(self, path: Path, columns: data.DatasetSchema, splits: data.DataSplits) -> None:
        self.path = path
        self.columns = columns
        self.label = columns.label
        self.is_number = columns.task == "regression"
        self.measure = data.R2_NAME if self.is_number else data.AUC_NAME
        times = self._read(columns.event_time).dt.tz_convert("UTC")
        labels = self._read(self.label).to_numpy(np.float64)
        self.train, self.test = (
            ((times >= w.start) & (times < w.end)).to_numpy() for w in (splits.train, splits.test)
        )
        self._of_train, self._of_test = labels[self.train], labels[self.test]
        self.numbered = f"read_parquet({sql_text(self.path)}, file_row_number = true)"

    @property
    def num_test(self) -> int:
        """Test rows that the scores are of."""
        return len(self._of_test)

    def score(self, column: str, others: pd.Series[Any] | None = None) -> float:
        """AUC, or R2 of a regression, of a model that sees this column alone; at best 1.

        Args:
            column: an input.
            others: taken for its values, in the order of the snapshot.
        """
        values = self._read(column) if others is None else others
        is_text = column in self.columns.categorical
        if not (self.train.any() and self.test.any()):
            return 0.0
        bins = _text_bins(values, self.train) if is_text else _number_bins(values, self.train)
        if not self.is_number:
            # Of several classes the mean of what it tells of each, as a model is judged.
            classes = range(len(self.columns.classes)) or (1,)
            return float(np.mean([self._auc(bins, number) for number in classes]))
        scores = [self._r2(_means(bins[self.train], self._of_train)[bins[self.test]])]
        if not is_text:
            scores.append(self._linear(values.to_numpy(np.float64, na_value=np.nan)))
        return max(scores)

    def _auc(self, bins: NDArray[np.intp], label: int) -> float:
        """AUC of the share of a label in each bin; of one that all or no rows have, chance."""
        of_test = self._of_test == label
        if of_test.all() or not of_test.any():
            return 0.5
        means = _means(bins[self.train], (self._of_train == label).astype(np.float64))
        one = np.zeros(len(of_test), dtype=np.intp)
        ranked = RankedRows(of_test, means[bins[self.test]], one, 1)
        return float(ranked.estimate()[METRICS.index("auc")])

    def _linear(self, values: Floats) -> float:
        """R2 of a straight line; in bins even the label itself is not exact."""
        x, y = values[self.train], self._of_train
        known = np.isfinite(x)
        if known.sum() < MIN_ROWS or np.ptp(x[known]) == 0:
            return 0.0
        slope, start = np.polyfit(x[known], y[known], 1)
        line = np.where(np.isfinite(values[self.test]), values[self.test], x[known].mean())
        return self._r2(slope * line + start)

    def _r2(self, predicted: Floats) -> float:
        around_mean = ((self._of_test - self._of_test.mean()) ** 2).sum()
        missed = ((self._of_test - predicted) ** 2).sum()
        return float(1 - missed / around_mean) if around_mean else 0.0

    def _read(self, column: str) -> pd.Series[Any]:
        frame: pd.DataFrame = pq.read_table(self.path, columns=[column]).to_pandas()
        return frame[column]


def _score_before(
    column: str,
    rows: SingleScores,
    tables: data.FeatureTables,
    config: FeatureConfig,
    store: ArtifactStore,
) -> float | None:
    """Score of the value one row earlier of the same entity; None where that is not known.

    Earlier in its feature table, or, of a column that no feature table gives, in the entity frame.
    """
    held = set(pq.read_schema(rows.path).names)
    view, _, feature = column.partition("__")
    known = [t for t in config.feature_tables if set(t.entity_keys) <= held]
    if not feature:
        # Of whom the row before is, the frame alone does not say: the keys that tell most.
        before = [_earlier_in_frame(column, t.entity_keys, rows) for t in known]
        return max((rows.score(column, values) for values in before), default=None)
    found = [t for t in known if t.name == view and not t.static]
    refs = [ref for ref in tables.tables if ref.name == view]
    if not found or not refs:
        return None
    table = parquet(store.path(refs[0].artifact))
    return rows.score(column, _earlier_in_table(feature, found[0].entity_keys, table, rows))


def _earlier_in_frame(
    column: str, entity_keys: Sequence[str], rows: SingleScores
) -> pd.Series[Any]:
    with duckdb.connect() as con:
        return con.execute(
            f"SELECT lag({sql_name(column)}) OVER (PARTITION BY {names(list(entity_keys))} "
            f"ORDER BY {sql_name(rows.columns.event_time)}, file_row_number) AS earlier "
            f"FROM {rows.numbered} ORDER BY file_row_number"
        ).df()["earlier"]


def _earlier_in_table(
    feature: str, entity_keys: Sequence[str], table: str, rows: SingleScores
) -> pd.Series[Any]:
    keys, moment = names(list(entity_keys)), sql_name(rows.columns.event_time)
    equal = " AND ".join(f"s.{sql_name(k)} = p.{sql_name(k)}" for k in entity_keys)
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        return con.execute(
            f"WITH past AS (SELECT {keys}, event_timestamp AS at, lag({sql_name(feature)}) OVER "
            f"(PARTITION BY {keys} ORDER BY event_timestamp) AS earlier FROM {table}) "
            f"SELECT p.earlier FROM (SELECT {keys}, {moment}, file_row_number AS place FROM "
            f"{rows.numbered}) AS s "
            f"ASOF LEFT JOIN past AS p ON {equal} AND s.{moment} >= p.at ORDER BY s.place"
        ).df()["earlier"]


def _text_bins(values: pd.Series[Any], train: Mask) -> NDArray[np.intp]:
    known = pd.Index(values[train].dropna().unique())
    return np.where((place := known.get_indexer(values)) < 0, len(known), place).astype(np.intp)


def _number_bins(values: pd.Series[Any], train: Mask) -> NDArray[np.intp]:
    numbers = values.to_numpy(np.float64, na_value=np.nan)
    known = numbers[train & np.isfinite(numbers)]
    few = len(known) <= NUM_BINS
    cuts = np.unique(known if few else np.quantile(known, np.linspace(0, 1, NUM_BINS + 1)))
    bins = np.searchsorted(cuts, numbers, side="right")
    return np.where(np.isnan(numbers), len(cuts) + 1, bins).astype(np.intp)


def _means(bins: NDArray[np.intp], labels: Floats) -> Floats:
    """Mean label of each bin, drawn a little to the mean of all; bins up to the last possible."""
    size = max(NUM_BINS + 3, int(bins.max()) + 2)
    sums, counts = np.bincount(bins, labels, size), np.bincount(bins, minlength=size)
    means: Floats = (sums + PRIOR_ROWS * labels.mean()) / (counts + PRIOR_ROWS)
    return means
