import errno
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tasks.contracts.base import Artifact
from tasks.contracts.training import TrainedModel
from tasks.kernel.errors import RegistryError, StorageError
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tasks.registry.mlflow_registry import (
    MANIFEST_TAG,
    PROGRAM_TAG,
    SNAPSHOT_TAG,
    VARIANTS_TAG,
    RegisteredVersion,
)
from tasks.registry.model_folder import (
    digest_of_value,
    list_variants,
    read_version,
    remove_unlisted,
    sign_version,
    verified_encoders,
    verified_program,
    write_model,
    write_variants,
)
from tests.support.data import builders as shared
from tests.support.registry import builders
from tests.support.training.states import flip_a_bit


@dataclass(frozen=True)
class Filed:
    """A model and its variants, filed without a registry."""

    store: ArtifactStore
    trained: TrainedModel
    version: RegisteredVersion

    @property
    def folder(self) -> Path:
        return self.version.folder


def file_model(store: ArtifactStore, **encoders: Artifact) -> Filed:
    """Beside the store's folder."""
    dataset = shared.dataset(store, shared.frame(300))
    snapshot = dataset.snapshot.model_copy(update={"encoders": encoders})
    trained = builders.trained_model(store, dataset)
    folder, report = store.root.with_name("model"), builders.evaluation(store, trained)
    manifest = write_model(folder, trained, report, snapshot, "m", "abc1234", store)
    made = builders.variants(store, trained.program.sha256)
    listed = write_variants(folder, list_variants(trained.program.sha256, made), store)
    tags = {
        PROGRAM_TAG: trained.program.sha256,
        SNAPSHOT_TAG: trained.snapshot_sha256,
        MANIFEST_TAG: manifest,
        VARIANTS_TAG: listed,
    }
    version = RegisteredVersion("m", 1, "r", folder, tags, folder.parent)
    sign_version(version)
    return Filed(store, trained, version)


@pytest.fixture
def filed(tmp_path: Path) -> Filed:
    return file_model(ArtifactStore(tmp_path / "store"))


def test_a_model_folder_holds_all_that_using_and_tracing_it_takes(filed: Filed) -> None:
    record = read_version(filed.version)

    assert record.damage == ()
    assert record.manifest.code_commit == "abc1234"
    assert record.manifest.snapshot_sha256 == filed.trained.snapshot_sha256
    assert record.manifest.columns == filed.trained.columns
    assert [(i.name, i.dtype, i.shape) for i in record.manifest.inputs] == [
        ("categorical", "int32", ("batch", 3)),
        ("numeric", "float32", ("batch", 5)),
    ]
    assert "CRC-32" in record.manifest.preprocessing.category_code_rule
    assert sorted(p.name for p in filed.folder.iterdir()) == [
        "checkpoint.pt",
        "environment.cdx.json",
        "evaluation.json",
        "model.json",
        "model.json.sig",
        "program.pt2",
        "variants",
        "variants.json",
        "variants.json.sig",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "program.pt2",
        "checkpoint.pt",
        "environment.cdx.json",
        "evaluation.json",
        "model.json",
        "variants.json",
        "variants/*/model.onnx",
        "variants/*/weights/0.bin",
    ],
)
@pytest.mark.parametrize("is_removed", [True, False])
def test_any_file_that_is_changed_or_gone_is_found(
    filed: Filed, name: str, is_removed: bool
) -> None:
    (victim,) = filed.folder.glob(name)
    if is_removed:
        victim.unlink()
    else:
        flip_a_bit(victim)

    damage = read_version(filed.version).damage

    assert len(damage) == 1
    assert "missing" in damage[0] or "expected" in damage[0]


def test_an_encoder_is_kept_with_its_version_and_handed_out_whole_alone(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    (store.root / "encoders" / "k" / "encoder").mkdir(parents=True)
    (store.root / "encoders" / "k" / "encoder" / "model.onnx").write_bytes(b"weights")
    files = StagedFolder(store, "encoders", "k", store.root / "encoders" / "k").artifact("encoder")
    version = file_model(store, review=files).version
    folder = version.folder
    assert verified_encoders(version) == {"review": folder / "encoder-review"}
    assert read_version(version).manifest.files["encoder-review"].sha256 == files.sha256
    (folder / "encoder-review" / "model.onnx").unlink()
    with pytest.raises(RegistryError, match="encoder-review has SHA-256"):
        verified_encoders(version)


@pytest.mark.parametrize("name", ["program.pt2", "model.json"])
def test_a_damaged_program_is_not_handed_out(filed: Filed, name: str) -> None:
    (filed.folder / name).write_bytes(b"something else")

    with pytest.raises(RegistryError, match=f"{name} has SHA-256 .* expected"):
        verified_program(filed.version)


def test_variants_built_anew_replace_the_old_ones_list_last(filed: Filed) -> None:
    sha = filed.trained.program.sha256
    (old,) = (filed.folder / "variants").iterdir()
    newer = builders.variants(filed.store, sha, "a better graph")
    listed = list_variants(sha, newer)

    digest = write_variants(filed.folder, listed, filed.store)

    assert old.exists()  # readers of the old list are served until the tag has moved
    assert digest == digest_of_value(listed)
    remove_unlisted(filed.folder, listed)
    assert not old.exists()
    version = replace(filed.version, tags={**filed.version.tags, VARIANTS_TAG: digest})
    sign_version(version)
    assert read_version(version).damage == ()


def test_a_full_disk_leaves_the_old_list_of_variants_in_place(
    filed: Filed, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = filed.trained.program.sha256
    newer = builders.variants(filed.store, sha, "a better graph")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", refuse)
        with pytest.raises(StorageError, match="free space"):
            write_variants(filed.folder, list_variants(sha, newer), filed.store)

    assert read_version(filed.version).damage == ()
