"""Pruned and distilled networks in the place of a large one: how fast, and as good?

Two large networks: one of 512-256-128 units on made-up clicks, trained here, and the one of the
finished loop. Each is made smaller by the project's own shrinking, whose trainings run on ranks.
What is timed is calls of 1024 rows, in turns with the large network in ONNX Runtime fp32, and the
AUC is that of the timed form's own scores. The state folder is only read.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from infra.bench.figures import Figure, LeftOut, Measured, at_least
from infra.bench.parts import Bench, newest_record
from infra.bench.training.click_rows import click_rows, click_splits
from tasks.contracts.base import Artifact, ModelVersionRef
from tasks.contracts.conversion import SnapshotRows, tabular_signature
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.evaluation import StudentReport
from tasks.contracts.release import BuiltVariant, CompressionParent, RegisteredProgram
from tasks.contracts.training import CompressedModel, TrainedModel
from tasks.conversion.config import ConversionConfig
from tasks.conversion.kinds.tabular import read_rows
from tasks.conversion.measure import time_interleaved
from tasks.conversion.targets.catalog import with_sources
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime, load_files
from tasks.conversion.variants import build_variant
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import judge_siblings, score_window
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.training.compression.config import ShrinkingConfig
from tasks.training.compression.distillation import chosen, lesson_of
from tasks.training.compression.planning import plan_student
from tasks.training.config import EXECUTION_FIELDS, TrainingConfig
from tasks.training.launch.launcher import launch_training

LARGE = "large onnx-fp32"
FORMS = ("onnx-fp32", "openvino-fp32", "openvino-bf16", "openvino-int8")
BATCH_ROWS, ROUNDS, ROUND_MS = 1024, 15, 40.0
BOUND = 5.0
"""Times ONNX Runtime fp32 of the large network."""
CLICKS = TrainingConfig(
    hidden_sizes=(512, 256, 128),
    num_bins=16,
    max_epochs=6,
    patience=2,
    global_batch_size=256,
    learning_rate=2e-3,
    weight_decay=0.05,
    dropout=0.2,
    progress_timeout_s=600,
)
_SMALL = {"max_embedding_size": 4, "num_bins": 6, "dropout": 0.0}
NUM_EPOCHS = 12
# Both networks are made smaller in the same ways: what pays is told by the figures.
WAYS = {
    "pruned": ShrinkingConfig.model_validate(
        {**_SMALL, "method": "pruning", "pruned_share": 0.75, "dropout": 0.05}
    ),
    "distilled": ShrinkingConfig.model_validate(
        {**_SMALL, "method": "distillation", "hidden_sizes": (64, 32)}
    ),
    "pruned, distilled": ShrinkingConfig.model_validate(
        {**_SMALL, "method": "pruning-distillation", "pruned_share": 0.75}
    ),
}


@dataclass(frozen=True)
class Subject:
    """A large network, and the rows it is of."""

    name: str
    parent: CompressionParent
    dataset: ValidatedDataset
    training: TrainingConfig
    judging: EvaluationConfig


@dataclass(frozen=True)
class Smaller:
    """One smaller network, judged."""

    way: str
    program: RegisteredProgram
    model: CompressedModel
    report: StudentReport


def figures(bench: Bench) -> Measured:
    """Measure both large networks.

    Raises:
        RuntimeError: there is no finished loop, or no form could be built.
    """
    store, work = ArtifactStore(bench.folder / "store"), bench.folder / "work"
    subjects = [_finished(bench.settings, store)]
    if not bench.small:
        subjects.insert(0, _clicks(store, work))
    measured: Measured = []
    for subject in subjects:
        measured += _figures(subject, store, work, bench)
    return measured


def _clicks(store: ArtifactStore, work: Path) -> Subject:
    dataset, splits = click_rows(store), click_splits()
    model = launch_training(dataset, splits, CLICKS, store, work)
    parent = _parent(model, model.program, splits)
    return Subject("clicks", parent, dataset, CLICKS, EvaluationConfig())


def _finished(settings: Settings, store: ArtifactStore) -> Subject:
    record = newest_record(settings)
    model, data = record.model, record.dataset
    needed = (model.program, model.checkpoint, data.snapshot.data, data.validation.result)
    for artifact in needed:
        _copy(artifact, settings.store, store)
    # As an earlier version trained it; how its ranks ran is another matter.
    known = {k: v for k, v in model.config.items() if k not in EXECUTION_FIELDS}
    training = TrainingConfig.model_validate(known)
    parent = _parent(model, model.program, model.splits)
    return Subject(record.use_case, parent, data, training, EvaluationConfig())


def _copy(artifact: Artifact, source: ArtifactStore, target: ArtifactStore) -> None:
    path = source.path(artifact)
    copied = target.root / path.relative_to(source.root)
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copied)


def _program(model: TrainedModel, number: int) -> RegisteredProgram:
    version = ModelVersionRef(
        name="bench",
        version=number,
        run_id="bench",
        program_sha256=model.program.sha256,
        snapshot_sha256=model.snapshot_sha256,
    )
    return RegisteredProgram(
        version=version,
        program=model.program,
        columns=model.columns,
        signature=tabular_signature(model.columns),
    )


def _parent(model: TrainedModel, program: Artifact, splits: DataSplits) -> CompressionParent:
    return CompressionParent(
        program=_program(model, 1),
        checkpoint=model.checkpoint,
        splits=splits,
        training_config=model.config,
    )


def _figures(subject: Subject, store: ArtifactStore, work: Path, bench: Bench) -> Measured:
    ways = bench.size(list(WAYS), ["pruned, distilled"])
    epochs = bench.size(NUM_EPOCHS, 2)
    small = [_shrunk(subject, way, epochs, store, work) for way in ways]
    forms, left_out = _loaded(subject, small, store)
    rows = read_rows(
        subject.dataset, subject.parent.program.raw_columns, subject.parent.splits.test, store
    )
    speeds = _speeds(forms, rows.inputs.repeated(BATCH_ROWS), bench.size(ROUNDS, 6))
    aucs = {name: _auc(form, rows.inputs, rows.labels) for name, form in forms.items()}
    least = small[0].report.parent.primary.low
    sound = [name for name in forms if name != LARGE and aucs[name] >= least]
    fastest = max(sound, key=lambda name: speeds[name], default=LARGE)
    told = f"{fastest}, AUC {aucs[fastest]:.4f}, at least {least:.4f}; large {aucs[LARGE]:.4f}"
    name = f"{subject.name}: speed to large ORT fp32, 1024"
    return [
        at_least(name, speeds[fastest], BOUND, told),
        *(_told(subject, one, speeds) for one in small),
        *(LeftOut(f"{subject.name}: {form}", why) for form, why in left_out.items()),
    ]


def _told(subject: Subject, one: Smaller, speeds: dict[str, float]) -> Figure:
    """What one way gives: its AUC beyond the bound, its speed in each form, its teacher."""
    parent, student = one.report.parent.primary, one.report.student.primary
    of_way = {name.removeprefix(f"{one.way} "): speed for name, speed in speeds.items()}
    shown = ", ".join(f"{form} {of_way[form]:.1f} times" for form in FORMS if form in of_way)
    sizes = f"{one.model.num_parameters:,} of {one.model.shrinking.parent_parameters:,} parameters"
    name = f"{subject.name}: AUC of {one.way}, over the bound"
    result = f"; {one.report.result}" if one.report.result else ""
    return at_least(name, student.value - parent.low, 0.0, f"{sizes}, {shown}{result}")


def _shrunk(subject: Subject, way: str, epochs: int, store: ArtifactStore, work: Path) -> Smaller:
    parent, dataset = subject.parent, subject.dataset
    asked = WAYS[way].model_copy(update={"max_epochs": epochs})
    plan = plan_student(parent, asked, subject.training, store)
    train = partial(launch_training, dataset, parent.splits, plan.config, store, work)
    untaught = train(initial=plan.initial)
    taught: TrainedModel | None = None
    if asked.teaches:
        window = parent.splits.train
        answers = score_window(parent.program, dataset, window, subject.judging, store)
        taught = train(initial=plan.initial, lesson=lesson_of(answers, asked))
    model = chosen(plan.shrinking, taught, untaught).model
    report = judge_siblings(
        model, parent.program, taught, untaught, dataset, subject.judging, store
    )
    return Smaller(way, _program(model, 2 + list(WAYS).index(way)), model, report)


def _loaded(
    subject: Subject, small: list[Smaller], store: ArtifactStore
) -> tuple[dict[str, LoadedModel], dict[str, str]]:
    """The large network in ONNX Runtime fp32, each form of each smaller one, and what has none."""
    rows = SnapshotRows(dataset=subject.dataset, splits=subject.parent.splits)
    of_large, left_out = _forms(subject.parent.program, rows, store)
    loaded = {LARGE: of_large["onnx-fp32"]}
    for one in small:
        forms, without = _forms(one.program, rows, store)
        loaded |= {f"{one.way} {form}": model for form, model in forms.items()}
        left_out |= without
    return loaded, left_out


def _forms(
    program: RegisteredProgram, rows: SnapshotRows, store: ArtifactStore
) -> tuple[dict[str, LoadedModel], dict[str, str]]:
    """Forms that this host computes, and why it does not compute the others."""
    built: dict[str, BuiltVariant] = {}
    loaded: dict[str, LoadedModel] = {}
    left_out: dict[str, str] = {}
    for target in with_sources(FORMS):
        sources = tuple(built[name] for name in target.made_from)
        made = build_variant(target, program, sources, rows, ConversionConfig(), store)
        built[target.name] = made
        if made.files is None:
            left_out[target.name] = made.failure or "it was not built"
        else:
            files = store.path(made.files)
            loaded[target.name] = load_files(target.name, files, program.signature, Runtime())
    return loaded, left_out


def _speeds(forms: dict[str, LoadedModel], batch: ModelInputs, num_rounds: int) -> dict[str, float]:
    """How many times as fast as the large network each form is, in the same rounds."""
    calls = {name: partial(form, batch) for name, form in forms.items()}
    timings = time_interleaved(calls, num_rounds, ROUND_MS)
    return {name: t.times_faster_than(timings[LARGE]).value for name, t in timings.items()}


def _auc(form: LoadedModel, inputs: ModelInputs, labels: NDArray[Any]) -> float:
    scores = np.concatenate([form(block) for block in inputs.blocks(8192)])
    return float(roc_auc_score(labels, scores))
