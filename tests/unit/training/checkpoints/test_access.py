from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError
from tasks.training.checkpoints.access import (
    FILE_NAME,
    S3Access,
    access_handed_over,
    read_access,
)
from tasks.training.checkpoints.config import CheckpointConfig

CONFIG = CheckpointConfig(uri="s3://bucket/prefix")
SECRET = "marker-of-a-secret-77d1"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": f"{SECRET}-token",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
}


def test_the_keys_travel_in_a_file_that_is_the_owners_alone_and_gone_in_the_end(
    tmp_path: Path,
) -> None:
    with access_handed_over(CONFIG, tmp_path, KEYS):
        file = tmp_path / FILE_NAME
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        access = read_access(tmp_path)
        assert access.arguments() == {
            "endpoint_override": "http://127.0.0.1:9000",
            "region": "eu-west-1",
            "access_key": "key",
            "secret_key": SECRET,
            "session_token": f"{SECRET}-token",
        }
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_gone_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), access_handed_over(CONFIG, tmp_path, KEYS):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_driver_left_is_replaced_or_removed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{}")
    with access_handed_over(CONFIG, tmp_path, KEYS):
        assert read_access(tmp_path).access_key_id == "key"
    (tmp_path / FILE_NAME).write_text("{}")
    with access_handed_over(CheckpointConfig(), tmp_path, KEYS):
        assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / FILE_NAME).symlink_to(target)
    with access_handed_over(CONFIG, tmp_path, KEYS):
        assert not (tmp_path / FILE_NAME).is_symlink()
    assert not target.exists()


def test_checkpoints_on_a_disk_need_no_file(tmp_path: Path) -> None:
    with access_handed_over(CheckpointConfig(), tmp_path, KEYS):
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ConfigurationError, match="which the driver writes for its ranks"):
            read_access(tmp_path)


def test_without_keys_the_machines_own_chain_is_asked() -> None:
    assert S3Access.of_driver({}).arguments() == {}


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="the other is not") as caught:
        S3Access.of_driver({name: SECRET})
    assert SECRET not in str(caught.value)


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    assert SECRET not in repr(S3Access.of_driver(KEYS))
    (tmp_path / FILE_NAME).write_text(f'{{"secret_access_key": "{SECRET}", "unknown": "{SECRET}"}}')
    with pytest.raises(ConfigurationError, match="start the run again") as caught:
        read_access(tmp_path)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
