"""The prediction log: its folders, its columns, and how a segment of it is named.

Said in one place, because servers write the log, and drift checks, releases and people read it. One
row for each row of an answered request, and one for each request that was refused:

    <home>/predictions/model=<name>/day=<YYYY-MM-DD>/part-*.parquet

The day is the UTC day of `event_timestamp`. Segments never change: what merges or rewrites them
puts a new one beside them that names, in its metadata, the ones that it replaces. So no reader of
`tasks.predictions.reading` ever meets a row twice, whenever a process is killed.

Masked fields: digests under a key that only this installation has (HMAC with SHA-256).
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import private_folder
from tasks.kernel.settings import children, claim

MOMENT_TYPE = pa.timestamp("us", tz="UTC")

REQUEST_ID = "request_id"
REQUEST_ROW = "request_row"
EVENT_TIME = "event_timestamp"
MODEL, VERSION, VARIANT, TRACK, HARDWARE = "model", "version", "variant", "slot", "hardware"
SUBJECT, SCORE, SCORES, ERROR = "subject", "score", "scores", "error"
LATENCY_US, COMPUTE_US, BATCH_ROWS = "latency_us", "compute_us", "batch_rows"

FEATURE, ENTITY, AGE, STATE = "f:", "e:", "age_s:", "state:"
"""Beginnings of the names of a feature, an entity key, and a view's age and state."""

FIXED = pa.schema(
    [
        pa.field(REQUEST_ID, pa.string()),
        pa.field(REQUEST_ROW, pa.int32()),
        pa.field(EVENT_TIME, MOMENT_TYPE),
        *(pa.field(name, pa.string()) for name in (MODEL, VERSION, VARIANT, TRACK, HARDWARE)),
        pa.field(SUBJECT, pa.string()),
        pa.field(SCORE, pa.float64()),
        pa.field(SCORES, pa.list_(pa.float32())),
        pa.field(ERROR, pa.string()),
        pa.field(LATENCY_US, pa.int64()),
        pa.field(COMPUTE_US, pa.int64()),
        pa.field(BATCH_ROWS, pa.int32()),
    ]
)
"""Columns that every model has.

`event_timestamp` is when the request arrived. `score` is null where nothing was answered, and where
the model gives several numbers a row: those are in `scores`. `error` is the word of the refusal.
`latency_us` lasts from arrival to answer, `compute_us` is the model's own time for the whole batch
of `batch_rows` rows.
"""

REPLACES = b"falaj.replaces"
"""Metadata of a segment that was made of others: their names, a comma between them."""

WRITTEN, MERGED, ASIDE = "part-", "merged-", ".aside-"


def log_root(home: Path) -> Path:
    """Folder of the prediction log in a state folder."""
    return home / "predictions"


def model_folder(home: Path, model: str) -> Path:
    """Folder of one model; a name that could lead elsewhere is quoted."""
    return log_root(home) / f"model={quote(model, safe='')}"


BY_REQUEST, BY_ENTITY = "request", "entity"
"""What labels are named by: beginnings of the names of their tables."""


def labels_folder(home: Path, model: str) -> Path:
    """Where the labels of a model lie."""
    return log_root(home) / "labels" / f"model={quote(model, safe='')}"


def day_folder(home: Path, model: str, day: date) -> Path:
    """Folder of one UTC day of a model."""
    return model_folder(home, model) / f"day={day.isoformat()}"


def day_of(folder: Path) -> date | None:
    """The UTC day of a folder; None where it is no day's."""
    try:
        return date.fromisoformat(folder.name.removeprefix("day="))
    except ValueError:
        return None


def logged_models(home: Path) -> list[str]:
    """Models that have a log, in order."""
    names = [folder.name for folder in children(log_root(home))]
    return sorted(unquote(n.removeprefix("model=")) for n in names if n.startswith("model="))


def typed(name: str) -> pa.DataType | None:
    """Type of a column by its name; None of a feature, whose type is its model's."""
    if name in FIXED.names:
        return FIXED.field(name).type
    if name.startswith(AGE):
        return pa.float64()
    return pa.string() if name.startswith((ENTITY, STATE)) else None


def in_order(names: Iterable[str]) -> list[str]:
    """Names of columns as a segment has them: fixed ones, keys, features, then ages and states."""
    kinds = (ENTITY, FEATURE, AGE, STATE)

    def rank(name: str) -> tuple[int, str]:
        kind = next((i for i, beginning in enumerate(kinds) if name.startswith(beginning)), 4)
        return kind, name

    given = set(names)
    fixed = [name for name in FIXED.names if name in given]
    return fixed + sorted(given.difference(fixed), key=rank)


KEY_BYTES = 32
DIGEST_CHARACTERS = 32
"""Of 64: 128 bits, more than chance ever meets twice."""


class Mask:
    """Turns values into keyed digests; equal values give equal ones.

    Args:
        key: at least 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)

    def text(self, value: str) -> str:
        """The digest of one value."""
        digest = self._hmac.copy()
        digest.update(value.encode())
        return digest.hexdigest()[:DIGEST_CHARACTERS]

    def column(self, values: pa.Array) -> pa.Array:
        """The digests of a column, as strings; null stays null. Each distinct value costs once."""
        coded = values.dictionary_encode()
        values = coded.dictionary.to_pylist()
        masked = [None if v is None else self.text(_spelled(v)) for v in values]
        return pc.take(pa.array(masked, pa.string()), coded.indices)


def _spelled(value: object) -> str:
    """How a value is written before it is masked: a float32 is the shortest text that gives it."""
    if isinstance(value, float):
        return "nan" if value != value else repr(float(np.float32(value)))
    return str(value)


def open_mask(home: Path) -> Mask:
    """The mask of an installation; its key is made on first use, readable by its owner alone.

    Raises:
        ConfigurationError: the key file was cut off, or others may read it.
        StorageError: it cannot be written.
    """
    file = mask_key_file(home)
    if not file.exists():
        private_folder(file.parent.parent)
        private_folder(file.parent)
        claim(file, secrets.token_hex(KEY_BYTES), private=True)
    if file.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"{file} may be read by others (mode {file.stat().st_mode & 0o777:o}), expected 600: "
            "whoever has the key can find masked values by trying. Close it, or remove it to get a "
            "new key, after which new digests no longer match old ones"
        )
    try:
        key = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except ValueError:
        key = b""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{file} holds {len(key)} bytes of a key, expected {KEY_BYTES} in hexadecimal; put the "
            "former file back, or remove it to get a new key. Nothing was logged"
        )
    return Mask(key)


def mask_key_file(home: Path) -> Path:
    """Where the key lies: beside the log, so that a copy of the log's segments lacks it."""
    return log_root(home) / "secrets" / "mask-key"
