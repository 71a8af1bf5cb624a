"""Logs predictions until it is killed; run as a module with arguments HOME NAME.

It tells how many rows are on the disk, one line each time it is more: rows 0 to that number, in
order, of requests `<NAME>-<number>`.
"""

import sys
import time
from pathlib import Path

import numpy as np

from serving.interfaces import Call, Served, ServedBatch
from serving.log import prediction_log
from serving.log.prediction_log import PredictionLog
from tasks.contracts.conversion import tabular_signature
from tasks.predictions import upkeep
from tasks.predictions.config import PredictionLogConfig
from tests.support.data.builders import COLUMNS

MODEL, SIZE = "flight-delay", 16
BY = Served(MODEL, "1", "onnx-fp32", "stable", "cpu")


def batch(name: str, first: int) -> ServedBatch:
    """Requests `<name>-<first>` and so on; each one's score is its number."""
    now = time.monotonic()
    numbers = np.arange(first, first + SIZE)
    return ServedBatch(
        calls=tuple(Call(MODEL, {}, 1, f"{name}-{n}", arrived=now) for n in numbers),
        inputs={
            "categorical": np.zeros((SIZE, len(COLUMNS.categorical)), np.int32),
            "numeric": np.repeat(numbers[:, None], len(COLUMNS.numeric), 1).astype(np.float32),
        },
        outputs={"score": numbers.astype(np.float32)},
        served=BY,
        started=now,
        finished=now,
        finished_at=time.time(),
    )


def write(home: Path, name: str) -> None:
    """Serve and log for ever, with small parts that are merged very often."""
    prediction_log.UPKEEP_S, upkeep.COMPACT_SEGMENTS = 0.3, 3
    config = PredictionLogConfig(flush_s=0.05)
    signature = tabular_signature(COLUMNS)
    log = PredictionLog(config, home, lambda model, version: signature)
    log.start()
    told, number = 0, 0
    while True:
        log.served(batch(name, number))
        number += SIZE
        written = int(log.counters()["logged_rows"])
        if written > told:
            told = written
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()
        time.sleep(0.002)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
