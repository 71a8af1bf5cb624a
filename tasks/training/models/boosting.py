"""Gradient boosting as a candidate: rows, category values, trees, the best number of them.

One process does it, without ranks: scikit-learn and LightGBM use the host's cores by themselves.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import TargetEncoder
from threadpoolctl import threadpool_limits

from tasks.contracts.base import TimeWindow
from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.kernel.cores import usable_cores
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.training.checkpoints.store import serialized
from tasks.training.config import TrainingConfig
from tasks.training.core.network import exported
from tasks.training.core.objective import Objective, objective_of
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.data.decode import RowFacts, SnapshotFile, inside
from tasks.training.data.preprocess import (
    NO_CODE,
    Float32Array,
    Float64Array,
    Int32Array,
    LabelScale,
    fit_vocabulary,
)
from tasks.training.models.config import BoostingConfig
from tasks.training.models.trees import (
    LARGEST,
    NO_LEAF,
    BoostingProgram,
    CategoryValues,
    Tree,
    TreeFeatures,
    grouped,
)

LOGGER = logging.getLogger(__name__)
# Trees between two looks at the validation window: what an epoch is to a network.
STEP_TREES = 10
# Trees without a lower validation loss after which no more are grown.
PATIENCE_TREES = 15
# Parts of the training rows; a row's categories are valued by the labels of the other parts.
FOLDS = 5
L2 = 1.0
BLOCK_ROWS = 4096
# Training rows, about, from which the training loss is taken.
LOSS_ROWS = 100_000
PACKAGES = {"sklearn": "scikit-learn", "lightgbm": "lightgbm"}


def check_library(config: BoostingConfig) -> None:
    """Refuse a library that is not installed here.

    Raises:
        ConfigurationError: it is LightGBM, an extra.
    """
    if importlib.util.find_spec(config.library) is None:
        raise ConfigurationError(
            f"training.boosting.library={config.library!r} is not installed here; install the "
            "extra falaj[boosting], or set it to 'sklearn'. Nothing was trained"
        )


@dataclass(frozen=True)
class Rows:
    """Rows of one window in memory.

    Args:
        codes: of categories, shape (rows, categories).
        numbers: shape (rows, numbers); NaN is missing.
        labels: shape (rows,).
    """

    codes: Int32Array
    numbers: Float32Array
    labels: Float32Array

    def blocks(self, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Codes, numbers and labels of all of them, `size` rows at a time."""
        whole = (torch.from_numpy(each) for each in (self.codes, self.numbers, self.labels))
        yield from zip(*(torch.split(each, size) for each in whole), strict=True)

    def for_losses(self) -> Rows:
        """So many of them, evenly, as a loss is taken from."""
        every = slice(None, None, max(1, len(self.labels) // LOSS_ROWS))
        return Rows(self.codes[every], self.numbers[every], self.labels[every])


class Task(NamedTuple):
    """What trees are grown from: features and targets of the training and the validation rows."""

    features: Float32Array
    targets: Float64Array
    later: Float32Array
    known: Float64Array
    is_number: bool
    num_outputs: int


def train_boosting(request: TrainingRequest, store: ArtifactStore) -> TrainedModel:
    """Grow trees on the training window, keep as many as do best on the validation window.

    The same rows, settings and versions give the same trees, whatever the number of cores.

    Raises:
        DataContractError: the snapshot is not what was promised, or its labels are all alike.
        ConfigurationError: the library is not installed.
        ArtifactError: the snapshot is absent or damaged.
        StorageError: the disk refused a write.
    """
    config, snapshot = request.config, request.dataset.snapshot
    check_library(config.boosting)
    version = importlib.metadata.version(PACKAGES[config.boosting.library])
    decides = (config.boosting, config.seed, config.min_category_rows)
    key = content_key(
        "boosting", code_digest(__file__), torch.__version__, version, snapshot.data.sha256,
        request.columns, request.splits, *decides,
    )  # fmt: skip

    def build(folder: StagedFolder) -> TrainedModel:
        started = time.monotonic()
        program, epochs, best = _fitted(request, store.path(snapshot.data))
        columns = request.columns
        content = exported(program, len(columns.categorical), len(columns.numeric))
        write_atomically(folder.path / "model.pt2", content)
        state = {"epoch": best, "boosting": program.state()}
        write_atomically(folder.path / "best.pt", serialized(state))
        write_atomically(folder.path / "training.log", "".join(map(_line, epochs)))
        return TrainedModel(
            program=folder.artifact("model.pt2"),
            checkpoint=folder.artifact("best.pt"),
            log=folder.artifact("training.log"),
            columns=columns,
            config=config.model_dump(mode="json"),
            snapshot_sha256=snapshot.data.sha256,
            splits=request.splits,
            epochs=epochs,
            best_epoch=best,
            num_ranks=1,
            strategy=f"{PACKAGES[config.boosting.library]} {version}",
            num_parameters=num_parameters(program),
            seconds=time.monotonic() - started,
            launch="one process, without ranks",
        )

    made = store.build_once("models", key, TrainedModel, build)
    return made.model_copy(update={"config": config.model_dump(mode="json")})


def num_parameters(program: BoostingProgram) -> int:
    """Thresholds and leaves of all trees."""
    groups = program.trees.groups()
    leaves = sum(int((group["lefts"] < NO_LEAF).sum()) for group in groups)
    return 2 * leaves - sum(len(group["leaf"]) for group in groups)


def _line(epoch: EpochMetrics) -> str:
    return (
        f"step {epoch.epoch} (of {STEP_TREES} trees): train loss {epoch.train_loss:.5f}, "
        f"validation loss {epoch.validation_loss:.5f}, {epoch.quality_name} {epoch.quality:.5f}\n"
    )


def _fitted(
    request: TrainingRequest, path: Path
) -> tuple[BoostingProgram, tuple[EpochMetrics, ...], int]:
    config, splits = request.config, request.splits
    rows, facts = read_rows(request, path, splits.train)
    chosen_on, _ = read_rows(request, path, splits.validation)
    labels = None
    if request.columns.task == "regression":
        deviation = (facts.label_squares / facts.num_rows) ** 0.5
        labels = LabelScale(float(np.float32(facts.label_mean)), float(np.float32(deviation)))
    targets, known = (_targets(each.labels, labels) for each in (rows, chosen_on))
    values, encoded = _category_values(request, rows, facts, targets)
    started = time.monotonic()
    grow = _sklearn_trees if config.boosting.library == "sklearn" else _lightgbm_trees
    later = np.hstack([_encoded(chosen_on, values), _bounded(chosen_on.numbers)])
    outputs = len(request.columns.classes) or 1
    features = np.hstack([encoded, _bounded(rows.numbers)])
    task = Task(features, targets, later, known, labels is not None, outputs)
    given = config.launch.threads_per_rank
    threads = usable_cores() if given == "auto" else given
    with threadpool_limits(threads, user_api="openmp"):
        trees, base = grow(task, config)
    seconds = time.monotonic() - started
    num_features = later.shape[1]
    grown = BoostingProgram(values, grouped(trees, num_features, outputs), base, labels)
    epochs = _epochs(grown, rows, chosen_on, config.boosting.learning_rate, seconds)
    best = max(range(len(epochs)), key=lambda number: epochs[number].quality)
    kept = trees[: (best + 1) * STEP_TREES * outputs]
    LOGGER.info("%d of %d trees are kept, on %d rows", len(kept), len(trees), len(targets))
    return BoostingProgram(values, grouped(kept, num_features, outputs), base, labels), epochs, best


def _targets(labels: Float32Array, scale: LabelScale | None) -> Float64Array:
    wide = labels.astype(np.float64)
    return wide if scale is None else (wide - scale.mean) / scale.deviation


def _bounded(numbers: Float32Array) -> Float32Array:
    """Infinite numbers as the program takes them; a column without a number is held constant."""
    bounded: Float32Array = np.clip(numbers, -LARGEST, LARGEST).astype(np.float32)
    bounded[:, np.isnan(bounded).all(axis=0)] = 0
    return bounded


def read_rows(request: TrainingRequest, path: Path, window: TimeWindow) -> tuple[Rows, RowFacts]:
    """Rows of a window, a seeded sample where there are too many; facts about all of them.

    Raises:
        DataContractError: as `SnapshotFile.decode`, or the labels are alike.
    """
    columns, config = request.columns, request.config
    snapshot = SnapshotFile(path, columns, num_shards=1)
    times = pq.read_table(path, columns=[columns.event_time])[columns.event_time]
    num_rows, most = int(inside(times, window).sum()), config.boosting.max_rows
    kept = np.ones(num_rows, dtype=np.bool_)
    if num_rows > most:
        LOGGER.warning("%d of %d rows of %s are taken, sampled", most, num_rows, window)
        kept[:] = False
        kept[np.random.default_rng(config.seed).choice(num_rows, most, replace=False)] = True
    facts, parts, seen = RowFacts.none_of(columns), [], 0
    for number, group in snapshot.groups(window).items():
        for _, words, of_words in snapshot.decode(number, group, [0], window):
            facts.add(of_words)
            parts.append(words[kept[seen : seen + len(words)]])
            seen += len(words)
    snapshot.close()
    words, layout = np.concatenate(parts) if parts else np.empty((0, 0), np.int32), snapshot.layout
    labels = layout.labels(words) if len(words) else np.empty(0, np.float32)
    fewest = FOLDS
    if columns.task != "regression":
        fewest = min(int((labels == label).sum()) for label in range(columns.num_labels))
    if fewest < FOLDS or facts.label_squares <= 0:
        raise DataContractError(
            f"the window {window} has {num_rows} rows, and label {columns.label!r} is "
            f"{facts.label_mean:g} on average; expected at least {FOLDS} rows of each label, or "
            "numbers that differ. Widen the window or build the snapshot again"
        )
    return Rows(layout.codes(words).copy(), layout.numeric(words).copy(), labels.copy()), facts


def _category_values(
    request: TrainingRequest, rows: Rows, facts: RowFacts, targets: Float64Array
) -> tuple[list[CategoryValues], Float32Array]:
    """The mean label of each category, shrunk towards that of all; and the training rows' values.

    A training row's value is made from the labels of other rows: else a rare category would tell
    the label. Rare categories, unknown and missing ones share a value.
    """
    names, config = request.columns.categorical, request.config
    if not names:
        return [], np.empty((len(targets), 0), dtype=np.float32)
    codes = rows.codes.copy()
    for of_column, name in zip(codes.T, names, strict=True):
        known = fit_vocabulary(name, facts.category_counts[name], config.min_category_rows)
        of_column[~np.isin(of_column, known)] = NO_CODE
    is_number, classes = request.columns.task == "regression", request.columns.classes
    parts = (KFold if is_number else StratifiedKFold)(FOLDS, shuffle=True, random_state=config.seed)
    kind = "continuous" if is_number else "multiclass" if classes else "binary"
    encoder = TargetEncoder(target_type=kind, cv=parts)
    encoded = encoder.fit_transform(codes, targets).astype(np.float32)
    values, of_all = [], np.atleast_1d(encoder.target_mean_)
    for place, means in enumerate(encoder.encodings_):  # of a column for each class in turn
        column, of_class = divmod(place, len(of_all))
        of_code = dict(zip(encoder.categories_[column].tolist(), means.tolist(), strict=True))
        unknown = float(of_code.pop(NO_CODE, of_all[of_class]))
        known_codes = np.array(list(of_code), dtype=np.int32)
        known_values = np.array(list(of_code.values()), dtype=np.float32)
        values.append(CategoryValues(known_codes, known_values, unknown))
    return values, encoded


def _encoded(rows: Rows, values: list[CategoryValues]) -> Float32Array:
    """Values of the rows' categories, as the program gives them, shape (rows, categories)."""
    codes, no_numbers = torch.from_numpy(rows.codes), torch.empty(len(rows.codes), 0)
    encoded: Float32Array = TreeFeatures(values)(codes, no_numbers)[:, : len(values)].numpy()
    return encoded


def _sklearn_trees(task: Task, config: TrainingConfig) -> tuple[list[Tree], list[float]]:
    asked = config.boosting
    kind = HistGradientBoostingRegressor if task.is_number else HistGradientBoostingClassifier
    model: Any = kind(
        max_iter=asked.max_iterations,
        learning_rate=asked.learning_rate,
        max_leaf_nodes=asked.max_leaf_nodes,
        min_samples_leaf=asked.min_leaf_rows,
        l2_regularization=L2,
        early_stopping=True,
        n_iter_no_change=PATIENCE_TREES,
        random_state=config.seed,
    )
    model.fit(task.features, task.targets, X_val=task.later, y_val=task.known)
    # Private names; a test compares the scores of the trees with those of the model.
    trees = [_tree_of_nodes(tree.nodes) for step in model._predictors for tree in step]
    return trees, np.ravel(model._baseline_prediction).tolist()


def _tree_of_nodes(nodes: NDArray[Any]) -> Tree:
    is_leaf = nodes["is_leaf"].astype(bool)
    return Tree(
        feature=nodes["feature_idx"].astype(np.int64),
        threshold=nodes["num_threshold"].astype(np.float64),
        missing_left=nodes["missing_go_to_left"].astype(bool),
        left=np.where(is_leaf, -1, nodes["left"].astype(np.int64)),
        right=np.where(is_leaf, -1, nodes["right"].astype(np.int64)),
        value=nodes["value"].astype(np.float64),
    )


def _lightgbm_trees(task: Task, config: TrainingConfig) -> tuple[list[Tree], list[float]]:
    import lightgbm

    asked, of_classes = config.boosting, "multiclass" if task.num_outputs > 1 else "binary"
    settings = {
        "objective": "regression" if task.is_number else of_classes,
        "num_class": task.num_outputs,
        "learning_rate": asked.learning_rate,
        "num_leaves": asked.max_leaf_nodes,
        "min_data_in_leaf": asked.min_leaf_rows,
        "lambda_l2": L2,
        "seed": config.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    rows = lightgbm.Dataset(task.features, task.targets)
    model = lightgbm.train(
        settings,
        rows,
        asked.max_iterations,
        valid_sets=[lightgbm.Dataset(task.later, task.known, reference=rows)],
        callbacks=[lightgbm.early_stopping(PATIENCE_TREES, verbose=False)],
    )
    described = model.dump_model(num_iteration=-1)["tree_info"]
    return [_tree_of_json(tree["tree_structure"]) for tree in described], [0.0] * task.num_outputs


def _tree_of_json(root: Mapping[str, Any]) -> Tree:
    """A tree as LightGBM describes it; what is missing is 0 where no training row lacked it."""
    nodes: list[Mapping[str, Any]] = [root]
    sides: dict[str, list[int]] = {"left_child": [], "right_child": []}
    for node in nodes:  # grows while it is walked
        for side, places in sides.items():
            places.append(len(nodes) if side in node else -1)
            nodes += [node[side]] if side in node else []
    return Tree(
        feature=np.array([node.get("split_feature", 0) for node in nodes], dtype=np.int64),
        threshold=np.array([node.get("threshold", 0.0) for node in nodes], dtype=np.float64),
        missing_left=np.array([_missing_goes_left(node) for node in nodes], dtype=np.bool_),
        left=np.array(sides["left_child"], dtype=np.int64),
        right=np.array(sides["right_child"], dtype=np.int64),
        value=np.array([node.get("leaf_value", 0.0) for node in nodes], dtype=np.float64),
    )


def _missing_goes_left(node: Mapping[str, Any]) -> bool:
    if node.get("missing_type", "None") == "None":
        return bool(node.get("threshold", 0.0) >= 0.0)
    return bool(node["default_left"])


def _epochs(
    program: BoostingProgram, rows: Rows, chosen_on: Rows, learning_rate: float, seconds: float
) -> tuple[EpochMetrics, ...]:
    """What each `STEP_TREES` trees brought, on both windows."""
    objective = objective_of(len(program.base), program.labels)
    train, _ = measured(objective, _stages(program, rows.for_losses()))
    validation, qualities = measured(objective, _stages(program, chosen_on))
    each = seconds / len(train)
    return tuple(
        EpochMetrics(
            epoch=number,
            train_loss=train_loss,
            validation_loss=validation_loss,
            **quality,
            learning_rate=learning_rate,
            seconds=each,
            rows_per_s=len(rows.labels) / max(each, 1e-9),
        )
        for number, (train_loss, validation_loss, quality) in enumerate(
            zip(train, validation, qualities, strict=True)
        )
    )


Blocks = Iterator[tuple[torch.Tensor, torch.Tensor]]


def measured(objective: Objective, blocks: Blocks) -> tuple[list[float], list[dict[str, float]]]:
    """Mean loss and quality of each stage.

    Args:
        objective: of the task.
        blocks: outputs (rows, stages), of several classes (rows, stages, classes), and labels
            (rows,) of some rows.
    """
    losses, totals, num_rows = np.zeros(1), np.zeros((1, objective.num_totals)), 0
    for outputs, labels in blocks:
        by_stage = outputs.transpose(0, 1).contiguous()
        row_losses = [objective.row_losses(stage, labels).double().sum() for stage in by_stage]
        losses = losses + np.array([float(loss) for loss in row_losses])
        totals = totals + np.stack([objective.totals(stage, labels) for stage in by_stage])
        num_rows += len(labels)
    return (losses / num_rows).tolist(), [objective.quality(of_stage) for of_stage in totals]


def _stages(program: BoostingProgram, rows: Rows) -> Blocks:
    """Outputs after each `STEP_TREES` trees (of each class), and after the last one."""
    outputs = len(program.base)
    size, step = max(1, BLOCK_ROWS // outputs**2), STEP_TREES * outputs
    with torch.inference_mode():
        for codes, numbers, labels in rows.blocks(size):
            each = program.trees.of_each(program.features(codes, numbers))
            sums = program.with_base(each.cumsum(1))
            ends = [*range(step - 1, sums.shape[1], step), sums.shape[1] - 1]
            yield sums[:, sorted(set(ends))], labels
