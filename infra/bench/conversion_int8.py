"""What 7-bit weights mend and cost on this host: INT8 forms beside those in 32 bits.

    python -m infra.bench.conversion_int8 [network] [encoder] [sentence-encoder]

`network` and `encoder` are the small models of the tests, `sentence-encoder` is the real one; all
three without an argument. Each is quantised with weights of 8 and of 7 bits. Told of each form: its
largest and mean gap to PyTorch, the change of the task metric, and its CPU time as a share of that
of the same runtime in 32 bits. `exact` computes the 8-bit ONNX form in floats, as a processor with
an 8-bit dot product would: no sum saturates. Its time says nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnxruntime as ort

from infra.bench.conversion import sentence_encoder
from infra.bench.cpu_time import cpu_times
from tasks.contracts.conversion import ConversionRows
from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.families.interface import Batches, JudgedRows, Scores
from tasks.conversion.families.registry import family_of
from tasks.conversion.onnx_export import MODEL_FILE
from tasks.conversion.onnx_quantization import quantize_onnx
from tasks.conversion.openvino_export import read_ir, save_ir
from tasks.conversion.parity import score_batches, score_gap
from tasks.conversion.processor import this_processor
from tasks.conversion.quantization import quantize
from tasks.conversion.runtimes import LoadedModel, load_pytorch, torch_threads_restored
from tasks.conversion.targets.interface import Runtime
from tasks.conversion.targets.registry import TARGET
from tasks.settings import ArtifactStore
from tests.support.conversion.judged import MODELS as SMALL
from tests.support.conversion.programs import built

BATCHES = (1, 32)
FLOATS = ("onnx-fp32", "openvino-fp32")
ENCODER = "sentence-encoder"
NAMES = (*SMALL, ENCODER)


def int8_lines(name: str, scratch: Path) -> Iterator[str]:
    """A line for each form of one model; everything is written to `scratch`."""
    store = ArtifactStore(scratch / "artifacts")
    program, rows, config = _model(name, store)
    config = config.model_copy(update={"targets": FLOATS})
    sources = {one.name: one.files for one in built(program, rows, config, store)}
    family = family_of(program)
    sample = family.read_calibration(program, rows, config, store)
    judged = family.read_judged(program, rows, config, store)
    expected = score_batches(
        load_pytorch(store.path(program.program), program.signature, Runtime()), judged.batches
    )
    if judged.distances_of is not None:
        judged = replace(judged, distances=judged.distances_of(expected))
    for floats, quantised in zip(FLOATS, (_onnx, _openvino), strict=True):
        files = sources[floats]
        assert files is not None
        models = {floats: TARGET[floats].load(store.path(files), program.signature, Runtime())}
        for bits in (8, 7):
            folder = scratch / f"{quantised.__name__}-{bits}"
            folder.mkdir()
            quantised(store.path(files), folder, sample, config, family.is_transformer, bits)
            models[f"{TARGET[floats].format}-int8, {bits} bits"] = TARGET[floats].load(
                folder, program.signature, Runtime()
            )
        if quantised is _onnx:
            models["onnx-int8, 8 bits, exact"] = _exact(models[floats], scratch / "_onnx-8")
        yield from (f"{name}: {line}" for line in _compared(models, floats, judged, expected))


def _model(
    name: str, store: ArtifactStore
) -> tuple[RegisteredProgram, ConversionRows, ConversionConfig]:
    return sentence_encoder(store) if name == ENCODER else (*SMALL[name](store), ConversionConfig())


def _onnx(
    source: Path, folder: Path, sample: Batches, _: ConversionConfig, __: bool, bits: int
) -> None:
    onnx.save(quantize_onnx(source / MODEL_FILE, sample, bits), folder / MODEL_FILE)


def _openvino(
    source: Path, folder: Path, sample: Batches, config: ConversionConfig, is_bert: bool, bits: int
) -> None:
    save_ir(quantize(read_ir(source), sample, config.quantized_layers, is_bert, bits), folder, {})


def _exact(like: LoadedModel, folder: Path) -> LoadedModel:
    """The form with each of its nodes computed by itself, products in floats."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / MODEL_FILE, options, ["CPUExecutionProvider"])
    return replace(like, score=lambda arrays: session.run(None, arrays)[0])


def _compared(
    models: dict[str, LoadedModel], floats: str, judged: JudgedRows, expected: Scores
) -> Iterator[str]:
    times = {
        count: cpu_times({n: partial(m, judged.timing_batch(count)) for n, m in models.items()})
        for count in BATCHES
    }
    for name, model in models.items():
        scores = score_batches(model, judged.batches)
        gap = score_gap(expected, scores, judged.distances)
        change = judged.change(expected, scores)
        shares = ", ".join(f"{t.share(name, floats):.2f} at {count}" for count, t in times.items())
        yield (
            f"{name:<26} gap {gap.largest:.2g}, mean {gap.mean:.2g}; {judged.wording.metric} "
            f"{change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f}); CPU {shares}"
        )


def main(names: list[str]) -> int:
    """Print the lines of the named models."""
    print(this_processor())
    for name in names or NAMES:
        with tempfile.TemporaryDirectory(prefix="falaj-bench-") as scratch:
            with torch_threads_restored():
                for line in int8_lines(name, Path(scratch)):
                    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
