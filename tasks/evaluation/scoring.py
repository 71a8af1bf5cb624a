"""Scores of an exported program on the rows of a window.

Rows of a snapshot, one window at a time, a bounded number in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import Artifact, TimeWindow
from tasks.contracts.conversion import open_program
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.config import MONTH, EvaluationConfig
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore

if TYPE_CHECKING:  # whoever opens no program needs no PyTorch, which takes a second to import
    import torch

SCORE, BASELINE_MODEL_SCORE, PREDICTED = "score", "yardstick_score", "predicted"


def read_batches(
    dataset: ValidatedDataset,
    window: TimeWindow,
    columns: Sequence[str],
    store: ArtifactStore,
    batch_rows: int,
) -> Iterator[pd.DataFrame]:
    """Rows of one window in the order of the snapshot, at most `batch_rows` at a time.

    Raises:
        DataContractError: the snapshot lacks a column.
        ArtifactError: the snapshot is absent or damaged.
    """
    snapshot = dataset.snapshot
    data = ds.dataset(store.path(snapshot.data), format="parquet")
    absent = [name for name in columns if name not in data.schema.names]
    if absent:
        raise DataContractError(
            f"snapshot {snapshot.data.sha256[:12]} lacks column(s) {', '.join(absent)}; it has "
            f"{len(data.schema.names)} columns. Use a snapshot of the model's own feature service"
        )
    time = ds.field(snapshot.columns.event_time)
    scanner = data.scanner(
        columns=list(dict.fromkeys(columns)),
        filter=(time >= window.start) & (time < window.end),
        batch_size=batch_rows,
        batch_readahead=2,
    )
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield batch.to_pandas()


def input_columns(columns: DatasetSchema) -> tuple[str, ...]:
    """Names of all columns that a model takes."""
    return (*columns.categorical, *columns.numeric)


def slice_columns(columns: DatasetSchema, config: EvaluationConfig) -> tuple[str, ...]:
    """Columns that the slices need from the snapshot.

    Raises:
        ConfigurationError: a slice names no column of the snapshot.
    """
    wanted = tuple(name for name in config.slices if name != MONTH)
    known = {*columns.categorical, *columns.numeric}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigurationError(
            f"slices name {', '.join(unknown)}, which the snapshot does not have as feature(s); "
            f"expected `{MONTH}` or one of {', '.join(columns.categorical)}. Change `slices`"
        )
    return wanted


def labelled(scored: ScoredWindow, columns: DatasetSchema, store: ArtifactStore) -> pd.DataFrame:
    """Moment, label and score of the rows of a scored window whose label is known.

    Raises:
        ArtifactError: the scores are absent or damaged.
    """
    names = [columns.event_time, columns.label, SCORE]
    rows: pd.DataFrame = pq.read_table(store.path(scored.scores), columns=names).to_pandas()
    time, window = rows[columns.event_time], scored.window
    inside = (time >= window.start) & (time < window.end)  # the file may hold later rows too
    return rows[inside & rows[columns.label].notna()]


def utc_times(frame: pd.DataFrame, column: str) -> NDArray[np.datetime64]:
    """Event times as UTC without a zone, shape (rows,)."""
    times: NDArray[np.datetime64] = frame[column].dt.tz_convert(None).to_numpy()
    return times


def joined(
    parts: Iterable[pd.DataFrame], dataset: ValidatedDataset, window: TimeWindow
) -> pd.DataFrame:
    """All parts in one frame.

    Raises:
        DataContractError: there is no row.
    """
    frames = list(parts)
    if not frames:
        raise DataContractError(
            f"snapshot {dataset.snapshot.data.sha256[:12]} ({dataset.snapshot.window}) has no row "
            f"in {window}; expected some. Choose a window with rows"
        )
    return pd.concat(frames, ignore_index=True)


BATCH_ROWS = 8192  # scored at once; bounds memory
SMALL_NETWORK = 10_000_000
"""Parameters below which one thread computes: on a network of tables a second one saved no time and
took 1.7 times the CPU."""


@dataclass(frozen=True)
class Program:
    """An opened program and the columns it takes; one for a whole window."""

    artifact: Artifact
    columns: DatasetSchema
    module: torch.nn.Module

    @classmethod
    def open(cls, artifact: Artifact, columns: DatasetSchema, store: ArtifactStore) -> Program:
        """Read the program from the store, its digest checked.

        Raises:
            ArtifactError: it is absent, damaged, no `torch.export` program, or holds pickles.
        """
        return cls(artifact, columns, open_program(store.path(artifact)).module())

    def score(self, frame: pd.DataFrame) -> NDArray[np.float32]:
        """Probability of label 1, or the label itself, for each row of `frame`, shape (rows,).

        Of several classes the probability of each, shape (rows, classes).

        Raises:
            DataContractError: a column is absent, or the program's answer is not one probability
                (or finite number) a row.
        """
        import torch

        categorical, numeric = self.columns.model_inputs(frame)
        try:
            with torch.inference_mode():
                answer = self.module(torch.from_numpy(categorical), torch.from_numpy(numeric))
        except (RuntimeError, AssertionError) as exc:
            raise DataContractError(
                f"program {self._name} refused inputs of shapes {categorical.shape} and "
                f"{numeric.shape} ({str(exc).splitlines()[0]}); expected a program exported for "
                "these columns with a dynamic batch axis"
            ) from exc
        return self._checked(answer, len(frame))

    @property
    def _name(self) -> str:
        return self.artifact.sha256[:12]

    def _checked(self, answer: Any, num_rows: int) -> NDArray[np.float32]:
        shape = tuple(getattr(answer, "shape", (type(answer).__name__,)))
        expected = (num_rows, *([len(self.columns.classes)] if self.columns.classes else []))
        if shape != expected:
            raise DataContractError(
                f"program {self._name} returned {shape} for {num_rows} rows, expected a tensor of "
                f"shape {expected}. Export the model with one score a row, or one a class"
            )
        scores: NDArray[np.float32] = answer.numpy().astype(np.float32)
        kind, wanted, fits = "probabilities", "values from 0 to 1", (scores >= 0) & (scores <= 1)
        if self.columns.task == "regression":
            kind, wanted, fits = "numbers", "finite values", np.isfinite(scores)
        if bad := int(np.count_nonzero(~fits)):  # NaN fits neither
            raise DataContractError(
                f"program {self._name} returned {bad:,} scores of {num_rows:,} that are no {kind} "
                f"({np.count_nonzero(np.isnan(scores)):,} of them NaN); expected {wanted}. The "
                "model was not judged; look at its training log"
            )
        return scores


def score_rows(
    program: Program,
    dataset: ValidatedDataset,
    window: TimeWindow,
    keep: Sequence[str],
    store: ArtifactStore,
    batch_rows: int = BATCH_ROWS,
) -> pd.DataFrame:
    """Score all rows of a window, in the order of the snapshot.

    Returns:
        The columns `keep`, and `score`; of several classes `score_0` and so on, and `predicted`,
        the name of the most probable one.

    Raises:
        DataContractError: no row in the window, a column is absent, or the program's answer is
            not one probability a row.
        ArtifactError: the snapshot is absent or damaged.
    """
    import torch

    held = dataset.snapshot.columns.encoders
    if others := [e for e in program.columns.encoders if e not in held]:
        raise DataContractError(
            f"the model takes {others[0].column} as encoder {others[0].sha256[:12]} "
            f"({others[0].source}) gives it, and snapshot {dataset.snapshot.data.sha256[:12]} was "
            "made with another. Name that encoder in use_case.yaml until another model serves, or "
            "withdraw the model. Nothing was scored"
        )
    wanted = [*keep, *input_columns(program.columns)]
    batches = read_batches(dataset, window, wanted, store, batch_rows)
    is_small = sum(each.numel() for each in program.module.parameters()) < SMALL_NETWORK
    parts = (
        frame[list(keep)].assign(**named_scores(program.columns, SCORE, program.score(frame)))
        for frame in batches
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if is_small else threads)
        return joined(parts, dataset, window)
    finally:
        torch.set_num_threads(threads)


def named_scores(columns: DatasetSchema, name: str, scores: NDArray[Any]) -> dict[str, Any]:
    """Scores of some rows by column: one, or one for each of several classes and `predicted`."""
    each = scores.reshape(len(scores), -1)
    found = dict(zip(columns.score_columns(name), each.T, strict=True))
    if columns.classes and name == SCORE:
        found[PREDICTED] = np.array(columns.classes, dtype=object)[each.argmax(axis=1)]
    return found
