"""A rank program: every collective that training uses, on every type, against numpy."""

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


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for check in (check_allreduce, check_allgather, check_broadcast):
        check(rank, size)
    hvd.shutdown()


if __name__ == "__main__":
    main()
