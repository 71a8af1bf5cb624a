"""Will TensorRT take an ONNX file? Asked of TensorRT-RTX, on a machine without any device.

Its parser is TensorRT's and builds engines on a processor. What it builds is for devices of its own
list and serves nothing here; that it can be built is what is asked.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.conversion.targets.tensorrt_engine import ShapeRange
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import PROJECT_ROOT

NAME = "tensorrt-rtx"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Opinion:
    """What TensorRT-RTX says of one file."""

    version: str
    supported: bool
    """It has an implementation of every node."""
    engine_bytes: int
    refusal: str | None


def ask(python: Path, files: Mapping[Path, Mapping[str, ShapeRange]]) -> tuple[Opinion, ...]:
    """Parse ONNX files and build an engine of each.

    Args:
        python: of an environment with `infra/tensorrt_rtx/requirements.in`.
        files: ranges of shapes that each is to take, by input.

    Raises:
        ConversionError: the program did not answer at all.
    """
    questions = [
        {"onnx": str(file), "ranges": {name: [*asdict(r).values()] for name, r in ranges.items()}}
        for file, ranges in files.items()
    ]
    done = subprocess.run(
        [python, "-m", "infra.tensorrt_rtx"],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        cwd=PROJECT_ROOT,
    )
    if done.returncode:
        raise ConversionError(
            f"TensorRT-RTX ended with {done.returncode} and no answer: "
            f"{done.stderr.strip().splitlines()[-1:] or 'nothing said'}. Look at its environment, "
            f"of which {python} is the interpreter"
        )
    return tuple(Opinion(**opinion) for opinion in json.loads(done.stdout.splitlines()[-1]))
