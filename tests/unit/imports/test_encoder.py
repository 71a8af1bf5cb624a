import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.imports.config import EncoderConfig
from tasks.imports.encoder import FILES, find_files, read_encoder
from tasks.imports.program import export_encoder
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore
from tests.support.data import encoders


def _reference(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same encoder, written with torch's own attention and straight from the checkpoint."""
    w = encoders.tensors()
    norm = torch.nn.functional.layer_norm

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        return values @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        return norm(values, (32,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    values = w["embeddings.word_embeddings.weight"][ids]
    values = values + w["embeddings.position_embeddings.weight"][torch.arange(ids.shape[1])]
    values = values + w["embeddings.token_type_embeddings.weight"][torch.zeros_like(ids)]
    values = normed(values, "embeddings.LayerNorm")
    for number in range(2):
        prefix = f"encoder.layer.{number}."
        query, key, value = (
            linear(values, f"{prefix}attention.self.{part}").unflatten(2, (4, 8)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        seen = mask.bool()[:, None, None, :]
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
        mixed = linear(mixed.transpose(1, 2).flatten(2), f"{prefix}attention.output.dense")
        values = normed(values + mixed, f"{prefix}attention.output.LayerNorm")
        inner = torch.nn.functional.gelu(linear(values, f"{prefix}intermediate.dense"))
        values = normed(
            values + linear(inner, f"{prefix}output.dense"), f"{prefix}output.LayerNorm"
        )
    mean = (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean)


def test_it_is_the_encoder_that_the_checkpoint_describes(tmp_path: Path) -> None:
    network, _ = read_encoder(find_files(encoders.write_encoder(tmp_path)))
    ids = torch.randint(0, 60, (5, 11), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(11)[None] < torch.tensor([11, 3, 1, 7, 9])[:, None]).long()
    with torch.no_grad():
        torch.testing.assert_close(network(ids, mask), _reference(ids, mask), atol=1e-5, rtol=0)


def test_it_is_built_once_and_says_what_it_was_made_from(
    tmp_path: Path, store: ArtifactStore
) -> None:
    config = encoders.write_encoder(tmp_path / "e")
    first, second = export_encoder(config, store), export_encoder(config, store)
    assert first == second
    assert store.num_builds == 1
    assert first.files == {name: digest_of(config.folder / name) for name in FILES}
    encoders.write_encoder(tmp_path / "e", seed=1)
    other = export_encoder(config, store)
    assert other.origin_sha256 != first.origin_sha256
    assert other.program.sha256 != first.program.sha256


@pytest.mark.parametrize(
    ("package", "seen"),
    [("numpy", r"lacks config\.json, model"), ("no-such-package", "is not installed here")],
)
def test_a_package_without_an_encoder_is_refused(package: str, seen: str) -> None:
    with pytest.raises(ConfigurationError, match=seen):
        find_files(EncoderConfig(package=package, folder=Path(package)))


@pytest.mark.parametrize(
    ("changes", "damaged", "kind"),
    [
        ({"model_type": "gpt2"}, None, ConfigurationError),
        ({"vocab_size": -1}, None, ConfigurationError),
        ({"intermediate_size": 128}, None, ArtifactError),
        ({}, "model.safetensors", ArtifactError),
        ({}, "config.json", ConfigurationError),
    ],
)
def test_a_damaged_file_or_another_network_is_refused(
    tmp_path: Path, changes: dict[str, Any], damaged: str | None, kind: type[Exception]
) -> None:
    config = encoders.write_encoder(tmp_path, **changes)
    if damaged is not None:
        (tmp_path / damaged).write_bytes((tmp_path / damaged).read_bytes()[:-100])
    with pytest.raises(kind, match=re.escape(damaged or "config.json")):
        read_encoder(find_files(config))
