"""Ten places, each with a flipped byte and by a stranger: not used, and named."""

import hashlib
import json
import shutil
from base64 import urlsafe_b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.__main__ import main
from flows.config import approved_suites, read_pipeline_config
from serving.config import EngineConfig, ServedModel
from serving.engine.loading import RegistryCatalogue
from serving.engine.versions import LoadedVersion
from serving.errors import NotReadyError
from serving.features.recipe import registry_origins
from tasks.contracts.base import Artifact, ModelVersionRef
from tasks.contracts.data import EncodedColumn
from tasks.governance import signing
from tasks.imports.config import EncoderConfig
from tasks.imports.encoded import build_encoder
from tasks.imports.encoder import WEIGHTS_FILE, find_files
from tasks.imports.program import export_encoder
from tasks.kernel.errors import ArtifactError, RegistryError, SignatureError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.store import MODELS
from tasks.kernel.location import Location
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, Settings, StagedFolder
from tasks.registry import mlflow_registry as mlflow
from tasks.registry.connection import RegistryLocation
from tasks.registry.model_folder import read_version
from tasks.registry.programs import fetch_version, find_champion, find_start
from tasks.registry.promotion import roll_back, withdraw
from tasks.state.backup import back_up, restore
from tasks.validation.suites import sign_baseline
from tests.support.data import encoders
from tests.support.data.shop import Shop
from tests.support.registry.builders import CONFIG, FEBRUARY, World, comparison, evaluation
from tests.support.serving.served import FLIGHTS, QUICK, ServedHome
from tests.support.state import acts
from tests.support.training.states import flip_a_bit

NAME = CONFIG.model_name
PROGRAM, CHECKPOINT, EVALUATION = "program.pt2", "checkpoint.pt", "evaluation.json"
MANIFEST, LISTED, VARIANT = "model.json", "variants.json", "variants/*/model.onnx"
ENCODER = "encoder-review/model.onnx"
SIGNATURES = [f"{MANIFEST}.sig", f"{LISTED}.sig"]
FILES = [PROGRAM, CHECKPOINT, EVALUATION, MANIFEST, LISTED, VARIANT, ENCODER]
REFUSED = (RegistryError, SignatureError)


def refusals(home: Path) -> list[str]:
    return [line["subject"]["signed"] for line in acts(home, "refuse-signature")]


def change(
    registry: mlflow.Registry, version: mlflow.RegisteredVersion, name: str, stranger: Path | None
) -> None:
    """Flip a byte; a stranger changes a file, all digests up to the database, and signs anew."""
    folder = version.folder
    (victim,) = folder.glob(name)
    if stranger is None or name in SIGNATURES:
        flip_a_bit(victim)
        return
    root = folder / (LISTED if "variants" in name else MANIFEST)
    whole = victim if victim.parent == folder else victim.parent
    before = digest_of(whole)
    victim.write_bytes(victim.read_bytes() + b" ")  # JSON that means the same, all else is spoilt
    root.write_text(root.read_text().replace(before, digest_of(whole)))
    found = signing.digests(folder, [root.name])
    signing.sign(stranger, version.subject, found, folder / f"{root.name}.sig")
    tags = {mlflow.VARIANTS_TAG if root.name == LISTED else mlflow.MANIFEST_TAG: digest_of(root)}
    registry.set_tags(version, {**tags, mlflow.PROGRAM_TAG: digest_of(folder / PROGRAM)})


def with_encoder(world: World) -> World:
    """Its versions hold what turns the texts of a column into numbers."""

    def build(folder: StagedFolder) -> Artifact:
        (folder.path / "encoder").mkdir()
        (folder.path / "encoder" / "model.onnx").write_bytes(b"weights" * 9)
        return folder.artifact("encoder")

    made = world.store.build_once("encoders", "k", Artifact, build)
    snapshot = world.dataset.snapshot.model_copy(update={"encoders": {"review": made}})
    return replace(world, dataset=world.dataset.model_copy(update={"snapshot": snapshot}))


@pytest.mark.parametrize("name", [*FILES, *SIGNATURES])
@pytest.mark.parametrize("by_stranger", [False, True])
def test_what_was_changed_is_not_promoted_trained_on_or_restored(
    world: World, name: str, by_stranger: bool
) -> None:
    world = with_encoder(world)
    world.promoted(0)
    world.promoted(1, against=(comparison("champion:1", 0.004),))
    change(world.registry, world.version(1), name, world.home / "strange" if by_stranger else None)
    version = world.version(1)
    record = read_version(version)
    with pytest.raises(RegistryError, match="cannot be rolled back"):
        roll_back(NAME, 2, "it hurts", "order", world.location, FEBRUARY)
    made = tuple(e.variant for e in record.variants.variants) if record.variants else ()
    report = evaluation(world.store, world.model(0))
    assert "whole-artifacts" in world.promote(version.ref, report, made).closed
    world.registry.set_alias(version, "champion")
    splits = world.model(0).splits
    if name in (CHECKPOINT, MANIFEST, f"{MANIFEST}.sig"):
        with pytest.raises(REFUSED):
            find_start(world.dataset, splits, {}, NAME, world.location, world.store)
    if name in (PROGRAM, MANIFEST, f"{MANIFEST}.sig"):
        with pytest.raises(REFUSED):
            fetch_version(version.ref, world.location, world.store)
    if name in (ENCODER, MANIFEST, f"{MANIFEST}.sig"):
        with pytest.raises(REFUSED):  # as a server asks
            registry_origins(Settings(world.home, world.home / "repo"))(NAME, "1")
    assert main(["verify", f"models/{NAME}/1", "--home", str(world.home)]) == 4
    if by_stranger or name in SIGNATURES:
        assert refusals(world.home)[0] == version.subject
    else:
        folders = {VARIANT: "onnx-fp32", ENCODER: "encoder-review"}
        assert folders.get(name, name) in record.damage[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedHome, ModelVersionRef]:
    """A version that serves."""
    home = ServedHome.at(tmp_path_factory.mktemp("served"))
    ref = home.add_flights()
    home.convert(ref, QUICK.model_copy(update={"formats": ("onnx-fp32",)}))
    assert loaded(home, ref).backends
    return home, ref


def loaded(home: ServedHome, ref: ModelVersionRef) -> LoadedVersion:
    config, models = EngineConfig(), (ServedModel(name=FLIGHTS),)
    catalogue = RegistryCatalogue(home.location, home.home, config, models)
    return catalogue.open(catalogue.by_number(FLIGHTS, str(ref.version)))


@pytest.mark.parametrize("by_stranger", [False, True])
@pytest.mark.parametrize("name", [PROGRAM, MANIFEST, LISTED, VARIANT, *SIGNATURES])
def test_what_was_changed_is_not_served(
    served: tuple[ServedHome, ModelVersionRef], tmp_path: Path, name: str, by_stranger: bool
) -> None:
    home, ref = ServedHome.at(tmp_path / "home"), served[1]
    shutil.copytree(served[0].home, home.home)
    registry = mlflow.Registry(home.location)
    version = registry.confirmed(ref)
    change(registry, version, name, tmp_path / "strange" if by_stranger else None)
    with pytest.raises(NotReadyError, match="flight-delay"):
        loaded(home, ref)
    if by_stranger or name in SIGNATURES:
        assert version.subject in refusals(home.home)


def test_a_champion_is_that_which_was_promoted(world: World) -> None:
    world.promoted(0)
    (record,) = (world.home / "signatures" / "promotions" / "models").rglob("*.sig")
    flip_a_bit(record)
    with pytest.raises(SignatureError):
        find_champion(NAME, world.location, world.store)
    withdraw(NAME, 1, "nobody signed that", "Ana", world.location, FEBRUARY)
    assert world.promoted(1).promoted


def test_an_older_version_is_signed_by_one_command_that_the_error_names(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.promoted(0)
    version = world.version(1)
    for file in version.folder.glob("*.sig"):
        file.unlink()
    with pytest.raises(SignatureError, match="falaj models sign flight-delay 1"):
        find_champion(NAME, world.location, world.store)
    assert main(["models", "sign", NAME, "1", "--home", str(world.home)]) == 0
    assert find_champion(NAME, world.location, world.store).version == version.ref
    flip_a_bit(version.folder / "program.pt2")
    assert main(["models", "sign", NAME, "1", "--home", str(world.home)]) == 1
    assert "program.pt2 has SHA-256" in capsys.readouterr().err


def test_versions_of_before_signatures_are_adopted_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.promoted(0)
    version = world.version(1)
    for file in [*version.folder.glob("*.sig"), signing.record_path(world.home, "adopted")]:
        file.unlink()
    monkeypatch.setenv("FALAJ_TRUSTED_KEYS", str(world.home / "keyring"))
    with pytest.raises(SignatureError):
        find_champion(NAME, world.location, world.store)
    monkeypatch.delenv("FALAJ_TRUSTED_KEYS")
    assert find_champion(NAME, world.location, world.store).version == version.ref
    (version.folder / "model.json.sig").unlink()
    world.register(1)  # from now on nothing is of before
    assert (version.folder / "model.json.sig").exists()
    (version.folder / "model.json.sig").unlink()
    with pytest.raises(SignatureError, match="falaj models sign flight-delay 1"):
        find_champion(NAME, world.location, world.store)


def test_a_training_set_of_somebody_else_is_not_trained_on(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    made, home = shop.training_set(), shop.settings.home
    folder = shop.store.path(made.data).parent
    flip_a_bit(folder / "data.parquet")
    assert shop.training_set().data.sha256 == made.data.sha256  # built again, of the tables
    subject = f"snapshots/{folder.name}"
    assert refusals(home) == [subject]
    value = json.loads((folder / "value.json").read_text())
    value["num_rows"] += 1
    (folder / "value.json").write_text(json.dumps(value))
    with pytest.raises(SignatureError, match="there is none"):
        shop.training_set()
    named = refusals(home)[-1]
    source, digest = signing.record_path(home, named), named.rpartition("/")[2]
    signing.sign(tmp_path / "stranger", named, {"value.json": digest}, source)
    with pytest.raises(SignatureError, match="does not trust"):
        shop.training_set()


def test_bands_that_were_approved_are_the_bands_that_judge(tmp_path: Path) -> None:
    repo = shutil.copytree(PROJECT_ROOT / "feature_repo" / "flights", tmp_path / "repo")
    settings, config = Settings(tmp_path / "home", repo), read_pipeline_config(repo)
    approved_suites(config, settings)  # never signed: as reviewed as all of the repository
    sign_baseline(settings, config.name, "raw_weather")
    file = repo / "expectations" / "baseline" / "raw_weather.yaml"
    stranger = replace(settings, home=tmp_path / "stranger")
    kept = file.read_bytes()
    for change in (lambda: file.write_bytes(kept + b"#"), file.unlink):
        change()
        with pytest.raises(SignatureError, match=r"raw_weather.*falaj baseline --reviewed"):
            approved_suites(config, settings)
    file.write_bytes(kept)
    sign_baseline(stranger, config.name, "raw_weather")
    record = signing.record_path(settings.home, f"suites/{config.name}/raw_weather")
    shutil.copy(signing.record_path(stranger.home, f"suites/{config.name}/raw_weather"), record)
    with pytest.raises(SignatureError, match="does not trust"):
        approved_suites(config, settings)


@pytest.mark.parametrize(
    ("name", "by_stranger", "trusts", "is_refused"),
    [
        (PROGRAM, True, True, True),
        (MANIFEST, False, True, True),
        (PROGRAM, False, True, False),  # model.json is signed, and holds its digest
        (PROGRAM, True, False, False),
    ],
)
def test_a_backup_with_a_changed_model_is_not_restored_or_not_used(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    by_stranger: bool,
    trusts: bool,
    is_refused: bool,
) -> None:
    world.promoted(0)
    trust, target = tmp_path / "trust", Location.of((tmp_path / "backups").as_uri())
    shutil.copytree(world.home / "keyring" / MODELS, trust / MODELS)
    settings, other = (Settings(home, world.home / "repo") for home in (world.home, tmp_path / "b"))
    whole = back_up(settings, target, {}, lambda line: None)
    change(world.registry, world.version(1), name, tmp_path / "strange" if by_stranger else None)
    if by_stranger and trusts:
        for pem in (tmp_path / "strange" / "keyring" / MODELS).glob("*.pub"):
            shutil.copy(pem, world.home / "keyring" / MODELS)  # who writes the state can do that
        assert not read_version(world.version(1)).damage
    changed = back_up(settings, target, {}, lambda line: None)
    if trusts:
        monkeypatch.setenv("FALAJ_TRUSTED_KEYS", str(trust))
    monkeypatch.setenv("FALAJ_HOME", str(other.home))
    restored = World(RegistryLocation.of(other), other.store, world.dataset)
    if is_refused:
        with pytest.raises(SignatureError, match=r"does not trust|another model\.json"):
            restore(other, target, changed, {}, lambda line: None)
        assert not (other.home / "mlflow").exists()
        restore(other, target, whole, {}, lambda line: None)
        assert not read_version(restored.version(1)).damage
        return
    restore(other, target, changed, {}, lambda line: None)
    with pytest.raises(REFUSED, match="flight-delay"):
        find_champion(NAME, restored.location, other.store)


@pytest.mark.parametrize("by_stranger", [False, True])
def test_an_import_with_a_changed_byte_or_by_a_stranger_is_not_taken(
    tmp_path: Path, by_stranger: bool
) -> None:
    home, publisher, stranger = (tmp_path / name for name in ("home", "publisher", "stranger"))
    config = encoders.write_encoder(tmp_path / "encoder")
    store, sources = ArtifactStore(home / "artifacts"), find_files(config)
    signing.sign(publisher, "encoder", sources.digests, config.folder / "model.sig")
    shutil.copytree(publisher / "keyring" / MODELS, home / "keyring" / "imports")
    assert "signed_by" in export_encoder(config, store).origin
    flip_a_bit(config.folder / WEIGHTS_FILE)
    if by_stranger:
        files = find_files(config).digests
        signing.sign(stranger, "encoder", files, config.folder / "model.sig")
    seen = "does not trust" if by_stranger else "another model.safetensors"
    with pytest.raises(SignatureError, match=seen):
        export_encoder(config, store)
    assert refusals(home) == ["encoder"]
    assert len(store.folders("programs")) == 1


def test_an_encoder_of_somebody_else_is_not_used_to_train(tmp_path: Path) -> None:
    home, store = tmp_path / "home", ArtifactStore(tmp_path / "home" / "artifacts")
    encoders.write_encoder(tmp_path / "encoder")
    spec = EncodedColumn(text="encoder", dimensions=8, max_tokens=encoders.MOST_TOKENS)
    folder = store.path(build_encoder("review", spec, tmp_path, store)[1])
    flip_a_bit(folder / "model.onnx")
    value, key = folder.parent / "value.json", folder.parent.name
    written = value.read_text()
    value.write_text(written.replace(json.loads(written)["sha256"], digest_of(folder)))
    with pytest.raises(SignatureError, match=f"encoders/{key}.*there is none"):
        build_encoder("review", spec, tmp_path, store)
    value.write_text(written)
    assert signing.find_signed(store, "encoders", key, Artifact) is None  # it is built again
    assert refusals(home)[1:] == [f"encoders/{key}"]


def test_a_file_of_a_package_is_the_one_that_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = encoders.write_encoder(tmp_path / "carrier" / "model").folder
    about = tmp_path / "carrier-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    digests = {file: hashlib.sha256(file.read_bytes()).digest() for file in folder.iterdir()}
    lines = (
        f"{file.relative_to(tmp_path)},sha256={urlsafe_b64encode(d).decode().rstrip('=')},1"
        for file, d in digests.items()
    )
    (about / "RECORD").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    config = EncoderConfig(package="carrier", folder=Path("carrier/model"))
    assert find_files(config).digests[WEIGHTS_FILE] == digest_of(folder / WEIGHTS_FILE)
    flip_a_bit(folder / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match=r"carrier/model/model\.safetensors of the package"):
        find_files(config)
