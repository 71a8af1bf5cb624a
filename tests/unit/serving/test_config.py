from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from infra.gateway.config import GatewayConfig
from serving.config import ServingConfig, checked_config, read_serving_config, registered_model
from serving.described import all_settings, lines_of
from serving.protocol.http.pages import TOKEN_FILE, admin_token
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings


def test_a_repository_without_the_file_serves_with_defaults(tmp_path: Path) -> None:
    config = read_serving_config(tmp_path)
    assert config == ServingConfig()
    assert config.host == "127.0.0.1"
    (tmp_path / "use_case.yaml").write_text("name: sums\nregistry: {model_name: the-sums}\n")
    name = registered_model(Settings(home=tmp_path, feature_repo=tmp_path))
    assert config.of_models((name,)).models[0].name == "the-sums"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no YAML"),
        ("[1]", "valid dictionary"),
        ("prot: 1", "prot: Extra inputs are not permitted"),
        ("http: {port: 9}\ngrpc: {port: 9}", "ports .* are the same twice"),
        ("models: [{name: a}, {name: a}]", "models .* are the same twice"),
        ("security: {issuers: []}", r"security\.issuers: Extra"),
        ("engine: {max_versions: 0}", r"engine\.max_versions"),
        ("timeout_s: -1", "timeout_s"),
        ("http: {port: eight}", r"http\.port: Input should be a valid integer"),
        ("models: flight-delay", "models: Input should be a list"),
    ],
)
def test_what_cannot_be_is_told_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "serving.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        read_serving_config(tmp_path)


def test_what_cannot_be_read_is_told_too(tmp_path: Path) -> None:
    file = tmp_path / "serving.yaml"
    file.write_bytes(b"host: \xff")
    with pytest.raises(ConfigurationError, match="is no YAML"):
        read_serving_config(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_serving_config(tmp_path)


def test_ports_of_0_may_repeat_and_a_listener_that_is_off_has_none() -> None:
    zero = {"port": 0}
    assert checked_config({"http": zero, "grpc": zero, "admin": zero}, "x").http.port == 0
    off = {"grpc": {"enabled": False, "port": 8000}}
    assert not checked_config(off, "x").grpc.enabled


def test_the_admin_token_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    token = admin_token(tmp_path)
    assert token == admin_token(tmp_path)
    file = tmp_path / TOKEN_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="others may read it"):
        admin_token(tmp_path)


def test_every_setting_is_told_with_its_default_and_meaning() -> None:
    lines = all_settings() + lines_of("edge", GatewayConfig)
    text = "\n".join(lines)
    for expected in (
        "http.port: 8000",
        "models[].on_move: swap\n    swap | offer. What a moved",
        "log.retention_days: 90",
        "limits.client.burst: 400",
        "issuers[].issuer: (has to be given)",
        "address_limit.per_s: 1000",
    ):
        assert expected in text
    shown = [line for line in lines if line and not line.startswith("=")]
    for line, after in pairwise([*shown, "end"]):
        is_setting = ": " in line and not line.startswith(" ")
        assert not is_setting or after.startswith("    "), f"{line} says nothing of its meaning"


def test_former_names_are_still_read() -> None:
    assert not checked_config({"http": {"slot_header": False}}, "x").http.track_header
    former = checked_config({"seeing": {"logs": {"level": "ERROR"}}}, "x")
    assert former.observability.logs.level == "ERROR"
