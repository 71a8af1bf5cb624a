"""Training on an NVIDIA device: its speed by precision, what exchanging costs, whole trainings.

`infra/bench/gpu.sh` prepares a machine that has one, runs the tests marked `gpu`, and measures.
"""

import os
import statistics
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional

from infra.bench.figures import Measured, at_least, interleaved, median_ratio, reported, seconds
from infra.bench.parts import Bench, plain_schema
from infra.bench.training.strategies import (
    CATEGORY_COUNTS,
    NUM_NUMBERS,
    Alone,
    build,
    tabular,
    timed,
)
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DataSplits
from tasks.contracts.telemetry import TrainingTelemetry
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import RunDirectory, TrainingJob, exclusive
from tasks.training.launch.launcher import plan_ranks, run_job
from tasks.training.launch.rank_group import local_environments
from tasks.training.strategies.base import Batch, Communicator
from tasks.training.strategies.communicators import join
from tasks.training.strategies.config import StrategyConfig

DEVICE = torch.device("cuda", 0)
Hidden = tuple[int, ...]
Places = dict[str, tuple[dict[str, object], torch.device]]
Runs = Mapping[str, tuple[str, Alone | Communicator, dict[str, object], torch.device]]
"""Engine, communicator, settings of the strategy and device by name."""
NETWORKS: dict[str, Hidden] = {"flights": (128, 64), "4 x 2,048": (2048,) * 4}
"""Hidden layers; inputs and rows are of the flights' shape."""
ROWS = (2048, 65_536)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS, STEPS = 10, 8
LARGEST = 1e12
"""Operations of a step that is compiled, and timed on the processor, which takes seconds else."""
TRAINED_ROWS, EPOCHS = 600_000, 4


def precision(bench: Bench) -> Measured:
    """Two networks in three precisions, and their operations to those of bare products."""
    size = bench.size(8192, 256)
    limits = {name: product_flops(name, size) for name in TYPES}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    told = ", ".join(f"{name} {flops / 1e12:.1f}" for name, flops in limits.items())
    told += f" TFLOP/s; PyTorch {torch.__version__}, NCCL {nccl}"
    found: Measured = [
        reported(f"bare products of {size:,}: bf16 to fp32", limits["bf16"] / limits["fp32"], told)
    ]
    cases = [(name, hidden, rows) for name, hidden in NETWORKS.items() for rows in ROWS]
    for name, hidden, rows in cases:
        operations = 6.0 * rows * num_weights(hidden)
        places: Places = {each: ({"precision": each}, DEVICE) for each in TYPES}
        if operations < LARGEST:
            places["compiled"] = ({"compile": True}, DEVICE)
            places["processor"] = ({}, torch.device("cpu"))
        alone: Runs = {each: ("alone", Alone(), *place) for each, place in places.items()}
        taken = step_seconds(alone, hidden, rows, bench.size(ROUNDS, 1))
        title, times = f"{name}, {rows:,} rows", in_ms(taken)
        pairs = [(each, "fp32") for each in taken if each not in ("fp32", "processor")]
        pairs += [("fp32", "processor")] if "processor" in taken else []
        for one, other in pairs:
            ratio = median_ratio(taken[other], taken[one])
            found.append(reported(f"{title}: {one} to {other}, samples/s", ratio, times))
        share = operations / statistics.median(taken["bf16"]) / limits["bf16"]
        told = f"{operations / 1e9:,.0f} GFLOP a step"
        found.append(reported(f"{title}: bf16 to bare products, operations/s", share, told))
    return found


def strategies(bench: Bench) -> Measured:
    """What one rank pays for exchanging over NCCL, beside one that exchanges nothing."""
    found: Measured = []
    with local_environments(1, bench.folder / "store") as (environment,):
        os.environ.update(environment)
        horovod, on_torch = join(StrategyConfig(), "cuda"), join(StrategyConfig(name="ddp"), "cuda")
        engines: dict[str, Alone | Communicator]
        engines = {"alone": Alone(), "horovod": horovod, "ddp": on_torch, "fsdp": on_torch}
        runs: Runs = {
            name: (name, each, {"precision": "bf16"}, DEVICE) for name, each in engines.items()
        }
        for (name, hidden), rows in zip(NETWORKS.items(), ROWS, strict=True):
            taken = step_seconds(runs, hidden, rows, bench.size(2 * ROUNDS, 1))
            for engine, base, bound in (("horovod", "ddp", 0.95), ("horovod", "alone", 0.75)):
                title = f"{name}, {rows:,} rows: {engine} to {base}, samples/s"
                ratio = median_ratio(taken[base], taken[engine])
                found.append(at_least(title, ratio, bound, f"bf16; {in_ms(taken)}"))
        horovod.shut_down()
        on_torch.shut_down()
    return found


def training(bench: Bench) -> Measured:
    """Whole trainings of the flights' network, on the device and on the processor."""
    found: Measured = []
    snapshot = bench.folder / "data.parquet"
    write_rows(snapshot, bench.size(TRAINED_ROWS, 20_000))
    for rows in ROWS:
        runs = [trained(bench.folder, snapshot, kind, rows) for kind in ("cuda", "cpu")]
        speeds = [each.ranks[0].rows_per_s or 0.0 for each in runs]
        told = "rows/s: device {:,.0f}, processor {:,.0f}".format(*speeds)
        title = f"batches of {rows:,}"
        found.append(reported(f"{title}: device to processor", speeds[0] / speeds[1], told))
        phases, used = runs[0].ranks[0].phases, runs[0].devices[0]
        steps = {name: phases[name].steady_s for name in ("data", "compute", "exchange")}
        told = ", ".join(f"{name} {each:.2f} s" for name, each in steps.items())
        told += f"; device busy {used.utilisation_mean or 0:.2f}, {used.energy_j or 0:,.0f} J"
        share = steps["data"] / sum(steps.values())
        found.append(reported(f"{title}: share of steps that waits for rows", share, told))
    return found


def num_weights(hidden: Hidden) -> int:
    """Weights that each row is multiplied with; embeddings are looked up."""
    named = tabular(2, 0, hidden)[0].named_parameters()
    return sum(each.numel() for name, each in named if name.endswith("weight"))


def product_flops(name: str, size: int) -> float:
    """Operations a second of a square product of random numbers."""
    left, right = (torch.randn(size, size, device=DEVICE).to(TYPES[name]) for _ in range(2))

    def products() -> None:
        for _ in range(STEPS):
            functional.linear(left, right)
        torch.cuda.synchronize()

    taken = interleaved({name: partial(seconds, products)}, ROUNDS)[name]
    return STEPS * 2.0 * size**3 / statistics.median(taken)


def step_seconds(runs: Runs, hidden: Hidden, rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in each round; rows are in page-locked memory, where training has them.

    Args:
        runs: whose steps.
        hidden: of the network.
        rows: of a step.
        rounds: in which all take turns.
    """
    batch = tabular(rows, 0, hidden)[1]
    locked = Batch(tuple(part.pin_memory() for part in batch.inputs), batch.labels.pin_memory())

    def call(engine: str, ranks: object, fields: Any, on: torch.device) -> partial[float]:
        steps = STEPS if on.type == "cuda" else 1
        strategy = build(engine, tabular(2, 0, hidden)[0], ranks, on, **fields)
        return partial(lambda: timed(strategy, locked, 1, steps) / steps)

    return interleaved({name: call(*each) for name, each in runs.items()}, rounds)


def in_ms(taken: Mapping[str, list[float]]) -> str:
    """Medians, in words."""
    middle = {name: statistics.median(each) for name, each in taken.items()}
    return "ms a step: " + ", ".join(f"{name} {1000 * each:.2f}" for name, each in middle.items())


MONTHS = [f"2024-{month:02}-01T00:00Z" for month in (1, 10, 11, 12)]
WINDOWS = [TimeWindow.model_validate({"start": a, "end": b}) for a, b in pairwise(MONTHS)]
SPLITS = DataSplits(train=WINDOWS[0], validation=WINDOWS[1], test=WINDOWS[2])
COLUMNS = plain_schema(len(CATEGORY_COUNTS), NUM_NUMBERS)


def write_rows(path: Path, num_rows: int) -> None:
    """Random rows of the flights' shape, in order of time."""
    bounds = SPLITS.train.start.timestamp(), SPLITS.test.end.timestamp()
    times = np.linspace(*bounds, num_rows, endpoint=False) * 1e6
    batch = tabular(num_rows, 0)[1]
    positions, numbers = (part.numpy() for part in batch.inputs)
    texts = np.array([f"value {number}" for number in range(max(CATEGORY_COUNTS))], object)
    columns = {
        COLUMNS.row_id: np.arange(num_rows),
        COLUMNS.event_time: pa.array(times.astype(np.int64), pa.timestamp("us", "UTC")),
        COLUMNS.label: batch.labels.numpy().astype(np.int8),
        **{name: texts[positions[:, n]] for n, name in enumerate(COLUMNS.categorical)},
        **{name: numbers[:, n] for n, name in enumerate(COLUMNS.numeric)},
    }
    pq.write_table(pa.table(columns), path, row_group_size=65_536)


def trained(folder: Path, snapshot: Path, on: str, rows: int) -> TrainingTelemetry:
    """What a training with batches of `rows` took."""
    settings = {"device": on, "global_batch_size": rows, "max_epochs": EPOCHS, "patience": EPOCHS}
    config = TrainingConfig.model_validate(settings)
    num_ranks, threads = plan_ranks(config, len(os.sched_getaffinity(0)))
    job = TrainingJob(
        snapshot_path=snapshot,
        columns=COLUMNS,
        splits=SPLITS,
        config=config,
        num_ranks=num_ranks,
        threads_per_rank=threads,
    )
    run = RunDirectory(folder / f"{on}-{rows}")
    with exclusive(run.path, 0) as lock:
        run.make()
        telemetry = run_job(run, job, lock, lambda _: None).telemetry
    assert telemetry is not None
    return telemetry
