"""One measurement in a process of its own.

    python -m infra.bench.measurement PART/NAME FOLDER usual|small

Its figures are written to `figures.json` in the folder, why it failed to `failure.txt`.
"""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

from pydantic import TypeAdapter

from infra.bench.figures import Figure, LeftOut
from infra.bench.parts import Bench, chosen

FIGURES_FILE, FAILURE_FILE = "figures.json", "failure.txt"
Stored = TypeAdapter(list[Figure | LeftOut])


def main(title: str, folder: str, size: str) -> None:
    """Measure."""
    # What a measurement started ends with it, a platform too, which needs its turn.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (measurement,) = chosen([title])
    scratch = Path(folder) / "scratch"
    scratch.mkdir()
    try:
        module = importlib.import_module(measurement.module)
        measured = module.figures(Bench(scratch, small=size == "small"))
    except Exception as exc:
        (Path(folder) / FAILURE_FILE).write_text(f"{type(exc).__name__}: {exc}")
        raise
    (Path(folder) / FIGURES_FILE).write_bytes(Stored.dump_json(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
