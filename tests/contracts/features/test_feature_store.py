"""The embedded Feast store on real rows: materialization, retrieval, what they must never do."""

from datetime import timedelta
from pathlib import Path

import duckdb
import pandas as pd
import pytest
import yaml

from tasks.features.declared.queries import read_query
from tasks.kernel.errors import DataContractError
from tests.support.data.installation import Installation, Refreshed
from tests.support.data.repository import SmallRepository, days
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


def test_a_snapshot_holds_every_labelled_row_once_and_counts_the_others(
    ten_days: Refreshed,
) -> None:
    installation, tables = ten_days
    snapshot = installation.snapshot(tables, days(2, 8))
    rows = installation.rows(snapshot)
    flights = installation.repository.read("flights")
    landed = flights[flights["arr_delay"] != "NA"]
    counted = {e.reason: e.num_rows for e in snapshot.excluded}
    assert rows["flight_id"].is_unique
    assert set(rows["is_late"]) == {0, 1}
    assert len(rows) == snapshot.num_rows
    assert counted["cancelled"] + counted["diverted"] + len(rows) == pytest.approx(
        len(flights) * 0.8, rel=0.1
    )
    assert len(rows) <= len(landed)
    assert set(rows) >= {*snapshot.columns.categorical, *snapshot.columns.numeric}


@proves(Promise.NO_FUTURE, "features before the moment are unchanged")
def test_outcomes_after_a_moment_change_no_feature_before_it(
    ten_days: Refreshed, tmp_path: Path
) -> None:
    """The future is spoilt: whatever landed or was observed after T now says something else."""
    installation, tables = ten_days
    moment = days(0, 7).end
    spoilt = SmallRepository(tmp_path, num_days=10)
    flights = spoilt.read("flights")
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        for name in ("flights", "airports"):
            file = spoilt.path / "raw" / f"{name}.csv"
            con.execute(f"CREATE VIEW {name} AS SELECT * FROM read_csv('{file}', nullstr = 'NA')")
        query = (spoilt.path / "sql" / "flight_times.sql").read_text()
        times = con.execute(f"SELECT time_hour, carrier, flight, origin, landed_at FROM ({query})")
        landed_at = times.df()
    landed_at["time_hour"] = landed_at["time_hour"].dt.strftime("%Y-%m-%dT%H:%M:%SZ")
    landed_at["flight"] = landed_at["flight"].astype(str)
    merged = flights.merge(landed_at, on=["time_hour", "carrier", "flight", "origin"], how="left")
    later = (merged["landed_at"] > moment).to_numpy()
    for column in ("arr_delay", "dep_delay"):
        flights.loc[later, column] = (flights.loc[later, column].astype(int) + 500).astype(str)
    spoilt.write("flights", flights)
    weather = spoilt.read("weather")
    unseen = pd.to_datetime(weather["time_hour"], utc=True) > moment - timedelta(hours=1)
    weather.loc[unseen, "temp"] = "-99"
    spoilt.write("weather", weather)
    other = Installation(tmp_path / "home", spoilt)
    spoilt_rows = other.rows(other.snapshot(other.refresh(days(0, 10)), days(0, 10)))
    honest_rows = installation.rows(installation.snapshot(tables, days(0, 10)))

    def known(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[rows["event_timestamp"] <= moment].drop(columns="is_late")

    assert later.sum() > 1000
    assert (~later).sum() > 1000
    pd.testing.assert_frame_equal(known(spoilt_rows), known(honest_rows))
    assert not spoilt_rows["weather__temp"].equals(honest_rows["weather__temp"])


@proves(Promise.NO_FUTURE, "shifted times show in the features")
def test_a_feature_changes_when_its_event_times_are_shifted(
    ten_days: Refreshed, tmp_path: Path
) -> None:
    installation, tables = ten_days
    shifted = SmallRepository(tmp_path, num_days=10)
    use_case = shifted.path / "use_case.yaml"
    described = yaml.safe_load(use_case.read_text())
    for table in described["features"]["feature_tables"]:
        if table["name"] in ("carrier_stats", "weather"):
            asked = read_query(shifted.path, table["sql"], table.pop("parameters", {}))
            for bound in ("getvariable('window_start')", "getvariable('window_end')"):
                asked = asked.replace(bound, f"({bound} - INTERVAL 3 HOURS)")
            table["sql"] = f"sql/{table['name']}_late.sql"
            table["lookback_hours"] += 3
            (shifted.path / table["sql"]).write_text(
                "SELECT * REPLACE (event_timestamp + INTERVAL 3 HOURS AS event_timestamp, "
                f"created + INTERVAL 3 HOURS AS created) FROM ({asked})"
            )
    use_case.write_text(yaml.safe_dump(described))
    other = Installation(tmp_path / "home", shifted)
    late = other.rows(other.snapshot(other.refresh(days(0, 10)), days(2, 6)))
    honest = installation.rows(installation.snapshot(tables, days(2, 6)))
    for column in ("carrier_stats__arr_delay_3h", "weather__temp"):
        assert (late[column] != honest[column]).mean() > 0.5
    assert late["origin_stats__arr_delay_3h"].equals(honest["origin_stats__arr_delay_3h"])


def test_a_window_that_was_not_refreshed_is_refused(ten_days: Refreshed) -> None:
    installation, tables = ten_days
    with pytest.raises(
        DataContractError, match=r"not covered .* run `falaj features refresh 2013-01-11"
    ):
        installation.snapshot(tables, days(5, 10))
