"""Variants of the newest finished loop's model, against PyTorch and ONNX Runtime in 32 bits."""

from __future__ import annotations

from infra.bench.conversion.variants import FLOATS, best_of, convert, timed
from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, newest_record
from tasks.contracts.conversion import SnapshotRows
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.decide import EAGER
from tasks.conversion.kinds.interface import kind_of
from tasks.conversion.targets.pytorch import torch_threads_restored
from tasks.kernel.settings import Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.programs import fetch_version


def figures(bench: Bench) -> Measured:
    """The best variant at batch 1 and 1024."""
    settings, config = bench.settings, bench.config.conversion
    program, rows = loop_model(settings, bench)
    converted = convert(program, rows, config, settings.store, bench)
    judged = kind_of(program).read_judged(program, rows, config, settings.store)
    with torch_threads_restored():
        models = converted.loaded()
        at = {count: timed(models, judged.timing_batch(count), bench) for count in (1, 1024)}
    names = [variant.name for variant in converted.variants]
    one, with_one = best_of(at[1], names, EAGER)
    many, with_many = best_of(at[1024], names, FLOATS)
    return [
        at_most("tabular, batch 1, CPU to PyTorch eager", one, 0.2, with_one),
        at_most(f"tabular, batch 1024, CPU to {FLOATS}", many, 0.35, with_many),
    ]


def loop_model(settings: Settings, bench: Bench) -> tuple[RegisteredProgram, SnapshotRows]:
    """The model that the newest finished loop registered, and the rows that judge it."""
    record = newest_record(settings)
    program = fetch_version(record.version, RegistryLocation.of(settings), settings.store)
    return program, SnapshotRows(dataset=record.dataset, splits=bench.config.splits)
