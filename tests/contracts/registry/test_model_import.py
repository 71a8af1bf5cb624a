"""A text encoder from elsewhere through registry and conversion, under a real Prefect API."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from flows.config import ImportConfig, read_import_config
from flows.conversion import model_import_flow
from tasks.imports.config import CorpusConfig
from tasks.imports.encoder import TOKENIZER_FILE, find_files, read_encoder
from tasks.imports.rows import tokenize
from tasks.kernel.errors import ConfigurationError, RegistryError
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.lineage.journal import Journal
from tasks.lineage.trace import trace
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import Registry
from tasks.registry.model_folder import read_version
from tasks.registry.programs import find_trained
from tests.support.data import encoders

pytestmark = pytest.mark.slow

QUICK = {
    "formats": ["onnx-fp32", "openvino-int8"],
    "batch_sizes": [1, 8],
    "measurement": "quick",
    "calibration_rows": 16,
    "minimum_gain": 1.0,
}
DESCRIBED = PROJECT_ROOT / "feature_repo" / "models" / "sentence-encoder.yaml"


def _config(tmp_path: Path) -> ImportConfig:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(encoders.texts(60)))
    return ImportConfig(
        encoder=encoders.write_encoder(tmp_path / "encoder"),
        corpus=CorpusConfig(file=texts, judged_texts=32),
        registry=RegistryConfig(model_name="small-encoder", experiment="imports"),
        conversion=QUICK,  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("on_prefect")
def test_an_encoder_becomes_a_version_with_variants_that_any_runtime_loads(
    settings: Settings, tmp_path: Path
) -> None:
    config = _config(tmp_path)
    first = model_import_flow(config)
    assert [variant.name for variant in first.variants] == ["onnx-fp32", "openvino-int8"]
    assert all(variant.quality_name == "neighbour overlap" for variant in first.variants)

    registry = Registry(RegistryLocation.of(settings))
    version = registry.confirmed(first.version)
    record = read_version(version)
    assert record.damage == ()
    assert record.imported.family == "text-embedding"
    assert set(record.imported.origin_files) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    filed = [entry.folder for entry in record.variants.variants if entry.folder]
    assert len(filed) == sum(variant.accepted for variant in first.variants)

    chain = trace(
        f"models/small-encoder/{first.version.version}", Journal(settings.home / "lineage")
    )
    assert {node.name for node in chain.sources()} == {
        f"imports/small-encoder/{name}" for name in record.imported.origin_files
    }

    with pytest.raises(RegistryError, match=r"was trained elsewhere.*import it again"):
        find_trained("small-encoder", first.version.version, RegistryLocation.of(settings))

    again = model_import_flow(config)
    assert again.version == first.version
    assert [v.files for v in again.variants] == [v.files for v in first.variants]

    model = settings.store.path(first.variants[0].files) / "model.onnx"
    ids = np.array([[2, 5, 8, 3, 0, 0]])
    mask = np.array([[1, 1, 1, 1, 0, 0]])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    [embedding] = session.run(None, {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        ("a: [", "is no YAML"),
        ("encoder: {folder: x}\ncorpus: {packages: [numpy]}\nregistry: {}\nodd: 1", "odd: Extra"),
        (
            "encoder: {folder: x}\ncorpus: {packages: [numpy]}\nregistry: {}\n"
            "conversion: {targets: [onnx-int3]}",
            "there is no format 'onnx-int3'",
        ),
        ("corpus: {packages: [numpy]}\nregistry: {}", "either an encoder or a program"),
        ("encoder: {folder: x}\nregistry: {}", "either a corpus or rows"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    file = tmp_path / "model.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=sentence):
        read_import_config(file)


def test_the_real_encoder_gives_the_embedding_that_its_authors_published() -> None:
    config = read_import_config(DESCRIBED).encoder
    files = find_files(config)
    network, _ = read_encoder(files)
    ids = torch.tensor(
        tokenize(["This is an example sentence"], files.folder / TOKENIZER_FILE, config.max_tokens)
    )
    with torch.no_grad():
        [embedding] = network(ids, torch.ones_like(ids)).numpy()
    # The beginning of what the model's documentation shows for this sentence.
    published = [0.0676569, 0.0634959, 0.0487131, 0.0793049, 0.0374480]
    np.testing.assert_allclose(embedding[:5], published, atol=1e-5)
    shape = json.loads((files.folder / "config.json").read_text())
    assert shape["num_hidden_layers"] == 6
