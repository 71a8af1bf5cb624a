"""Columns of a training set that an encoder turns into numbers, and the encoder's own folder."""

import hashlib
import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from tasks.contracts.base import Artifact
from tasks.contracts.conversion import BATCH_AXIS, open_program
from tasks.contracts.data import ColumnEncoder, EncodedColumn, FeatureSnapshot
from tasks.governance.signing import build_signed
from tasks.imports import column_encoder as folder_of
from tasks.imports.column_encoder import EncoderSettings, LoadedEncoder, Numbers, image_file
from tasks.imports.config import EncoderConfig, digest_in, find_package
from tasks.imports.encoder import TOKENIZER_FILE, WEIGHTS_FILE, find_files
from tasks.imports.program import MOST_ROWS, export_encoder
from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.extras import require_extras
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

SNAPSHOTS, DATA_FILE, ROW_GROUP_ROWS = "snapshots", "data.parquet", 8192
"""As the room of features has them."""
FOLDER = "encoder"
SCHEME = 1
"""To be raised where one value would be turned into other numbers than before."""
OPSET, IMAGE_WIDTH = 20, 1280


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
        SignatureError: the training set that is there was made or changed by somebody else.
    """
    made = {column: build_encoder(column, spec, project, store) for column, spec in encoded.items()}
    encoders = tuple(encoder for encoder, _ in made.values())
    rows = pq.read_table(store.path(snapshot.data))
    paths = [rows[encoder.column] for encoder in encoders if encoder.kind == "image"]
    images = [digest_of(file) for column in paths for file in _images(column, project)]
    key = content_key("encoded", code_digest(__file__), snapshot.data.sha256, encoders, images)

    def build(folder: StagedFolder) -> FeatureSnapshot:
        table, columns = rows, snapshot.columns
        for column, (encoder, files) in made.items():
            loaded = LoadedEncoder(store.path(files), column, project)
            for name, values in loaded.columns(rows[column].to_pylist()).items():
                table = table.append_column(name, pa.array(values, pa.float32(), from_pandas=True))
            numeric = (*columns.numeric, *encoder.numbers)
            columns = columns.model_copy(update={"numeric": numeric, "encoders": encoders})
        pq.write_table(table, folder.path / DATA_FILE, row_group_size=ROW_GROUP_ROWS)
        return snapshot.model_copy(
            update={
                "data": folder.artifact(DATA_FILE),
                "columns": columns,
                "encoders": {column: files for column, (_, files) in made.items()},
                "retrieved_sha256": snapshot.data.sha256,
                "parts": folder.parts(DATA_FILE),
            }
        )

    return build_signed(store, SNAPSHOTS, key, FeatureSnapshot, build)


def _images(paths: pa.ChunkedArray, project: Path) -> list[Path]:
    """The files that a column names, those that are there, in the order of their names."""
    named = sorted(paths.unique().drop_null().to_pylist())
    return [file for path in named if (file := image_file(path, project)).is_file()]


def build_encoder(
    column: str, spec: EncodedColumn, project: Path, store: ArtifactStore
) -> tuple[ColumnEncoder, Artifact]:
    """What encodes a column, and its folder, which is made once for the same files and settings.

    Raises:
        ConfigurationError: its files are not there, are of another kind of network, or it gives
            fewer numbers, or takes fewer tokens, than are asked for.
        ArtifactError: its weights are damaged, or a package's are not as they were installed.
        SignatureError: somebody else made or changed what is in the store.
    """
    source = _Text(spec, project, store) if spec.text else _Image(spec)
    width, asked = source.width, spec.dimensions or source.width
    if asked > width:
        raise ConfigurationError(
            f"encoded.{column}.dimensions is {asked}, and {source.name} gives {width} numbers; ask "
            "for as many at most. Nothing was encoded"
        )
    settings = EncoderSettings(kind=source.kind, dimensions=asked, max_tokens=spec.max_tokens)
    described = json.dumps([SCHEME, source.digests, settings.model_dump()], sort_keys=True)
    encoder = ColumnEncoder(
        column=column,
        kind=settings.kind,
        source=source.name,
        sha256=hashlib.sha256(described.encode()).hexdigest(),
        dimensions=settings.dimensions,
    )
    key = content_key("encoder", code_digest(__file__), encoder.sha256, torch.__version__)

    def build(staged: StagedFolder) -> Artifact:
        folder = staged.path / FOLDER
        folder.mkdir()
        (folder / folder_of.SETTINGS_FILE).write_text(settings.model_dump_json(), encoding="utf-8")
        if source.tokenizer:
            shutil.copyfile(source.tokenizer, folder / TOKENIZER_FILE)
        _write_network(source, settings, folder)
        return staged.artifact(FOLDER)

    return encoder, build_signed(store, "encoders", key, Artifact, build)


class _Text:
    """A text encoder of a package, or of a folder of the project."""

    kind: folder_of.Kind = "text"

    def __init__(self, spec: EncodedColumn, project: Path, store: ArtifactStore) -> None:
        named, most = str(spec.text), spec.max_tokens
        config = EncoderConfig(folder=project / named, max_tokens=most)
        if not config.folder.is_dir():
            folder = _file_of(named, WEIGHTS_FILE, "a BERT encoder").parent
            config = EncoderConfig(package=named, folder=folder, max_tokens=most)
        imported, self._store = export_encoder(config, store), store
        self.name = f"{named} {imported.origin.get('version', '')}".strip()
        self.digests, self._program = imported.files, imported.program
        self.width = int(imported.signature.output.shape[1])
        self.tokenizer: Path | None = find_files(config).folder / TOKENIZER_FILE

    def program(self, example: tuple[torch.Tensor, ...]) -> ExportedProgram:
        """The network."""
        return open_program(self._store.path(self._program))


class _Image:
    """EfficientNet-Lite0 with the weights of a package, before its classes: 1,280 numbers."""

    kind: folder_of.Kind = "image"
    width, tokenizer = IMAGE_WIDTH, None

    def __init__(self, spec: EncodedColumn) -> None:
        require_extras("image")
        package, named = find_package(str(spec.image)), str(spec.image)
        weights = _file_of(named, ".pth", "EfficientNet-Lite0")
        self._weights = Path(str(package.locate_file(weights)))
        self.name = f"{named} {package.version}"
        self.digests = {"weights": digest_in(package, weights)}

    def program(self, example: tuple[torch.Tensor, ...]) -> ExportedProgram:
        """The network.

        Raises:
            ArtifactError: the weights are damaged, or those of another network.
        """
        from efficientnet_lite_pytorch import EfficientNet

        network = EfficientNet.from_name("efficientnet-lite0")
        try:  # tensors alone are read, never pickled objects
            state = torch.load(self._weights, map_location="cpu", weights_only=True)
            network.load_state_dict(state)
        except (pickle.UnpicklingError, RuntimeError, OSError) as exc:
            raise ArtifactError(
                f"the weights of {self.name} are damaged, or not those of EfficientNet-Lite0: "
                f"{' '.join(str(exc).split())[:300]}. Install the package again"
            ) from exc
        axes = {"pixels": {0: Dim(BATCH_AXIS, min=1, max=MOST_ROWS)}}
        return torch.export.export(_Pooled(network).eval(), example, dynamic_shapes=axes)


class _Pooled(nn.Module):
    """The last features of a network, averaged over the image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.network.extract_features(pixels)
        return features.mean((2, 3))


def _file_of(package: str, end: str, network: str) -> Path:
    """The first file of a package whose name ends so, as the package lists it."""
    found = [file for file in find_package(package).files or () if file.name.endswith(end)]
    if not found:
        raise ConfigurationError(
            f"package {package!r} carries no weights of {network} (a file {end}); name one that "
            "does, see docs/how-to/text-and-images.md. Nothing was encoded"
        )
    return Path(found[0])


def projection(width: int, dimensions: int) -> Numbers:
    """Fixed directions at right angles, onto which an encoder's numbers are projected.

    No data decide them, so nothing of a test can leak into them, and the numbers of two windows are
    always comparable. As many as there are: the numbers themselves.
    """
    if width == dimensions:
        return np.eye(width, dtype=np.float32)
    drawn = np.random.default_rng(SCHEME).standard_normal((width, dimensions))
    return np.linalg.qr(drawn)[0].astype(np.float32)


def _write_network(source: _Text | _Image, settings: EncoderSettings, folder: Path) -> None:
    """The network as ONNX, its projection, and what PyTorch answers to the golden values."""
    reader: Any = folder_of.reader_of(settings, folder, None)
    chosen, inputs = next(reader.batches(reader.golden))
    example = tuple(torch.from_numpy(values) for values in inputs.values())
    matrix = projection(source.width, settings.dimensions)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = source.program(example)
        golden = np.empty((len(chosen), settings.dimensions), np.float32)
        golden[list(chosen)] = program.module()(*example).numpy() @ matrix
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=[folder_of.OUTPUT],
            verbose=False,
        )
    assert exported is not None  # only without dynamo
    exported.save(folder / folder_of.MODEL_FILE)
    np.save(folder / folder_of.PROJECTION_FILE, matrix)
    np.save(folder / folder_of.GOLDEN_FILE, golden)
