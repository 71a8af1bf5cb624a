"""The order in which the rows of a virtual shard come in an epoch.

An order is a function of (seed, epoch, shard, rows of the shard) and two sizes alone. It does not
depend on the number of ranks or threads, nor on whether the rows lie in memory or in a file, and
any place in it can be computed without what comes before.

A shard is cut into pieces of neighbouring rows. Pieces are shuffled, consecutive ones form pools,
and the rows of a pool are shuffled with each other. Where a shard is one pool, its order is a
uniformly random permutation. Otherwise a pool mixes pieces from all over the shard: with pieces of
64 rows a pool of 32,768 holds 512 of them, so even where neighbours are alike (one day's flights)
batches of one pool differ from those of the next hardly more than by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasks.training.data.preprocess import Int64Array


@dataclass(frozen=True)
class Pool:
    """Rows of one shard that are shuffled with each other.

    Args:
        first_row: place of the pool's first row in the epoch's order of the shard.
        starts: first row of each range of the shard that is to be read, increasing.
        stops: end of each range.
        order: places in the ranges' rows, laid end to end, in the order in which they come.
    """

    first_row: int
    starts: Int64Array
    stops: Int64Array
    order: Int64Array

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return len(self.order)

    def rows(self) -> Int64Array:
        """Row numbers in the shard, in the order in which they come."""
        ordered: Int64Array = laid_out(self.starts, self.stops)[self.order]
        return ordered


@dataclass(frozen=True)
class ShardOrder:
    """Orders of one shard's rows, one for each epoch.

    Args:
        shard: the shard's number.
        num_rows: rows of the shard.
        seed: of the run.
        pool_rows: rows of a pool, about.
        piece_rows: neighbouring rows that are read together.
    """

    shard: int
    num_rows: int
    seed: int
    pool_rows: int
    piece_rows: int

    def pools(self, epoch: int, first_row: int = 0) -> Iterator[Pool]:
        """Pools of an epoch from the one that holds place `first_row` on."""
        num_pieces = -(-self.num_rows // self.piece_rows)
        if num_pieces == 0:
            return
        num_pools = min(num_pieces, max(1, -(-self.num_rows // self.pool_rows)))
        pieces = np.random.default_rng((self.seed, epoch, self.shard)).permutation(num_pieces)
        begin = 0
        for number, members in enumerate(np.array_split(pieces, num_pools)):
            starts = np.sort(members) * self.piece_rows
            stops = np.minimum(starts + self.piece_rows, self.num_rows)
            size = int((stops - starts).sum())
            if begin + size > first_row:
                # A pool's own number keeps its generator apart from the one of the pieces.
                generator = np.random.default_rng((self.seed, epoch, self.shard, 1 + number))
                yield Pool(begin, *merged_ranges(starts, stops), generator.permutation(size))
            begin += size


def laid_out(starts: Int64Array, stops: Int64Array) -> Int64Array:
    """All numbers of some half-open ranges, one range after the other."""
    lengths = stops - starts
    offsets = np.cumsum(lengths) - lengths
    numbers: Int64Array = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
    return numbers


def merged_ranges(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join increasing ranges of which one begins where the other ends: fewer, longer reads."""
    apart = starts[1:] != stops[:-1]
    return starts[np.append(True, apart)], stops[np.append(apart, True)]
