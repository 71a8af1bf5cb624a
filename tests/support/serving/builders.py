"""Batches and calls as an engine tells them."""

import time
from typing import Any

import numpy as np

from serving.interfaces import Call, Served, ServedBatch, Track, VersionState

MODEL = "flight-delay"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATES = [
    VersionState(MODEL, "3", "READY", "", ("stable",), "openvino-f32", "cpu", "openvino_ir"),
    VersionState(MODEL, "4", "READY", "", ("candidate",), "onnx-fp32", "cpu", "onnxruntime_onnx"),
]


def call(latency_s: float = 0.002, num_rows: int = 1, **told: Any) -> Call:
    """A call that arrived `latency_s` ago."""
    named = {"model": MODEL, "request_id": "r-1", **told}
    return Call(inputs={}, num_rows=num_rows, arrived=time.monotonic() - latency_s, **named)


def batch(
    *calls: Call, version: str = "3", track: Track = "stable", fell_over_from: str = ""
) -> ServedBatch:
    """Calls that a model has just answered, within a millisecond."""
    now = time.monotonic()
    variant = "openvino-f32" if version == "3" else "onnx-fp32"
    rows = sum(c.num_rows for c in calls)
    return ServedBatch(
        calls=calls,
        inputs={},
        outputs={"score": np.zeros(rows, np.float32)},
        served=Served(MODEL, version, variant, track, "cpu", fell_over_from),
        started=now - 0.001,
        finished=now,
        finished_at=time.time(),
    )
