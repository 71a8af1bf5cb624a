"""Backup, restore, prune and the move to a server, on a small state with real stores."""

import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from subprocess import PIPE, Popen
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from falaj.context import Context
from falaj.state import _prepare, backup, migrate, restore
from tasks.governance.journal import Journal
from tasks.governance.verification import verify
from tasks.kernel.errors import ArtifactError, ConfigurationError, StorageError, TransientError
from tasks.kernel.location import Location, object_name
from tasks.kernel.settings import SERVER_NAMES, ArtifactStore, Settings, server_environment
from tasks.kernel.tenants import Tenant, put_tenant
from tasks.metadata.database import USED, held_everywhere, open_database, transaction
from tasks.metadata.tables import models
from tasks.registry.connection import ADDRESS, load_mlflow
from tasks.state import contents
from tasks.state.backup import Kept, back_up, list_backups, read_backup
from tasks.state.backup import restore as restore_state
from tasks.state.databases import copy_sqlite, name_of_state
from tasks.state.move import examine, nobody_else
from tasks.state.move import migrate as move
from tasks.state.prune import plan_pruning
from tasks.state.prune import prune as prune_state
from tests.support.services.servers import new_database
from tests.support.state import Notes, build_notes

pytestmark = pytest.mark.usefixtures("own_environment")
MODEL = "arrivals"
KEPT, OLD = "0123456789abcdef0123", "fedcba98765432100123"


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two databases, as they are when they are new."""
    home = tmp_path_factory.mktemp("new")
    for name, make in _prepare(home).items():
        (home / name).parent.mkdir(exist_ok=True, parents=True)
        make(f"sqlite:///{home / name}")
    return home


@pytest.fixture
def grown(tmp_path: Path, databases: Path) -> Settings:
    """A state with a bit of everything."""
    home = tmp_path / "laptop"
    settings = Settings(home, tmp_path)
    build_notes(settings.store, key=KEPT)
    build_notes(settings.store, "x" * 200_000, OLD)
    link = home / "feature_tables" / "current"
    link.parent.mkdir()
    (home / "artifacts" / "tables" / KEPT / "features").mkdir(parents=True)
    link.symlink_to(f"../artifacts/tables/{KEPT}/features")
    report = home / "reports" / "20260101T000000Z-aa"
    report.mkdir(parents=True)
    (report / "report.json").write_text(json.dumps({"uri": f"artifact:notes/{KEPT}/note.txt"}))
    (home / "reports" / "latest").symlink_to(report.name)
    Journal(home / "audit").append("apply", subject="x")
    (home / "predictions" / "secrets").mkdir(parents=True)
    (home / "predictions" / "secrets" / "mask-key").write_text("secret")
    (home / "run.lock").touch()
    shutil.copytree(databases, home, dirs_exist_ok=True)
    with transaction(open_database(settings.metadata_url)) as connection:
        connection.execute(models.insert().values(model=MODEL))
    store = tracking(settings)
    experiment = store.create_experiment("of the test")
    store.create_run(experiment, "nobody", int(time.time() * 1000), [], "first")
    return settings


def tracking(settings: Settings):  # type: ignore[no-untyped-def]
    load_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore(settings.mlflow_uri, ADDRESS)  # type: ignore[no-untyped-call]


def nothing(_: str) -> None:
    """Nobody reads progress here."""


def check_same(settings: Settings) -> None:
    """It holds what `grown` made."""
    store = ArtifactStore(settings.home / "artifacts", settings.location)
    notes = store.find("notes", KEPT, Notes)
    assert notes is not None
    assert store.path(notes.text).read_text() == "hello"
    engine = open_database(settings.metadata_url)
    with transaction(engine, reads_only=True) as connection:
        assert connection.execute(sa.select(models.c.model)).scalars().all() == [MODEL]
    mlflow = tracking(settings)
    names = [e.name for e in mlflow.search_experiments()]
    assert "of the test" in names
    assert mlflow.create_experiment("another")  # its numbers go on
    mlflow.engine.dispose()


def test_a_backup_is_restored_under_another_path(
    grown: Settings, location: Location, tmp_path: Path
) -> None:
    context = Context(grown)
    backup(location.url, context=context)
    sent = location.entries("objects")
    backup(location.url, context=context)
    assert {*location.entries("objects")} - {*sent} == set()
    shown = backup(location.url, listed=True, context=context)
    assert len(shown.facts["backups"]) == 2
    backup(location.url, verify=True, context=context)
    there = Settings(tmp_path / "elsewhere", tmp_path)
    grown.home.rename(tmp_path / "away")
    restore(location.url, context=Context(there))
    check_same(there)
    assert not (there.home / "predictions").exists()
    assert (there.home / "feature_tables" / "current").resolve().is_relative_to(there.home)
    assert (there.home / "reports" / "latest" / "report.json").is_file()
    assert verify(Journal(there.home / "audit")).faults == ()
    with pytest.raises(ConfigurationError, match="holds state already"):
        restore(location.url, context=Context(there))


def test_what_a_linked_folder_holds_is_of_the_state(grown: Settings, tmp_path: Path) -> None:
    target, elsewhere = Location.of((tmp_path / "backups").as_uri()), tmp_path / "large-disk"
    (grown.home / "artifacts" / "notes" / KEPT / "model").mkdir()
    for name in (".hidden", "lock"):
        (grown.home / "artifacts" / "notes" / KEPT / "model" / name).touch()
    (grown.home / "artifacts").rename(elsewhere)
    (grown.home / "artifacts").symlink_to(elsewhere)
    made = back_up(grown, target, {}, nothing)
    there = Settings(tmp_path / "elsewhere", tmp_path)
    restore_state(there, target, made, {}, nothing)
    check_same(there)
    assert (there.home / "feature_tables" / "current").readlink() == Path(
        f"../artifacts/tables/{KEPT}/features"
    )
    assert len([*(there.home / "artifacts" / "notes" / KEPT / "model").iterdir()]) == 2
    elsewhere.rename(tmp_path / "not-mounted")
    with pytest.raises(TransientError, match="mount where it leads"):
        back_up(grown, target, {}, nothing)
    assert list_backups(target) == [made.name]


def test_segments_that_are_merged_during_a_backup_are_in_it(
    grown: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = grown.home / "predictions" / "model=m" / "day=2026-01-01"
    day.mkdir(parents=True)
    small = [day / f"s{number}.parquet" for number in range(3)]
    for file in small:
        file.write_text("row")
    listing = contents.contents

    def listed(*args: Any, **named: Any) -> Iterator[Any]:
        yield from [*listing(*args, **named)]
        if args[1] == contents.OTHERS:
            (day / "merged.parquet").write_text("rowrowrow")
            for file in small:
                file.unlink(missing_ok=True)

    monkeypatch.setattr("tasks.state.backup.state.contents", listed)
    made = back_up(grown, Location.of((tmp_path / "backups").as_uri()), {}, nothing)
    there = [PurePosixPath(name).name for name in made.files if "day=" in name]
    assert there == ["merged.parquet"]


def test_damage_is_seen_and_what_was_cut_off_goes_on(
    grown: Settings, location: Location, tmp_path: Path
) -> None:
    made = back_up(grown, location, {}, nothing)
    name = f"artifacts/notes/{KEPT}/note.txt"
    object_ = object_name(made.files[name].sha256)
    location.write(object_, b"hellx")
    there = Settings(tmp_path / "elsewhere", tmp_path)
    with pytest.raises(ArtifactError, match="changed or damaged"):
        restore_state(there, location, made, {}, nothing)
    assert not (there.home / "artifacts").exists()
    with pytest.raises(ConfigurationError, match="has not ended; run it again"):
        backup(location.url, context=Context(there))
    location.remove([object_])
    shared = Settings(tmp_path / "s", tmp_path, location=Location.of((tmp_path / "l").as_uri()))
    with pytest.raises(ArtifactError, match="Remove it, run `falaj backup`"):
        restore_state(shared, location, made, {}, nothing)
    assert not (tmp_path / "l").exists()
    back_up(grown, location, {}, nothing)
    work = there.home / "work.json"
    work.touch()
    with pytest.raises(ConfigurationError, match=r"state already, such as work\.json"):
        restore_state(there, location, made, {}, nothing)
    work.unlink()
    restore_state(there, location, made, {}, nothing)
    assert not (there.home / ".restoring").exists()
    check_same(there)


def test_a_file_that_has_not_changed_since_the_last_backup_is_not_read_again(
    grown: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Location.of((tmp_path / "backups").as_uri())
    read: list[str] = []
    copying = shutil.copyfile
    monkeypatch.setattr(
        shutil, "copyfile", lambda path, to: read.append(Path(path).name) or copying(path, to)
    )
    old, young = (grown.home / "reports" / f"{name}.json" for name in ("old", "young"))
    moments = {old: time.time() - 3600, young: time.time()}

    def backed_up() -> dict[str, Kept]:
        read.clear()
        return back_up(grown, target, {}, nothing).files

    def write(text: str) -> None:
        for file, moment in moments.items():
            file.write_text(text)
            os.utime(file, (moment, moment))

    write("one")
    first = backed_up()
    old.chmod(0o600)
    again = backed_up()
    assert (again["reports/old.json"].mode, first["reports/old.json"].mode) == (0o600, 0o644)
    backed_up()
    assert ("old.json" in read, "young.json" in read) == (False, True), "that may have changed"
    write("two")  # of the same length, with the time that it had
    changed = backed_up()
    assert changed["reports/old.json"].sha256 != again["reports/old.json"].sha256


@pytest.mark.parametrize("where", ["s3:/bucket/backups", "gs://bucket", "s3:"])
def test_a_mistyped_place_of_backups_is_refused_and_makes_no_folder(
    grown: Settings, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="expected file:///folder or s3://"):
        backup(where, context=Context(grown))
    assert sorted(tmp_path.iterdir()) == before


def test_keys_of_a_run_under_way_and_a_list_that_is_damaged_stop_no_backup(
    grown: Settings, tmp_path: Path
) -> None:
    target = Location.of((tmp_path / "backups").as_uri())
    keys = grown.home / "training" / "run" / "s3-access.json"
    keys.parent.mkdir(parents=True)
    keys.write_text("{}")
    back_up(grown, target, {}, nothing)
    (newest,) = target.entries("backups")
    target.write(newest, b"half of it")
    made = back_up(grown, target, {}, nothing)
    assert f"artifacts/notes/{KEPT}/note.txt" in made.files
    assert not [name for name in made.files if "s3-access" in name]


def test_an_empty_state_is_refused_and_two_states_do_not_mix(
    grown: Settings, databases: Path, tmp_path: Path
) -> None:
    target, empty = Location.of((tmp_path / "backups").as_uri()), tmp_path / "mistyped"
    with pytest.raises(ConfigurationError, match="holds no state"):
        back_up(Settings(empty, tmp_path), target, {}, nothing)
    assert (empty.exists(), target.entries("")) == (False, {})
    shutil.copytree(databases, tmp_path / "other")
    mine = [back_up(grown, target, {}, nothing) for _ in range(2)]
    other = back_up(Settings(tmp_path / "other", tmp_path), target, {}, nothing)
    with pytest.raises(ConfigurationError, match="several states"):
        read_backup(target)
    assert read_backup(target, of=name_of_state(grown)) == mine[-1]
    found = plan_pruning(grown, 1, timedelta(days=30), target)
    assert (found.backups, other.name in list_backups(target)) == ([mine[0].name], True)
    with pytest.raises(StorageError, match="set TMPDIR"):
        copy_sqlite(grown.metadata_file, tmp_path / "not-there" / "copy.db")


@pytest.mark.slow
def test_a_state_moves_to_a_server_and_from_there_to_a_folder(
    grown: Settings, bucket: str, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of-the-server.yaml"
    file.write_text(f"state: {bucket}\ndatabase: ${{DATABASE}}\n")
    with pytest.raises(ConfigurationError, match="DATABASE, which is not set"):
        migrate(to=file, dry_run=True, context=Context(grown))
    monkeypatch.setenv("DATABASE", new_database(postgres))
    assert migrate(to=file, dry_run=True, context=Context(grown)).facts["moved"] is False
    location = Location.of(bucket)
    assert not location.entries("")
    with monkeypatch.context() as patch:
        patch.setattr("tasks.state.backup._share_links", cut_off)
        with pytest.raises(KeyboardInterrupt):
            migrate(to=file, context=Context(grown))
    assert not (grown.home / "server.yaml").exists()
    migrate(to=file, context=Context(grown))
    assert (grown.home / "server.yaml").stat().st_mode & 0o077 == 0
    assert (location.read("feature_tables/published") or b"").decode() == KEPT
    assert (location.read("reports/newest") or b"").decode() == "20260101T000000Z-aa"
    monkeypatch.setenv("FALAJ_HOME", str(grown.home))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(tmp_path))
    moved = Context().settings
    assert (moved.location, moved.database_url) == (location, os.environ["DATABASE"])
    other = Settings(tmp_path / "b", tmp_path, "", moved.database_url, None, location)
    check_same(other)
    with pytest.raises(ConfigurationError, match="on a server already"):
        migrate(to=file, context=Context(moved))

    made = back_up(other, Location.of((tmp_path / "kept").as_uri()), _prepare(other.home), nothing)
    for name in ("FALAJ_STATE", "FALAJ_DATABASE_URL"):
        monkeypatch.delenv(name)
    back = Settings(tmp_path / "back", tmp_path)
    restore_state(back, Location.of((tmp_path / "kept").as_uri()), made, {}, nothing)
    (back.home / "mlflow" / "mlflow.db").exists()
    assert ArtifactStore(back.home / "artifacts").find("notes", KEPT, Notes) is not None
    with transaction(open_database(back.metadata_url), reads_only=True) as connection:
        assert connection.execute(sa.select(models.c.model)).scalars().all() == [MODEL]


def cut_off(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_move_that_was_cut_off_takes_the_state_as_it_is_then(
    grown: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location.of((tmp_path / "lake").as_uri())
    target = replace(grown, location=location)
    segment = grown.home / "predictions" / "a.parquet"
    segment.touch()
    monkeypatch.setattr("tasks.state.backup._share_links", cut_off)
    with pytest.raises(KeyboardInterrupt):
        move(grown, target, "state: x", {}, nothing)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="holds state already"):
        examine(Settings(tmp_path / "x", tmp_path), replace(target, database_url="-"), None)
    segment.rename(segment.with_name("merged.parquet"))
    shutil.rmtree(grown.home / "artifacts" / "notes" / OLD)
    notes = build_notes(grown.store, "another", OLD)
    examined = open_database(grown.metadata_url).connect()  # so that SQLite's log stays
    with transaction(open_database(grown.metadata_url)) as connection:
        connection.execute(models.insert().values(model="late"))
    move(grown, target, "state: x", {}, nothing)
    assert [*location.entries("predictions")] == ["predictions/merged.parquet"]
    assert ArtifactStore(tmp_path / "b", location).find("notes", OLD, Notes) == notes
    with closing(sqlite3.connect(f"{grown.metadata_file}.moved")) as moved:
        assert ("late",) in moved.execute("SELECT model FROM falaj_governed").fetchall()
    examined.close()


def age_builds(home: Path) -> None:
    """Let all that was made be of long ago."""
    then = (datetime.now(UTC) - timedelta(days=90)).timestamp()
    for file in home.rglob("*"):
        if not file.is_symlink():
            os.utime(file, (then, then))


def test_what_nothing_names_goes_and_what_a_report_names_stays(
    grown: Settings, tmp_path: Path
) -> None:
    target = Location.of((tmp_path / "backups").as_uri())
    back_up(grown, target, {}, nothing)
    newest = back_up(grown, target, {}, nothing)
    assert plan_pruning(grown, 1, timedelta(days=30), None).builds == {}
    age_builds(grown.home)
    age_builds(tmp_path / "backups")
    found = plan_pruning(grown, 1, timedelta(days=30), target)
    assert [*found.builds] == [f"notes/{OLD}"]
    assert grown.store.find("notes", OLD, Notes) is not None
    prune_state(grown, found, target)
    assert grown.store.find("notes", OLD, Notes) is None
    assert list_backups(target) == [newest.name]
    restore_state(Settings(tmp_path / "r", tmp_path), target, read_backup(target), {}, nothing)
    check_same(grown)


def test_content_of_a_location_goes_when_no_build_or_backup_names_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location.of(bucket)
    settings = Settings(tmp_path / "a", tmp_path, "", None, None, location)
    notes = build_notes(settings.store, "y" * 200_000, OLD)
    open_database(settings.metadata_url)
    monkeypatch.setattr("tasks.state.prune.UPLOAD_LIMIT", timedelta())
    back_up(settings, location, {}, nothing)
    found = plan_pruning(settings, 1, timedelta(), location)
    assert [*found.builds] == [f"notes/{OLD}"]
    prune_state(settings, found, location)
    assert location.size(object_name(notes.text.sha256)) == 200_000  # the backup names it
    location.remove(location.entries("backups"))
    prune_state(settings, plan_pruning(settings, 1, timedelta(), location), None)
    assert not location.entries("objects")


def test_what_a_work_pool_runs_elsewhere_keeps_prunes_out_until_it_ends(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("FALAJ_DATABASE_URL", new_database(postgres))
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "of another machine"))
    program = ["infra.orchestration.checked", "sh", "-c", "echo begun; read -r _"]
    with Popen([sys.executable, "-m", *program], stdin=PIPE, stdout=PIPE) as run:
        assert run.stdout and run.stdout.readline() == b"begun\n"  # noqa: PT018
        monkeypatch.setenv("FALAJ_HOME", str(home))
        with pytest.raises(ConfigurationError, match="here or on another"), nobody_else(home):
            pass
        run.communicate(b"\n")
    held_everywhere(home / USED, wait_s=60).__enter__()  # the server noticed


def test_a_server_file_stands_for_variables_and_the_environment_wins(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    assert server_environment(file, {}) == {}
    file.write_text("database: postgresql://u:${PASSWORD}@h/d\nredis: r:6379\n")
    found = server_environment(file, {"PASSWORD": "p", "FALAJ_REDIS": "other:1"})
    assert found == {
        "FALAJ_DATABASE_URL": "postgresql://u:p@h/d",
        "FALAJ_REGISTRY_URL": "postgresql+psycopg://u:p@h/d",
        "FALAJ_PROFILE": "server",
    }
    file.write_text("stat: x\n")
    with pytest.raises(ConfigurationError, match="names stat; expected state, database"):
        server_environment(file, {})


@pytest.mark.parametrize(
    "kept", [("../../outside", ""), ("/outside", ""), ("a/b", "../../outside")]
)
def test_a_backup_that_leads_out_of_the_state_is_refused(
    tmp_path: Path, kept: tuple[str, str]
) -> None:
    location, (name, link) = Location.of((tmp_path / "backups").as_uri()), kept
    made = {"made": datetime.now(UTC).isoformat(), "release": "1", "secrets": False}
    location.write("backups/b.json", json.dumps({**made, "files": {name: {"link": link}}}).encode())
    with pytest.raises(ArtifactError, match="leads out of the state"):
        read_backup(location, "b")


def of_tenant(home: Path, tenant: str) -> Context:
    """What a command of a tenant works on, in a process of its own."""
    for name in {*SERVER_NAMES.values()} & {*os.environ}:
        del os.environ[name]
    os.environ.update({"FALAJ_HOME": str(home), "FALAJ_TENANT": tenant})
    return Context(assume_yes=True)


@pytest.mark.parametrize(("own", "other"), [("red", "blue"), ("", "red"), ("red", "")])
def test_a_location_and_a_database_are_refused_to_other_tenants(
    tmp_path: Path, bucket: str, postgres: str, own: str, other: str
) -> None:
    homes = {"": tmp_path, **{n: put_tenant(tmp_path, n, Tenant()) for n in ("red", "blue")}}
    server = {"state": bucket, "database": new_database(postgres)}
    (homes[own] / "server.yaml").write_text(yaml.safe_dump(server))
    assert of_tenant(tmp_path, own).settings.location == Location(bucket)
    for name, value in server.items():
        (homes[other] / "server.yaml").write_text(yaml.safe_dump({name: value}))
        with pytest.raises(ConfigurationError, match=f"holds the state of {own or 'the instal'}"):
            of_tenant(tmp_path, other).settings  # noqa: B018
    assert {*Location(bucket).entries("")} == {"identity"}


def test_a_backup_of_another_tenant_is_not_restored(tmp_path: Path) -> None:
    place, home = str(tmp_path / "backups"), tmp_path / "inst"
    for name in ("red", "blue"):
        put_tenant(home, name, Tenant())
    settings = of_tenant(home, "blue").settings
    open_database(settings.metadata_url).dispose()
    build_notes(settings.store, "secret")
    backup(place, context=of_tenant(home, "blue"))
    for other in ("red", ""):
        with pytest.raises(ConfigurationError, match="holds the state of blue"):
            restore(place, context=of_tenant(home, other))
        assert not of_tenant(home, other).settings.store.folders("notes")
    restore(place, context=of_tenant(tmp_path / "rehearsal", ""))
