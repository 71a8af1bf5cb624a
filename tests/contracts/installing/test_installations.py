"""Projects and installations side by side: none sees, changes or serves another's values."""

from pathlib import Path

import pytest

from tasks.features.access.store import apply_definitions
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, TransientError
from tests.support.data.installation import Installation
from tests.support.data.profiles import Servers, choose_server, write_profiles
from tests.support.data.repository import days

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")]
WINDOW = days(0, 1)


def installation(
    folder: Path, project: str = "flights", registry: str | None = None
) -> Installation:
    """A state folder and a repository of the project, its registry where it is said."""
    folder.mkdir(exist_ok=True)
    made = Installation.at(folder, num_days=1)
    repo = made.repository.path
    local = write_profiles(repo, project)
    if registry:
        text = local.read_text().replace("sqlite:///${FALAJ_HOME}/feast/registry.db", registry)
        local.write_text(text)
    return made


def fill(made: Installation) -> None:
    made.materialize(made.refresh(WINDOW), WINDOW)


def temperature(made: Installation) -> float | None:
    value: float | None = made.online("weather:temp", origin="JFK")
    return value


def in_celsius(made: Installation) -> None:
    """Another project's view of the same name means something else."""
    weather = made.repository.read("weather")
    weather["temp"] = [str((float(t) - 32) / 1.8) if t != "NA" else t for t in weather["temp"]]
    made.repository.write("weather", weather)


@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_two_projects_share_a_registry_and_see_nothing_of_each_other(
    tmp_path: Path, running: Servers, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shared = f"sqlite:///{tmp_path}/shared.db"
    if kind == "server":
        choose_server(monkeypatch, running, running.new_database())
    flights = installation(tmp_path / "a", "flights", shared)
    airports = installation(tmp_path / "b", "airports", shared)
    in_celsius(airports)
    fill(flights)
    seen = temperature(flights)
    fill(airports)
    other = temperature(airports)
    assert other == pytest.approx((seen - 32) / 1.8, abs=1e-3)
    assert temperature(flights) == seen
    store = airports.open()
    assert {p.name for p in store.list_projects()} == {"flights", "airports"}
    assert len(store.list_feature_views()) == 7
    # What one project drops, and most of its permissions, stays with the other.
    permissions = airports.repository.path / "permissions.py"
    permissions.write_text(permissions.read_text().partition("values_are_read_online =")[0])
    apply_definitions(store)
    assert len(store.list_permissions()) == 1
    assert len(flights.open().list_permissions()) == 5
    assert temperature(flights) == seen


def test_two_installations_of_one_project_cannot_share_a_redis(
    tmp_path: Path, running: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = installation(tmp_path / "a"), installation(tmp_path / "b")
    choose_server(monkeypatch, running, running.new_database())
    fill(first)
    seen = temperature(first)
    fill(second)  # another machine of the same installation
    assert temperature(second) == seen is not None
    monkeypatch.setenv("FALAJ_REGISTRY_URL", running.new_database())
    in_celsius(second)
    with pytest.raises(ConfigurationError, match="belongs to another registry"):
        fill(second)


def test_projects_whose_names_end_alike_cannot_share_a_redis(
    tmp_path: Path, running: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feast removes keys by `*<project>`: dropping a view of one would drop the other's."""
    choose_server(monkeypatch, running, running.new_database())
    fill(installation(tmp_path / "a", "flights"))
    with pytest.raises(ConfigurationError, match="one name ends in the other"):
        fill(installation(tmp_path / "b", "delayed_flights"))


def test_a_state_folder_of_another_project_and_incremental_writes_are_refused(
    tmp_path: Path,
) -> None:
    made = installation(tmp_path)
    store = made.open()
    with pytest.raises(FeatureStoreError, match="materialize a window with a start and an end"):
        store.materialize_incremental(end_date=None)
    apply_definitions(store)
    file = made.repository.path / "feature_store.yaml"
    file.write_text(file.read_text().replace("project: flights", "project: airports"))
    with pytest.raises(ConfigurationError, match="belongs to project flights"):
        made.open()


def test_a_registry_that_does_not_answer_is_told_without_its_password(
    tmp_path: Path, running: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = installation(tmp_path)
    gone = "postgresql+psycopg://feast:secret@127.0.0.1:1/feast"
    choose_server(monkeypatch, running, gone)
    with pytest.raises(TransientError, match="cannot be reached") as raised:
        made.open()
    assert "secret" not in str(raised.value)


def test_the_state_folder_of_the_store_is_closed_to_others(tmp_path: Path) -> None:
    made = installation(tmp_path)
    (made.home / "feast").mkdir(parents=True, mode=0o755)
    fill(made)
    assert (made.home / "feast").stat().st_mode & 0o777 == 0o700
    assert (made.home / "audit").stat().st_mode & 0o777 == 0o700
