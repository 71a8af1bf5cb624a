"""Forms that go wrong: files changed after the build, in the store under a digest of their own."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx

from tasks.contracts.release import BuiltVariant
from tasks.conversion.targets.onnx import MODEL_FILE, write_provenance
from tasks.kernel.settings import ArtifactStore, StagedFolder

Change = Callable[[Path], None]
"""Changes the files of a folder in place."""
Edit = Callable[[onnx.ModelProto], None]
"""Changes the graph of an ONNX form, or what is written beside it, in place."""


def changed(store: ArtifactStore, built: BuiltVariant, change: Change) -> BuiltVariant:
    """The form with other files, as whoever tampered with them would record it."""
    source = store.path(built.files)

    def build(folder: StagedFolder) -> BuiltVariant:
        copy = folder.path / "model"
        shutil.copytree(source, copy)
        change(copy)
        return built.model_copy(update={"files": folder.artifact("model")})

    return store.build_once("forged", secrets.token_hex(16), BuiltVariant, build)


def edited(edit: Edit) -> Change:
    """A change of an ONNX form; what nobody edits, its stamp too, is left as it is."""

    def change(folder: Path) -> None:
        model = onnx.load(folder / MODEL_FILE)
        edit(model)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, folder / MODEL_FILE)

    return change


def passed_off(store: ArtifactStore, forged: BuiltVariant, as_if: BuiltVariant) -> BuiltVariant:
    """An ONNX form of something else that says it were `as_if`: only its answers betray it."""

    def restamp(model: onnx.ModelProto) -> None:
        del model.metadata_props[:]
        write_provenance(model, as_if.provenance)

    return as_if.model_copy(update={"files": changed(store, forged, edited(restamp)).files})
