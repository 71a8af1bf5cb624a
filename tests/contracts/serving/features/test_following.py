"""Definitions that move, versions that are not as trained, and a store that goes away."""

import asyncio
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from serving.errors import NotReadyError, UnknownModelError
from serving.features.reader import FeastEntityReader
from serving.features.recipe import ModelOrigin
from serving.interfaces import VersionState
from tasks.contracts.base import TimeWindow
from tests.support.serving.entity_stores import MODEL, WATERMARK, Serving, made, reading, request_of

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:feast"), pytest.mark.anyio]


async def asked(reader: FeastEntityReader, serving: Serving) -> dict[str, Any]:
    _, features = await reader.resolve(MODEL, request_of(serving.rows()[:1]))
    return features.report()


async def test_another_definition_than_in_training_is_refused(on_sqlite: Serving) -> None:
    """As where the registry was made again, and gives the same number to something else."""
    pins = on_sqlite.origin.pins
    elsewhere = pins.model_copy(update={"service_definition": "f" * 32})
    dropped = pins.model_copy(update={"service_version": 9})
    views = {**on_sqlite.origin.feature_views, "weather": "f" * 32}
    for change, sentence in (
        ({"pins": elsewhere}, "the registry is of another installation"),
        ({"pins": dropped}, "does not hold any more"),
        ({"pins": None}, "train it again"),
        ({"feature_views": views}, "weather is .* expected ffffffffffff"),
    ):
        async with reading(on_sqlite, on_sqlite.origin.model_copy(update=change)) as reader:
            with pytest.raises(NotReadyError, match=sentence):
                await asked(reader, on_sqlite)
            with pytest.raises(NotReadyError, match=sentence):
                reader.keys_of(MODEL)


async def test_a_model_without_feature_views_takes_no_entities(on_sqlite: Serving) -> None:
    async with reading(on_sqlite, ModelOrigin()) as reader:
        assert reader.keys_of(MODEL) is None
        with pytest.raises(UnknownModelError, match="was not trained on feature views"):
            await asked(reader, on_sqlite)


async def test_what_is_served_is_followed(on_sqlite: Serving) -> None:
    served: list[VersionState] = []
    async with reading(on_sqlite, states=served) as reader:
        with pytest.raises(UnknownModelError, match="is not served here"):
            await asked(reader, on_sqlite)
        served.append(VersionState(MODEL, "1", "READY", tracks=("candidate",)))
        with pytest.raises(NotReadyError, match="is ready in track stable"):
            reader.keys_of(MODEL)
        served.append(VersionState(MODEL, "2", "READY", tracks=("stable",)))
        with pytest.raises(NotReadyError, match="not opened yet"):
            reader.keys_of(MODEL)
        opened = await asked(reader, on_sqlite)  # when it is needed
        assert opened["trained_version"] == "2"
        request = request_of(on_sqlite.rows())
        _, features = await reader.resolve(MODEL, request, track="candidate")
        assert features.recipe.version == "1"
        served[0] = VersionState(MODEL, "1", "READY")
        _, features = await reader.resolve(MODEL, request, track="candidate")
        assert features.recipe.version == "2", "which the engine lets answer for an empty track"
        with pytest.raises(NotReadyError, match="track shadow"):
            await reader.resolve(MODEL, request, track="shadow")
        with pytest.raises(UnknownModelError, match="version '9'"):
            await reader.resolve(MODEL, request, version="9")
        served.clear()
        await reader.follow()
        assert reader.counters()["freshness"] == {}


async def test_a_store_that_went_away_is_not_ready_and_comes_back(on_redis: Serving) -> None:
    """The server is stopped in its tracks, so that a read waits for it in vain."""
    redis = on_redis.server.connect()
    async with reading(on_redis) as reader:
        assert (await asked(reader, on_redis))["views"]["weather"]["state"] == ["fresh"]
        redis.execute_command("CLIENT", "PAUSE", "4000", "ALL")
        with pytest.raises(NotReadyError, match="could not be read") as refused:
            await asked(reader, on_redis)
        assert refused.value.retry_after_s == 1.0
        async with asyncio.timeout(60):
            while True:
                try:
                    assert (await asked(reader, on_redis))["views"]["weather"]["age_s"]
                    break
                except NotReadyError:
                    await asyncio.sleep(0.1)
        assert reader.counters()["refused"]["not_ready"] >= 1


@pytest.mark.slow
async def test_a_changed_definition_leaves_a_model_with_its_own(tmp_path: Path) -> None:
    """In a store of its own: a new version of `weather` is applied and published."""
    serving = made("sqlite", tmp_path / "own", ExitStack())
    repo = serving.installation.repository.path
    async with reading(serving) as reader:
        assert (await asked(reader, serving))["service"] == "flight_delay_v1.v1"
        await asyncio.to_thread(_shorten_ttl, repo)
        await asyncio.to_thread(_materialize, serving)
        async with reading(serving) as anew:
            for one in (reader, anew):
                await one.follow()
                read = await asked(one, serving)
                assert read["service"] == "flight_delay_v1.v1"
                assert read["views"]["weather"]["version"] == 0, "as it was trained"


def _shorten_ttl(repo: Path) -> None:
    file = repo / "definitions.py"
    head, weather = file.read_text().split("weather = FeatureView(")
    assert "timedelta(hours=7)" in weather
    file.write_text(f"{head}weather = FeatureView({weather.replace('hours=7', 'hours=6')}")


def _materialize(serving: Serving) -> None:
    """Apply what changed, bring it online and let readers get it."""
    serving.installation.apply()
    window = TimeWindow(start=WATERMARK - timedelta(days=1), end=WATERMARK)
    serving.installation.materialize(serving.tables, window)
