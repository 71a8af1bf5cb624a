"""Beginning a training with the champion's weights, as far as they mean the same.

Vocabularies and bins are fitted anew on every window, so row 3 of an embedding table, or input 40
of the first layer, stands for something else each time. Weights are therefore moved by what they
stand for: embeddings by category code, the first layer's inputs by column. A number's weights are a
piecewise-linear function of it, which is written down anew on the new bin edges and is the same at
each of them, and everywhere where the new edges hold the old ones. So the network that begins is
the champion, but for what the report names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.contracts.data import DatasetSchema
from tasks.kernel.errors import ArtifactError
from tasks.training.data.preprocess import Float32Array, Float64Array, Preprocessing

Weights = Mapping[str, Tensor]
FIRST_LAYER = "perceptron.0"


@dataclass(frozen=True)
class Fitted:
    """What a network's inputs stand for: preprocessing, and the columns it was fitted on."""

    preprocessing: Preprocessing
    columns: DatasetSchema

    @classmethod
    def from_state(cls, state: object, columns: DatasetSchema) -> Fitted:
        """What `Preprocessing.state` wrote into a checkpoint of a model of these columns.

        Raises:
            ArtifactError: it is of a release that did not write it, of other columns, or damaged.
        """
        try:
            assert isinstance(state, Mapping)
            fitted = Preprocessing.of_state(state)
            assert len(columns.categorical) == len(fitted.vocabularies)
            assert len(columns.numeric) == len(fitted.edges)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ArtifactError(
                "the champion's checkpoint does not say which categories and bins its weights "
                "stand for; it is of an earlier release, or damaged. Train without a warm start"
            ) from exc
        return cls(fitted, columns)


def warm_start(
    initial: Weights, new: Fitted, champion: Weights, old: Fitted
) -> tuple[dict[str, Tensor], list[str]]:
    """The champion's weights in the place of freshly drawn ones, as far as they mean the same.

    Returns:
        Weights to begin with, and what was not taken over and why, for the run's log.

    Args:
        initial: state dict of the network that is about to be trained, freshly drawn.
        new: what its inputs stand for.
        champion: state dict of the champion.
        old: what the champion's inputs stand for.
    """
    move = _Move(initial, new, champion, old)
    move.embeddings()
    if move.first_layer():
        move.later_layers()
    return move.weights, move.lines


class _Move:
    """One move of weights; reads in the order of the network's layers."""

    def __init__(self, initial: Weights, new: Fitted, champion: Weights, old: Fitted) -> None:
        self.weights = {name: value.detach().cpu().clone() for name, value in initial.items()}
        self.lines: list[str] = []
        self._new, self._old = new, old
        self._champion = {name: value.detach().cpu() for name, value in champion.items()}
        # Old inputs of the first layer in terms of the new ones, per category column.
        self._turns: dict[str, Float64Array] = {}

    def embeddings(self) -> None:
        """Move each table by category code; one that the champion does not know is its unknown."""
        for position, name in enumerate(self._new.columns.categorical):
            if name not in self._old.columns.categorical:
                self.lines.append(f"category {name}: the champion does not have this column")
                continue
            earlier = self._old.columns.categorical.index(name)
            old_codes = self._old.preprocessing.vocabularies[earlier]
            codes = self._new.preprocessing.vocabularies[position]
            # The row of the old table for each of the new one, whose last is the unknown.
            places, last = {int(code): row for row, code in enumerate(old_codes)}, len(old_codes)
            rows = np.array([*(places.get(int(code), last) for code in codes), last], np.int64)
            moved = self._champion[f"tables.{earlier}"].double().numpy()[rows]
            table = self.weights[f"tables.{position}"]
            kept, self._turns[name] = _fitted_width(moved, table.shape[1])
            table[:, : kept.shape[1]] = torch.from_numpy(kept).to(table.dtype)
            known, gone = int(np.isin(codes, old_codes).sum()), ~np.isin(old_codes, codes)
            if known < len(codes) or gone.any():
                self.lines.append(
                    f"category {name}: {len(codes) - known} new value(s) begin as the champion's "
                    f"unknown, {gone.sum()} of its own are unknown now"
                )

    def first_layer(self) -> bool:
        """Move the inputs of the first layer by column; False where its units do not fit."""
        weight, bias = f"{FIRST_LAYER}.weight", f"{FIRST_LAYER}.bias"
        old, new = self._champion[weight].double().numpy(), self.weights[weight]
        if old.shape[0] != new.shape[0]:
            self.lines.append(
                f"all layers: the champion's first one has {old.shape[0]} units, this one has "
                f"{new.shape[0]}"
            )
            return False
        source = _Inputs.of(self._old, self._champion)
        target = _Inputs.of(self._new, self.weights)
        made = np.zeros(new.shape)
        offset = self._champion[bias].double().numpy().copy()
        for name, turn in self._turns.items():
            columns = target.tables[name]
            part = old[:, source.tables[name]] @ turn.T
            made[:, columns.start : columns.start + part.shape[1]] = part
        # Each number's function is written down on its new edges; what it is at the first moves
        # over. Below the first edge all bins are 0, so the function's value there goes into the
        # bias; of a missing value all bins are 0 too, so its indicator takes that value back.
        for position, name in enumerate(self._new.columns.numeric):
            if name not in self._old.columns.numeric:
                self.lines.append(f"number {name}: the champion does not have this column")
                continue
            edges = self._new.preprocessing.edges[position]
            earlier = self._old.columns.numeric.index(name)
            old_edges = self._old.preprocessing.edges[earlier]
            function = _at(edges, old[:, source.bins[name]], old_edges)
            flag = old[:, source.flags[name]] if name in source.flags else 0.0
            base = function[:, 0] if len(edges) else 0.0
            made[:, target.bins[name]] = np.diff(function, axis=1)
            offset += base
            if name in target.flags:
                made[:, target.flags[name]] = flag - base
            if len(old_edges) and not len(edges):
                self.lines.append(f"number {name}: is constant now; what it meant is left out")
        self.weights[weight] = torch.from_numpy(made).to(new.dtype)
        self.weights[bias] = torch.from_numpy(offset).to(new.dtype)
        return True

    def later_layers(self) -> None:
        """Take over the layers behind the first one, up to the first that does not fit."""
        for name in self.weights:
            if not name.startswith("perceptron.") or name.startswith(f"{FIRST_LAYER}."):
                continue
            before = self._champion.get(name)
            if before is None or before.shape != self.weights[name].shape:
                self.lines.append(f"{name} and what follows it: other shapes than the champion's")
                return
            self.weights[name] = before.clone()


@dataclass(frozen=True)
class _Inputs:
    """Which inputs of the first layer belong to which column."""

    tables: dict[str, slice]
    bins: dict[str, slice]
    flags: dict[str, int]

    @classmethod
    def of(cls, fitted: Fitted, weights: Weights) -> _Inputs:
        columns, at = fitted.columns, 0
        tables, bins = {}, {}
        for position, name in enumerate(columns.categorical):
            width = weights[f"tables.{position}"].shape[1]
            tables[name] = slice(at, at + width)
            at += width
        for name, edges in zip(columns.numeric, fitted.preprocessing.edges, strict=True):
            width = max(len(edges) - 1, 0)
            bins[name] = slice(at, at + width)
            at += width
        flagged = fitted.preprocessing.flagged
        flags = {columns.numeric[column]: at + k for k, column in enumerate(flagged)}
        return cls(tables, bins, flags)


def _fitted_width(table: Float64Array, width: int) -> tuple[Float64Array, Float64Array]:
    """The table in at most `width` columns, and the turn with `table = made @ turn`.

    Where columns have to go, those of least variance do (singular values; Eckart and Young, 1936).

    Returns:
        (made, turn), shapes (rows, k) and (k, table's columns), k <= width.
    """
    if table.shape[1] <= width:
        return table, np.eye(table.shape[1])
    left, sizes, right = np.linalg.svd(table, full_matrices=False)
    return left[:, :width] * sizes[:width], right[:width]


def _at(values: Float32Array, weights: Float64Array, edges: Float32Array) -> Float64Array:
    """A number's part in each unit at `values`: weights times its piecewise-linear encoding.

    Args:
        values: shape (values,); may be empty.
        weights: of the encoding on `edges`, shape (units, bins).
        edges: of the bins; none for a constant column, whose part is 0.

    Returns:
        Shape (units, values).
    """
    if not len(edges):
        return np.zeros((len(weights), len(values)))
    wide = edges.astype(np.float64)
    shares = (values.astype(np.float64)[:, None] - wide[:-1]) / np.diff(wide)
    return weights @ np.clip(shares, 0.0, 1.0).T
