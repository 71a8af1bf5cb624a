"""Fitting the preprocessing on all ranks' training rows, wherever they lie."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import numpy as np

from tasks.contracts.data import DatasetSchema
from tasks.kernel.errors import DataContractError
from tasks.training.core.run_directory import TrainingJob
from tasks.training.data.decode import RowFacts
from tasks.training.data.preprocess import (
    MAX_MAGNITUDE,
    Float32Array,
    LabelScale,
    Preprocessing,
    fit_preprocessing,
)
from tasks.training.data.source import merged_ranges
from tasks.training.data.store import RowStore
from tasks.training.strategies.base import Communicator

# Rows over all shards from which the quantiles of numbers are taken.
MAX_SAMPLE_ROWS = 100_000


def total_facts(store: RowStore, columns: DatasetSchema) -> RowFacts:
    """Facts about all rows of a store."""
    total = RowFacts.none_of(columns)
    for facts in store.facts.values():
        total.add(facts)
    return total


def fit_on_all_ranks(job: TrainingJob, store: RowStore, ranks: Communicator) -> Preprocessing:
    """Fit vocabularies on all training rows and bins on a seeded sample of them. Collective.

    Every rank brings counts and a sample of its own shards and fits on what all brought, so that
    all get the same result, whatever their number and wherever their rows lie.

    Args:
        job: columns and configuration.
        store: this rank's training rows.
        ranks: all ranks.

    Raises:
        DataContractError: two categories of one column share a code, or all labels are equal.
    """
    columns, config = job.columns, job.config
    facts = total_facts(store, columns)
    sample = sample_numbers(store, config.num_shards, config.seed)
    of_each = cast(list[dict[str, dict[str, int]]], ranks.gather_values(facts.category_counts))
    merged: dict[str, Counter[str]] = {name: Counter() for name in columns.categorical}
    for of_names in of_each:
        for name, of_rank in of_names.items():
            merged[name].update(of_rank)
    labels = fit_labels(facts, job, ranks) if columns.task == "regression" else None
    totals = ranks.sum(np.append(facts.num_missing, facts.num_rows).astype(np.float64))
    return fit_preprocessing(
        columns,
        merged,
        ranks.gather_rows(sample),
        [bool(0 < missing < totals[-1]) for missing in totals[:-1]],
        min_category_rows=config.min_category_rows,
        num_bins=config.num_bins,
        labels=labels,
    )


def fit_labels(facts: RowFacts, job: TrainingJob, ranks: Communicator) -> LabelScale:
    """Mean and standard deviation of all ranks' labels. Collective.

    Args:
        facts: of the rows that this rank brings.
        job: column and window, for people.
        ranks: all ranks.

    Raises:
        DataContractError: all labels are equal, or too large for 32-bit floats.
    """
    num_rows, mean, squares = label_moments(facts, ranks)
    deviation = float(np.float32(math.sqrt(squares / num_rows)))
    if not 0 < deviation < MAX_MAGNITUDE or abs(mean) >= MAX_MAGNITUDE:
        raise DataContractError(
            f"label {job.columns.label!r} has mean {mean:g} and standard deviation {deviation:g} "
            f"in {num_rows} training rows of {job.splits.train}; expected numbers that differ, "
            f"below {MAX_MAGNITUDE:g}. Mend the query of the training set"
        )
    return LabelScale(mean=float(np.float32(mean)), deviation=deviation)


def label_moments(facts: RowFacts, ranks: Communicator) -> tuple[int, float, float]:
    """Rows of all ranks, the mean of their labels and the squared distances from it. Collective."""
    num_rows, total = ranks.sum(np.array([facts.num_rows, facts.num_rows * facts.label_mean]))
    mean = float(total / max(num_rows, 1))
    own = facts.label_squares + facts.num_rows * (facts.label_mean - mean) ** 2
    return int(num_rows), mean, float(ranks.sum(np.array([own]))[0])


def sample_numbers(store: RowStore, num_shards: int, seed: int) -> Float32Array:
    """Numbers of equally many random rows of each shard, the same for any number of ranks."""
    layout, wanted = store.layout, -(-MAX_SAMPLE_ROWS // num_shards)
    sample = [np.empty((0, layout.num_numeric), dtype=np.float32)]
    for shard, facts in store.facts.items():
        generator = np.random.default_rng((seed, shard))
        rows = generator.choice(facts.num_rows, min(facts.num_rows, wanted), replace=False)
        rows.sort()
        sample.append(layout.numeric(store.read(shard, *merged_ranges(rows, rows + 1))))
    return np.concatenate(sample)
