"""The drift check of the loop's features, and Evidently's preset on the same frames.

Both read the reference's and the current rows from Parquet files; CPU of all threads counts, and
Evidently's libraries are told to take one, so that none spins. Its environment is
`.venv-evidently`; it judges each column alone, ours also its days and faults.
"""

import os
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import pandas as pd
from threadpoolctl import threadpool_limits

from flows.config import PipelineConfig
from infra.bench.figures import LeftOut, Measured, at_most, interleaved, median_ratio, reported
from infra.bench.parts import Bench, newest_record
from tasks.contracts.data import ValidatedDataset
from tasks.evaluation.drift.compare import compare_features, open_windows
from tasks.features.entities import EVENT_TIME
from tasks.kernel.settings import ArtifactStore, tool_python

NAME = "drift check to Evidently's preset, CPU"
PRESET = """
import sys, time, pandas as pd
from evidently import Dataset, Report
from evidently.presets import DataDriftPreset
began = time.process_time()
current, reference = (Dataset.from_pandas(pd.read_parquet(name)) for name in sys.argv[1:])
Report([DataDriftPreset()]).run(current, reference).dict()
print(time.process_time() - began)
"""


def figures(bench: Bench) -> Measured:
    """CPU of one comparison of all features, ours to Evidently's."""
    config, store = bench.config, bench.settings.store
    dataset = newest_record(bench.settings).dataset
    columns = dataset.snapshot.columns
    frame = pd.read_parquet(store.path(dataset.snapshot.data))
    files, sizes = [], []
    for name, window in (("current", config.current), ("reference", config.splits.train)):
        times = frame[EVENT_TIME]
        rows = frame[(times >= window.start) & (times < window.end)]
        files.append(bench.folder / f"{name}.parquet")
        sizes.append(f"{len(rows):,}")
        rows[[*columns.numeric, *columns.categorical]].to_parquet(files[-1])
    calls = {"ours": partial(_ours_s, dataset, config, store)}
    if python := tool_python("evidently"):
        calls["preset"] = partial(_preset_s, python, files)
    found = interleaved(calls, bench.size(3, 1))
    features = len(columns.numeric) + len(columns.categorical)
    measured_on = f"{features} features, {sizes[1]} and {sizes[0]} rows"
    ours = statistics.median(found["ours"])
    own = reported("drift check, s of CPU", ours, measured_on)
    if "preset" not in found:
        return [own, LeftOut(NAME, "there is no environment .venv-evidently")]
    evidence = f"{ours:.2f} s to {statistics.median(found['preset']):.1f} s"
    return [own, at_most(NAME, median_ratio(found["ours"], found["preset"]), 0.05, evidence)]


def _ours_s(dataset: ValidatedDataset, config: PipelineConfig, store: ArtifactStore) -> float:
    began = time.process_time()
    both = dataset, config.splits.train, dataset, config.current
    with threadpool_limits(1):
        windows = open_windows(*both, config.drift, store)
        compare_features(dataset.snapshot.columns, windows, config.drift, ())
    return time.process_time() - began


def _preset_s(python: Path, files: list[Path]) -> float:
    command = [str(python), "-W", "ignore", "-c", PRESET, *map(str, files)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    return float(ended.stdout.split()[-1])
