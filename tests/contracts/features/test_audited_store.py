"""What the SDK does with the feature store is in the audit; Feast's own tools read the profiles."""

import asyncio
import getpass
from datetime import UTC, datetime, timedelta

import pandas as pd
import pyarrow as pa
import pytest

from falaj.__main__ import main
from tasks.governance.journal import on_behalf_of
from tasks.kernel.errors import FeatureStoreError, WindowError
from tests.support.data.installation import GATES, Installation
from tests.support.data.repository import days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
WINDOW = days(0, 1)
SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """One day, applied and materialized on behalf of a flow run."""
    installation = Installation.at(tmp_path_factory.mktemp("one"), num_days=1)
    with on_behalf_of("0f8b5f0e"):
        installation.materialize(installation.refresh(WINDOW), WINDOW)
    return installation


def test_an_apply_says_which_views_and_who(made: Installation) -> None:
    begun, done = made.acts("apply")[:2]
    assert (begun["outcome"], done["outcome"]) == ("begun", "ok")
    assert "weather" in done["subject"]["views"]
    assert done["who"]["user"] == getpass.getuser()
    assert done["flow_run"] == "0f8b5f0e"
    assert done["project"] == "flights"


def test_a_materialization_says_its_window_of_each_view_and_the_registry_it_saw(
    made: Installation,
) -> None:
    done = [act for act in made.acts("materialize") if act["outcome"] == "ok"]
    assert len({tuple(act["subject"]["views"]) for act in done}) == 7
    last = WINDOW.end - timedelta(microseconds=1)
    assert {act["window"]["end"] for act in done} == {last.isoformat()}
    assert all(act["registry_version"] for act in done)


def test_a_historical_read_says_views_and_counts_and_no_key_or_value(made: Installation) -> None:
    at = pd.Timestamp(WINDOW.start) + pd.Timedelta(hours=20)
    frame = pd.DataFrame({"origin": ["JFK", "EWR"], "event_timestamp": [at, at]})
    store = made.open(made.refresh(WINDOW))
    store.get_historical_features(frame, ["weather:temp"]).to_df()
    query = f"SELECT 'JFK' AS origin, TIMESTAMPTZ '{at}' AS event_timestamp"
    store.get_historical_features(query, ["weather:temp"]).to_arrow()
    by_frame, by_query = made.acts("historical-read")[-2:]
    assert (by_frame["entity_rows"], by_frame["rows"], by_frame["outcome"]) == (2, 2, "ok")
    assert len(by_query["query_sha256"]) == 64
    assert b"JFK" not in b"".join(line.text for line in made.trail.lines())


def test_a_read_that_fails_is_told_as_one(made: Installation) -> None:
    store = made.open(made.refresh(WINDOW))
    job = store.get_historical_features("SELECT 1 AS one", ["weather:temp"])
    with pytest.raises(FeatureStoreError):
        job.to_df()
    assert made.acts("historical-read")[-1]["outcome"] == "failed: FeatureStoreError"


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """One with a view that can be pushed to; nothing is online."""
    installation = Installation.at(tmp_path_factory.mktemp("gates"), num_days=1)
    (installation.repository.path / "gates.py").write_text(GATES)
    installation.apply()
    return installation


def pushed_rows(**times: object) -> pd.DataFrame:
    usual: dict[str, object] = {"event_timestamp": WINDOW.start, "created": WINDOW.start}
    good, odd = usual, {**usual, **times}
    return pd.DataFrame([{"origin": "JFK", "temp": 51.0, **row} for row in (good, odd)])


@pytest.mark.parametrize("column", ["event_timestamp", "created"])
@pytest.mark.parametrize(
    ("moment", "wrong"),
    [
        (SOON, "reaches "),
        ("2099-01-01T00:00:00Z", r"reaches 2099-01-01"),
        (None, "has a null"),
        ("NaT", "has a null"),
        ("2013-01-01T06:00:00", "without a time zone"),
        ("yesterday evening", "is no time"),
    ],
)
def test_a_push_whose_times_cannot_be_is_refused_in_every_way_to_push(
    gates: Installation, column: str, moment: object, wrong: str
) -> None:
    """The newer value wins, so one of 2099 would keep out all that come after it."""
    rows = pushed_rows(**{column: moment})
    if not isinstance(moment, datetime | None):
        rows[column] = [moment, moment]  # a column of texts or numbers, as HTTP brings it
    store = gates.open()
    view = store.get_feature_view("gate_weather")
    provider = store._get_provider()
    ways = (
        lambda: store.push("gates", rows),
        lambda: store.write_to_online_store("gate_weather", rows),
        lambda: asyncio.run(store.write_to_online_store_async("gate_weather", rows)),
        lambda: provider.ingest_df_to_offline_store(view, pa.Table.from_pandas(rows)),
    )
    for way in ways:
        with pytest.raises(WindowError, match=rf"gate_weather: column {column} .*{wrong}"):
            way()


def test_a_push_of_now_by_a_clock_a_little_ahead_can_be_read(gates: Installation) -> None:
    now = datetime.now(UTC) + timedelta(minutes=2)
    gates.open().push("gates", pushed_rows(event_timestamp=now, created=now).tail(1))
    assert gates.online("gate_weather:temp", origin="JFK") == pytest.approx(51.0)


def test_the_command_shows_the_trail_and_notices_a_removed_line(
    made: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--home", str(made.home), "audit"]
    assert main([*arguments, "show", "--action", "materialize"]) == 0
    said = capsys.readouterr().out
    assert "materialize     ok" in said
    assert f"{getpass.getuser()}: weather" in said
    assert "apply" not in said
    assert main([*arguments, "verify"]) == 0
    (file,) = (made.home / "audit").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2] + lines[3:]))
    try:
        assert main([*arguments, "verify"]) == 4
        assert f"cut: {file.name} line 3" in capsys.readouterr().out
        file.write_bytes(file.read_bytes() + b"\xff\nnull\n")
        for options, shown in (([], "is no line of a"), (["--json"], '"action": "materialize"')):
            assert main([*arguments, *options]) == 0
            assert shown in capsys.readouterr().out
    finally:
        file.write_bytes(b"".join(lines))
