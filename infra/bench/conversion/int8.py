"""What 7-bit weights mend and cost on this host: INT8 forms beside those in 32 bits.

Each model is quantised with weights of 8 and of 7 bits. A figure is the mean gap to PyTorch as a
multiple of that of exact sums; beside it stand the change of the task metric, and the CPU time as a
share of that of the same runtime in 32 bits. Exact is the 8-bit ONNX form computed in floats, as a
processor with an 8-bit dot product would: no sum saturates. Its time says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import onnx
import onnxruntime as ort

from infra.bench.conversion.cpu_time import NUM_TURNS, cpu_times
from infra.bench.conversion.encoder import sentence_encoder
from infra.bench.conversion.tabular import loop_model
from infra.bench.figures import Figure, Measured, reported
from infra.bench.parts import Bench
from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.examine import score_batches, score_gap
from tasks.conversion.kinds.interface import JudgedRows, kind_of
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import Batches, LoadedModel, Runtime, Scores, load_files
from tasks.conversion.targets.onnx import MODEL_FILE, quantize_onnx
from tasks.conversion.targets.openvino import quantize, read_ir, save_ir
from tasks.conversion.targets.pytorch import load_pytorch, torch_threads_restored
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import ArtifactStore

BATCHES = (1, 32)
FLOATS = ("onnx-fp32", "openvino-fp32")
Subject: TypeAlias = tuple[RegisteredProgram, ConversionRows, ConversionConfig]


def figures(bench: Bench) -> Measured:
    """Of the loop's model and of a sentence encoder."""
    settings = bench.settings
    network, snapshot = loop_model(settings, bench)
    store = ArtifactStore(bench.folder / "artifacts")
    subjects: list[tuple[str, Subject, ArtifactStore]] = [
        ("tabular", (network, snapshot, bench.config.conversion), settings.store)
    ]
    if not bench.small:  # for minutes nodes are computed one by one
        subjects.append(("encoder", sentence_encoder(store, bench), store))
    with torch_threads_restored():
        return [
            figure
            for name, subject, of_subject in subjects
            for figure in _of_model(name, subject, of_subject, bench)
        ]


def _of_model(name: str, subject: Subject, store: ArtifactStore, bench: Bench) -> Iterator[Figure]:
    """A figure for each form; everything is written to a folder of the model."""
    program, rows, config = subject
    family = kind_of(program)
    sample = family.read_calibration(program, rows, config, store)
    judged = family.read_judged(program, rows, config, store)
    eager = load_pytorch(store.path(program.program), program.signature, Runtime())
    expected = score_batches(eager, judged.batches)
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(expected))
    exact_gap = math.nan
    built: dict[str, BuiltVariant] = {}
    for floats, quantised in zip(FLOATS, (_onnx, _openvino), strict=True):
        sources = tuple(built[source] for source in FORMAT[floats].made_from)
        made = built[floats] = build_variant(FORMAT[floats], program, sources, rows, config, store)
        if made.files is None:
            raise RuntimeError(f"{floats} could not be built: {made.failure}")
        files = store.path(made.files)
        models = {floats: load_files(floats, files, program.signature, Runtime())}
        for bits in (8, 7):
            folder = bench.folder / name / f"{floats}-{bits}"
            folder.mkdir(parents=True)
            quantised(files, folder, sample, config, family.is_transformer, bits)
            form = f"{FORMAT[floats].file_format}-int8 of {bits} bits"
            models[form] = load_files(floats, folder, program.signature, Runtime())
        if quantised is _onnx:
            exact = _exact(models[floats], bench.folder / name / f"{floats}-8")
            exact_gap = score_gap(
                expected, score_batches(exact, judged.batches), judged.distances
            ).mean
            models["exact sums of 8 bits"] = exact
        for form, gap, told in _compared(models, floats, judged, expected, bench):
            yield reported(f"{name}: {form}, gap to exact", gap / exact_gap, told)


def _onnx(
    source: Path, folder: Path, sample: Batches, _: ConversionConfig, __: bool, bits: int
) -> None:
    onnx.save(quantize_onnx(source / MODEL_FILE, sample, bits), folder / MODEL_FILE)


def _openvino(
    source: Path, folder: Path, sample: Batches, config: ConversionConfig, is_bert: bool, bits: int
) -> None:
    save_ir(quantize(read_ir(source), sample, is_bert, bits), folder, {})


def _exact(like: LoadedModel, folder: Path) -> LoadedModel:
    """The form with each of its nodes computed by itself, products in floats."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / MODEL_FILE, options, ["CPUExecutionProvider"])
    return replace(like, score=lambda arrays: session.run(None, arrays)[0])


def _compared(
    models: dict[str, LoadedModel],
    floats: str,
    judged: JudgedRows,
    expected: Scores,
    bench: Bench,
) -> Iterator[tuple[str, float, str]]:
    """Of each form but that in 32 bits: name, mean gap to PyTorch, and the rest in words."""
    turns = bench.size(NUM_TURNS, 2)
    times = {
        count: cpu_times(
            {n: partial(m, judged.timing_batch(count)) for n, m in models.items()}, turns
        )
        for count in BATCHES
    }
    for name, model in models.items():
        if name == floats:
            continue
        scores = score_batches(model, judged.batches)
        gap, change = (
            score_gap(expected, scores, judged.distances),
            judged.change(expected, scores),
        )
        shares = ", ".join(f"{t.share(name, floats):.2f} at {count}" for count, t in times.items())
        yield (
            name,
            gap.mean,
            f"gap {gap.largest:.2g}, mean {gap.mean:.2g}; {judged.wording.metric} "
            f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]; CPU {shares}",
        )
