import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from falaj.context import Context
from infra.orchestration.embedded import only_run
from tasks.contracts.base import Artifact
from tasks.kernel import files
from tasks.kernel.errors import (
    ArtifactError,
    ConfigurationError,
    StorageError,
    refused_writes_explained,
)
from tasks.kernel.files import private_folder, write_atomically
from tasks.kernel.settings import (
    DEFAULT_FEATURE_REPO,
    PROJECT_ROOT,
    ArtifactStore,
    Settings,
    content_key,
    find_project,
)
from tasks.metadata.database import open_database
from tests.support.host.processes import python, wait_until
from tests.support.state import build_notes
from tests.support.suite.promises import Promise, proves


def test_a_finished_build_is_not_repeated(store: ArtifactStore) -> None:
    first = build_notes(store)
    assert build_notes(store, "other") == first
    assert store.path(first.text).read_text() == "hello"
    assert store.num_builds == 1


def test_a_damaged_artifact_is_built_again(store: ArtifactStore) -> None:
    first = build_notes(store)
    store.path(first.text).write_text("tampered")
    assert not store.holds(first.text)
    with pytest.raises(ArtifactError, match="changed or damaged"):
        store.path(first.text)
    assert store.path(build_notes(store).text).read_text() == "hello"


@pytest.mark.parametrize("uri", ["artifact:../../secret", "/etc/passwd", "artifact:/etc/passwd"])
def test_a_uri_that_leaves_the_store_is_refused(store: ArtifactStore, uri: str) -> None:
    with pytest.raises(ArtifactError, match="no artifact of this store"):
        store.path(Artifact(uri=uri, sha256="0" * 64, num_bytes=1))


@proves(Promise.INTERRUPT, "nothing half built is visible")
def test_a_build_killed_midway_shows_nothing_and_is_done_by_the_next(
    store: ArtifactStore, tmp_path: Path
) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tasks.kernel.settings import ArtifactStore\n"
        "from tasks.kernel.values import Artifact\n"
        "def build(folder):\n"
        "    (folder.path / 'half').write_text('x'); Path(sys.argv[2]).touch(); time.sleep(60)\n"
        "ArtifactStore(Path(sys.argv[1])).build_once('notes', 'k', Artifact, build)\n"
    )
    started = tmp_path / "started"
    process = python("-c", program, str(store.root), str(started))
    wait_until(started.exists, "the build has begun")
    process.kill()
    process.wait()
    assert not (store.root / "notes" / "k").exists()
    assert list((store.root / "notes").iterdir())  # what it had begun
    assert store.path(build_notes(store).text).read_text() == "hello"
    assert [folder.name for folder in (store.root / "notes").iterdir()] == ["k"]


def test_no_build_is_begun_on_a_disk_without_space_and_what_is_finished_is_still_read(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = build_notes(store)
    monkeypatch.setattr(files, "LEAST_FREE_BYTES", 1 << 60)
    assert build_notes(store) == finished
    with pytest.raises(StorageError, match=r"Free some space.*nothing was begun"):
        build_notes(store, key="another")


@pytest.mark.parametrize(
    "first_write",
    [
        lambda home: private_folder(home / "platform"),
        lambda home: write_atomically(home / "reports" / "a", "x"),
        lambda home: ArtifactStore(home / "artifacts").build_once(
            "notes", "k", Artifact, lambda folder: folder.artifact(".")
        ),
        lambda home: open_database(f"sqlite:///{home / 'operation' / 'operation.db'}"),
        lambda home: only_run(home).__enter__(),
    ],
    ids=["platform", "file", "artifact", "database", "run"],
)
def test_whatever_makes_the_state_folder_closes_it_to_others(
    tmp_path: Path, first_write: Callable[[Path], object]
) -> None:
    tmp_path.chmod(0o755)
    home = tmp_path / "above" / "state"
    before = os.umask(0o022)
    try:
        first_write(home)
    finally:
        os.umask(before)
    for folder in (home, *(path for path in home.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755  # what was there stays as it was


def test_content_keys_depend_on_every_part(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("1")
    keys = {
        content_key("a", 1),
        content_key("a", 2),
        content_key("a", [1]),
        content_key("a", tmp_path / "code.py"),
    }
    assert len(keys) == 4
    assert content_key({"x": 1, "y": 2}) == content_key({"y": 2, "x": 1})


def test_a_folder_that_cannot_be_made_is_a_refused_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for home in (tmp_path / "file" / "deep", Path("/proc/none")):
        with pytest.raises(StorageError, match="refused a write"), refused_writes_explained(home):
            home.mkdir(parents=True, exist_ok=True)


def test_use_cases_side_by_side_keep_their_feature_state_apart(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copied = repository_of(copy, f"name: {DEFAULT_FEATURE_REPO.name}")
    repos = (PROJECT_ROOT / DEFAULT_FEATURE_REPO, copied, repository_of(copy / "b", "name: other"))
    default, of_a_copy, other = (Settings(home=tmp_path, feature_repo=repo) for repo in repos)
    assert default.features_home == of_a_copy.features_home == tmp_path
    assert other.features_home == tmp_path / "use_cases" / "other"
    assert other.reports == tmp_path / "use_cases" / "other" / "reports"
    assert other.store == default.store


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; begin a project with `falaj init`"),
        ("name: ../../elsewhere", "it names a folder too"),
        ("name: 7", "names the use case 7"),
    ],
)
def test_a_repository_that_names_no_use_case_has_no_state(
    tmp_path: Path, text: str | None, words: str
) -> None:
    settings = Settings(home=tmp_path, feature_repo=repository_of(tmp_path / "repo", text))
    with pytest.raises(ConfigurationError, match=words):
        _ = settings.features_home


def repository_of(folder: Path, text: str | None) -> Path:
    folder.mkdir()
    if text is not None:
        (folder / "use_case.yaml").write_text(text)
    return folder


def test_where_things_are_comes_from_the_environment(tmp_path: Path) -> None:
    own = Settings.from_environment({"FALAJ_HOME": str(tmp_path)})
    assert own.home == tmp_path
    assert own.metadata_url == f"sqlite:///{tmp_path.resolve()}/operation/operation.db"
    address = "postgresql://falaj:hunter2@host/falaj"
    shared = Settings.from_environment({"FALAJ_DATABASE_URL": address})
    assert shared.metadata_url == address
    assert "hunter2" not in repr(shared)


def test_a_project_is_found_from_a_folder_in_it_and_keeps_its_state_beside_its_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = repository_of(tmp_path / "shop", "name: shop")
    (shop / "sql").mkdir()
    monkeypatch.chdir(shop / "sql")
    assert find_project(Path.cwd()) == shop
    found = Settings.from_environment({})
    assert (found.feature_repo, found.home) == (shop, shop / ".falaj")
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environment({"FALAJ_FEATURE_REPO": "shop"}) == found


def test_in_a_checkout_flights_are_the_default_and_all_projects_share_the_state_at_its_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights, traffic = (PROJECT_ROOT / "feature_repo" / name for name in ("flights", "traffic"))
    for folder, project in {PROJECT_ROOT / "docs": flights, traffic / "sql": traffic}.items():
        monkeypatch.chdir(folder)
        found = Settings.from_environment({})
        assert (found.feature_repo, found.home) == (project, PROJECT_ROOT / ".falaj")
    (tmp_path / "feature_repo" / "flights").mkdir(parents=True)
    repository_of(tmp_path / "feature_repo" / "flights" / "x", "name: x")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert find_project(tmp_path) is None


def test_without_a_project_it_is_said_where_was_looked_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"falaj init.*--project") as caught:
        Settings.from_environment({})
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"typo/use_case.yaml does not exist.*--project"):
        Settings.from_environment({"FALAJ_FEATURE_REPO": "typo"})
    assert list(tmp_path.iterdir()) == []
    state_alone = Settings.from_environment({"FALAJ_HOME": "state"})
    assert state_alone.home == tmp_path / "state"
    with pytest.raises(ConfigurationError, match=r"use_case.yaml does not exist.*--project"):
        _ = state_alone.use_case


def test_a_command_tells_what_it_starts_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = repository_of(tmp_path / "shop", "name: shop")
    monkeypatch.delenv("FALAJ_HOME", raising=False)
    monkeypatch.delenv("FALAJ_FEATURE_REPO", raising=False)
    monkeypatch.chdir(shop)
    found = Context().settings
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environment() == found
