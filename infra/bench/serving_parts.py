"""Figures of a serving process, part by part: engine, HTTP, edge, log, entities, releases.

    python -m infra.bench.serving_parts STATE_FOLDER

The state folder is one in which a loop of the flights has ended; only entity requests read it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from infra.bench.edge import edge_figures
from infra.bench.figures import Figure
from infra.bench.finished import newest_record
from infra.bench.prediction_log import prediction_log_figures
from infra.bench.release import release_figures
from infra.bench.release_whole import release_whole_figures
from infra.bench.serving import measure_serving
from infra.bench.serving_entities import entity_figures, measure_entities
from infra.bench.serving_http import serving_http_figures
from tasks.settings import Settings

KEYS = ("carrier", "origin", "dest", "tailnum")
NUM_ENTITIES = 200


def serving_figures(
    settings: Settings, folder: Path
) -> list[tuple[str, Callable[[], list[Figure]]]]:
    """What is measured, and how, in turn."""
    return [
        ("the engine: overhead, overload, swaps, roll back", lambda: measure_serving(folder)),
        ("an answer over HTTP, ours and others'", serving_http_figures),
        ("the edge", edge_figures),
        ("the prediction log", prediction_log_figures),
        ("entity requests", lambda: _entities(settings)),
        ("releases, simulated", release_figures),
        ("a roll back by hand, through all parts", release_whole_figures),
    ]


def _entities(settings: Settings) -> list[Figure]:
    record = newest_record(settings)
    columns = record.dataset.snapshot.columns
    names = [name for name in (*columns.categorical, *columns.numeric) if "__" not in name]
    asked = list(dict.fromkeys([*KEYS, *names]))
    rows = pd.read_parquet(settings.store.path(record.dataset.snapshot.data), columns=asked)
    rows = rows.dropna().tail(NUM_ENTITIES)
    entities: dict[str, list[Any]] = {name: rows[name].tolist() for name in asked}
    ref = record.version
    return entity_figures(measure_entities(settings, ref.name, str(ref.version), entities))


def main(home: str) -> int:
    """Measure, and say by the exit code whether all figures hold."""
    os.environ["FALAJ_HOME"] = home
    settings = Settings.from_environment()
    holds = True
    for what, measure in serving_figures(settings, settings.home / "bench-serving"):
        sys.stdout.write(f"{what}\n")
        for figure in measure():
            sys.stdout.write(figure.line() + "\n")
            holds = holds and figure.holds
        sys.stdout.flush()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
