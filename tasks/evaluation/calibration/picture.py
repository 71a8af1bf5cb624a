"""Reliability before and after: what scores promised, and what came."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

BLUE, GREY = "#1f5fa8", "#8a8f98"
DOTS_PER_INCH = 90
NUM_BINS = 20
Bins = tuple[NDArray[np.float64], NDArray[np.float64]]


def reliability(labels: NDArray[Any], scores: NDArray[Any], num_bins: int = NUM_BINS) -> Bins:
    """Mean score and mean label of bins of equally many rows, lowest scores first.

    Args:
        labels: 0 or 1, or numbers, shape (rows,).
        scores: of the same rows.
        num_bins: at most; fewer where there are not so many rows.
    """
    order = np.argsort(scores, kind="stable")
    parts = np.array_split(order, min(num_bins, len(order)))
    means = [
        [values[part].astype(np.float64).mean() for part in parts] for values in (scores, labels)
    ]
    return np.array(means[0]), np.array(means[1])


def draw_reliability(rows: pd.DataFrame, label: str, before: str, after: str, unit: str) -> bytes:
    """A PNG with one curve of each column of scores.

    Args:
        rows: the label and both columns of scores.
        label: its name.
        before: scores of the source.
        after: scores with the new map.
        unit: of a label that is a number; empty for probabilities.
    """
    figure = Figure(figsize=(4.8, 4.2), layout="constrained")
    axes = figure.subplots()
    ends = []
    for name, column, colour in (("before", before, GREY), ("after", after, BLUE)):
        x, y = reliability(rows[label].to_numpy(), rows[column].to_numpy())
        axes.plot(x, y, ".-", color=colour, label=name)
        ends += [x.min(), x.max(), y.min(), y.max()]
    low, high = (0.0, 1.05 * max(ends)) if not unit else (min(ends), max(ends))
    axes.plot([low, high], [low, high], color=GREY, linestyle=":", label="perfect")
    axes.set_title("Reliability on later rows", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(f"mean prediction ({unit})" if unit else "mean score")
    axes.set_ylabel(f"mean label ({unit})" if unit else "observed rate")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return content.getvalue()
