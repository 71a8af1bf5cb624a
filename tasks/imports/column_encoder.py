"""An encoder of one column, as its folder holds it: texts or images in, numbers out.

    encoder.json  model.onnx  projection.npy  golden.npy  tokenizer.json (of texts)

Training, `Model.predict` and a server all run it by ONNX Runtime on processors, so one text gives
one answer everywhere, up to the last digits, which depend on what is encoded beside it.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tasks.contracts.base import Contract
from tasks.contracts.data import number_names
from tasks.kernel.errors import ArtifactError, DataContractError
from tasks.kernel.extras import require_extras
from tasks.kernel.process import report_progress

SETTINGS_FILE, MODEL_FILE, GOLDEN_FILE = "encoder.json", "model.onnx", "golden.npy"
PROJECTION_FILE, TOKENIZER_FILE = "projection.npy", "tokenizer.json"
OUTPUT = "numbers"
GOLDEN_GAP = 1e-3
"""So far may a golden answer be from that of PyTorch; numbers are about 0.1 to 1 in size."""
PIXELS = 224
"""Side of the squares that images are resized to."""
Kind = Literal["text", "image"]
Numbers = NDArray[np.float32]
Inputs = dict[str, NDArray[Any]]
Batches = Iterator[tuple[Sequence[int], Inputs]]
"""Places of some values, and what the network takes of them; in all, each value once."""


class EncoderSettings(Contract):
    """What a folder's encoder takes and gives."""

    kind: Kind
    dimensions: int
    max_tokens: int


class Texts:
    """Texts as a BERT encoder takes them."""

    expected = "a text"
    kinds: tuple[type, ...] = (str,)
    golden: Sequence[Any] = ("It arrived late, and the box was open.", "Perfect!", "naïve café")
    rows = 64

    def __init__(self, tokenizer: Path, max_tokens: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.no_padding()

    def batches(self, values: Sequence[str]) -> Batches:
        """Those of about one length together, so that little is padded."""
        tokens = [e.ids for e in self._tokenizer.encode_batch(list(values))]
        order = sorted(range(len(values)), key=lambda place: len(tokens[place]))
        for start in range(0, len(order), self.rows):
            chosen = order[start : start + self.rows]
            ids = np.zeros((len(chosen), len(tokens[chosen[-1]])), np.int64)
            mask = np.zeros_like(ids)
            for row, place in enumerate(chosen):
                ids[row, : len(tokens[place])] = tokens[place]
                mask[row, : len(tokens[place])] = 1
            yield chosen, {"input_ids": ids, "attention_mask": mask}


class Images:
    """Images as EfficientNet-Lite takes them: float32 (rows, 3, PIXELS, PIXELS), about -1 to 1.

    Args:
        base: folder that paths start at; None where images come as bytes.
    """

    expected = "a path, or the bytes of a PNG or JPEG"
    kinds: tuple[type, ...] = (str, bytes)
    rows = 16

    def __init__(self, base: Path | None) -> None:
        self._base = base

    @property
    def golden(self) -> Sequence[Any]:
        """Two PNG, which lose nothing."""
        from PIL import Image

        ramp = np.arange(PIXELS * PIXELS * 3, dtype=np.uint32).reshape(PIXELS, PIXELS, 3)
        files = io.BytesIO(), io.BytesIO()
        for step, file in enumerate(files, 1):
            Image.fromarray((ramp // (7 * step) % 256).astype(np.uint8)).save(file, "PNG")
        return tuple(file.getvalue() for file in files)

    def batches(self, values: Sequence[str | bytes]) -> Batches:
        """In their order."""
        for start in range(0, len(values), self.rows):
            pixels = np.stack([self._pixels(value) for value in values[start : start + self.rows]])
            yield range(start, start + len(pixels)), {"pixels": pixels}

    def _pixels(self, value: str | bytes) -> Numbers:
        from PIL import Image

        try:
            source: Path | io.BytesIO = (
                image_file(value, self._base) if isinstance(value, str) else io.BytesIO(value)
            )
            with Image.open(source, formats=("PNG", "JPEG")) as image:
                square = image.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
        except (OSError, Image.DecompressionBombError) as exc:
            named = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
            raise DataContractError(
                f"{named} cannot be read as an image ({exc}); expected the path of a PNG or JPEG "
                "file inside the project. Mend the file, or leave the cell empty. Nothing was "
                "encoded"
            ) from exc
        return (np.asarray(square, np.float32).transpose(2, 0, 1) - 127.0) / 128.0


def image_file(path: str, base: Path | None) -> Path:
    """The file of an image.

    Raises:
        DataContractError: there is no folder that it could be in, or it lies outside of it.
    """
    file = base and (base / path).resolve()
    if not base or not file or not file.is_relative_to(base.resolve()):
        raise DataContractError(
            f"image {path!r} lies outside of {base or 'what is asked'}; expected a path inside the "
            "project, or the bytes. Nothing was encoded"
        )
    return file


def reader_of(settings: EncoderSettings, folder: Path, base: Path | None) -> Texts | Images:
    """What makes a network's inputs of values.

    Raises:
        ConfigurationError: the extra that reads texts or images is not installed.
    """
    require_extras(settings.kind)
    if settings.kind == "text":
        return Texts(folder / TOKENIZER_FILE, settings.max_tokens)
    return Images(base)


class LoadedEncoder:
    """Gives the numbers of texts or images.

    Args:
        folder: of the encoder; its digest is the caller's to check.
        column: for messages, and for the names of numbers.
        base: folder that paths of images start at; None where images come as bytes.
        threads: of one call; 0 for as many as there are cores.

    Raises:
        ConfigurationError: the extra that reads texts or images is not installed.
        ArtifactError: it does not give the answers that it gave when it was made.
    """

    def __init__(
        self, folder: Path, column: str, base: Path | None = None, threads: int = 0
    ) -> None:
        text = (folder / SETTINGS_FILE).read_text(encoding="utf-8")
        self.settings, self.column = EncoderSettings.model_validate_json(text), column
        self._reader: Any = reader_of(self.settings, folder, base)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = ["CPUExecutionProvider"]
        self._session = ort.InferenceSession(folder / MODEL_FILE, options, providers=providers)
        self._matrix = np.load(folder / PROJECTION_FILE)
        golden = np.load(folder / GOLDEN_FILE)
        if not (gap := float(np.abs(self(self._reader.golden) - golden).max())) <= GOLDEN_GAP:
            raise ArtifactError(
                f"the encoder of column {column} answers its golden values {gap:.2g} from what was "
                f"recorded, within {GOLDEN_GAP:g} is expected: {folder} was damaged, or other "
                "releases of tokenizers, Pillow or ONNX Runtime read it. Install the locked ones, "
                "or train again. Nothing was encoded"
            )

    def __call__(self, values: Sequence[Any]) -> Numbers:
        """The numbers of each value; each different one is encoded once.

        Args:
            values: texts; or images, as paths or as the bytes of a PNG or JPEG. None, NaN and blank
                texts are missing.

        Returns:
            Shape (values, dimensions); NaN for missing ones.

        Raises:
            DataContractError: a value is no text, or no image.
        """
        places: dict[Any, list[int]] = {}
        for place, value in enumerate(values):
            if not self._is_missing(value):
                places.setdefault(value, []).append(place)
        distinct, done = list(places), 0
        made = np.full((len(values), self.settings.dimensions), np.nan, np.float32)
        for chosen, inputs in self._reader.batches(distinct):
            numbers = self._session.run([OUTPUT], inputs)[0] @ self._matrix
            for place, row in zip(chosen, numbers, strict=True):
                made[places[distinct[place]]] = row
            done += len(chosen)
            report_progress("encoding", done, len(distinct), f"encoding {self.column}")
        return made

    def columns(self, values: Sequence[Any]) -> dict[str, Numbers]:
        """The same, by the names of the numbers."""
        names = number_names(self.column, self.settings.dimensions)
        return dict(zip(names, self(values).T, strict=True))

    def _is_missing(self, value: Any) -> bool:
        if value is None or value != value:
            return True
        if not isinstance(value, self._reader.kinds):
            raise DataContractError(
                f"column {self.column} holds {value!r:.60} ({type(value).__name__}), expected "
                f"{self._reader.expected}, or null, in every row. Nothing was encoded"
            )
        return not value.strip()
