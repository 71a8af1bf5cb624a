"""A rank program: every collective that training uses, on every type, against numpy."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ARITHMETIC = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
MOVED = (*ARITHMETIC, torch.uint8, torch.int8)
SHAPES = ((1,), (17,), (3, 5), (64, 33))


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """What a rank brings; small whole numbers, so that sums are exact in every type."""
    rng = np.random.default_rng([rank, seed, *shape])
    return torch.from_numpy(rng.integers(0, 10, shape)).to(dtype)


def of_all(dtype: torch.dtype, shape: tuple[int, ...], ranks: range | list[int]) -> NDArray[object]:
    """What all ranks bring, one after the other."""
    return np.stack([values(rank, dtype, shape).numpy() for rank in ranks])


def same(seen: Tensor, expected: NDArray[object]) -> None:
    np.testing.assert_array_equal(seen.numpy(), expected.astype(seen.numpy().dtype))


def check_allreduce(rank: int, size: int) -> None:
    for dtype in ARITHMETIC:
        for shape in SHAPES:
            own, brought = values(rank, dtype, shape), of_all(dtype, shape, range(size))
            same(hvd.allreduce(own, op=hvd.Sum), brought.sum(0))
            same(hvd.allreduce(own, op=hvd.Min), brought.min(0))
            same(hvd.allreduce(own, op=hvd.Max), brought.max(0))
    own = values(rank, torch.float32, (9,))
    mean = of_all(own.dtype, (9,), range(size)).mean(0)
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Average).numpy(), mean, rtol=1e-6)
    same(
        hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        2 * of_all(own.dtype, (9,), range(size)).sum(0),
    )


def check_grouped(rank: int, size: int) -> None:
    for dtype in ARITHMETIC:
        tensors = [values(rank, dtype, shape) for shape in SHAPES]
        for seen, shape in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), SHAPES, strict=True):
            same(seen, of_all(dtype, shape, range(size)).sum(0))
        for seen, shape in zip(hvd.grouped_allgather(tensors), SHAPES, strict=True):
            same(seen, np.concatenate(of_all(dtype, shape, range(size))))


def check_allgather(rank: int, size: int) -> None:
    """Ranks bring different numbers of rows; one brings none."""
    for dtype in MOVED:
        rows = [values(of, dtype, (2 * of, 3)) for of in range(size)]
        same(hvd.allgather(rows[rank]), np.concatenate([part.numpy() for part in rows]))


def check_broadcast(rank: int, size: int) -> None:
    for dtype in MOVED:
        for root in range(size):
            seen = hvd.broadcast(values(rank, dtype, (4, 3)), root_rank=root)
            same(seen, values(root, dtype, (4, 3)).numpy())


def check_alltoall(rank: int, size: int) -> None:
    """Rank r sends each other rank d the d + 1 rows that are its."""
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    starts = [0, *np.cumsum(splits.numpy())]
    for dtype in MOVED:
        rows = [values(of, dtype, (int(splits.sum()), 2)) for of in range(size)]
        seen, received = hvd.alltoall(rows[rank], splits)
        mine = [part[starts[rank] : starts[rank + 1]].numpy() for part in rows]
        same(seen, np.concatenate(mine))
        assert received.tolist() == [rank + 1] * size


def check_reducescatter(rank: int, size: int) -> None:
    """Rows that do not divide go to the first ranks, one each."""
    for dtype in ARITHMETIC:
        for num_rows in (size, 2 * size + 1):
            total = of_all(dtype, (num_rows, 3), range(size)).sum(0)
            seen = hvd.reducescatter(values(rank, dtype, (num_rows, 3)), op=hvd.Sum)
            same(seen, np.array_split(total, size)[rank])


def check_join(rank: int, size: int) -> None:
    """Ranks that have run out of rows count as zeros until the last one has."""
    for step in range(2 * (rank + 1)):
        seen = hvd.allreduce(torch.ones(3), op=hvd.Sum, name=f"step {step}")
        still_there = sum(step < 2 * (of + 1) for of in range(size))
        same(seen, np.full(3, still_there))
    assert hvd.join() == size - 1


def check_sparse(rank: int, size: int) -> None:
    """A sparse gradient, as an embedding has it, is summed like a dense one."""
    dense = torch.zeros(6, 2)
    dense[rank] = rank + 1.0
    dense[5] = 1.0
    handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Sum)
    expected = torch.zeros(6, 2)
    for of in range(size):
        expected[of] += of + 1.0
        expected[5] += 1.0
    same(handle().to_dense(), expected.numpy())


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for check in (
        check_allreduce,
        check_grouped,
        check_allgather,
        check_broadcast,
        check_alltoall,
        check_reducescatter,
        check_sparse,
        check_join,
    ):
        check(rank, size)
    hvd.shutdown()


if __name__ == "__main__":
    main()
