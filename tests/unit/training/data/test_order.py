from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.data.source import ShardOrder, laid_out, merged_ranges


def rows_of(order: ShardOrder, epoch: int, first_row: int = 0) -> np.ndarray:
    """Rows of an epoch from a place on, pools joined."""
    pools = list(order.pools(epoch, first_row))
    if not pools:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([pool.rows() for pool in pools])[first_row - pools[0].first_row :]


orders = st.builds(
    ShardOrder,
    shard=st.integers(0, 5),
    num_rows=st.integers(0, 400),
    seed=st.integers(0, 3),
    pool_rows=st.integers(1, 500),
    piece_rows=st.integers(1, 60),
)


@given(orders, st.integers(0, 3))
def test_an_epoch_takes_every_row_once(order: ShardOrder, epoch: int) -> None:
    rows = rows_of(order, epoch)
    np.testing.assert_array_equal(np.sort(rows), np.arange(order.num_rows))


@given(orders, st.data())
def test_an_order_can_be_entered_anywhere(order: ShardOrder, data: st.DataObject) -> None:
    first_row = data.draw(st.integers(0, order.num_rows))
    np.testing.assert_array_equal(rows_of(order, 1, first_row), rows_of(order, 1)[first_row:])


@given(orders)
def test_pools_are_about_as_large_as_asked_for(order: ShardOrder) -> None:
    for pool in order.pools(0):
        assert pool.num_rows <= order.pool_rows + order.piece_rows
        assert (pool.starts < pool.stops).all()
        assert (pool.stops[:-1] < pool.starts[1:]).all()


def test_epochs_shards_and_seeds_have_orders_of_their_own() -> None:
    one, other_shard, other_seed = (
        ShardOrder(shard, 1000, seed, 300, 10) for shard, seed in ((0, 0), (1, 0), (0, 1))
    )
    orders = [rows_of(one, 0), rows_of(one, 1), rows_of(other_shard, 0), rows_of(other_seed, 0)]
    for number, order in enumerate(orders):
        assert not any(np.array_equal(order, later) for later in orders[number + 1 :])
    np.testing.assert_array_equal(rows_of(one, 0), orders[0])


def test_a_small_shard_is_shuffled_as_a_whole() -> None:
    (pool,) = ShardOrder(0, 5000, 0, 32_768, 256).pools(0)
    distance = np.abs(pool.rows() - np.arange(5000)).mean()
    assert abs(distance / (5000 / 3) - 1) < 0.05  # of two random places


@given(st.lists(st.integers(1, 30), max_size=20), st.sets(st.integers(0, 20)))
def test_merged_ranges_hold_the_same_rows(lengths: list[int], left_out: set[int]) -> None:
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    kept = np.array([number not in left_out for number in range(len(lengths))], dtype=bool)
    starts, stops = (ends - np.array(lengths, dtype=np.int64))[kept], ends[kept]
    if len(starts):
        merged = merged_ranges(starts, stops)
        np.testing.assert_array_equal(laid_out(*merged), laid_out(starts, stops))
        assert (merged[0][1:] > merged[1][:-1]).all()


def batch_rates(rows_of_shards: list[np.ndarray], labels: np.ndarray, size: int) -> np.ndarray:
    """Share of ones in each step that takes `size` rows of each shard."""
    steps = min(map(len, rows_of_shards)) // size
    taken = [labels[number, rows[: steps * size]] for number, rows in enumerate(rows_of_shards)]
    return np.stack(taken).reshape(len(taken), steps, size).mean(axis=(0, 2))


def test_batches_differ_hardly_more_than_by_chance_where_neighbours_are_alike() -> None:
    """Rows come in order of time, and one day's rate is nothing like another's.

    The variance of the batches' rates is compared with that of batches drawn at random, of which it
    is 1 on average: 8 shards of 400,000 rows, days of 900 rows, 256 rows of each shard in a step.
    """
    rng = np.random.default_rng(0)
    num_shards, num_rows, size = 8, 400_000, 256
    rates = rng.beta(2, 6, size=(num_shards, -(-num_rows // 900)))  # from 2 % to 60 % late
    labels = rng.random((num_shards, num_rows)) < np.repeat(rates, 900, axis=1)[:, :num_rows]
    by_chance = labels.mean() * (1 - labels.mean()) / (num_shards * size)

    def excess(pool_rows: int, piece_rows: int) -> float:
        orders = [ShardOrder(s, num_rows, 0, pool_rows, piece_rows) for s in range(num_shards)]
        rows = [rows_of(order, 0) for order in orders]
        return float(batch_rates(rows, labels, size).var() / by_chance)

    assert 0.9 < excess(num_rows, 64) < 1.1  # a uniform permutation
    assert 0.9 < excess(32_768, 64) < 1.1  # as configured
    assert excess(32_768, 8192) > 1.3  # pools of four row groups: what the small pieces are for
