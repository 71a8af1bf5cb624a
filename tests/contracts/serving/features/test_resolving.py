"""Requests that name entities, against a real feature store on SQLite and on Redis."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pytest

from serving.errors import BadRequestError, FeaturesRefusedError, OverloadedError, TooLargeError
from serving.features.reader import FeastEntityReader
from tasks.contracts.clock import ClockConfig
from tasks.features.config import OnlineConfig, ViewPolicy
from tests.support.serving.entity_stores import MODEL, WATERMARK, Serving, reading, request_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")
Found = TypeVar("Found")


def ask(
    serving: Serving, question: Callable[[FeastEntityReader], Awaitable[Found]], **config: Any
) -> Found:
    """Ask a reader of its own, at the watermark where nothing else is said."""

    async def asked() -> Found:
        async with reading(serving, **config) as reader:
            return await question(reader)

    return asyncio.run(asked())


def resolve(
    serving: Serving, entities: dict[str, Any], **config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and report."""

    async def question(reader: FeastEntityReader) -> Any:
        inputs, features = await reader.resolve(MODEL, entities)
        return dict(inputs), features.report()

    return ask(serving, question, **config)


def comparable(serving: Serving) -> tuple[pd.DataFrame, datetime]:
    """Rows of the commonest moment that know exactly what is online.

    Not those of an entity of which something new was seen since the watermark, or something older
    became known after the row's moment.
    """
    rows = serving.rows()
    moment = rows["event_timestamp"].mode()[0]
    rows = rows[rows["event_timestamp"] == moment]
    for table in serving.installation.repository.config.feature_tables:
        ref = next(t for t in serving.tables.tables if t.name == table.name)
        known = pd.read_parquet(serving.installation.store.path(ref.artifact))
        times, created = known["event_timestamp"], known["created"]
        unlike = known[(times >= WATERMARK) != (created > moment)]
        keys = list(table.entity_keys)
        changed = set(unlike[keys].itertuples(index=False, name=None))
        kept = [key not in changed for key in rows[keys].itertuples(index=False, name=None)]
        rows = rows.loc[kept]
    return rows, moment.to_pydatetime()


def test_inputs_from_entities_are_those_of_the_snapshots_rows(serving: Serving) -> None:
    rows, moment = comparable(serving)
    assert len(rows) >= 3
    inputs, report = resolve(serving, request_of(rows), moment=moment)
    categorical, numeric = serving.snapshot.columns.model_inputs(rows)
    names = serving.snapshot.columns.numeric
    for position, name in enumerate(names):
        np.testing.assert_array_equal(inputs["numeric"][:, position], numeric[:, position], name)
    np.testing.assert_array_equal(inputs["categorical"], categorical)
    assert np.isfinite(numeric).mean() > 0.7, "rows with values were compared"
    assert report["read_at"] == moment.isoformat()


def test_the_answer_says_which_values_versions_and_ages_were_used(serving: Serving) -> None:
    rows, moment = comparable(serving)
    _, report = resolve(serving, request_of(rows[:2]), moment=moment)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["service"] == "flight_delay_v1.v1"
    weather = report["views"]["weather"]
    assert weather["version"] == 0
    assert weather["definition"] == serving.snapshot.feature_views["weather"]
    seen = datetime.fromisoformat(weather["event_time"][0])
    assert weather["age_s"][0] == (moment - seen).total_seconds()
    assert weather["state"] == ["fresh", "fresh"]
    assert report["given"]["origin"] == rows["origin"].tolist()[:2]
    assert report["features"]["weather__temp"] == pytest.approx(rows["weather__temp"].tolist()[:2])


def test_stale_features_follow_their_policy(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, late = request_of(serving.rows()[:1]), WATERMARK + timedelta(days=3)
    blank, told = resolve(serving, request, moment=late)
    column = serving.snapshot.columns.numeric.index("weather__temp")
    assert np.isnan(blank["numeric"][0, column])
    assert told["views"]["weather"]["state"] == ["stale"]
    assert told["features"]["weather__temp"] == [None]

    def policies(online: OnlineConfig) -> None:
        monkeypatch.setattr(
            "serving.features.reader._read_use_case", lambda repo: (online, ClockConfig())
        )

    policies(OnlineConfig(policy=ViewPolicy(stale="serve"), timeout_s=5))
    served, told = resolve(serving, request, moment=late)
    assert np.isfinite(served["numeric"][0, column])
    assert told["views"]["weather"]["state"] == ["stale"]
    policies(OnlineConfig(view_policies={"weather": ViewPolicy(stale="refuse")}, timeout_s=5))
    with pytest.raises(FeaturesRefusedError, match="feature view weather"):
        resolve(serving, request, moment=late)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"origin": None}, "has no key column origin; flight-delay is read by carrier"),
        ({"weekday": None}, "lacks column weekday"),
        ({"orgin": ["EWR"]}, "has column orgin, which is no key"),
        ({"distance": ["far"]}, "column distance holds 'far', expected a number"),
        ({"carrier": [["UA"]]}, "entity key"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(
    serving: Serving, change: dict[str, Any], sentence: str
) -> None:
    request = request_of(serving.rows()[:1])
    request.update(change)
    asked = {name: values for name, values in request.items() if values is not None}
    with pytest.raises(BadRequestError, match=sentence):
        resolve(serving, asked)


def test_many_at_once_share_reads_and_each_gets_its_own_rows(serving: Serving) -> None:
    rows = serving.rows()

    async def question(reader: FeastEntityReader) -> Any:
        asked = [request_of(rows[n % 5 : n % 5 + 1 + n % 3]) for n in range(60)]
        bad = {**asked[0], "distance": ["far"] * len(asked[0]["distance"])}
        together = await asyncio.gather(
            *(reader.resolve(MODEL, one) for one in asked),
            reader.resolve(MODEL, bad),
            return_exceptions=True,
        )
        alone = [await reader.resolve(MODEL, one) for one in asked[:15]]
        return together, alone, reader.counters()

    together, alone, counters = ask(serving, question)
    assert isinstance(together.pop(), BadRequestError)
    for n, (inputs, features) in enumerate(together):
        same, _ = alone[n % 15]
        np.testing.assert_array_equal(inputs["numeric"], same["numeric"])
        np.testing.assert_array_equal(inputs["categorical"], same["categorical"])
        assert features.answer.num_rows == len(inputs["numeric"])
    assert counters["shared"] >= 20
    assert counters["waiting"] == 0
    assert counters["freshness"]["weather", "fresh"] > 0


def test_what_is_over_the_bounds_is_refused_at_once(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.features.reads.MOST_WAITING", 3)
    request = request_of(serving.rows()[:3])
    with pytest.raises(TooLargeError, match="names 3 entities, expected at most 2"):
        resolve(serving, request, max_rows=2)

    async def question(reader: FeastEntityReader) -> Any:
        return await asyncio.gather(
            *(reader.resolve(MODEL, request) for _ in range(8)), return_exceptions=True
        )

    came = ask(serving, question)
    refused = [one for one in came if isinstance(one, OverloadedError)]
    assert len(refused) == 5
    assert refused[0].retry_after_s == 1.0
