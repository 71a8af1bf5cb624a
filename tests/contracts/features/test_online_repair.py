"""The commands that write a view online again, or forget values there."""

import sqlite3
from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.features.online.materialization import forget_entities
from tasks.governance.erasure import Theirs
from tests.support.data.installation import Installation
from tests.support.data.repository import days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WINDOW = days(0, 2)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    installation = Installation.at(tmp_path_factory.mktemp("installation"), num_days=2)
    tables = installation.refresh(WINDOW)
    installation.materialize(tables, WINDOW)
    installation.publish(tables)
    return installation


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO"):
        monkeypatch.setenv(name, "")  # the command sets them
        monkeypatch.delenv(name)


def run(installation: Installation, *words: str) -> int:
    home, repo = str(installation.home), str(installation.repository.path)
    return main(["--home", home, "--repo", repo, *words])


def result(installation: Installation) -> str:
    return installation.parity(installation.refresh(WINDOW)).result


def spoil(installation: Installation) -> None:
    """Values of an earlier version: from the future, and nobody knows what wrote them."""
    with sqlite3.connect(installation.home / "feast" / "online.db") as connection:
        connection.execute(
            "UPDATE flights_weather AS spoilt SET event_us = event_us + 1000000000000000, "
            "origin_us = NULL, value = (SELECT value FROM flights_weather AS other WHERE "
            "other.entity_key = spoilt.entity_key AND other.feature_name = 'humid') "
            "WHERE feature_name = 'temp'"
        )
    connection.close()


def test_a_rebuilt_view_is_what_its_table_says(
    filled: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(filled)
    assert result(filled) == "different"
    assert run(filled, "features", "rebuild", "weather") == 0
    assert "weather" in capsys.readouterr().out
    assert result(filled) == "equal"
    rebuilt = filled.acts("rebuild")
    assert [line["outcome"] for line in rebuilt] == ["begun", "ok"]
    assert rebuilt[0]["subject"] == {"views": ["weather"]}


def test_an_entity_is_forgotten_in_a_feature_then_in_all_views_and_comes_back(
    filled: Installation,
) -> None:
    station = ("--key", "origin=JFK")
    assert run(filled, "features", "forget", "weather", *station, "--feature", "temp") == 0
    assert filled.online("weather:temp", origin="JFK") is None
    assert filled.online("weather:humid", origin="JFK") is not None
    assert filled.online("weather:temp", origin="LGA") is not None
    assert run(filled, "features", "forget", *station) == 0
    for feature in ("weather:humid", "origin_stats:landed_1h"):
        assert filled.online(feature, origin="JFK") is None
        assert filled.online(feature, origin="LGA") is not None
    assert run(filled, "features", "rebuild") == 0
    assert result(filled) == "equal"
    text = b"".join(line.text for line in filled.trail.lines())
    assert b'"action":"forget"' in text
    assert b"JFK" not in text


def test_an_erased_entity_goes_from_keys_that_it_is_a_part_of_too(filled: Installation) -> None:
    theirs = Theirs(keys={("origin",): {"JFK"}})
    counted = forget_entities(theirs, filled.settings, count_only=True)
    assert counted.keys() >= {"weather", "route_stats"}
    assert filled.online("weather:humid", origin="JFK") is not None
    assert forget_entities(theirs, filled.settings, count_only=False) == counted
    assert forget_entities(theirs, filled.settings, count_only=True) == {}
    assert filled.online("weather:humid", origin="JFK") is None
    assert filled.online("weather:humid", origin="LGA") is not None
    assert run(filled, "features", "rebuild") == 0


def test_a_whole_view_is_forgotten(filled: Installation) -> None:
    assert run(filled, "features", "forget", "weather") == 0
    assert filled.online("weather:temp", origin="LGA") is None
    assert run(filled, "features", "rebuild", "weather") == 0
    assert result(filled) == "equal"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["features", "rebuild", "wether"],
            "feature view wether is not online; there are: carrier_s",
        ),
        (["features", "forget"], "name a feature view, or an entity"),
        (["features", "forget", "weather", "--feature", "tmp"], "has no feature tmp; it has temp"),
        (["features", "forget", "--key", "nobody=1"], "no feature view has the key nobody"),
    ],
)
def test_what_is_not_there_is_named(
    filled: Installation, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(filled, *words) == 2
    assert said in capsys.readouterr().err


def test_nothing_is_rebuilt_where_nothing_is_online(
    filled: Installation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Installation(tmp_path / "home", filled.repository), "features", "rebuild") == 1
    assert "run the feature refresh" in capsys.readouterr().err
