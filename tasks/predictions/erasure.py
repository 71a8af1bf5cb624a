"""Erasure: all rows of one person, and their labels, taken out of the log for good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.kernel.errors import StorageError
from tasks.kernel.files import write_atomically
from tasks.predictions.labels import BY_REQUEST, labels_folder
from tasks.predictions.masking import mask_key_file, open_mask
from tasks.predictions.parts import (
    PartWriter,
    locked,
    remove_replaced,
    replace_parts,
    visible_parts,
)
from tasks.predictions.schema import REQUEST_ID, SUBJECT, log_root, logged_models, model_folder
from tasks.predictions.upkeep import damaged


@dataclass
class Erasure:
    """What an erasure did.

    Attributes:
        rows: of the subject, that are gone.
        parts: that were rewritten or removed.
        labels: of the subject's requests, that are gone.
        unread: sentences about parts that could not be looked through: damaged, or set aside.
    """

    rows: int = 0
    parts: int = 0
    labels: int = 0
    unread: list[str] = field(default_factory=list)


def erase_subject(home: Path, subject: str, model: str | None = None) -> Erasure:
    """Rewrite every part that has rows of a subject, as written openly or masked.

    A part is replaced whole, so a kill in between leaves it as it was or as it is to be; run again.
    Servers go on meanwhile: what they answered this subject in the last seconds may still be on its
    way to the disk.

    Args:
        home: state folder.
        subject: as the client is known to the server.
        model: of this model only; None for all.

    Raises:
        StorageError: the disk refused a write; parts done before stay done.
    """
    names = [subject]
    if mask_key_file(home).exists():
        names.append(open_mask(home).text(subject))
    erasure = Erasure()
    with PartWriter(home) as writer:
        for name in [model] if model is not None else logged_models(home):
            folder = model_folder(home, name)
            requests: set[str] = set()
            with locked(folder, exclusive=True):
                for day_folder in sorted(folder.glob("day=*")):
                    remove_replaced(day_folder)
                    for part in visible_parts(day_folder):
                        _erase_from(part, names, writer, requests, erasure)
            _erase_labels(labels_folder(home, name), requests, erasure)
    aside = sorted((log_root(home) / "damaged").glob("*.parquet"))
    erasure.unread += [
        f"{file} was set aside as damaged; look through it, or remove it" for file in aside
    ]
    return erasure


def _erase_from(
    part: Path, names: list[str], writer: PartWriter, requests: set[str], erasure: Erasure
) -> None:
    try:
        data = ds.dataset(part, format="parquet")
        theirs = data.to_table([REQUEST_ID], filter=ds.field(SUBJECT).isin(names))
        total = data.count_rows()
    except (OSError, pa.ArrowException) as exc:
        erasure.unread.append(damaged(part, exc))
        return
    if not theirs.num_rows:
        return
    if theirs.num_rows == total:
        part.unlink()
    else:
        schema = pq.read_schema(part).remove_metadata()
        replace_parts(writer, part.parent, [part], _others(part, names), schema)
    requests.update(theirs.column(0).to_pylist())
    erasure.rows += theirs.num_rows
    erasure.parts += 1


def _others(part: Path, names: list[str]) -> Iterator[pa.Table]:
    """The rows of everybody else, one row group at a time."""
    with pq.ParquetFile(part) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            theirs = pc.is_in(table.column(SUBJECT), value_set=pa.array(names))
            yield table.filter(pc.invert(theirs))


def _erase_labels(folder: Path, requests: set[str], erasure: Erasure) -> None:
    """Take the labels of requests out; a file's digest in its name stays that of what came."""
    if not requests:
        return
    ids = pa.array(sorted(requests))
    for file in sorted(folder.glob(f"{BY_REQUEST}-*.parquet")):
        try:
            table = pq.read_table(file)
        except (OSError, pa.ArrowException) as exc:
            raise StorageError(
                f"{file} is damaged ({str(exc).splitlines()[0]}): its labels could not be looked "
                "through. Remove it, import the labels again, and run the erasure again"
            ) from exc
        theirs = pc.is_in(table.column(REQUEST_ID), value_set=ids)
        count = pc.sum(theirs).as_py() or 0
        if count:
            sink = pa.BufferOutputStream()
            pq.write_table(table.filter(pc.invert(theirs)), sink, compression="zstd")
            write_atomically(file, sink.getvalue().to_pybytes())
            erasure.labels += count
