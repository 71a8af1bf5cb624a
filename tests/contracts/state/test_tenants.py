"""Tenants with servers of their own: S3, PostgreSQL, backups; each is of one tenant."""

import os
from pathlib import Path

import psycopg
import pytest
import yaml

from falaj.context import Context
from falaj.state import backup, restore
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.location import Location
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.kernel.tenants import Tenant, put_tenant
from tasks.metadata.database import open_database
from tests.support.state import build_notes

PAIRS = [("red", "blue"), ("blue", "red"), ("", "red"), ("red", "")]


@pytest.fixture
def home(tmp_path: Path, own_environment: None) -> Path:
    """The state folder of an installation with two tenants, in no project."""
    for name in ("red", "blue"):
        put_tenant(tmp_path / "inst", name, Tenant())
    return tmp_path / "inst"


def command(home: Path, tenant: str, **variables: str) -> Context:
    """What a command of this tenant works on, in a process of its own."""
    for name in [name for name in os.environ if name.startswith("FALAJ_")]:
        del os.environ[name]
    os.environ.update({"FALAJ_HOME": str(home), "FALAJ_TENANT": tenant, **variables})
    return Context(assume_yes=True)


def owned_by(postgres: str, tenant: str) -> str:
    """A database that is a tenant's as the page describes it; its address for that tenant."""
    role = f"{tenant or 'falaj'}_{os.urandom(4).hex()}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        for line in (
            f"CREATE ROLE {role} LOGIN PASSWORD 'x'",
            f"CREATE DATABASE {role} OWNER {role}",
            f"REVOKE CONNECT, TEMPORARY ON DATABASE {role} FROM PUBLIC",
        ):
            connection.execute(line.encode())
    return postgres.replace("//postgres@", f"//{role}@").replace("/postgres?", f"/{role}?")


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_a_location_and_a_database_are_refused_to_other_tenants(
    home: Path, bucket: str, postgres: str, own: str, other: str
) -> None:
    database = owned_by(postgres, own)
    mine, theirs = (home / "tenants" / each if each else home for each in (own, other))
    server = {"state": bucket, "database": database}
    (mine / "server.yaml").write_text(yaml.safe_dump(server))
    settings = command(home, own).settings
    build_notes(ArtifactStore(settings.home / "artifacts", settings.location), "secret")
    objects = Location(bucket).entries("")
    for named in ({"state": bucket}, {"database": database}):
        (theirs / "server.yaml").write_text(yaml.safe_dump(named))
        with pytest.raises(ConfigurationError, match=f"holds the state of {own or 'the instal'}"):
            command(home, other).target  # noqa: B018
    assert Location(bucket).entries("") == objects
    assert command(home, own).settings.location == Location(bucket)


def test_the_role_of_a_tenant_opens_no_other_database(postgres: str) -> None:
    red, blue = (owned_by(postgres, name) for name in ("red", "blue"))
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(f"{red.rpartition('/')[0]}/{blue.rpartition('/')[2]}")
    psycopg.connect(red).close()


def test_a_backup_of_another_tenant_is_not_restored(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "backups")
    settings = command(home, "blue").settings
    open_database(settings.metadata_url).dispose()
    build_notes(settings.store, "secret")
    backup(place, context=command(home, "blue"))
    for other in ("red", ""):
        into = command(home, other).target.home
        before = {*into.rglob("*")} - {into / n for n in ("used.lock", "run.lock")}
        with pytest.raises(ConfigurationError, match="holds the state of blue"):
            restore(place, context=command(home, other))
        assert {*into.rglob("*")} - {into / n for n in ("used.lock", "run.lock")} == before
    restore(place, context=command(tmp_path / "rehearsal", ""))
    assert Settings(tmp_path / "rehearsal", tmp_path).store.folders("notes")
