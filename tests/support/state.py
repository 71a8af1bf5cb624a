"""State in a location: buckets, and machines that share one; its journal; what commands say."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from pyarrow.fs import S3FileSystem

from falaj.__main__ import main
from infra.bench.processes import S3_KEY
from tasks.contracts.base import Artifact, Contract
from tasks.governance.journal import Journal
from tasks.governance.verification import verify
from tasks.kernel.settings import ArtifactStore, StagedFolder
from tests.support.host.processes import python
from tests.support.services.servers import s3_server


def make_bucket(endpoint: str, name: str) -> None:
    """Make a bucket of the tests' S3 service."""
    S3FileSystem(
        endpoint_override=endpoint,
        access_key=S3_KEY,
        secret_key=S3_KEY,
        region="us-east-1",
        allow_bucket_creation=True,
    ).create_dir(name)


@contextmanager
def s3_of_environment(bucket: str = "lake") -> Iterator[str]:
    """An S3 service with a bucket, which the environment names; its endpoint."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEY)
        patch.setenv("AWS_REGION", "us-east-1")
        make_bucket(endpoint, bucket)
        yield endpoint


class Notes(Contract):
    """A value that names a file and a folder."""

    text: Artifact
    pages: Artifact


def build_notes(store: ArtifactStore, text: str = "hello", key: str = "k") -> Notes:
    """Build, or find, notes under a key."""

    def write(folder: StagedFolder) -> Notes:
        (folder.path / "note.txt").write_text(text)
        (folder.path / "pages" / "b").mkdir(parents=True)
        (folder.path / "pages" / "1").write_text(f"one {text}")
        (folder.path / "pages" / "b" / "2").write_text("two")
        return Notes(text=folder.artifact("note.txt"), pages=folder.artifact("pages"))

    return store.build_once("notes", key, Notes, write)


APPENDING = """
import sys
from pathlib import Path
from tasks.governance import journal
journal.SHIP_EVERY_S, journal.SHIP_WITHIN_S = float(sys.argv[3]), 60
for number in range(int(sys.argv[2])):
    journal.Journal(Path(sys.argv[1])).append("push", rows=number, outcome="ok")
"""


def appending(journal: Journal, count: int, ships_every_s: float = 0) -> Popen[str]:
    """A process that appends lines to a journal."""
    return python("-c", APPENDING, str(journal.folder), str(count), str(ships_every_s))


def act(journal: Journal, count: int = 1) -> None:
    """Append lines to a journal."""
    for number in range(count):
        journal.append("push", rows=number, outcome="ok")


def faults(journal: Journal) -> list[tuple[str, str]]:
    """Kind and place of what is wrong with a journal."""
    return [(fault.kind, fault.where) for fault in verify(journal).faults]


def acts(home: Path, action: str) -> list[dict[str, Any]]:
    """The lines of a state's journal about one kind of act."""
    lines = [line.content for line in Journal(home / "audit").lines()]
    return [line for line in lines if line.get("action") == action]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What a command says as JSON."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def become(patch: pytest.MonkeyPatch, home: Path, url: str) -> None:
    """Let this process be a machine with a disk of its own."""
    patch.setenv("FALAJ_HOME", str(home))
    patch.setenv("FALAJ_STATE", url)
