"""The parts of a serving process, with stand-ins for what they are made of, and its start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serving.assembly import ADDRESS_FILE, Components, read_addresses, serve
from serving.config import ServingConfig, checked_config
from tasks.kernel.errors import ConfigurationError


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
        asyncio.run(serve(config, tmp_path, components_of))
    assert found == [None]
