"""Columns of a training set that an encoder turns into numbers, and the encoder's own folder."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackagePath
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from tasks.contracts.base import Artifact, Contract
from tasks.contracts.data import FeatureSnapshot
from tasks.contracts.encoding import ColumnEncoder, EncodedColumn
from tasks.imports.column_encoder import (
    GOLDEN_FILE,
    MODEL_FILE,
    OUTPUT,
    PROJECTION_FILE,
    SETTINGS_FILE,
    EncoderSettings,
    Kind,
    LoadedEncoder,
    Numbers,
    image_file,
    reader_of,
)
from tasks.imports.config import EncoderConfig
from tasks.imports.encoder import (
    FILES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    EncoderFiles,
    find_files,
    find_package,
    read_encoder,
    read_shape,
)
from tasks.kernel.errors import ArtifactError, ConfigurationError, DataContractError
from tasks.kernel.extras import require_extras
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

SNAPSHOTS, DATA_FILE = "snapshots", "data.parquet"
"""As the room of features calls them."""
FOLDER = "encoder"
SCHEME = 1
"""To be raised where one value would be turned into other numbers than before."""
OPSET, MOST_ROWS, IMAGE_WIDTH = 20, 4096, 1280


def encode_snapshot(
    snapshot: FeatureSnapshot,
    encoded: Mapping[str, EncodedColumn],
    project: Path,
    store: ArtifactStore,
) -> FeatureSnapshot:
    """The training set with the numbers of its encoded columns; rows and their order stay.

    The key is of the rows, the encoders' files and settings, and the images' files, so nothing is
    encoded again that was encoded by the same encoder.

    Args:
        snapshot: as it was retrieved; it holds the columns as texts.
        encoded: columns and their encoders.
        project: folder that encoders and images may lie in.
        store: holds the snapshot, and takes the encoders and the new one.

    Raises:
        ConfigurationError: an encoder is not there, or gives fewer numbers than are asked for.
        DataContractError: a value is no text, or no image.
        ArtifactError: an encoder's files are damaged.
    """
    rows = store.path(snapshot.data)
    encoders, folders = [], {}
    for column, spec in encoded.items():
        encoder, folders[column] = build_encoder(column, spec, project, store)
        encoders.append(encoder)
    images = [_image_digests(rows, e.column, project) for e in encoders if e.kind == "image"]
    key = content_key("encoded", code_digest(__file__), snapshot.data.sha256, encoders, images)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        numbers = pa.table(
            {
                name: pa.array(values, pa.float32(), from_pandas=True)
                for encoder in encoders
                for name, values in _loaded(encoder, folders, project, store)
                .columns(pq.read_table(rows, columns=[encoder.column])[encoder.column].to_pylist())
                .items()
            }
        )
        _write_beside(rows, numbers, folder.path / DATA_FILE)
        columns = snapshot.columns.model_copy(
            update={
                "numeric": (*snapshot.columns.numeric, *numbers.column_names),
                "encoders": tuple(encoders),
            }
        )
        return snapshot.model_copy(
            update={
                "data": folder.artifact(DATA_FILE),
                "columns": columns,
                "encoders": folders,
                "retrieved_sha256": snapshot.data.sha256,
            }
        )

    return store.build_once(SNAPSHOTS, key, FeatureSnapshot, build)


def _loaded(
    encoder: ColumnEncoder, folders: Mapping[str, Artifact], project: Path, store: ArtifactStore
) -> LoadedEncoder:
    return LoadedEncoder(store.path(folders[encoder.column]), encoder.column, project)


def _image_digests(rows: Path, column: str, project: Path) -> list[str]:
    """Digests of the files that a column names, in the order of their names."""
    named = pq.read_table(rows, columns=[column])[column].unique().drop_null().to_pylist()
    try:
        return [digest_of(image_file(path, project)) for path in sorted(named) if path.strip()]
    except (OSError, ValueError) as exc:
        raise DataContractError(
            f"column {column} names a file that cannot be read ({exc}); expected paths that start "
            f"at {project}. Nothing was encoded"
        ) from exc


def _write_beside(rows: Path, numbers: pa.Table, target: Path) -> None:
    """Copy a Parquet file with more columns, by its own row groups."""
    with pq.ParquetFile(rows) as source:
        schema = pa.schema([*source.schema_arrow, *numbers.schema])
        with pq.ParquetWriter(target, schema) as written:
            start = 0
            for group in range(source.num_row_groups):
                part = source.read_row_group(group)
                added = numbers.slice(start, part.num_rows)
                start += part.num_rows
                written.write_table(
                    pa.table([*part.columns, *added.columns], schema=schema),
                    row_group_size=part.num_rows,
                )


class BuiltEncoder(Contract):
    """A finished encoder's folder."""

    files: Artifact


@dataclass(frozen=True)
class _Source:
    """Where an encoder comes from, the files that decide it, and how many numbers it gives."""

    name: str
    files: dict[str, Path]
    kind: Kind
    width: int
    most_tokens: int

    @property
    def as_files(self) -> EncoderFiles:
        """The same, of a text encoder."""
        return EncoderFiles(self.files[WEIGHTS_FILE].parent, {})


def build_encoder(
    column: str, spec: EncodedColumn, project: Path, store: ArtifactStore
) -> tuple[ColumnEncoder, Artifact]:
    """What encodes a column, and its folder, which is made once for the same files and settings.

    Raises:
        ConfigurationError: its files are not there, are of another kind of network, or it gives
            fewer numbers, or takes fewer tokens, than are asked for.
        ArtifactError: its weights are damaged.
    """
    source = _text_source(spec.text, project) if spec.text else _image_source(str(spec.image))
    digests = {name: digest_of(path) for name, path in source.files.items()}
    settings = _settings(source, spec, column)
    described = json.dumps([SCHEME, digests, settings.model_dump()], sort_keys=True)
    encoder = ColumnEncoder(
        column=column,
        kind=settings.kind,
        source=source.name,
        sha256=hashlib.sha256(described.encode()).hexdigest(),
        dimensions=settings.dimensions,
    )
    key = content_key("encoder", code_digest(__file__), encoder.sha256, torch.__version__)

    def build(folder: StagedFolder) -> BuiltEncoder:
        made = folder.path / FOLDER
        made.mkdir()
        (made / SETTINGS_FILE).write_text(settings.model_dump_json(), encoding="utf-8")
        network: nn.Module
        if spec.text:
            network = read_encoder(source.as_files)[0]
            shutil.copyfile(source.files[TOKENIZER_FILE], made / TOKENIZER_FILE)
        else:
            network = _image_network(source)
        _write_network(network, projection(source.width, settings.dimensions), settings, made)
        return BuiltEncoder(files=folder.artifact(FOLDER))

    return encoder, store.build_once("encoders", key, BuiltEncoder, build).files


def projection(width: int, dimensions: int) -> Numbers:
    """Fixed directions at right angles, onto which an encoder's numbers are projected.

    No data decide them, so nothing of a test can leak into them, and the numbers of two windows are
    always comparable. As many as there are: the numbers themselves.
    """
    if width == dimensions:
        return np.eye(width, dtype=np.float32)
    drawn = np.random.default_rng(SCHEME).standard_normal((width, dimensions))
    return np.linalg.qr(drawn)[0].astype(np.float32)


def _text_source(named: str, project: Path) -> _Source:
    if (project / named).is_dir():
        config = EncoderConfig(folder=project / named)
    else:
        weights = _file_of(named, (WEIGHTS_FILE,), "a BERT encoder, model.safetensors")
        config = EncoderConfig(package=named, folder=Path(weights).parent)
    found = find_files(config)
    name = " ".join(found.origin[part] for part in ("package", "version") if part in found.origin)
    shape, files = read_shape(found), {file: found.folder / file for file in FILES}
    return _Source(name or named, files, "text", shape.hidden_size, shape.max_position_embeddings)


def _image_source(named: str) -> _Source:
    package = find_package(named)
    weights = _file_of(named, (".pth", ".pt"), "EfficientNet-Lite0, a .pth file")
    path = Path(str(package.locate_file(weights)))
    return _Source(f"{named} {package.version}", {"weights": path}, "image", IMAGE_WIDTH, 4096)


def _file_of(package: str, ends: tuple[str, ...], what: str) -> PackagePath:
    """The first file of a package whose name ends so."""
    found = [f for f in find_package(package).files or () if f.name.endswith(ends)]
    if not found:
        raise ConfigurationError(
            f"package {package!r} carries no weights of {what}; name one that does, or see "
            "docs/how-to/text-and-images.md. Nothing was encoded"
        )
    return found[0]


def _settings(source: _Source, spec: EncodedColumn, column: str) -> EncoderSettings:
    dimensions = spec.dimensions or source.width
    asked = {"dimensions": (dimensions, source.width)}
    asked["max_tokens"] = (spec.max_tokens, source.most_tokens)
    for name, (wanted, most) in asked.items():
        if wanted > most:
            raise ConfigurationError(
                f"encoded.{column}.{name} is {wanted}, and {source.name} has {most}; ask for as "
                "many at most. Nothing was encoded"
            )
    return EncoderSettings(kind=source.kind, dimensions=dimensions, max_tokens=spec.max_tokens)


class PooledFeatures(nn.Module):
    """The last features of EfficientNet-Lite0, averaged over the image: 1,280 numbers."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        from efficientnet_lite_pytorch import EfficientNet

        self.network = EfficientNet.from_name("efficientnet-lite0")
        # Tensors alone are read, never pickled objects.
        state = torch.load(weights, map_location="cpu", weights_only=True)
        self.network.load_state_dict(state)
        self.eval()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Images (rows, 3, 224, 224); float32 (rows, 1280)."""
        features: torch.Tensor = self.network.extract_features(pixels)
        return features.mean((2, 3))


def _image_network(source: _Source) -> nn.Module:
    require_extras("image")
    try:
        return PooledFeatures(source.files["weights"])
    except (pickle.UnpicklingError, RuntimeError, OSError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise ArtifactError(
            f"the weights of {source.name} are damaged, or not those of EfficientNet-Lite0: "
            f"{reason}. Install the package again. Nothing was encoded"
        ) from exc


def _write_network(
    network: nn.Module, matrix: Numbers, settings: EncoderSettings, folder: Path
) -> None:
    """The network as ONNX, its projection, and what PyTorch answers to the golden values."""
    reader: Any = reader_of(settings, folder, None)
    chosen, inputs = next(reader.batches(reader.golden))
    example = tuple(torch.from_numpy(values) for values in inputs.values())
    axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=MOST_ROWS)}
    if settings.kind == "text":
        axes[1] = torch.export.Dim("seq", min=1, max=settings.max_tokens)
    with torch.inference_mode():
        answered = network(*example).numpy() @ matrix
    golden = np.empty_like(answered)
    golden[list(chosen)] = answered
    np.save(folder / GOLDEN_FILE, golden)
    np.save(folder / PROJECTION_FILE, matrix)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        exported = torch.onnx.export(
            torch.export.export(network, example, dynamic_shapes=dict.fromkeys(inputs, axes)),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=[OUTPUT],
            verbose=False,
        )
    assert exported is not None  # only without dynamo
    exported.save(folder / MODEL_FILE)
