"""`falaj init`: what is proposed of somebody's file can be checked, and what cannot is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from pydantic import ValidationError

from falaj.__main__ import main
from falaj.onboarding import raw
from falaj.onboarding.checks import check_project
from falaj.onboarding.project import begin
from falaj.onboarding.proposal import Wishes
from flows.config import PipelineConfig
from tasks.features.tables import sniffing
from tasks.kernel.errors import ConfigurationError, DataContractError

NUM_ROWS = 1200


def orders() -> pd.DataFrame:
    """Orders of half a year by forty customers, with names and markers as people write them."""
    rng = np.random.default_rng(5)
    seconds = np.sort(rng.integers(0, 180 * 86400, NUM_ROWS))
    moments = pd.Timestamp("2024-01-01") + pd.to_timedelta(seconds, unit="s")
    amounts = np.round(rng.gamma(9, 2, NUM_ROWS), 2).astype(object)
    amounts[::50] = "n/a"
    return pd.DataFrame(
        {
            "Order ID": np.arange(NUM_ROWS),
            "Customer": [f"c{n:02d}" for n in rng.integers(0, 40, NUM_ROWS)],
            "Order Date": moments.strftime("%Y-%m-%d %H:%M:%S"),
            "Amount": amounts,
            "Note": [f"note {n}" for n in range(NUM_ROWS)],
            "Churned": np.where(rng.random(NUM_ROWS) < 0.3, "left", "stayed"),
        }
    )


def series(num_series: int) -> pd.DataFrame:
    """A number every hour for two months, of several places."""
    hours = pd.date_range("2024-01-01", periods=60 * 24, freq="h", tz="UTC")
    place = np.repeat([f"p{n}" for n in range(num_series)], len(hours))
    values = 100 + 20 * np.sin(np.arange(len(hours)) * 2 * np.pi / 24)
    noise = np.random.default_rng(2).normal(0, 3, len(place))
    moments = np.tile(hours, num_series)
    return pd.DataFrame(
        {"hour": moments, "place": place, "load": np.tile(values, num_series) + noise}
    )


def wishes(label: str = "Churned", ask: Callable[[str], str] | None = None, **more: str) -> Wishes:
    said = dict.fromkeys(("time", "key", "label_known_after", "horizon", "time_zone"))
    return Wishes(**{**said, "label": label, "template": "table", "ask": ask, **more})  # type: ignore[arg-type]


def written(rows: pd.DataFrame, folder: Path, name: str = "orders.csv") -> str:
    folder.mkdir(exist_ok=True)
    file = folder / name
    if name.endswith(".csv"):
        rows.to_csv(file, sep=";", index=False)
    elif name.endswith(".json"):
        rows.to_json(file, orient="records", lines=True)
    else:
        rows.to_parquet(file)
    return str(file)


@pytest.mark.parametrize(
    ("rows", "file", "wanted"),
    [
        (orders(), "orders.csv", wishes()),
        (orders(), "orders.csv", wishes(template="events", key="Customer", label_known_after="7d")),
        (orders(), "orders.csv", wishes(key="Order ID")),
        (orders().drop(columns="Customer"), "orders.json", wishes(time_zone="Asia/Muscat")),
        (
            orders().assign(Churned=orders()["Order ID"] % 2),
            "orders.parquet",
            wishes(time="Order Date"),
        ),
        (
            series(2),
            "load.parquet",
            wishes("load", template="timeseries", key="place", horizon="1d"),
        ),
        (series(1), "load.csv", wishes("load", template="timeseries", horizon="6h")),
    ],
    ids=[
        "table",
        "events",
        "key-of-the-row",
        "json-without-key",
        "parquet",
        "several-series",
        "one-series",
    ],
)
def test_what_is_proposed_has_no_mistake(
    rows: pd.DataFrame, file: str, wanted: Wishes, tmp_path: Path
) -> None:
    if file == "orders.parquet":
        rows["Order Date"] = pd.to_datetime(rows["Order Date"])
        rows["Amount"] = pd.to_numeric(rows["Amount"], errors="coerce")
    told = begin(tmp_path / "shop", written(rows, tmp_path / "data", file), wanted)
    report = check_project(tmp_path / "shop")
    assert [f.lines() for f in report.findings if f.severity == "error"] == []
    texts = [path for path in (tmp_path / "shop").rglob("*") if path.is_file()]
    assert len(texts) <= 3
    assert len((tmp_path / "shop" / "use_case.yaml").read_text().splitlines()) <= 40
    assert any(line.startswith("Next") for line in told)


@pytest.mark.parametrize("num_series", [1, 4])
def test_labels_of_a_long_series_are_found_in_a_check(
    num_series: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SAMPLE_ROWS", 1000)
    data = written(series(num_series), tmp_path / "data", "load.parquet")
    key = {"key": "place"} if num_series > 1 else {}
    begin(tmp_path / "p", data, wishes("load", template="timeseries", horizon="1d", **key))
    report = check_project(tmp_path / "p")
    assert report.findings == []
    test = next(split for split in report.splits if split["name"] == "test")
    assert test["rows"] == test["days"] * 24 * num_series
    assert dict(report.leading)["history__season_before_6d"] > 0.5
    file = tmp_path / "p" / "use_case.yaml"
    said = yaml.safe_load(file.read_text()) | {"evaluation": {"min_slice_rows": 90000}}
    file.write_text(yaml.safe_dump(said | {"clock": {"label_hours": 23}}, sort_keys=False))
    found = check_project(tmp_path / "p").findings
    assert [f.check for f in found] == ["no-slice", "early-labels"]
    assert "label_hours: 24" in found[1].action
    assert "label" not in found[0].seen + found[0].expected


def test_dates_are_told_until_somebody_says_when_their_rows_are_known(tmp_path: Path) -> None:
    rows = orders()
    rows["Order Date"] = rows["Order Date"].str[:10]
    begin(tmp_path / "p", written(rows, tmp_path / "data"), wishes(key="Customer"))
    file = tmp_path / "p" / "use_case.yaml"

    def found() -> list[str]:
        return [f.check for f in check_project(tmp_path / "p").findings]

    assert "dates" in found()
    file.write_text(file.read_text().replace("known_after: 1h", "known_after: 1d"))
    assert "dates" in found()
    file.write_text(
        re.sub("( +)(label_known_after)", r"\1predict_after: 1d\n\1\2", file.read_text())
    )
    assert found() == []


def test_a_file_is_described_as_it_is(tmp_path: Path) -> None:
    begin(tmp_path / "shop", written(orders(), tmp_path / "data"), wishes(key="Customer"))
    said = yaml.safe_load((tmp_path / "shop" / "use_case.yaml").read_text())
    table, spec = said["features"]["raw_tables"][0], said["features"]["training_set"]
    assert table["uri"] == "../data/orders.csv"
    assert table["key"] == ["order_id"]
    assert table["rename"]["Order Date"] == table["time_column"] == "order_date"
    assert table["columns"]["amount"] == "DOUBLE"
    assert "n/a" in table["null_text"]
    assert (spec["label"], spec["ignore"]) == ("(churned = 'left')", ["note"])
    assert said["features"]["feature_tables"][0]["entity_keys"] == ["customer"]


def test_what_differs_in_a_later_file_alone_is_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sniffing, "LARGEST_SAMPLE", 800)
    rows = orders().assign(Waited=0, Constant=0)
    rows.loc[len(rows) - 100 :, "Waited"] = 5
    for number, part in enumerate(np.array_split(rows.index, 3)):
        written(rows.loc[part], tmp_path / "data", f"{number}.csv")
    begin(tmp_path / "shop", str(tmp_path / "data"), wishes(key="Customer"))
    said = yaml.safe_load((tmp_path / "shop" / "use_case.yaml").read_text())
    assert said["features"]["training_set"]["ignore"] == ["note", "constant"]


def test_a_column_is_ignored_for_a_reason_that_is_said(tmp_path: Path) -> None:
    rows = orders().assign(Constant=0, shop_id=np.arange(NUM_ROWS) % 7, Nothing="")
    rows["the_weight_of_what_was_sent_to_them"] = [f"1.{n % 500:03d},5" for n in range(NUM_ROWS)]
    told = begin(tmp_path / "shop", written(rows, tmp_path / "data"), wishes(key="Customer"))
    reasons = {
        "note": "texts that hardly come back",
        "constant": "one value only",
        "shop_id": "a number that is a name",
        "nothing": "no value",
        "the_weight_of_what_was_sent_to_them": "decimal commas: make it DOUBLE in staging",
    }
    lines = [line for line in told if "ignored: " in line]
    for line, (name, reason) in zip(lines, reasons.items(), strict=True):
        assert re.match(rf"  (\S+ -> )?{name} +[A-Z]+ +ignored: {reason} ", line), line
    said = wishes()
    begin(tmp_path / "other", written(rows.drop(columns="shop_id"), tmp_path / "data"), said)
    assert "histories are of each customer (--key)" in said.assumed


def test_a_text_of_a_few_values_is_one_of_several_classes(tmp_path: Path) -> None:
    rows = orders()
    rows["Churned"] = np.resize(["left", "stayed", "it's open"], len(rows))
    begin(tmp_path / "shop", written(rows, tmp_path / "data"), wishes())
    said = yaml.safe_load((tmp_path / "shop" / "use_case.yaml").read_text())
    spec = said["features"]["training_set"]
    assert (spec["task"], spec["label"]) == ("multi-class", "churned")
    assert spec["classes"] == ["it's open", "left", "stayed"]
    config = PipelineConfig.model_validate(said)
    assert config.features.training_set.class_names[1] == "left"
    for changes, told in (
        ({"model": "mine:build"}, "needs one a class"),
        ({"release": {"task": "auc"}}, "release.task auc"),
    ):
        with pytest.raises(ValidationError, match=told):
            PipelineConfig.model_validate({**said, **changes})
    with pytest.raises(ConfigurationError, match="a recalibration is for models of one score"):
        config.refuse_several_classes("a recalibration")
    assert not check_project(tmp_path / "shop").findings


def test_what_only_a_person_can_know_is_asked_or_assumed_and_said(tmp_path: Path) -> None:
    data = written(orders(), tmp_path / "data")
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "Asia/Muscat" if "[UTC]" in question else "9d"

    begin(tmp_path / "a", data, wishes(ask=answer))
    said = yaml.safe_load((tmp_path / "a" / "use_case.yaml").read_text())
    assert said["features"]["training_set"]["label_known_after"] == "9d"
    assert said["clock"] == {"time_zone": "Asia/Muscat"}
    assert len(asked) == 2
    told = begin(tmp_path / "b", data, wishes())
    assert sum(line.startswith("Assumed") for line in told) == 3


@pytest.mark.parametrize(
    ("rows", "wanted", "sentence"),
    [
        (orders(), wishes("churn"), "did you mean Churned"),
        (orders().assign(Churned=orders()["Customer"]), wishes(), "one of a few classes"),
        (orders().assign(Churned="left"), wishes(), "two values at least"),
        (orders().assign(**{"Order Date": "31.01.2024"}), wishes(time="Order Date"), "year first"),
        (orders().drop(columns="Order Date"), wishes(), "--time"),
        (pd.concat([orders()] * 2), wishes(), "Remove the copies"),
        (orders().head(40), wishes(label_known_after="1d"), "14 days"),
        (orders(), wishes(label_known_after="a month"), "expected a duration"),
        (series(1), wishes("load", template="timeseries", horizon="90m"), "--horizon"),
        (orders(), wishes(template="timeseries"), "--template events"),
    ],
)
def test_what_cannot_be_a_project_is_refused_and_nothing_written(
    rows: pd.DataFrame, wanted: Wishes, sentence: str, tmp_path: Path
) -> None:
    data = written(rows, tmp_path / "data")
    with pytest.raises((ConfigurationError, DataContractError), match=sentence):
        begin(tmp_path / "shop", data, wanted)
    assert not (tmp_path / "shop").exists()


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    data = written(orders(), tmp_path / "shop")
    begin(tmp_path / "shop", data, wishes())
    with pytest.raises(ConfigurationError, match=r"holds .*use_case.yaml"):
        begin(tmp_path / "shop", data, wishes())


def test_a_shipped_example_is_copied_and_the_commands_answer_with_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(tmp_path / "mine"))
    assert main(["init", str(tmp_path / "mine"), "--template", "traffic"]) == 0
    assert main(["check"]) == 0
    assert "0 error(s)" in capsys.readouterr().out
    file = tmp_path / "mine" / "use_case.yaml"
    file.write_text(file.read_text().replace("task: regression", "task: regresion"))
    assert main(["check", "--json"]) == 2
    assert '"place": "use_case.yaml:' in capsys.readouterr().out
    assert main(["init", str(tmp_path / "new")]) == 2
