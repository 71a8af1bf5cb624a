"""Erased entities: known by digest alone, and files without their rows.

Regulation (EU) 2016/679 (GDPR) article 17 asks that a person's data be erased on request. So that
they do not come back, whatever lands or is restored later is compared with the list here. It holds
no value, but a salted SHA-256 of each entity's keys. Whoever has the list and guesses a key can
test the guess, so only its owner may read it.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import private_folder
from tasks.kernel.settings import bring, put
from tasks.kernel.values import Contract

FOLDER = "erasures"
ENTITIES = f"{FOLDER}/entities.json"
LOGGED = "e:"
"""Beginning of an entity key's column in the prediction log."""
SEPARATOR = "\0"
Mask = NDArray[np.bool_]


class ErasedEntity(Contract):
    """Names of the join keys of an entity, and the digest of names and values."""

    keys: tuple[str, ...]
    digest: str


class ErasedEntities(Contract):
    """All entities that were erased from one installation."""

    salt: str
    entities: tuple[ErasedEntity, ...] = ()

    def entity(self, values: Mapping[str, str]) -> ErasedEntity:
        """What the list says, or would say, of an entity."""
        keys = tuple(sorted(values))
        return ErasedEntity(keys=keys, digest=self.digest(keys, [values[k] for k in keys]))

    def with_entities(self, given: Iterable[Mapping[str, str]]) -> "ErasedEntities":
        """The list with more entities."""
        added = dict.fromkeys((*self.entities, *map(self.entity, given)))
        return self.model_copy(update={"entities": tuple(added)})

    def digest(self, keys: Collection[str], values: Collection[str]) -> str:
        """Digest of an entity; several values may come as one, with `SEPARATOR` between them."""
        text = SEPARATOR.join((self.salt, *keys, *values))
        return hashlib.sha256(text.encode()).hexdigest()


def read_entities(home: Path) -> ErasedEntities | None:
    """The list of an installation; None where nothing was ever erased.

    Raises:
        ArtifactError: it is damaged.
    """
    file = bring(home / ENTITIES)
    return parse_entities(file.read_bytes(), str(file)) if file.exists() else None


def parse_entities(text: bytes, what: str) -> ErasedEntities:
    """A list that was read.

    Raises:
        ArtifactError: it is damaged: rows that were erased could come back.
    """
    try:
        return ErasedEntities.model_validate_json(text)
    except ValueError as exc:
        raise ArtifactError(
            f"{what} is damaged; expected the list of erased entities, without which their rows "
            "could come back. Nothing was read; bring it from a backup"
        ) from exc


def merged(lists: Iterable[ErasedEntities]) -> ErasedEntities | None:
    """All entities of several lists of one installation.

    Raises:
        ArtifactError: they are of different ones, whose digests cannot be compared.
    """
    found = [each for each in lists if each.entities]
    if len({each.salt for each in found}) > 1:
        raise ArtifactError(
            f"{len(found)} lists of erased entities are of different installations; expected those "
            f"of one. Nothing was restored; move away the {ENTITIES} that is not of this state"
        )
    entities = dict.fromkeys(entity for each in found for entity in each.entities)
    return found[0].model_copy(update={"entities": tuple(entities)}) if found else None


def write_entities(home: Path, entities: ErasedEntities) -> None:
    """Write the list for all machines of the state; its owner alone may read it."""
    private_folder(home / FOLDER)
    put(home / ENTITIES, entities.model_dump_json(indent=1))


def new_entities() -> ErasedEntities:
    """An empty list, with a salt of its own."""
    return ErasedEntities(salt=secrets.token_hex(16))


@dataclass
class Theirs:
    """Tells which rows of a table are of erased entities.

    Attributes:
        entities: known by digests.
        keys: columns to values, with `SEPARATOR` between several: of entities that are known by
            their values, and ids of rows that tables without their keys name.
    """

    entities: ErasedEntities = field(default_factory=new_entities)
    keys: dict[tuple[str, ...], set[str]] = field(default_factory=dict)

    def columns(self, names: Collection[str]) -> list[str]:
        """Columns by which rows of a table are known; none where no row of it can be theirs."""
        keys = {*self.keys, *(entity.keys for entity in self.entities.entities)}
        return sorted({column for each in keys for column in _named(each, names)})

    def rows(self, table: pa.Table) -> Mask:
        """True for each of their rows."""
        found = np.zeros(table.num_rows, bool)
        for columns, texts in self.keys.items():
            if (values := _joined(table, columns)) is not None:
                found |= _is_in(values, sorted(texts))
        known = {entity.digest for entity in self.entities.entities}
        for keys in {entity.keys for entity in self.entities.entities}:
            if (values := _joined(table, keys)) is not None:
                distinct = filter(None, pc.unique(values).to_pylist())
                theirs = [t for t in distinct if self.entities.digest(keys, [t]) in known]
                found |= _is_in(values, theirs)
        return found

    def note_ids(self, table: pa.Table, columns: tuple[str, ...]) -> None:
        """Keep the ids of these rows, which other tables name."""
        if (values := _joined(table, columns)) is not None:
            self.keys.setdefault(columns, set()).update(v for v in values.to_pylist() if v)


def _named(keys: tuple[str, ...], names: Collection[str]) -> list[str]:
    """The columns of keys in a table that has all of them."""
    found = [next((n for n in (key, LOGGED + key) if n in names), "") for key in keys]
    return found if all(found) else []


def _joined(table: pa.Table, keys: tuple[str, ...]) -> pa.Array | None:
    if not table.num_rows or not (columns := _named(keys, table.column_names)):
        return None
    texts = [table.column(name).cast(pa.string()) for name in columns]
    return pc.binary_join_element_wise(*texts, SEPARATOR).combine_chunks()


def _is_in(values: pa.Array, texts: list[str]) -> Mask:
    wanted = pa.array(texts, pa.string())
    return np.asarray(pc.is_in(values, value_set=wanted).to_numpy(zero_copy_only=False), bool)


def their_rows(file: Path, theirs: Theirs) -> list[Mask]:
    """Which rows of each row group of a Parquet file are theirs; empty where none is.

    Raises:
        OSError, pa.ArrowException: the file is damaged.
    """
    with pq.ParquetFile(file) as parquet:
        columns = theirs.columns(parquet.schema_arrow.names)
        groups = range(parquet.num_row_groups) if columns else ()
        masks = [theirs.rows(parquet.read_row_group(n, columns)) for n in groups]
    return masks if any(mask.any() for mask in masks) else []


def select(file: Path, masks: list[Mask], target: Path) -> None:
    """Write the rows of a Parquet file that the masks name, in row groups as they were."""
    with pq.ParquetFile(file) as parquet:
        codec = parquet.metadata.row_group(0).column(0).compression
        with pq.ParquetWriter(target, parquet.schema_arrow, compression=codec) as writer:
            for number, mask in enumerate(masks):
                if mask.any():
                    writer.write_table(parquet.read_row_group(number).filter(pa.array(mask)))


def leave_out_rows(file: Path, entities: ErasedEntities) -> None:
    """Take the rows of erased entities out of a Parquet file that has just been written."""
    if masks := their_rows(file, Theirs(entities)):
        aside = file.with_name(f".{file.name}")
        select(file, [~mask for mask in masks], aside)
        aside.replace(file)
