"""A program with another map of its scores, the network in it as it was.

The map goes into the program's last operations, in front of the sigmoid of a classification and
behind all else of a regression. So every format and every runtime takes the new program as it took
the old one. A straight line that stands there already takes the new one into its two numbers:
however often scores are mapped anew, the program stays as long as after the first time.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from tasks.contracts.conversion import tabular_signature
from tasks.contracts.data import DatasetSchema, DataSplits, TaskKind, ValidatedDataset
from tasks.contracts.evaluation import Calibration, Calibrator, MapFit
from tasks.contracts.release import CalibrationSource
from tasks.contracts.training import RecalibratedModel
from tasks.conversion.examine import score_batches, score_gap
from tasks.conversion.kinds.tabular import BLOCK_ROWS, edge_rows, read_rows, score_distances
from tasks.conversion.targets import pytorch
from tasks.conversion.targets.interface import ModelInputs, Runtime, Scorer
from tasks.kernel.errors import ConversionError, ConversionParityError, refused_writes_explained
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

PROGRAM_FILE = "program.pt2"
MAX_GAP = 1e-5
"""Between the new score and the map of the old one; of a regression in its own size."""
MAX_FALL = 1e-6
"""By which the new score of a row may lie below that of one that scored lower: rounding."""
CHECKED_ROWS, EDGE_ROWS = 4096, 1024
_ATEN = torch.ops.aten
# They change the shape and no value, so the map may stand before or behind them.
_SHAPES = {_ATEN.squeeze.dim, _ATEN.squeeze.default, _ATEN.view.default, _ATEN.reshape.default}


def map_program(
    source: CalibrationSource,
    fit: MapFit,
    dataset: ValidatedDataset,
    splits: DataSplits,
    store: ArtifactStore,
) -> RecalibratedModel:
    """The source's model with the fitted map in its program.

    Args:
        source: the registered version.
        fit: the map from its scores, and where it comes from.
        dataset: validated rows; those of the test window check the new program.
        splits: of the new model.
        store: holds the program and the rows, and takes the new program.

    Raises:
        ConversionError: the program does not end as such programs do.
        ConversionParityError: the new program does not give the mapped scores.
        DataContractError: the rows have other columns, or none lies in the test window.
        ArtifactError: a file is absent or damaged.
        StorageError: the disk refused a write.
    """
    program = source.program
    key = content_key(
        "score map", code_digest(__file__), torch.__version__, source, fit, splits,
        dataset.snapshot.data.sha256,
    )  # fmt: skip

    def build(folder: StagedFolder) -> RecalibratedModel:
        before, after = store.path(program.program), folder.path / PROGRAM_FILE
        columns = program.raw_columns
        whole_map = write_mapped(before, after, columns, fit.map)
        inputs = read_rows(dataset, columns, splits.test, store, limit=CHECKED_ROWS).inputs
        check_mapped(before, after, columns, fit.map, inputs)
        return RecalibratedModel(
            program=folder.artifact(PROGRAM_FILE),
            checkpoint=source.checkpoint,
            columns=columns,
            config=source.training_config,
            snapshot_sha256=dataset.snapshot.data.sha256,
            splits=splits,
            best_epoch=source.best_epoch,
            calibration=Calibration(source=program.version, fit=fit, whole_map=whole_map),
        )

    return store.build_once("recalibrated", key, RecalibratedModel, build)


def write_mapped(
    before: Path, after: Path, columns: DatasetSchema, calibrator: Calibrator
) -> Calibrator:
    """Write the program `before` with a map of its scores as `after`.

    Returns:
        The one map from the network's own output that the new program holds.

    Raises:
        ArtifactError: the file is no program, or holds pickled objects.
        ConversionError: it does not end as such programs do.
        StorageError: the disk refused a write.
    """
    program = pytorch.load_program(before)
    pytorch.check_program(program, tabular_signature(columns))
    whole_map = _put_in(program, calibrator, columns.task)
    content = io.BytesIO()  # saved to a path, the bytes would hold the file's name
    torch.export.save(program, content)
    with refused_writes_explained(after):
        after.write_bytes(content.getvalue())
    return whole_map


def check_mapped(
    before: Path, after: Path, columns: DatasetSchema, calibrator: Calibrator, inputs: ModelInputs
) -> None:
    """Prove on real rows and on edge rows that a program gives the mapped scores of another one.

    Raises:
        ConversionParityError: a score is another one, or two rows changed places.
    """
    with pytorch.torch_threads_restored():
        own = _own_outputs(before, columns.task)
        other = pytorch.load_pytorch(after, tabular_signature(columns), Runtime())
        edges = edge_rows(inputs, EDGE_ROWS)
        unit = 1.0
        for rows in (inputs, edges):
            batches = tuple(rows.blocks(BLOCK_ROWS))
            old, new = score_batches(own, batches), score_batches(other, batches)
            expected = mapped_outputs(old, calibrator, columns.task)
            if columns.task == "regression":
                unit = max(float(expected.std()), float(np.abs(expected).max()), 1.0)
            gap = score_gap(expected, new, partial(score_distances, unit=unit)).largest
            falls = float(-np.diff(new[np.argsort(old, kind="stable")]).min(initial=0.0)) / unit
            if gap > MAX_GAP or falls > MAX_FALL:
                raise ConversionParityError(
                    f"the recalibrated program differs by {gap:.2g} from the mapped scores on "
                    f"{rows.num_rows} rows, allowed are {MAX_GAP:.0e}, and falls by {falls:.2g} "
                    "where scores rise. It was not kept; retrain instead"
                )


def mapped_outputs(
    outputs: NDArray[np.floating[Any]], calibrator: Calibrator, task: TaskKind
) -> NDArray[np.float64]:
    """Scores with the map, from logits or predictions without it; shape as `outputs`."""
    exact = outputs.astype(np.float64)
    mapped: NDArray[np.float64] = calibrator.slope * exact + calibrator.intercept
    return mapped if task == "regression" else 0.5 * (1 + np.tanh(0.5 * mapped))


def _own_outputs(path: Path, task: TaskKind) -> Scorer:
    """What a program gives before its sigmoid: 32 bits cannot tell 0.9999999 from its neighbours.

    A regression's predictions are what it gives.
    """
    module = pytorch.load_program(path).module()
    if task == "classification":
        graph = module.graph
        last = next(n for n in reversed(graph.nodes) if n.target is _ATEN.sigmoid.default)
        last.replace_all_uses_with(_argument(last))
        module.recompile()

    def score(inputs: ModelInputs) -> NDArray[np.float32]:
        with torch.inference_mode():
            answer = module(*(torch.from_numpy(array) for array in inputs.values()))
        outputs: NDArray[np.float32] = answer.numpy()
        return outputs

    return score


def _put_in(program: ExportedProgram, calibrator: Calibrator, task: TaskKind) -> Calibrator:
    """Put the map into the program's graph; returns the one line that then stands there."""
    graph = program.graph_module.graph
    (returned,) = cast(tuple[Node], graph.output_node().args[0])
    last = place = _before_shapes(returned)
    is_number = task == "regression"
    if not is_number and last.target is _ATEN.sigmoid.default:
        place = _before_shapes(_argument(last))
    line = _line_at(place)
    if (is_number and line is None) or (not is_number and place is last):
        wanted = "multiplied by a number and added to one" if is_number else "of a sigmoid"
        raise ConversionError(
            f"the program's last operation is {last.target}, expected scores {wanted}, where a new "
            "map of the scores has its place; the model cannot be recalibrated. Retrain instead"
        )
    if line is None:
        whole = calibrator
        _insert_line(graph, place, whole)
    else:
        slope, intercept = (cast(float, node.args[1]) for node in line)
        whole = calibrator.after(Calibrator(slope=slope, intercept=intercept))
        for node, number in zip(line, (whole.slope, whole.intercept), strict=True):
            node.args = (node.args[0], number)
    program.graph_module.recompile()
    program.validate()  # type: ignore[no-untyped-call]
    return whole


def _line_at(node: Node) -> tuple[Node, Node] | None:
    """The rising line that ends at a node: multiply by one number, add another; None if another."""
    if not _is_by_number(node, _ATEN.add.Tensor):
        return None
    multiply = _argument(node)
    if not _is_by_number(multiply, _ATEN.mul.Tensor) or cast(float, multiply.args[1]) <= 0:
        return None
    return multiply, node


def _is_by_number(node: Node, operation: object) -> bool:
    is_plain = node.target is operation and not node.kwargs and len(node.users) == 1
    return is_plain and isinstance(node.args[1], int | float)


def _insert_line(graph: Graph, place: Node, calibrator: Calibrator) -> None:
    """Let all that used the value at `place` use the line over it instead."""
    users, end = list(place.users), place
    for operation, number in (
        (_ATEN.mul.Tensor, calibrator.slope),
        (_ATEN.add.Tensor, calibrator.intercept),
    ):
        with graph.inserting_after(end):
            end = graph.call_function(operation, (end, number))
        end.meta["val"] = place.meta["val"]
    for user in users:
        user.replace_input_with(place, end)


def _argument(node: Node) -> Node:
    return cast(Node, node.args[0])


def _before_shapes(node: Node) -> Node:
    """The value itself, before operations that only change its shape."""
    while node.target in _SHAPES:
        node = _argument(node)
    return node
