"""Boosted trees as plain tensors: they export like a network, to every format that has products.

A tree asks all of its questions at once: each is a comparison of one number with a threshold. A
matrix that holds the way to each leaf, 1 where it goes left and -1 where it goes right, times the
answers, counts how many of a leaf's lefts were answered so, less the rights that were not; only the
leaf that a row falls into reaches its full count. This is the matrix form of Nakandala et al., "A
Tensor Compiler for Unified Machine Learning Prediction Serving" (2020), whose package does not run
here; see `docs/decisions/0133-boosted-trees-as-a-program.md`.

A missing number goes where the tree says, left or right: each number is there twice, once with the
least value in its place and once with the greatest. Thresholds are rounded down to 32 bits, so that
each comparison comes out as in 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.training.core.network import scored
from tasks.training.data.preprocess import NO_CODE, Float64Array, Int32Array, LabelScale
from tasks.training.strategies.base import State

LARGEST = float(np.finfo(np.float32).max)
# Questions that are asked at once; bounds the memory of a row to some 20 KiB.
GROUP_QUESTIONS = 1024
# Count that no row reaches: of a leaf that only fills up a group.
NO_LEAF = 1e6
PARTS = ("column", "threshold", "path", "lefts", "leaf")


@dataclass(frozen=True)
class Tree:
    """One tree, its nodes by number; node 0 is the root.

    Args:
        feature: whose value a node asks for.
        threshold: a row goes left where its feature is at most this.
        missing_left: whether a row goes left where its feature is missing.
        left: node to the left; -1 of a leaf.
        right: likewise.
        value: of a leaf; what the tree adds to the score.
    """

    feature: NDArray[np.int64]
    threshold: Float64Array
    missing_left: NDArray[np.bool_]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: Float64Array

    @property
    def questions(self) -> NDArray[np.int64]:
        """Nodes that are no leaves."""
        return np.flatnonzero(self.left >= 0)

    def leaves(self) -> Iterator[tuple[int, dict[int, int]]]:
        """Each leaf, with the way to it: question to 1 (left) or -1 (right)."""
        waiting: list[tuple[int, dict[int, int]]] = [(0, {})]
        while waiting:
            node, way = waiting.pop()
            if self.left[node] < 0:
                yield node, way
                continue
            waiting.append((int(self.right[node]), {**way, node: -1}))
            waiting.append((int(self.left[node]), {**way, node: 1}))


def rounded_down(thresholds: Float64Array) -> NDArray[np.float32]:
    """The greatest 32-bit floats that are not above; a number of 32 bits is at most both or none.

    An infinite threshold parts what is missing from all the rest, so it becomes the greatest
    finite number.
    """
    near = np.clip(thresholds, -LARGEST, LARGEST).astype(np.float32)
    with np.errstate(over="ignore"):  # below the least there is nothing, and it is never taken
        below = np.nextafter(near, np.float32(-np.inf))
    return np.where(near > thresholds, below, near).astype(np.float32)


def grouped(
    trees: Sequence[Tree], num_features: int, num_outputs: int = 1
) -> list[dict[str, Tensor]]:
    """The tensors of some trees, as many of which are together as have `GROUP_QUESTIONS`.

    Args:
        trees: of several classes one for each in turn.
        num_features: that they ask for.
        num_outputs: c, classes where there are several.

    Returns:
        Of each group of t trees, with at most q questions and l leaves: `column` (t * q) in
        0 to 2 * num_features - 1, `threshold` (t * q), `path` (t, q, l), `lefts` (t, 1, l) and
        `leaf` (t, l, c), 0 but for the class that the tree is of.
    """
    most = max((len(tree.questions) for tree in trees), default=1)
    size = max(1, GROUP_QUESTIONS // max(1, most))
    size = -(-size // num_outputs) * num_outputs  # so a tree's place in its group tells its class
    return [
        _group(trees[k : k + size], num_features, num_outputs) for k in range(0, len(trees), size)
    ]


def _group(trees: Sequence[Tree], num_features: int, num_outputs: int) -> dict[str, Tensor]:
    count, wide = len(trees), max(1, *(len(tree.questions) for tree in trees))
    column = np.zeros((count, wide), dtype=np.int64)
    threshold = np.zeros((count, wide), dtype=np.float32)
    path = np.zeros((count, wide, wide + 1), dtype=np.float32)
    lefts = np.full((count, 1, wide + 1), NO_LEAF, dtype=np.float32)
    leaf = np.zeros((count, wide + 1, num_outputs), dtype=np.float32)
    for number, tree in enumerate(trees):
        asked = tree.questions
        places = {int(node): place for place, node in enumerate(asked)}
        copies = np.where(tree.missing_left[asked], 0, num_features)
        column[number, : len(asked)] = tree.feature[asked] + copies
        threshold[number, : len(asked)] = rounded_down(tree.threshold[asked])
        for place, (node, way) in enumerate(tree.leaves()):
            for question, turn in way.items():
                path[number, places[question], place] = turn
            lefts[number, 0, place] = sum(turn > 0 for turn in way.values())
            leaf[number, place, number % num_outputs] = tree.value[node]
    arrays = (column.ravel(), threshold.ravel(), path, lefts, leaf)
    return {name: torch.from_numpy(array) for name, array in zip(PARTS, arrays, strict=True)}


class BoostedTrees(nn.Module):
    """The sum of some trees, whatever is added to it; its buffers are `PARTS` with a number.

    Conversion knows trees by these names, see `tasks/conversion/targets/trees.py`.
    """

    def __init__(self, groups: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.num_groups = len(groups)
        for number, group in enumerate(groups):
            for name, tensor in group.items():
                self.register_buffer(f"{name}_{number}", tensor)

    def forward(self, features: Tensor) -> Tensor:
        """Sum over the trees, float32 (rows,), of several classes (rows, classes).

        Args:
            features: float32 (rows, 2 * features), from `TreeFeatures`: nothing is missing.
        """
        total = self._of_group(0, features).sum(0)
        for number in range(1, self.num_groups):
            total = total + self._of_group(number, features).sum(0)
        return total

    def of_each(self, features: Tensor) -> Tensor:
        """The answer of each tree, float32 (rows, trees), or (rows, trees, classes)."""
        each = torch.cat([self._of_group(n, features) for n in range(self.num_groups)])
        return each.transpose(0, 1)

    def _of_group(self, number: int, features: Tensor) -> Tensor:
        column, threshold, path, lefts, leaf = (
            self.get_buffer(f"{name}_{number}") for name in PARTS
        )
        count, wide, _ = path.shape
        answers = (features.index_select(1, column) <= threshold).to(features.dtype)
        by_tree = answers.reshape(-1, count, wide).transpose(0, 1)
        # Half a count of room: fewer bits round the sum, never by that much.
        answer = torch.bmm((torch.bmm(by_tree, path) > lefts - 0.5).to(features.dtype), leaf)
        return answer.squeeze(2) if answer.shape[2] == 1 else answer

    def groups(self) -> list[dict[str, Tensor]]:
        """The tensors that it was made of."""
        numbers = range(self.num_groups)
        return [{name: self.get_buffer(f"{name}_{n}") for name in PARTS} for n in numbers]


@dataclass(frozen=True)
class CategoryValues:
    """What number stands for each category of one column.

    Args:
        codes: known categories, `category_code` of each.
        values: of each of them, float32.
        unknown: of all others, and of what is missing.
    """

    codes: Int32Array
    values: NDArray[np.float32]
    unknown: float


class TreeFeatures(nn.Module):
    """Raw columns to what trees ask about: a number for each category, and no number missing.

    Of several classes a category has a number for each; `categories` then has as many for a column.
    """

    def __init__(self, categories: Sequence[CategoryValues]) -> None:
        super().__init__()
        self.unknown = [float(np.float32(column.unknown)) for column in categories]
        for number, column in enumerate(categories):
            # The first entry is no code, so it never matches: an empty vocabulary needs no more.
            codes = np.insert(column.codes, 0, NO_CODE).astype(np.int32)
            gains = np.insert(column.values - np.float32(column.unknown), 0, 0).astype(np.float32)
            self.register_buffer(f"codes_{number}", torch.from_numpy(codes))
            self.register_buffer(f"gains_{number}", torch.from_numpy(gains))

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """Features, categories first, twice: what is missing is least, then greatest.

        Args:
            categorical: int32 (rows, categories).
            numeric: float32 (rows, numbers); NaN is missing.

        Returns:
            float32 (rows, 2 * (values of categories + numbers)).
        """
        values, of_column = [], len(self.unknown) // max(categorical.shape[1], 1)
        for number, unknown in enumerate(self.unknown):
            column = number // of_column
            known = categorical[:, column : column + 1] == self.get_buffer(f"codes_{number}")
            # Sums of products, not a matrix product: runtimes round those to fewer bits.
            gains = known.to(numeric.dtype) * self.get_buffer(f"gains_{number}")
            values.append(gains.sum(1, keepdim=True) + unknown)
        missing = torch.isnan(numeric)
        # Nothing that is missing may reach `clamp`: runtimes differ in what they make of it.
        finite = torch.where(missing, 0.0, numeric).clamp(-LARGEST, LARGEST)
        least = torch.where(missing, -LARGEST, finite)
        greatest = torch.where(missing, float("inf"), finite)
        return torch.cat([*values, least, *values, greatest], dim=1)


class BoostingProgram(nn.Module):
    """Boosted trees as they are exported: the inputs and the answer of the network's program."""

    def __init__(
        self,
        categories: Sequence[CategoryValues],
        groups: Sequence[Mapping[str, Tensor]],
        base: float | Sequence[float],
        labels: LabelScale | None,
    ) -> None:
        super().__init__()
        self.categories = tuple(categories)
        self.features = TreeFeatures(categories)
        self.trees = BoostedTrees(groups)
        self.base = tuple(map(float, np.atleast_1d(base)))
        self.labels = labels
        if len(self.base) > 1:
            self.register_buffer("bases", torch.tensor(self.base))

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """As `core.network.ScoringProgram.forward`."""
        return scored(self.outputs(categorical, numeric), self.labels)

    def outputs(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """Logits, or standardised labels, float32 (rows,), or (rows, classes)."""
        return self.with_base(self.trees(self.features(categorical, numeric)))

    def with_base(self, sums: Tensor) -> Tensor:
        """Sums of trees with what they begin from."""
        return sums + (self.get_buffer("bases") if len(self.base) > 1 else self.base[0])

    def state(self) -> State:
        """Plain values and tensors, as a checkpoint holds them."""
        return {
            "categories": [
                [torch.from_numpy(c.codes), torch.from_numpy(c.values), c.unknown]
                for c in self.categories
            ],
            "groups": self.trees.groups(),
            "base": self.base,
            "labels": [self.labels.mean, self.labels.deviation] if self.labels else None,
        }

    @classmethod
    def of_state(cls, state: State) -> BoostingProgram:
        """The program that `state` was taken from."""
        return cls(
            [
                CategoryValues(c.numpy(), v.numpy(), unknown)
                for c, v, unknown in state["categories"]
            ],
            state["groups"],
            state["base"],
            LabelScale(*state["labels"]) if state["labels"] else None,
        )
