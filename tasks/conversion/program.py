"""Opening a `torch.export` program file without letting it run code."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from pathlib import Path

import torch
from torch.export import ExportedProgram

from tasks.contracts.data import DatasetSchema
from tasks.errors import ArtifactError, ConversionError

INPUT_NAMES = ("categorical", "numeric")
OUTPUT_NAME = "score"


def load_program(path: Path) -> ExportedProgram:
    """Read a `.pt2` file.

    `torch.export.load` unpickles parts that an archive marks so, and falls back to an unrestricted
    unpickler where the restricted one refuses; such archives are refused here before that.

    Raises:
        ArtifactError: it is no program archive, or holds pickled objects.
    """
    try:
        _refuse_pickled_objects(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            return torch.export.load(path)
    except (zipfile.BadZipFile, RuntimeError, KeyError, json.JSONDecodeError) as exc:
        raise ArtifactError(
            f"{path.name} cannot be read as a torch.export program ({exc}); expected a .pt2 file "
            "as training writes it. Train again to make a new one"
        ) from exc


def _refuse_pickled_objects(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json"):
                entries = json.loads(archive.read(name))["config"].values()
                _refuse_if(any(entry.get("use_pickle") for entry in entries), path, name)
            elif name.endswith(".pt") and (content := archive.read(name)):
                try:
                    torch.load(io.BytesIO(content), weights_only=True)
                except pickle.UnpicklingError:
                    _refuse_if(True, path, name)


def _refuse_if(unsafe: bool, path: Path, member: str) -> None:
    if unsafe:
        raise ArtifactError(
            f"{path.name} holds pickled objects in {member}, and unpickling can run any code; "
            "expected plain tensors alone. Nothing was loaded; find out who wrote this file"
        )


def check_inputs(program: ExportedProgram, columns: DatasetSchema) -> None:
    """Refuse a program whose inputs are not the two raw arrays of `columns`.

    Raises:
        ConversionError: other names, order or widths.
    """
    names = tuple(program.graph_signature.user_inputs)
    if names != INPUT_NAMES:
        raise ConversionError(
            f"the program takes inputs {names}, expected {INPUT_NAMES} in this order; export it "
            "with these argument names"
        )
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    for name, expected in zip(INPUT_NAMES, (columns.categorical, columns.numeric), strict=True):
        width = int(values[name].shape[1])
        if width != len(expected):
            raise ConversionError(
                f"the program's input {name!r} has {width} columns, the schema {len(expected)}; "
                "the program and the schema belong to different models"
            )
