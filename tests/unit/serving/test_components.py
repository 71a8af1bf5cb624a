"""The parts of a serving process, with stand-ins for what they are made of, and its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serving.assembly import ADDRESS_FILE, Components, ServingProcess, read_addresses
from serving.components import CheckedLog
from serving.config import ServingConfig, checked_config
from serving.errors import NotReadyError, OverloadedError
from serving.interfaces import VersionState
from serving.log.prediction_log import PredictionLog
from tasks.kernel.errors import ConfigurationError
from tasks.predictions.config import PredictionLogConfig
from tests.support.data.builders import frame
from tests.support.serving.served_rows import MODEL, SIGNATURE, batch_of, call, signature_of

FRAME = frame(10)


class OneModel:
    def states(self) -> list[VersionState]:
        return [VersionState(MODEL, "1", "READY")]

    def signature(self, model: str, version: str | None = None) -> Any:
        return SIGNATURE


class Keys:
    is_away = True

    def keys_of(self, model: str) -> frozenset[str]:
        if self.is_away:
            raise NotReadyError("the feature registry is away")
        return frozenset({"tailnum"})


def made(home: Path, keys: Keys, *masked: str) -> tuple[CheckedLog, PredictionLog]:
    log = PredictionLog(PredictionLogConfig(masked=masked), home, signature_of)
    return CheckedLog(log, OneModel(), keys), log  # type: ignore[arg-type]


def test_a_hidden_entity_key_is_no_misspelt_name_while_keys_cannot_be_read(tmp_path: Path) -> None:
    keys = Keys()
    checked, log = made(tmp_path, keys, "tailnum")
    checked.look()  # as at the start, which it does not end
    log.start()
    checked.served(batch_of(FRAME.head(2), ["a", "b"]))
    checked.refused(call(1, "r"), OverloadedError("full"))
    keys.is_away = False
    checked.served(batch_of(FRAME.head(3), ["c", "d", "e"]))
    log.stop()
    counters = log.counters()
    assert (counters["dropped_rows"]["unchecked"], counters["logged_rows"]) == (3, 3)


def test_a_misspelt_name_ends_the_start_once_all_names_are_known(tmp_path: Path) -> None:
    keys = Keys()
    checked, _ = made(tmp_path, keys, "tailnumb")
    checked.look()
    keys.is_away = False
    with pytest.raises(ConfigurationError, match="tailnumb"):
        checked.look()


def test_what_a_killed_process_said_of_itself_is_gone_while_the_next_one_starts(
    tmp_path: Path,
) -> None:
    """Whoever is to end the process would end another program, whose number it is by now."""
    file = tmp_path / ADDRESS_FILE
    file.parent.mkdir()
    file.write_text('{"pid": 1, "http": "http://127.0.0.1:1"}')
    config = checked_config(
        {"http": {"port": 0}, "admin": {"port": 0}, "grpc": {"enabled": False}}, "the test"
    )
    found = []

    def components_of(config: ServingConfig, home: Path) -> Components:
        found.append(read_addresses(home))
        raise ConfigurationError("a part cannot be made")

    with pytest.raises(ConfigurationError, match="cannot be made"):
        asyncio.run(ServingProcess(config, tmp_path, components_of).run())
    assert found == [None]
