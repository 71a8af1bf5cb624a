"""Which operators take the time of a call, as each runtime itself measures it.

Profiling slows a runtime, so a copy is loaded for it alone; latency is measured elsewhere.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from tasks.contracts.conversion import OperatorProfile, OperatorTime
from tasks.conversion.targets.interface import Array, ModelInputs, Profiler, Totals
from tasks.kernel.scratch import scratch_folder

WARM_UP_CALLS = 3
CALLS = 10
MOST_OPERATORS = 6
KINETO_LOG_LEVEL, SILENT = "KINETO_LOG_LEVEL", "99"
"""Read by PyTorch's profiler when it starts: below this it logs its start and stop."""
Arrays = Mapping[str, Array]


def top_operators(profiler: Profiler, batch: ModelInputs) -> OperatorProfile:
    """The operators that take the most time of a call, the largest first."""
    totals = profiler(batch)
    whole = sum(ms for ms, _ in totals.values())
    largest = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_OPERATORS]
    return OperatorProfile(
        batch_rows=batch.num_rows,
        total_ms=whole,
        operators=tuple(
            OperatorTime(operator=name, ms=ms, share=ms / whole if whole else 0, calls=round(runs))
            for name, (ms, runs) in largest
        ),
    )


def _summed(events: Iterable[tuple[str, float]]) -> Totals:
    """Totals of a call out of the events of `CALLS` equal calls, one call after the other.

    The median of the calls, because other work on the machine stretches single ones.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for operator, ms in events:
        found[operator].append(ms)
    return {name: (_typical(times), len(times) / CALLS) for name, times in found.items()}


def _typical(times: list[float]) -> float:
    if len(times) % CALLS:  # not the same in each call
        return sum(times) / CALLS
    return float(np.median(np.reshape(times, (CALLS, -1)).sum(axis=1)))


def profile_pytorch(call: Callable[[Arrays], object]) -> Profiler:
    """Operators of PyTorch eager, by the time spent in each itself."""
    import torch

    def profile(inputs: Arrays) -> Totals:
        for _ in range(WARM_UP_CALLS):
            call(inputs)
        # Not `torch.profiler`, which writes to standard error whenever it starts; nor may this.
        os.environ.setdefault(KINETO_LOG_LEVEL, SILENT)
        with torch.autograd.profiler.profile(use_kineto=False) as recorded:
            for _ in range(CALLS):
                call(inputs)
        events = sorted(recorded.function_events or [], key=lambda event: event.time_range.start)
        return _summed(
            (event.name.removeprefix("aten::"), event.self_cpu_time_total / 1e3)
            for event in events
            if event.name.startswith("aten::")
        )

    return profile


def profile_onnx(model: Path, options: ort.SessionOptions, providers: list[Any]) -> Profiler:
    """Operators of an ONNX file as ONNX Runtime runs them, fused ones under their own names."""

    def profile(inputs: Arrays) -> Totals:
        with scratch_folder("falaj-profile") as folder:
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
            session = ort.InferenceSession(model, options, providers=providers)
            for _ in range(WARM_UP_CALLS + CALLS):
                session.run(None, dict(inputs))
            events = json.loads(Path(session.end_profiling()).read_text())
        runs: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "Node" and str(event["name"]).endswith("_kernel_time"):
                runs[event["name"]].append((event["args"]["op_name"], event["dur"] / 1e3))
        return _summed(node[number] for number in range(-CALLS, 0) for node in runs.values())

    return profile


def profile_openvino(request: Any) -> Profiler:
    """Operators of a compiled OpenVINO model that counts."""

    def profile(inputs: Arrays) -> Totals:
        for _ in range(WARM_UP_CALLS):
            request.infer(dict(inputs))
        events: list[tuple[str, float]] = []
        for _ in range(CALLS):
            request.infer(dict(inputs))
            events += [
                (node.node_type, node.real_time.total_seconds() * 1e3)
                for node in request.profiling_info
                if node.status == node.Status.EXECUTED
            ]
        return _summed(events)

    return profile
