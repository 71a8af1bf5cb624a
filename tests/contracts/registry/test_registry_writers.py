"""Many processes write one registry at once, and nothing is lost."""

from pathlib import Path

import pytest

from tasks.features.access.store import open_store
from tests.support.data.repository import SmallRepository
from tests.support.host.processes import run_python

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WRITERS = """
import os, signal, sys
from pathlib import Path
from feast import Entity, ValueType
from tasks.features.access.store import open_store
import feast.infra.compute_engines.local.compute, feast.infra.registry.sql  # once, before forking
import tasks.features.access.provider
import tasks.features.offline.store, tasks.features.online.sqlite_store

home, repo, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def write(name, count, told):
    store = open_store(home, repo)
    for number in range(count):
        entity = Entity(name=f"e{name}_{number}", join_keys=["k"], value_type=ValueType.STRING)
        store.apply([entity])
        os.write(told, f"{entity.name}\\n".encode())

def start(name, count, told):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            write(name, count, told)
            code = 0
        finally:
            os._exit(code)
    return pid

if what == "together":
    pids = [start(writer, 5, 1) for writer in range(4)]
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))

for attempt in range(3):  # killed ever later
    told, telling = os.pipe()
    pid = start(attempt, 1000, telling)
    os.close(telling)
    names = b""
    while names.count(b"\\n") < 2 + attempt:
        names += os.read(told, 100)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(told, 100):
        names += more
    os.close(told)
    os.write(1, names)
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return SmallRepository(tmp_path, num_days=1).path


def written_by(program: str, home: Path, repo: Path) -> set[str]:
    """Names of the entities that its processes had applied when they ended or were killed."""
    done = run_python("-c", WRITERS, str(home), str(repo), program, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_four_processes_that_apply_at_once_lose_nothing(repo: Path, tmp_path: Path) -> None:
    written = written_by("together", tmp_path / "home", repo)
    assert len(written) == 20
    assert entities(tmp_path / "home", repo) == written


@pytest.mark.slow
def test_a_registry_stays_whole_when_its_writer_is_killed(repo: Path, tmp_path: Path) -> None:
    written = written_by("killed", tmp_path / "home", repo)
    assert len(written) >= 9
    # One that was being applied may be there too, though its writer could not say so any more.
    assert written <= entities(tmp_path / "home", repo)


def entities(home: Path, repo: Path) -> set[str]:
    return {e.name for e in open_store(home, repo).list_entities()} - {"__dummy"}
