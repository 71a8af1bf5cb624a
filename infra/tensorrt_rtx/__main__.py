"""Says of ONNX files whether TensorRT-RTX takes them; runs in an environment that has it.

`python -m infra.tensorrt_rtx < questions.json`; see `infra.tensorrt_rtx.asking`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tasks.conversion.targets.tensorrt_engine import ShapeRange, build_plan, is_supported
from tasks.kernel.errors import ConversionError


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Whether every node is known, and how large the engine is; or why there is none."""
    import tensorrt_rtx_bindings as trt  # type: ignore[import-not-found]

    content = Path(question["onnx"]).read_bytes()
    ranges = {
        name: ShapeRange(*(tuple(shape) for shape in shapes))
        for name, shapes in question["ranges"].items()
    }
    told = {"version": trt.__version__, "supported": is_supported(trt, content)}
    try:
        return {**told, "engine_bytes": len(build_plan(trt, content, ranges)), "refusal": None}
    except ConversionError as exc:
        return {**told, "engine_bytes": 0, "refusal": str(exc)}


if __name__ == "__main__":
    print(json.dumps([answer(question) for question in json.load(sys.stdin)]))
