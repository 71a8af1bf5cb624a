"""Erasing entities from every file of a state, of its location and of its backups.

Tables are written again without the rows. What a result names by its digest answers to that digest
still: a signed note beside it says what an erasure has made of it, so models go on being monitored
and converted, and what was changed can be told from what was damaged. Content is put in place file
by file, after the note: a kill in between is mended by doing the same again.
"""

import json
import mmap
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count, groupby
from pathlib import Path, PurePosixPath
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.governance.erasure import (
    ENTITIES,
    FOLDER,
    ErasedEntities,
    Mask,
    Theirs,
    merged,
    parse_entities,
    read_entities,
    select,
    their_rows,
    write_entities,
)
from tasks.kernel import files
from tasks.kernel.cores import usable_cores
from tasks.kernel.keys.signed import read_signed, signed
from tasks.kernel.location import Location, object_name
from tasks.kernel.parts import PARTIAL, PARTS_FILE, described
from tasks.kernel.settings import ARTIFACTS, REWRITTEN, VALUE, Build, Settings, send
from tasks.state.backup import Backup, Kept, list_backups, read_backup, under_way
from tasks.state.contents import BACKUPS, build_of, names
from tasks.state.databases import is_sqlite, name_of_state
from tasks.state.prune import remove_unnamed, shared_builds

TEXTS = (".json", ".jsonl", ".html", ".md", ".txt", ".csv", ".log", ".yaml")
"""Files in which a value is replaced by a word."""
TABLE, ONLINE, ASIDE = ".parquet", "feast/online.db", ".erasing"
OWN = (f"{FOLDER}/", "audit/")
"""What the erasure itself writes, and chained lines that hold no value of a row."""
BATCH = 64
"""Files that are rewritten before they are put in place."""
SHORTEST_TEXT = 5
"""A shorter value, or a number, is found by chance in files that are no tables."""
_ROW_ID = re.compile(r'"row_id": ?"(\w+)"')
_NAMED = re.compile(r'"uri": ?"(artifact:[\w-]+/[\w-]+)/([^"]+)",\s*"sha256": ?"(\w{64})"')

Chosen = Callable[[str, Path, list[Mask]], None]


class Place(Protocol):
    """Files by the names that the state has for them."""

    label: str

    def names(self) -> list[str]:
        """All of them."""

    def path(self, name: str) -> Path:
        """Where one can be read, until the next is asked for."""

    def same(self, name: str) -> object:
        """Equal for files that share their content."""

    def seen(self, name: str) -> tuple[str, int]:
        """Digest and bytes."""

    def replace(self, name: str, new: Path) -> None:
        """Put other content in its place."""

    def drop(self, name: str) -> None:
        """Remove it."""


@dataclass
class Folder:
    """The state folder of this machine."""

    home: Path
    label: str = "state"

    def names(self) -> list[str]:
        """Without links: what they lead to has a name of its own."""
        there = (name for name in names(self.home) if not name.startswith((*OWN, ASIDE)))
        return [name for name in there if not (self.home / name).is_symlink()]

    def path(self, name: str) -> Path:
        """The file itself."""
        return self.home / name

    def same(self, name: str) -> object:
        """Months of tables are linked from one version to the next."""
        seen = (self.home / name).stat()
        return seen.st_dev, seen.st_ino

    def seen(self, name: str) -> tuple[str, int]:
        """As it is now."""
        return _seen(self.home / name)

    def replace(self, name: str, new: Path) -> None:
        """Link it, so that what was one file stays one; other machines get it too."""
        target = self.home / name
        aside = target.with_name(f"{ASIDE}-{target.name}")
        aside.unlink(missing_ok=True)
        new.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o600)
        os.link(new, aside)
        aside.replace(target)
        if not name.startswith(ARTIFACTS):
            send(target)

    def drop(self, name: str) -> None:
        """Remove it here: it is a copy of what is elsewhere."""
        (self.home / name).unlink(missing_ok=True)


@dataclass
class Objects:
    """Files whose content a location keeps by digest: of a backup, or of one build."""

    location: Location
    label: str
    files: dict[str, tuple[str, int]]
    aside: Path
    value: str = ""
    """Of a build, whose record holds it."""

    def names(self) -> list[str]:
        """As the backup or the build has them."""
        return [name for name in self.files if not name.startswith(OWN)]

    def path(self, name: str) -> Path:
        """The object of a folder; a copy of another one."""
        if not (sha256 := self.files[name][0]):
            self.aside.write_text(self.value, encoding="utf-8")
        elif self.location.folder is not None:
            return self.location.folder / object_name(sha256)
        else:
            self.location.bring(object_name(sha256), self.aside, sha256=sha256)
        return self.aside

    def same(self, name: str) -> object:
        """Content has one digest."""
        return self.files[name][0] or (self.label, name)

    def seen(self, name: str) -> tuple[str, int]:
        """As the list says."""
        return self.files[name]

    def replace(self, name: str, new: Path) -> None:
        """Send it; the name has its digest then."""
        self.files[name] = self.location.send_content(new)

    def drop(self, name: str) -> None:
        """Leave it out."""
        del self.files[name]


@dataclass
class Eraser:
    """Finds rows and values of entities, and takes them out.

    Args:
        settings: the installation.
        theirs: tells their rows.
        ids: columns that together are the id of a row, by which other tables name it.
        values: of the entity as they are spelled; none where it is known by digest alone.
        scratch: folder on the state folder's disk.
    """

    settings: Settings
    theirs: Theirs
    ids: tuple[tuple[str, ...], ...]
    values: tuple[str, ...]
    scratch: Path
    erased: Callable[[str, str, int], None] = lambda *_: None
    """Gets folder, name and number of the rows of a table before they go."""
    unread: dict[str, str] = field(default_factory=dict)
    """Sentence by name: what could not be looked through."""
    changed: dict[str, str] = field(default_factory=dict)
    """URI of each result that can no longer be built as it was, and the digest that it had."""

    def __post_init__(self) -> None:
        plain = [v for v in self.values if len(v) >= SHORTEST_TEXT and not v.isdecimal()]
        self.marks = [m.encode() for v in plain for m in {v, json.dumps(v)[1:-1]}]
        self._text = re.compile(rb"(?<!\w)(%s)(?!\w)" % b"|".join(map(re.escape, self.marks)))
        self._own = Theirs(self.theirs.entities, dict(self.theirs.keys))
        self._made: dict[object, Path | None] = {}
        self._numbers = count()

    def learn(self, place: Place) -> None:
        """Find the ids of their rows, in tables that hold keys and ids."""
        for name, file in self._tables(place):
            with self._readable(place, name), pq.ParquetFile(file) as table:
                there = {*table.schema_arrow.names}
                ids = [columns for columns in self.ids if {*columns} <= there]
                for number in range(
                    table.num_row_groups if ids and self._own.columns(there) else 0
                ):
                    wanted = {
                        *self._own.columns(there),
                        *(name for columns in ids for name in columns),
                    }
                    rows = table.read_row_group(number, sorted(wanted))
                    theirs = rows.filter(pa.array(self._own.rows(rows)))
                    for columns in ids:
                        self.theirs.note_ids(theirs, columns)

    def rows(self, place: Place, chosen: Chosen | None = None) -> Counter[str]:
        """Their rows by folder, each content once.

        Args:
            place: looked through.
            chosen: gets the name, path and masks of each table that has some.
        """
        found = Counter[str]()
        for name, file in self._tables(place):
            with self._readable(place, name):
                if masks := their_rows(file, self.theirs):
                    found[kind_of(place, name)] += _num(masks)
                    if chosen:
                        chosen(name, file, masks)
        return found

    def _tables(self, place: Place, ends: str = TABLE) -> Iterator[tuple[str, Path]]:
        """Files, each content once."""
        done = set[object]()
        for name in place.names():
            with self._readable(place, name):
                if name.endswith(ends) and (same := place.same(name)) not in done:
                    done.add(same)
                    yield name, place.path(name)

    def erase(self, place: Place) -> None:
        """Take them out of all files; what names a result by its digest still finds it."""
        workers = usable_cores() if isinstance(place, Folder) else 1  # of others one copy is here
        with ThreadPoolExecutor(workers) as pool:
            for builds in _batches(sorted(place.names())):
                one_of = dict[object, str]()
                for name in (name for inside in builds.values() for name in inside):
                    with self._readable(place, name):
                        one_of.setdefault(place.same(name), name)
                for _ in pool.map(partial(self._make, place), one_of, one_of.values()):
                    pass
                for build, inside in builds.items():
                    self._replace(place, build, inside)

    def _replace(self, place: Place, build: str, inside: list[str]) -> None:
        changed = dict[str, Path]()
        for name in inside:
            with self._readable(place, name):
                if _is_copy(name, place):
                    place.drop(name)
                elif new := self._made.get(place.same(name)):
                    changed[name] = new
        if changed and build not in inside:
            changed = self._noted(place, build, inside, changed)
        for name, new in changed.items():
            place.replace(name, new)

    def left(self, place: Place) -> dict[str, int]:
        """Files that still hold rows of theirs, and how many, or a value alone: 0."""
        found = dict[str, int]()
        for name, file in self._tables(place, ends=""):
            with self._readable(place, name):
                rows, is_there = self._in_table(file) if name.endswith(TABLE) else (0, False)
                if rows or is_there or self._holds(file):
                    found[name] = rows
        return found

    def _in_table(self, file: Path) -> tuple[int, bool]:
        """Rows of theirs, and whether a text holds a value, compressed as it may be."""
        rows, is_there = 0, False
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            texts = [f.name for f in schema if self.marks and pa.types.is_string(f.type)]
            wanted = sorted({*self.theirs.columns(schema.names), *texts})
            for number in range(table.num_row_groups if wanted else 0):
                group = table.read_row_group(number, wanted)
                rows += int(self.theirs.rows(group).sum())
                is_there = is_there or any(
                    pc.any(pc.match_substring(group[name], mark.decode())).as_py()
                    for name in texts
                    for mark in self.marks
                )
        return rows, is_there

    @contextmanager
    def _readable(self, place: Place, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:  # removed meanwhile
            return
        except (OSError, pa.ArrowException, sqlite3.Error) as exc:
            self.unread[f"{place.label}: {name}"] = str(exc).splitlines()[0]

    def _make(self, place: Place, same: object, name: str) -> None:
        """Make what is to be in the place of a file, once for equal content."""
        if same in self._made or _is_copy(name, place):
            return
        self._made[same] = None
        with self._readable(place, name):
            file, target = place.path(name), self.scratch / str(next(self._numbers))
            if name.endswith(TABLE):
                if masks := their_rows(file, self.theirs):
                    self.erased(kind_of(place, name), name, _num(masks))
                    select(file, [~mask for mask in masks], target)
                    self._made[same] = target
            elif self.marks and name.endswith(TEXTS) and self._text.search(file.read_bytes()):
                target.write_bytes(self._text.sub(b"erased", file.read_bytes()))
                self._made[same] = target
            elif isinstance(place, Folder) and self._holds(file):
                self._clean_database(file)

    def _noted(
        self, place: Place, build: str, inside: list[str], changed: dict[str, Path]
    ) -> dict[str, Path]:
        """With the note that comes before all else, and the parts of what has other content."""
        note, parts = f"{build}/{REWRITTEN}", f"{build}/{PARTS_FILE}"
        tables = [new for name, new in changed.items() if name.count("/") == 3]
        if parts in inside and tables:
            changed[parts] = self.scratch / str(next(self._numbers))
            changed[parts].write_text(described(tables[0]))
        before = {name.removeprefix(f"{build}/"): place.seen(name) for name in inside}
        new = {name.removeprefix(f"{build}/"): _seen(file) for name, file in changed.items()}
        now = datetime.now(UTC)
        was, is_now = (Build(value={}, files=f, finished=now) for f in (before, {**before, **new}))
        home, is_again, digests = self.settings.home, note in inside, dict[str, str]()
        if is_again:
            digests = read_signed(home, place.path(note).read_text(encoding="utf-8"), note)
        text = place.path(f"{build}/{VALUE}").read_text(encoding="utf-8")
        uri = build.replace("/", ":", 1).replace(ARTIFACTS, "artifact")
        for named, name, sha256 in _NAMED.findall(text):
            if named != uri or was.digest(name) == is_now.digest(name):
                continue
            if not is_again and was.digest(name) != sha256:
                self.unread[f"{place.label}: {build}/{name}"] = "it was damaged before"
                continue
            digests[sha256] = is_now.digest(name)
            self.changed[f"{uri}/{name}"] = sha256
        aside = self.scratch / str(next(self._numbers))
        aside.write_text(signed(home, digests), encoding="utf-8")
        return {note: aside, **changed}

    def _holds(self, file: Path) -> bool:
        if not self.marks or not file.stat().st_size:
            return False
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return any(content.find(mark) >= 0 for mark in self.marks)

    def _clean_database(self, file: Path) -> None:
        """Replace values in texts of an SQLite file, and overwrite what was removed from it."""
        if file.name.endswith(("-wal", "-shm")):
            file = file.with_name(file.name[:-4])
        if not is_sqlite(file):
            return
        with closing(sqlite3.connect(file, timeout=60, isolation_level=None)) as database:
            tables = (
                "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
            )
            for (table,) in database.execute(tables).fetchall():
                for _, column, *_ in database.execute(f'PRAGMA table_info("{table}")').fetchall():
                    for mark in self.marks:
                        database.execute(
                            f'UPDATE OR IGNORE "{table}" SET "{column}" = replace("{column}", ?1, '
                            f"'erased') WHERE typeof(\"{column}\") = 'text' "
                            f'AND instr("{column}", ?1)',
                            [mark.decode()],
                        )
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def kind_of(place: Place, name: str) -> str:
    """Folder by which rows are counted, such as `artifacts/snapshots`; and of which backup."""
    parts = PurePosixPath(name).parts
    kind = "/".join(parts[: 2 if parts[0] in (ARTIFACTS, "use_cases") else 1])
    return kind if isinstance(place, Folder) else f"{place.label}: {kind}"


def _num(masks: list[Mask]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _build(name: str) -> str:
    """Folder of the build that a file is of; of others the name itself."""
    found = build_of(name)
    return found[0].removesuffix(".json") if found else name


def _batches(ordered: list[str]) -> Iterator[dict[str, list[str]]]:
    """Files by build, some builds at a time: what is made for them takes space twice."""
    batch = dict[str, list[str]]()
    for build, inside in groupby(ordered, _build):
        batch[build] = [*inside]
        if sum(map(len, batch.values())) > BATCH:
            yield batch
            batch = {}
    yield batch


def _is_copy(name: str, place: Place) -> bool:
    """What is made again from what is elsewhere: partial copies, decoded rows, an online store."""
    is_backup = not isinstance(place, Folder)
    return PARTIAL in name.split("/") or name.endswith((".rows", *[ONLINE] * is_backup))


def _seen(file: Path) -> tuple[str, int]:
    return files.digest_of(file), file.stat().st_size


def id_columns(settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Columns that name a row: of every training set, and of the prediction log."""
    texts = [(f / VALUE).read_text(encoding="utf-8") for f in settings.store.folders("snapshots")]
    names_of_rows = {name for text in texts for name in _ROW_ID.findall(text)}
    return (*((name,) for name in sorted(names_of_rows)), ("request_id", "request_row"))


def known_entities(settings: Settings, source: Location, backup: Backup) -> ErasedEntities | None:
    """Entities that were erased from a state, by its folder and by all its backups.

    Raises:
        ArtifactError: a list is damaged, or is of another state.
    """
    lists = [read_entities(settings.home)]
    for name in list_backups(source, backup.state):
        if kept := read_backup(source, name).files.get(ENTITIES):
            text = source.read(object_name(kept.sha256)) or b""
            lists.append(parse_entities(text, f"{source}/{name}/{ENTITIES}"))
    return merged(filter(None, lists))


def erase_restored(settings: Settings, entities: ErasedEntities | None, scratch: Path) -> None:
    """Take out of a restored state what was erased after its backup was made.

    Values online are known by their keys alone: a store that has any of them is filled anew by the
    next refresh.
    """
    if entities is None:
        return
    write_entities(settings.home, entities)
    eraser = Eraser(settings, Theirs(entities), id_columns(settings), (), scratch)
    eraser.learn(Folder(settings.home))
    eraser.erase(Folder(settings.home))
    for store in settings.home.rglob(ONLINE):
        for file in store.parent.glob(f"{store.name}*"):
            file.unlink()
    if settings.location is not None:
        erase_builds(eraser, settings.location)


def builds_of(location: Location, scratch: Path) -> Iterator[Objects]:
    """The builds of a location."""
    for name, build in shared_builds(location):
        folder = name.removesuffix(".json")
        inside = {f"{folder}/{n}": seen for n, seen in build.files.items()}
        inside[f"{folder}/{VALUE}"] = ("", 0)
        yield Objects(
            location, f"location: {name}", inside, scratch / "object", json.dumps(build.value)
        )


def erase_builds(eraser: Eraser, location: Location) -> None:
    """Erase from the builds of a location, and remove what nothing names then."""
    for place in builds_of(location, eraser.scratch):
        before = dict(place.files)
        eraser.erase(place)
        if place.files != before:
            name = place.label.removeprefix("location: ")
            folder = name.removesuffix(".json")
            value = json.loads(place.path(f"{folder}/{VALUE}").read_bytes())
            del place.files[f"{folder}/{VALUE}"]
            left = {n.removeprefix(f"{folder}/"): seen for n, seen in place.files.items()}
            build = Build(value=value, files=left, finished=datetime.now(UTC))
            location.write(name, build.model_dump_json().encode())
    remove_unnamed(location, eraser.settings)


def erase_backups(eraser: Eraser, location: Location) -> dict[str, int]:
    """Erase from all backups of a state; a killed erasure goes on.

    Returns:
        Backup to the number of its files that were changed or left out.
    """
    done: dict[str, int] = {}
    with under_way(location, "prune") as sign:
        for name in list_backups(location, name_of_state(eraser.settings)):
            sign()
            backup = read_backup(location, name)
            place = in_backup(backup, location, eraser.scratch)
            eraser.erase(place)
            inside = {n: kept for n, kept in backup.files.items() if kept.link}
            inside |= {n: _kept(seen, backup.files.get(n)) for n, seen in place.files.items()}
            both = inside.keys() | backup.files.keys()
            done[name] = sum(inside.get(n) != backup.files.get(n) for n in both)
            if done[name]:
                backup = backup.model_copy(update={"files": inside})
                location.write(f"{BACKUPS}/{name}.json", backup.model_dump_json().encode())
        sign(True)
        remove_unnamed(location, eraser.settings)
    return done


def in_backup(backup: Backup, location: Location, scratch: Path) -> Objects:
    """The files of a backup."""
    inside = {n: (k.sha256, k.num_bytes) for n, k in backup.files.items() if not k.link}
    return Objects(location, f"backup {backup.name}", inside, scratch / "object")


def _kept(seen: tuple[str, int], was: Kept | None) -> Kept:
    if was and (was.sha256, was.num_bytes) == seen:
        return was
    return Kept(sha256=seen[0], num_bytes=seen[1], mode=was.mode if was else 0o600)
