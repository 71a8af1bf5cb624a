"""Named input arrays of a model, same rows in the same order in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.kernel.errors import DataContractError

SEED = 0
"""Of every draw: calibrating rows, edge rows, bootstrap; so equal inputs give equal variants."""
Array = NDArray[Any]
FloatArray = NDArray[np.floating[Any]]
Scores = NDArray[np.floating[Any]]
"""What a program answers for some rows; the first axis counts the rows."""
Distances = Callable[[Scores, Scores], FloatArray]
"""How far two models' answers for the same rows are apart, one figure a row, 0 for equal."""


@dataclass(frozen=True, eq=False)
class ModelInputs(Mapping[str, Array]):
    """Arrays by the name of the input that takes them; the first axis of each counts the rows."""

    arrays: Mapping[str, Array]

    def __post_init__(self) -> None:
        """Refuse arrays of different lengths."""
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataContractError(
                f"model inputs have {lengths or 'no'} rows, expected the same number in each array"
            )

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def num_rows(self) -> int:
        """Rows of every array."""
        return len(next(iter(self.arrays.values())))

    def block(self, start: int, end: int) -> ModelInputs:
        """Rows `start` to before `end`, or fewer where there are not so many."""
        return ModelInputs({name: array[start:end] for name, array in self.arrays.items()})

    def blocks(self, rows: int) -> Iterator[ModelInputs]:
        """All rows, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.block(start, start + rows)

    def taken(self, index: NDArray[np.int64]) -> ModelInputs:
        """The rows at these places, in this order."""
        return ModelInputs({name: array[index] for name, array in self.arrays.items()})

    def repeated(self, rows: int) -> ModelInputs:
        """Exactly `rows` rows: the first ones, started over where there are not so many."""
        return self.taken(np.arange(rows) % self.num_rows)


Batches = tuple[ModelInputs, ...]
Scorer = Callable[[ModelInputs], NDArray[np.float32]]
