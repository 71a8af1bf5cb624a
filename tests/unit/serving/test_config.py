import asyncio
from pathlib import Path

import pytest
from pydantic import BaseModel

from infra.gateway.config import GatewayConfig
from serving.assembly import Components, serve
from serving.config import ServingConfig, checked_config, read_serving_config, registered_model
from serving.protocol.http.pages import TOKEN_FILE, admin_token
from tasks.contracts.serving import address_file, read_addresses
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
        ("[1]", "expected names with values"),
        ("prot: 1", "prot: Extra inputs are not permitted"),
        ("http: {port: 9}\ngrpc: {port: 9}", "ports .* are the same twice"),
        ("models: [{name: a}, {name: a}]", "models .* are the same twice"),
        ("security: {issuers: []}", r"security\.issuers: Extra"),
        ("engine: {max_versions: 0}", r"engine\.max_versions"),
        ("http: {port: eight}", r"http\.port: Input should be a valid integer"),
        ("models: flight-delay", "models: Input should be a list"),
    ],
)
def test_what_cannot_be_is_told_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "serving.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        read_serving_config(tmp_path)


def test_the_admin_token_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    token = admin_token(tmp_path)
    assert token == admin_token(tmp_path)
    file = tmp_path / TOKEN_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="others may read it"):
        admin_token(tmp_path)


@pytest.mark.parametrize("kind", [ServingConfig, GatewayConfig])
def test_every_setting_says_what_it_means(kind: type[BaseModel]) -> None:
    schema = kind.model_json_schema()
    for described in (schema, *schema.get("$defs", {}).values()):
        for name, field in described.get("properties", {}).items():
            is_section = "$ref" in field or name in described.get("description", "")
            assert is_section or field.get("description"), f"{described['title']}.{name}"


def test_former_names_are_still_read() -> None:
    assert not checked_config({"http": {"slot_header": False}}, "x").http.track_header
    former = checked_config({"seeing": {"logs": {"level": "ERROR"}}}, "x")
    assert former.observability.logs.level == "ERROR"


def test_what_a_killed_process_said_of_itself_is_gone_while_the_next_one_starts(
    tmp_path: Path,
) -> None:
    """Whoever is to end the process would end another program, whose number it is by now."""
    file = address_file(tmp_path)
    file.parent.mkdir()
    file.write_text('{"pid": 1, "http": "http://127.0.0.1:1"}')
    config = checked_config(
        {"http": {"port": 0}, "admin": {"port": 0}, "grpc": {"enabled": False}}, "the test"
    )
    found = []

    def components_of(config: ServingConfig, home: Path) -> Components:
        found.append(read_addresses(address_file(home)))
        raise ConfigurationError("a part cannot be made")

    with pytest.raises(ConfigurationError, match="cannot be made"):
        asyncio.run(serve(config, tmp_path, components_of))
    assert found == [None]
