"""Ten places, each with a flipped byte and by a stranger: not used, and named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.__main__ import main
from flows.config import approved_suites, read_pipeline_config
from serving.config import EngineConfig, ServedModel
from serving.engine.loading import RegistryCatalogue
from serving.engine.versions import LoadedVersion
from serving.errors import NotReadyError
from tasks.contracts.base import ModelVersionRef
from tasks.governance import signing
from tasks.governance.journal import Journal
from tasks.kernel.errors import ArtifactError, RegistryError, SignatureError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.store import MODELS
from tasks.kernel.location import Location
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import (
    MANIFEST_TAG,
    PROGRAM_TAG,
    VARIANTS_TAG,
    RegisteredVersion,
    Registry,
)
from tasks.registry.model_folder import read_version
from tasks.registry.programs import fetch_version, find_champion, find_start
from tasks.registry.promotion import find_champion_state, roll_back, withdraw
from tasks.state.backup import back_up, restore
from tasks.validation.suites import sign_baseline
from tests.support.data.shop import Shop
from tests.support.registry.builders import CONFIG, FEBRUARY, World, comparison, evaluation
from tests.support.serving.served import FLIGHTS, QUICK, ServedHome

NAME = CONFIG.model_name
FILES = {
    "program": "program.pt2",
    "checkpoint": "checkpoint.pt",
    "evaluation": "evaluation.json",
    "manifest": "model.json",
    "list of variants": "variants.json",
    "file of a variant": "variants/*/model.onnx",
    "signature": "model.json.sig",
    "signature of variants": "variants.json.sig",
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusals(home: Path) -> list[str]:
    lines = (line.content for line in Journal(home / "audit").lines())
    return [line["subject"] for line in lines if line["action"] == "refuse-signature"]


def forged(version: RegisteredVersion, place: str, stranger: Path) -> dict[str, str]:
    """Change a file of a version, all digests up to the database, and sign by another key.

    Returns:
        Tags that the stranger has to set in the database.
    """
    folder, tags = version.folder, dict[str, str]()
    (victim,) = folder.glob(FILES[place])
    in_variants = "variants" in FILES[place]
    root = folder / ("variants.json" if in_variants else "model.json")
    before = digest_of(victim.parent if victim.parent != folder else victim)
    if victim.suffix != ".json":
        flip(victim)
    elif victim != root:
        victim.write_text(f"{victim.read_text()} ")
    after = digest_of(victim.parent if victim.parent != folder else victim)
    root.write_text(f"{root.read_text().replace(before, after)} ")
    names = ("variants.json", "variants") if in_variants else ("model.json", *FILES.values())
    found = {n: d for n, d in signing.digests(folder, names).items() if not n.endswith(".sig")}
    signing.sign(stranger, version.subject, found, root.with_name(f"{root.name}.sig"))
    tags[VARIANTS_TAG if in_variants else MANIFEST_TAG] = digest_of(root)
    return {**tags, PROGRAM_TAG: digest_of(folder / "program.pt2")}


@pytest.mark.parametrize("place", FILES)
@pytest.mark.parametrize("by_stranger", [False, True])
def test_what_was_changed_is_not_promoted_trained_on_or_restored(
    world: World, place: str, by_stranger: bool
) -> None:
    world.promoted(0)
    world.promoted(1, against=(comparison("champion:1", 0.004),))
    version = world.version(1)
    if by_stranger and not place.startswith("signature"):
        world.registry.set_tags(version, forged(version, place, world.home / "stranger"))
    else:
        (victim,) = version.folder.glob(FILES[place])
        flip(victim)
    seen, named = world.version(1), Path(FILES[place]).name
    record = read_version(seen)
    assert record.damage
    assert by_stranger or named.removesuffix(".sig") in record.damage[0] or "model" in named
    standing = find_champion_state(NAME, world.location, FEBRUARY)
    assert standing is not None
    assert standing.previous_trouble == "; ".join(record.damage)
    with pytest.raises(RegistryError, match="cannot be rolled back"):
        roll_back(NAME, 2, "it hurts", "order", world.location, FEBRUARY)
    ref = seen.ref
    made = tuple(e.variant for e in record.variants.variants) if record.variants else ()
    assert not world.promote(ref, evaluation(world.store, world.model(0)), made).promoted
    world.registry.set_alias(seen, "champion")
    splits, refused = world.model(0).splits, (RegistryError, SignatureError, ArtifactError)
    if place in ("checkpoint", "manifest", "signature"):
        with pytest.raises(refused):
            find_start(world.dataset, splits, {}, NAME, world.location, world.store)
    if place in ("program", "manifest", "signature"):
        with pytest.raises(refused):
            fetch_version(ref, world.location, world.store)
    if by_stranger or "signature" in place:
        assert seen.subject in refusals(world.home)
        with pytest.raises(SignatureError):
            raise read_version(seen).refused or AssertionError
        assert main(["models", "verify", NAME, "1", "--home", str(world.home)]) == 1


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
@pytest.mark.parametrize(
    "place", ["program", "manifest", "list of variants", "file of a variant", "signature"]
)
def test_what_was_changed_is_not_served(
    served: tuple[ServedHome, ModelVersionRef], tmp_path: Path, place: str, by_stranger: bool
) -> None:
    home, ref = ServedHome.at(tmp_path / "home"), served[1]
    shutil.copytree(served[0].home, home.home)
    registry = Registry(home.location)
    version = registry.confirmed(ref)
    if by_stranger and place != "signature":
        registry.set_tags(version, forged(version, place, tmp_path / "stranger"))
    else:
        for victim in version.folder.glob(FILES[place]):
            flip(victim)
    with pytest.raises(NotReadyError) as told:
        loaded(home, ref)
    assert "flight-delay" in str(told.value)
    if by_stranger or place == "signature":
        assert version.subject in refusals(home.home)


def test_a_champion_is_that_which_was_promoted(world: World) -> None:
    world.promoted(0)
    (record,) = (world.home / "signatures" / "promotions" / "models").rglob("*.sig")
    flip(record)
    with pytest.raises(SignatureError):
        find_champion(NAME, world.location, world.store)
    with pytest.raises(SignatureError):
        world.promoted(1)
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
    flip(version.folder / "program.pt2")
    assert main(["models", "sign", NAME, "1", "--home", str(world.home)]) == 1
    assert "program.pt2 has SHA-256" in capsys.readouterr().err


def test_a_training_set_of_somebody_else_is_not_trained_on(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    made, home = shop.training_set(), shop.settings.home
    folder = shop.store.path(made.data).parent
    flip(folder / "data.parquet")
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
    approved_suites(config, settings)
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


@pytest.mark.parametrize("how", ["flipped", "stranger", "whole"])
def test_a_backup_with_a_changed_model_is_not_restored(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    world.promoted(0)
    trust, target = tmp_path / "trust", Location.of((tmp_path / "backups").as_uri())
    shutil.copytree(world.home / "keyring" / MODELS, trust / MODELS)
    version = world.version(1)
    if how == "stranger":
        world.registry.set_tags(version, forged(version, "program", world.home))
        strange = tmp_path / "strange"
        found = signing.digests(version.folder, ["model.json", "program.pt2"])
        signing.sign(strange, version.subject, found, version.folder / "model.json.sig")
        pems = key_store(strange).public_keys(MODELS)
        for key_id, pem in pems.items():  # who writes the state adds a key to it
            (world.home / "keyring" / MODELS / f"{key_id}.pub").write_bytes(pem)
        assert not read_version(world.version(1)).damage
    settings = Settings(world.home, world.home / "repo")
    backup = back_up(settings, target, {}, lambda line: None)
    if how == "flipped":
        kept = next(k for n, k in backup.files.items() if n.endswith("program.pt2"))
        flip(tmp_path / "backups" / "objects" / kept.sha256[:2] / kept.sha256)
    monkeypatch.setenv("FALAJ_TRUSTED_KEYS", str(trust))
    other = replace(settings, home=tmp_path / "other")
    monkeypatch.setenv("FALAJ_HOME", str(other.home))

    def act() -> None:
        restore(other, target, backup, {}, lambda line: None)

    if how == "whole":
        act()
        restored = World(RegistryLocation.of(other), other.store, world.dataset)
        assert not read_version(restored.version(1)).damage
        return
    with pytest.raises(SignatureError if how == "stranger" else ArtifactError):
        act()
    assert not (other.home / "mlflow").exists()
