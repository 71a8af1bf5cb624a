"""Columns of texts and images as numbers: which, in which order, and when they are made again."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.contracts.data import EncodedColumn, FeatureSnapshot
from tasks.imports.column_encoder import PROJECTION_FILE, Images, LoadedEncoder
from tasks.imports.encoded import build_encoder, encode_snapshot
from tasks.kernel.errors import ArtifactError, ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders, encoders

TEXTS = ["red cat", None, "the dog sleeps on a cat", "red cat", "", "a bird"]
SPEC = EncodedColumn(text="encoder", dimensions=8, max_tokens=encoders.MOST_TOKENS)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    encoders.write_encoder(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def shared(project: Path) -> ArtifactStore:
    return ArtifactStore(project / "artifacts")


@pytest.fixture(scope="module")
def encoder(project: Path, shared: ArtifactStore) -> LoadedEncoder:
    return LoadedEncoder(shared.path(build_encoder("review", SPEC, project, shared)[1]), "review")


def snapshot(store: ArtifactStore, texts: list[Any]) -> FeatureSnapshot:
    return builders.dataset(store, builders.frame(len(texts)).assign(review=texts)).snapshot


def test_each_text_gets_its_own_numbers_in_the_order_of_the_rows(encoder: LoadedEncoder) -> None:
    numbers = encoder(TEXTS)
    assert numbers.shape == (6, 8)
    assert np.isnan(numbers[[1, 4]]).all()
    np.testing.assert_array_equal(numbers[0], numbers[3])
    for place in (0, 2, 5):
        np.testing.assert_allclose(numbers[place], encoder([TEXTS[place]])[0], atol=1e-6)
    assert list(encoder.columns(["a"])) == [f"review_{n}" for n in range(8)]


def test_each_different_text_is_encoded_once(
    encoder: LoadedEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "progress"):
        encoder(["a cat", "a dog"] * 500)
    assert [record.__dict__["total"] for record in caplog.records] == [2]


def test_a_text_that_is_too_long_is_cut(encoder: LoadedEncoder) -> None:
    long = "the bird sings on " * 50
    first = " ".join(long.split()[: encoders.MOST_TOKENS - 2])
    np.testing.assert_allclose(encoder([long]), encoder([first]), atol=1e-6)


@pytest.mark.parametrize("value", [7, 1.5, b"text", ["a"]])
def test_what_is_no_text_is_refused_by_name(encoder: LoadedEncoder, value: Any) -> None:
    with pytest.raises(DataContractError, match=r"column review holds .* expected a text, or null"):
        encoder(["a cat", value])


def test_numbers_stand_beside_the_rows_they_are_of(
    project: Path, shared: ArtifactStore, encoder: LoadedEncoder
) -> None:
    plain = snapshot(shared, TEXTS)
    made = encode_snapshot(plain, {"review": SPEC}, project, shared)
    rows = pq.read_table(shared.path(made.data))
    before = pq.read_schema(shared.path(plain.data)).names
    assert rows.column_names == [*before, *(f"review_{n}" for n in range(8))]
    assert rows["review"].to_pylist() == TEXTS
    assert rows["review_0"].null_count == 2
    numbers = rows.select(encoder.columns([])).to_pandas().to_numpy(np.float32)
    np.testing.assert_allclose(numbers, encoder(TEXTS), atol=1e-6)
    assert made.columns.numeric == (*plain.columns.numeric, *encoder.columns([]))
    assert made.columns.given[-1] == "review"
    assert "review_0" not in made.columns.given
    assert made.retrieved_sha256 == plain.data.sha256
    assert made.parts is not None
    lengths = [length for length, _ in json.loads(shared.path(made.parts).read_text())]
    assert sum(lengths) == made.data.num_bytes


def test_it_is_done_again_for_other_rows_or_weights_alone(
    project: Path, shared: ArtifactStore
) -> None:
    plain = snapshot(shared, TEXTS)
    made = encode_snapshot(plain, {"review": SPEC}, project, shared)
    number = shared.num_builds
    assert encode_snapshot(plain, {"review": SPEC}, project, shared) == made
    assert shared.num_builds == number
    others = snapshot(shared, TEXTS[::-1])
    assert encode_snapshot(others, {"review": SPEC}, project, shared).data != made.data
    encoders.write_encoder(project / "other", seed=1)
    spec = {"review": SPEC.model_copy(update={"text": "other"})}
    other = encode_snapshot(plain, spec, project, shared)
    assert other.columns.encoders != made.columns.encoders
    assert other.data.sha256 != made.data.sha256


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"dimensions": 33}, "gives 32 numbers"),
        ({"max_tokens": 25}, "positions for 24 tokens"),
        ({"text": "no-such-package"}, "is not installed here"),
        ({"text": "numpy"}, "carries no weights"),
    ],
)
def test_an_encoder_that_cannot_do_it_is_refused(
    project: Path, shared: ArtifactStore, changed: dict[str, Any], seen: str
) -> None:
    with pytest.raises(ConfigurationError, match=seen):
        build_encoder("review", SPEC.model_copy(update=changed), project, shared)


def test_an_encoder_that_answers_otherwise_than_when_it_was_made_is_refused(
    project: Path, shared: ArtifactStore, tmp_path: Path
) -> None:
    folder = shared.path(build_encoder("review", SPEC, project, shared)[1])
    copied = shutil.copytree(folder, tmp_path / "encoder")
    np.save(copied / PROJECTION_FILE, np.load(copied / PROJECTION_FILE) * 1.1)
    with pytest.raises(ArtifactError, match="golden"):
        LoadedEncoder(copied, "review")


def test_an_image_is_read_from_its_file_or_its_bytes(tmp_path: Path) -> None:
    drawn = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5)
    drawn.save(tmp_path / "a.png")
    file = io.BytesIO()
    drawn.resize((300, 200)).save(file, "JPEG")
    images: Any = Images(tmp_path)
    values = ["a.png", (tmp_path / "a.png").read_bytes(), file.getvalue()]
    ((places, inputs),) = images.batches(values)
    assert list(places) == [0, 1, 2]
    assert inputs["pixels"].shape == (3, 3, 224, 224)
    np.testing.assert_array_equal(inputs["pixels"][0], inputs["pixels"][1])
    assert -1 <= inputs["pixels"].min() < inputs["pixels"].max() <= 1.01


@pytest.mark.parametrize("value", ["none.png", "../a.png", "text.png", b"no image"])
def test_what_is_no_image_of_the_project_is_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "text.png").write_text("no image")
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    images: Any = Images(tmp_path / "project")
    with pytest.raises(DataContractError, match=r"cannot be read as an image|lies outside of"):
        list(images.batches([value]))
