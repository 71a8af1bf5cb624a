"""Preprocessing fitted on training rows: vocabularies of categories, quantile bins of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import DatasetSchema, category_code
from tasks.kernel.errors import DataContractError

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

# Edges closer than this share of a column's span make no bin: 1 / width would lose all precision.
MIN_BIN_SHARE = 1e-6
# Beyond these, differences and 1 / width leave the range of float32; larger values are infinite.
MIN_BIN_WIDTH = 1e-30
MAX_MAGNITUDE = 1e30
# Codes have 31 bits and are never negative.
NO_CODE = -1


@dataclass(frozen=True)
class LabelScale:
    """How a label that is a number is standardised; from the training rows, as 32-bit floats hold.

    Args:
        mean: of the labels.
        deviation: their standard deviation, above 0.
    """

    mean: float
    deviation: float


@dataclass(frozen=True)
class Preprocessing:
    """Everything that turns raw columns into network inputs; becomes buffers of the exported model.

    Args:
        vocabularies: per categorical column, the known `category_code`s, increasing.
        edges: per numeric column, increasing bin edges; empty where the column is constant.
        flagged: positions of the numeric columns that get a missing indicator.
        labels: how predictions become labels again; None where the label is 0 or 1, or a class.
        num_outputs: of a network, one for each of several classes.
    """

    vocabularies: tuple[Int32Array, ...]
    edges: tuple[Float32Array, ...]
    flagged: tuple[int, ...]
    labels: LabelScale | None = None
    num_outputs: int = 1

    def category_positions(self, codes: Int32Array) -> Int64Array:
        """Position of each code in its column's vocabulary; unknown is the vocabulary's length.

        Args:
            codes: int32, shape (rows, categorical columns).

        Returns:
            int64, same shape: rows of the columns' embedding tables.
        """
        positions = np.empty(codes.shape, dtype=np.int64)
        for column, vocabulary in enumerate(self.vocabularies):
            found = np.searchsorted(vocabulary, codes[:, column])
            padded = np.append(vocabulary, np.int32(NO_CODE))  # what is past the end is unknown
            known = padded[found] == codes[:, column]
            positions[:, column] = np.where(known, found, len(vocabulary))
        return positions

    def state(self) -> dict[str, object]:
        """Plain values and tensors, as a checkpoint holds them."""
        import torch

        return {
            "vocabularies": [torch.from_numpy(codes) for codes in self.vocabularies],
            "edges": [torch.from_numpy(edges) for edges in self.edges],
            "flagged": list(self.flagged),
            **({"labels": [self.labels.mean, self.labels.deviation]} if self.labels else {}),
            **({"num_outputs": self.num_outputs} if self.num_outputs > 1 else {}),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Preprocessing:
        """What `state` was taken from."""
        return cls(
            vocabularies=tuple(codes.numpy() for codes in state["vocabularies"]),
            edges=tuple(edges.numpy() for edges in state["edges"]),
            flagged=tuple(int(column) for column in state["flagged"]),
            labels=LabelScale(*state["labels"]) if "labels" in state else None,
            num_outputs=state.get("num_outputs", 1),
        )


def fit_preprocessing(
    columns: DatasetSchema,
    category_counts: Mapping[str, Mapping[str, int]],
    number_sample: Float32Array,
    has_missing: Sequence[bool],
    *,
    min_category_rows: int,
    num_bins: int,
    labels: LabelScale | None = None,
) -> Preprocessing:
    """Fit vocabularies and bins on what was seen in the training rows.

    Args:
        columns: names of the columns, in model input order.
        category_counts: per categorical column, rows of every category in the training rows.
        number_sample: sample of training rows, shape (rows, numeric columns); NaN is missing.
        has_missing: per numeric column, whether some but not all training rows lack a value.
        min_category_rows: rarer categories are treated like ones never seen.
        num_bins: at most this many bins for each number.
        labels: how a label that is a number is standardised.

    Raises:
        DataContractError: two categories of one column share a code, or no column varies.
    """
    fitted = Preprocessing(
        vocabularies=tuple(
            fit_vocabulary(name, category_counts[name], min_category_rows)
            for name in columns.categorical
        ),
        edges=tuple(fit_edges(column, num_bins) for column in number_sample.T),
        flagged=tuple(position for position, missing in enumerate(has_missing) if missing),
        labels=labels,
        num_outputs=len(columns.classes) or 1,
    )
    if not (fitted.flagged or any(map(len, (*fitted.vocabularies, *fitted.edges)))):
        raise DataContractError(
            f"none of {len(columns.categorical)} categorical and {len(columns.numeric)} numeric "
            "columns varies in the training rows, so nothing can be learnt. Widen the training "
            "window or mend the feature definitions"
        )
    return fitted


def fit_vocabulary(column: str, counts: Mapping[str, int], min_rows: int) -> Int32Array:
    """Codes of the categories with at least `min_rows` rows, increasing.

    Rare categories count for collisions too: a rare one with a known one's code would be taken for
    it. The empty string is missing, hence no category.

    Raises:
        DataContractError: two categories share a code, or one has the code of "missing".
    """
    owners: dict[int, str] = {0: ""}
    for category in sorted(counts):
        owner = owners.setdefault(category_code(category), category)
        if owner != category:
            other = f"category {owner!r}" if owner else "the code that means missing"
            raise DataContractError(
                f"column {column!r}: category {category!r} has the same 31-bit code as {other}, so "
                "a model cannot tell them apart. Rename one of them in the feature definitions"
            )
    known = [code for code, name in owners.items() if code and counts[name] >= min_rows]
    return np.array(sorted(known), dtype=np.int32)


def fit_edges(values: Float32Array, num_bins: int) -> Float32Array:
    """Edges of at most `num_bins` quantile bins, strictly increasing; empty for a constant column.

    Args:
        values: one column of the sample; missing and infinite values are left out.
        num_bins: bins to aim for; repeated values make fewer.
    """
    finite = values[np.abs(values) < MAX_MAGNITUDE].astype(np.float64)
    if finite.size == 0:
        return np.empty(0, dtype=np.float32)
    quantiles = np.quantile(finite, np.linspace(0, 1, num_bins + 1)).astype(np.float32)
    closest = max(float(np.ptp(finite)) * MIN_BIN_SHARE, MIN_BIN_WIDTH)
    edges = [quantiles[0]]
    for edge in quantiles[1:]:
        if float(edge) - float(edges[-1]) > closest:
            edges.append(edge)
    return np.array(edges, dtype=np.float32) if len(edges) > 1 else np.empty(0, dtype=np.float32)
