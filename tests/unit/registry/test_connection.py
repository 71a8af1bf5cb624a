import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from infra.orchestration.embedded import free_port
from tasks.kernel.errors import FalajError, RegistryError, StorageError, TransientError
from tasks.kernel.settings import Settings
from tasks.registry.connection import (
    RegistryLocation,
    exclusive,
    explained,
    load_mlflow,
    prepare_database,
)

BUSY = "TEMPORARILY_UNAVAILABLE"


@pytest.fixture
def location(tmp_path: Path) -> RegistryLocation:
    return RegistryLocation.of(Settings(home=tmp_path, feature_repo=tmp_path))


@pytest.mark.slow
def test_first_use_sends_no_usage_data_and_prints_nothing(tmp_path: Path) -> None:
    """In a process with hardly any environment: CI's and pytest's variables alone switch it off."""
    program = f"""
import os, threading
from pathlib import Path
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import Registry
from mlflow.telemetry import get_telemetry_client  # somebody imported it before us
before = get_telemetry_client()
home = Path({str(tmp_path)!r})
registry = Registry(RegistryLocation(f"sqlite:///{{home}}/db/mlflow.db", home / "files"))
assert registry.versions("m") == []
assert before is not None and get_telemetry_client() is None
assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"  # for child processes too
assert threading.enumerate() == [threading.main_thread()]
"""
    env = {"PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path / "config")}

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=env, text=True)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == ""


def test_a_database_that_was_being_made_by_a_killed_process_is_made_anew(
    location: RegistryLocation,
) -> None:
    path = location.database_path
    path.parent.mkdir(parents=True)
    for name in (".mlflow.db-new", ".mlflow.db-new-journal"):
        path.with_name(name).write_bytes(b"half a migration")
    path.touch()  # what SQLite leaves when it was killed before its first page

    prepare_database(location)

    assert sorted(p.name for p in path.parent.iterdir()) == ["artifacts", "mlflow.db"]
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_that_is_no_database_is_refused_with_a_sentence(location: RegistryLocation) -> None:
    path = location.database_path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\3\4 this is a zip")

    with pytest.raises(RegistryError, match="is not an SQLite database"):
        prepare_database(location)
    assert path.read_bytes() == b"PK\3\4 this is a zip"


def test_a_lock_held_elsewhere_is_transient_and_free_again_afterwards(
    location: RegistryLocation,
) -> None:
    with (
        exclusive(location),
        pytest.raises(TransientError, match="nothing was changed"),
        exclusive(location, wait_s=0.1),
    ):
        pass
    with exclusive(location, wait_s=0):
        pass


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("database is locked", TransientError),
        ("attempt to write a readonly database", StorageError),
        ("unable to open database file", StorageError),
        ("database or disk is full", StorageError),
        ("database disk image is malformed", RegistryError),
        ("no such table: runs", RegistryError),
    ],
)
def test_what_the_database_says_becomes_an_error_of_ours(
    location: RegistryLocation, said: str, kind: type[FalajError]
) -> None:
    with pytest.raises(kind) as caught, explained(location):
        raise OperationalError("SELECT 1", None, sqlite3.OperationalError(said))

    assert type(caught.value) is kind
    assert str(location.database_path) in str(caught.value)


def test_a_server_that_is_away_is_worth_another_attempt(tmp_path: Path) -> None:
    uri = f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/registry"
    with pytest.raises(TransientError, match=r"the tracking database: .*try again"):
        prepare_database(RegistryLocation(uri, tmp_path))


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("(sqlite3.OperationalError) database is locked", BUSY, TransientError),
        ("connection reset by server", BUSY, TransientError),
        ("Detected out-of-date database schema", "INTERNAL_ERROR", RegistryError),
        ("", "INTERNAL_ERROR", RegistryError),
    ],
)
def test_what_mlflow_says_becomes_an_error_of_ours(
    location: RegistryLocation, said: str, code: str, kind: type[FalajError]
) -> None:
    load_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ErrorCode

    with pytest.raises(kind) as caught, explained(location):
        raise MlflowException(said, error_code=ErrorCode.Value(code))

    assert type(caught.value) is kind
