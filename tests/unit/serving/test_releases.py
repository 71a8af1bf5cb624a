"""A process begins with the tracks that the others have, and follows what is decided anywhere."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serving.config import checked_config
from serving.errors import NotReadyError
from serving.releases import FollowedReleases
from tasks.contracts.rollout import Action
from tasks.kernel.settings import Settings
from tasks.release.config import ReleaseConfig
from tasks.release.ledger import ReleaseLedger
from tasks.release.records import Decision
from tests.support.release.builders import MODEL
from tests.support.serving.admin_server import admin_server

pytestmark = pytest.mark.anyio


class FakeEngine:
    """Keeps what was set; version 9 cannot be had."""

    def __init__(self, stable: str) -> None:
        self.at: dict[str, str | None] = {"stable": stable, "candidate": None, "shadow": None}
        self.changed = asyncio.Event()
        self.failures: list[Exception] = []

    def tracks(self, model: str) -> Mapping[str, str | None]:
        return self.at

    async def set_tracks(self, model: str, tracks: Mapping[str, str | None]) -> None:
        if model == "another":
            raise RuntimeError("fails at each look")
        if self.failures:
            raise self.failures.pop()
        if "9" in tracks.values():
            raise NotReadyError("version 9 is not as recorded")
        self.at |= tracks
        self.changed.set()


def followed(home: Path, engine: Any) -> FollowedReleases:
    settings = Settings(home=home, feature_repo=home)
    models = [{"name": name, "on_move": "offer"} for name in ("another", MODEL)]
    values = {"models": models, "poll_s": 0.02}
    return FollowedReleases(engine, settings, checked_config(values, "the test"))


async def begun(home: Path, stable: str) -> str | None:
    """The stable version of a process that has begun, the alias naming another perhaps."""
    engine = FakeEngine(stable)
    releases = followed(home, engine)
    await releases.start()
    await releases.stop()
    return engine.at["stable"]


def ledger(home: Path) -> ReleaseLedger:
    return ReleaseLedger(Settings(home=home, feature_repo=home).metadata_url)


async def test_a_later_process_has_the_tracks_of_the_others_though_the_alias_has_moved(
    tmp_path: Path,
) -> None:
    with admin_server(tmp_path):
        assert await begun(tmp_path, "2") == "1"


async def test_alone_it_serves_what_the_alias_names(tmp_path: Path) -> None:
    (tmp_path / "serving" / "secrets").mkdir(parents=True)
    another = {"pid": 1, "admin": "http://127.0.0.1:9"}
    (tmp_path / "serving" / "server-1.json").write_text(json.dumps(another))
    (tmp_path / "serving" / "secrets" / "admin-token").write_text("of one that was killed")
    assert await begun(tmp_path, "2") == "2"


async def test_what_is_decided_on_another_machine_is_followed(tmp_path: Path) -> None:
    engine, book = FakeEngine("1"), ledger(tmp_path)
    releases = followed(tmp_path, engine)
    await releases.start()
    book.open("another", "1", "2", ReleaseConfig(), "a test", can_split=True)
    engine.failures.append(RuntimeError("unforeseen"))  # the next look sets them
    release = book.open(MODEL, "1", "2", ReleaseConfig(), "a test", can_split=True)
    await asyncio.wait_for(engine.changed.wait(), 60)
    assert engine.at == {"stable": "1", "candidate": "2", "shadow": "2"}
    engine.changed.clear()
    book.decide(release, Decision(action=Action.ROLL_BACK, rule="", reason=""), "a test")
    await asyncio.wait_for(engine.changed.wait(), 60)
    assert engine.at == {"stable": "1", "candidate": None, "shadow": None}
    await releases.stop()


async def test_where_the_candidate_cannot_be_had_the_version_before_answers_all(
    tmp_path: Path,
) -> None:
    ledger(tmp_path).open(MODEL, "1", "9", ReleaseConfig(), "a test", can_split=True)
    assert await begun(tmp_path, "9") == "1"
