"""Pruned and distilled networks in the place of the finished loop's: how fast, and as good?

Each is made by the project's own compression, whose trainings run on ranks. What is timed is calls
of 1024 rows, interleaved with the large network in ONNX Runtime fp32, and the AUC is that of the
timed variant's own scores. The state folder is only read.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from sklearn.metrics import roc_auc_score

from infra.bench.conversion import build_all, unregistered
from infra.bench.figures import Figure, LeftOut, Measured, at_least
from infra.bench.parts import Bench
from infra.bench.training.trainings import Trainings
from tasks.contracts.conversion import SnapshotRows, tabular_signature
from tasks.contracts.evaluation import StudentReport
from tasks.contracts.release import CompressionParent, RegisteredProgram
from tasks.contracts.training import CompressedModel, DistillationTargets, TrainedModel
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import read_rows
from tasks.conversion.measure import time_interleaved
from tasks.conversion.targets.interface import ConversionJob, LoadedModel, Runtime, load_files
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import judge_networks, score_window
from tasks.training.compression.config import CompressionConfig
from tasks.training.compression.plan import chosen, plan_student
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig

LARGE = "large onnx-fp32"
FORMATS = ("onnx-fp32", "openvino-fp32", "openvino-bf16", "openvino-int8")
_SMALL = {"max_embedding_size": 4, "num_bins": 6, "dropout": 0.0, "pruned_share": 0.75}
WAYS = {
    "pruned": {**_SMALL, "method": "pruning", "dropout": 0.05},
    "distilled": {**_SMALL, "method": "distillation", "hidden_sizes": (64, 32)},
    "pruned, distilled": {**_SMALL, "method": "pruning-distillation"},
}
JUDGING = EvaluationConfig()


@dataclass(frozen=True)
class Smaller:
    """One smaller network, judged."""

    way: str
    program: RegisteredProgram
    model: CompressedModel
    report: StudentReport


def figures(bench: Bench) -> Measured:
    """Measure on the model of the newest finished loop.

    Raises:
        RuntimeError: there is no finished loop.
    """
    trainings = Trainings(bench)
    program = _program(trainings.model, 1)
    parent = CompressionParent(
        program=program,
        checkpoint=trainings.model.checkpoint,
        splits=trainings.splits,
        training_config=trainings.model.config,
    )
    epochs = bench.size(12, 2)
    ways = bench.size(list(WAYS), ["pruned, distilled"])
    small = [_compressed(trainings, parent, way, epochs) for way in ways]
    of_large, left_out = _loaded(trainings, program)
    loaded = {LARGE: of_large["onnx-fp32"]}
    for one in small:
        variants, without = _loaded(trainings, one.program)
        loaded |= {f"{one.way} {name}": model for name, model in variants.items()}
        left_out |= without
    rows = read_rows(trainings.dataset, program.raw_columns, trainings.splits.test, trainings.store)
    calls = {name: partial(model, rows.inputs.repeated(1024)) for name, model in loaded.items()}
    timings = time_interleaved(calls, bench.size(15, 6), 40.0)
    speeds = {name: t.times_faster_than(timings[LARGE]).value for name, t in timings.items()}
    blocks = list(rows.inputs.blocks(8192))
    aucs = {
        name: float(roc_auc_score(rows.labels, np.concatenate([model(block) for block in blocks])))
        for name, model in loaded.items()
    }
    least = small[0].report.parent.primary.low
    sound = [name for name in loaded if name != LARGE and aucs[name] >= least]
    fastest = max(sound, key=lambda name: speeds[name], default=LARGE)
    text = f"{fastest}, AUC {aucs[fastest]:.4f}, at least {least:.4f}; large {aucs[LARGE]:.4f}"
    return [
        at_least("speed to large ORT fp32, 1024", speeds[fastest], 5.0, text),
        *(_quality_figure(one, speeds) for one in small),
        *(LeftOut(name, why) for name, why in left_out.items()),
    ]


def _quality_figure(one: Smaller, speeds: dict[str, float]) -> Figure:
    """What one way gives: its AUC beyond the bound, its speed in each format, its teacher."""
    parent, student = one.report.parent.primary, one.report.student.primary
    of_way = {name.removeprefix(f"{one.way} "): speed for name, speed in speeds.items()}
    shown = ", ".join(f"{name} {of_way[name]:.1f} times" for name in FORMATS if name in of_way)
    large = one.model.compression.parent_parameters
    sizes = f"{one.model.num_parameters:,} of {large:,} parameters"
    result = f"; {one.report.result}" if one.report.result else ""
    name = f"AUC of {one.way}, over the bound"
    return at_least(name, student.value - parent.low, 0.0, f"{sizes}, {shown}{result}")


def _program(model: TrainedModel, number: int) -> RegisteredProgram:
    columns, of = model.columns, (model.program, model.snapshot_sha256, number)
    return unregistered(*of, columns=columns, signature=tabular_signature(columns))


def _compressed(trainings: Trainings, parent: CompressionParent, way: str, epochs: int) -> Smaller:
    config = CompressionConfig.model_validate({**WAYS[way], "max_epochs": epochs})
    # As an earlier version trained it; how its ranks ran is another matter.
    known = {k: v for k, v in parent.training_config.items() if k not in EXECUTION_FIELDS}
    dataset, store = trainings.dataset, trainings.store
    plan = plan_student(parent, config, TrainingConfig.model_validate(known), store)
    control = trainings.train(plan.config, initial=plan.initial)
    distilled: TrainedModel | None = None
    if config.distils:
        scores = score_window(parent.program, dataset, parent.splits.train, JUDGING, store)
        targets = DistillationTargets(
            scores=scores, weight=config.teacher_weight, temperature=config.temperature
        )
        distilled = trainings.train(plan.config, initial=plan.initial, distillation=targets)
    model, _ = chosen(plan.compression, distilled, control)
    report = judge_networks(model, parent.program, distilled, control, dataset, JUDGING, store)
    return Smaller(way, _program(model, 2 + list(WAYS).index(way)), model, report)


def _loaded(
    trainings: Trainings, program: RegisteredProgram
) -> tuple[dict[str, LoadedModel], dict[str, str]]:
    """Variants that this host computes, and why it does not compute the others."""
    rows = SnapshotRows(dataset=trainings.dataset, splits=trainings.splits)
    loaded: dict[str, LoadedModel] = {}
    left_out: dict[str, str] = {}
    job = ConversionJob(program, rows, ConversionConfig(formats=FORMATS), trainings.store)
    for name, made in build_all(job).items():
        if made.files is None:
            left_out[name] = made.failure or "it was not built"
        else:
            files = trainings.store.path(made.files)
            loaded[name] = load_files(name, files, program.signature, Runtime())
    return loaded, left_out
