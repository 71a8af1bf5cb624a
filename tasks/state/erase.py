"""Erasing entities from every file of a state, of its location and of its backups.

Tables are written again without the rows. What a result names by its digest answers to that digest
still: a signed note beside it says what an erasure has made of it, so models go on being monitored
and converted, and what was changed can be told from what was damaged. Content is put in place file
by file, after the note: a kill in between is mended by doing the same again.
"""

import json
import os
import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import chain, count, groupby
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.governance import erasure
from tasks.governance.erasure import Mask, Theirs
from tasks.kernel import files
from tasks.kernel.cores import usable_cores
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.keys.signed import read_signed, signed
from tasks.kernel.keys.store import EVIDENCE
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
OWN = (f"{erasure.FOLDER}/", "audit/", ASIDE)
"""What the erasure itself writes, and chained lines that hold no value of a row."""
SHORTEST_TEXT = 5
"""A shorter value, or a number, is found by chance in files that are no tables."""
_NAMED = re.compile(r'"uri": ?"(artifact:[\w-]+/[\w-]+)/([^"]+)",\s*"sha256": ?"(\w{64})"')
_ROW_ID = re.compile(r'"row_id": ?"(\w+)"')


@dataclass
class Folder:
    """Files of the state folder of this machine, by their names."""

    home: Path
    label: str = "state"

    def names(self) -> list[str]:
        """Without links: what they lead to has a name of its own."""
        there = (name for name in names(self.home) if not name.startswith(OWN))
        return [name for name in there if not (self.home / name).is_symlink()]

    def path(self, name: str) -> Path:
        """The file itself."""
        return self.home / name

    def same(self, name: str) -> object:
        """Equal for files that share their content, as months of several versions of tables."""
        seen = (self.home / name).stat()
        return seen.st_dev, seen.st_ino

    def seen(self, name: str) -> tuple[str, int]:
        """Digest and bytes."""
        return _seen(self.home / name)

    def replace(self, name: str, new: Path) -> None:
        """Put other content in its place, as a link, so that what was one file stays one."""
        target = self.home / name
        aside = target.with_name(f"{ASIDE}-{target.name}")
        aside.unlink(missing_ok=True)
        new.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.link(new, aside)
        aside.replace(target)
        if not name.startswith(ARTIFACTS):
            send(target)

    def drop(self, name: str) -> None:
        """Remove it."""
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
        """The object, where a folder has it readable; else a copy, until the next is asked for."""
        if not (sha256 := self.files[name][0]):
            self.aside.write_text(self.value, encoding="utf-8")
        elif self.location.folder is not None and ENCRYPTION not in os.environ:
            return self.location.folder / object_name(sha256)
        else:
            self.location.bring(object_name(sha256), self.aside, sha256=sha256)
        return self.aside

    def same(self, name: str) -> object:
        """As of `Folder`."""
        return self.files[name][0] or (self.label, name)

    def seen(self, name: str) -> tuple[str, int]:
        """As of `Folder`."""
        return self.files[name]

    def replace(self, name: str, new: Path) -> None:
        """Send other content; the name has its digest then."""
        self.files[name] = self.location.send_content(new)

    def drop(self, name: str) -> None:
        """Leave it out."""
        del self.files[name]


Place = Folder | Objects


@dataclass
class Eraser:
    """Finds rows and values of entities, and takes them out.

    Args:
        settings: the installation.
        theirs: tells their rows.
        values: of the entity as they are spelled; none where it is known by digest alone.
        scratch: folder on the state folder's disk.
    """

    settings: Settings
    theirs: Theirs
    values: tuple[str, ...]
    scratch: Path
    erased: dict[str, int] = field(default_factory=dict)
    """Rows by the name of the table, each content once."""
    unread: dict[str, str] = field(default_factory=dict)
    """Sentence by name: what could not be looked through."""
    columns: set[str] = field(default_factory=set)
    """Of all tables that were looked through."""
    changed: dict[str, str] = field(default_factory=dict)
    """URI of each result that can no longer be built as it was, and the digest that it had."""

    def __post_init__(self) -> None:
        plain = [v for v in self.values if len(v) >= SHORTEST_TEXT and not v.isdecimal()]
        forms = [{v, json.dumps(v)[1:-1], escape(v), escape(v, quote=False)} for v in plain]
        self.marks = [mark.encode() for each in forms for mark in each]
        self._text = re.compile(rb"(?<!\w)(%s)(?!\w)" % b"|".join(map(re.escape, self.marks)))
        self._own = Theirs(self.theirs.entities, dict(self.theirs.keys))
        self._made: dict[object, Path | None] = {}
        self._locks: dict[object, Lock] = {}
        self._numbers = count()
        folders = self.settings.store.folders("snapshots")
        found = {n for f in folders for n in _ROW_ID.findall((f / VALUE).read_text("utf-8"))}
        self.ids = (*((name,) for name in sorted(found)), ("request_id", "request_row"))

    def learn(self, place: Place) -> None:
        """Find the ids of their rows, by which tables without their keys name them."""
        for name, file in self._each(place, TABLE):
            with self._readable(place, name), pq.ParquetFile(file) as table:
                there = {*table.schema_arrow.names}
                self.columns |= there
                ids, own = [c for c in self.ids if {*c} <= there], self._own.columns(there)
                for number in range(table.num_row_groups if ids and own else 0):
                    rows = table.read_row_group(number, sorted({*own, *chain(*ids)}))
                    for columns in ids:
                        self.theirs.note_ids(rows.filter(pa.array(self._own.rows(rows))), columns)

    def find(self, place: Place) -> Iterator[tuple[str, int, Path, list[Mask]]]:
        """Name, number of rows, path and masks of each content that has rows of theirs.

        The number is 0 where a file holds a value alone.
        """
        for name, file in self._each(place):
            with self._readable(place, name):
                masks = erasure.their_rows(file, self.theirs) if name.endswith(TABLE) else []
                if masks or self._holds(file) or (name.endswith(TABLE) and self._says(file)):
                    yield name, _num(masks), file, masks

    def _says(self, file: Path) -> bool:
        """Whether a text of a table holds a value, compressed as it may be."""
        with pq.ParquetFile(file) as table:
            texts = [f.name for f in table.schema_arrow if pa.types.is_string(f.type)]
            groups = range(table.num_row_groups if texts and self.marks else 0)
            columns = (c for n in groups for c in table.read_row_group(n, texts).columns)
            found = (pc.match_substring(c, mark.decode()) for c in columns for mark in self.marks)
            return any(pc.any(each).as_py() for each in found)

    def _holds(self, file: Path) -> bool:
        if not self.marks or not file.stat().st_size:
            return False
        with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            return any(content.find(mark) >= 0 for mark in self.marks)

    def _each(self, place: Place, ends: str = "") -> Iterator[tuple[str, Path]]:
        done = set[object]()
        for name in place.names():
            with self._readable(place, name):
                if name.endswith(ends) and (same := place.same(name)) not in done:
                    done.add(same)
                    yield name, place.path(name)

    @contextmanager
    def _readable(self, place: Place, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:  # removed meanwhile
            return
        except (OSError, pa.ArrowException, sqlite3.Error) as exc:
            self.unread[f"{place.label}: {name}"] = str(exc).splitlines()[0]

    def erase(self, place: Place) -> None:
        """Take them out of all files; what names a result by its digest still finds it."""
        builds = [(build, [*inside]) for build, inside in groupby(sorted(place.names()), _build)]
        workers = usable_cores() if isinstance(place, Folder) else 1  # of others one copy is here
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda each: self._erase(place, *each), builds))

    def _erase(self, place: Place, build: str, inside: list[str]) -> None:
        changed = dict[str, Path]()
        for name in inside:
            with self._readable(place, name):
                if _is_copy(name, place):
                    place.drop(name)
                elif new := self._without(place, name):
                    changed[name] = new
        if changed and build not in inside:
            changed = self._noted(place, build, inside, changed)
        for name, new in changed.items():
            place.replace(name, new)

    def _without(self, place: Place, name: str) -> Path | None:
        """What is to be in the place of a file, made once for equal content."""
        same = place.same(name)
        with self._locks.setdefault(same, Lock()):
            if same not in self._made:
                target = self.scratch / str(next(self._numbers))
                is_made = self._make(place, name, place.path(name), target)
                self._made[same] = target if is_made else None
        return self._made[same]

    def _make(self, place: Place, name: str, file: Path, target: Path) -> bool:
        if name.endswith(TABLE):
            if masks := erasure.their_rows(file, self.theirs):
                table = name if isinstance(place, Folder) else f"{place.label}/{name}"
                self.erased[table] = _num(masks)
                erasure.select(file, [~mask for mask in masks], target)
            return bool(masks)
        if not self._holds(file):
            return False
        if name.endswith(TEXTS):
            target.write_bytes(self._text.sub(b"erased", file.read_bytes()))
            return True
        main = file.with_name(file.name.removesuffix("-wal"))
        if isinstance(place, Folder) and is_sqlite(main):
            with closing(sqlite3.connect(main, timeout=60, isolation_level=None)) as database:
                database.execute("VACUUM")  # nothing of removed rows stays in free pages
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # and in the log
        return False

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
        was, is_now = (Build.model_construct(files=f) for f in (before, {**before, **new}))
        keys, digests = key_store(self.settings.home), dict[str, str]()
        if note in inside:
            known = place.path(note).read_text(encoding="utf-8")
            digests = read_signed(keys.public_keys(EVIDENCE), known, note)
        uri = build.replace(f"{ARTIFACTS}/", "artifact:", 1)
        text = place.path(f"{build}/{VALUE}").read_text(encoding="utf-8")
        for named, name, sha256 in _NAMED.findall(text):
            if named != uri or was.digest(name) == is_now.digest(name):
                continue
            if note not in inside and was.digest(name) != sha256:
                self.unread[f"{place.label}: {build}/{name}"] = "it was damaged before"
                continue
            digests[sha256] = is_now.digest(name)
            self.changed[f"{uri}/{name}"] = sha256
        aside = self.scratch / str(next(self._numbers))
        aside.write_text(signed(keys, digests), encoding="utf-8")
        return {note: aside, **changed}


def _build(name: str) -> str:
    """Folder of the build that a file is of; of others the name itself."""
    found = build_of(name)
    return found[0].removesuffix(".json") if found else name


def _is_copy(name: str, place: Place) -> bool:
    """What is made again from what is elsewhere: partial copies, decoded rows, an online store."""
    is_online = isinstance(place, Objects) and name.endswith(ONLINE)
    return is_online or PARTIAL in name.split("/") or name.endswith(".rows")


def _num(masks: list[Mask]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _seen(file: Path) -> tuple[str, int]:
    return files.digest_of(file), file.stat().st_size


def builds_of(location: Location, scratch: Path) -> Iterator[Objects]:
    """The builds of a location, each by the name of its record."""
    for name, build in shared_builds(location):
        folder = name.removesuffix(".json")
        inside = {f"{folder}/{n}": seen for n, seen in build.files.items()}
        inside[f"{folder}/{VALUE}"] = ("", 0)
        yield Objects(location, name, inside, scratch / "object", json.dumps(build.value))


def erase_builds(eraser: Eraser, location: Location) -> None:
    """Erase from the builds of a location, and remove what nothing names then."""
    for place in builds_of(location, eraser.scratch):
        before = dict(place.files)
        eraser.erase(place)
        if place.files != before:
            folder = place.label.removesuffix(".json")
            value = json.loads(place.path(f"{folder}/{VALUE}").read_bytes())
            del place.files[f"{folder}/{VALUE}"]
            left = {n.removeprefix(f"{folder}/"): seen for n, seen in place.files.items()}
            build = Build(value=value, files=left, finished=datetime.now(UTC))
            location.write(place.label, build.model_dump_json().encode())
    remove_unnamed(location, eraser.settings)


def backups_of(
    settings: Settings, location: Location, scratch: Path
) -> Iterator[tuple[Backup, Objects]]:
    """The backups of a state, and their files."""
    for name in list_backups(location, name_of_state(settings)):
        backup = read_backup(location, name)
        inside = {n: (k.sha256, k.num_bytes) for n, k in backup.files.items() if not k.link}
        yield backup, Objects(location, f"backup {name}", inside, scratch / "object")


def erase_backups(eraser: Eraser, location: Location) -> dict[str, int]:
    """Erase from all backups of a state; files of each that were changed or left out."""
    done: dict[str, int] = {}
    with under_way(location, "prune") as sign:
        for backup, place in backups_of(eraser.settings, location, eraser.scratch):
            before = dict(place.files)
            eraser.erase(place)
            changed = dict(place.files.items() - before.items())
            gone = before.keys() - place.files.keys()
            done[backup.name] = len(changed) + len(gone)
            inside = {n: kept for n, kept in backup.files.items() if n not in gone}
            for name, (sha256, num_bytes) in changed.items():
                mode = inside.get(name, Kept()).mode
                inside[name] = Kept(sha256=sha256, num_bytes=num_bytes, mode=mode)
            content = backup.model_copy(update={"files": inside}).model_dump_json().encode()
            sign(True)
            location.write(f"{BACKUPS}/{backup.name}.json", content)
        remove_unnamed(location, eraser.settings)
    return done


def known_entities(
    settings: Settings, source: Location, backup: Backup
) -> erasure.ErasedEntities | None:
    """Entities that were erased from a state, by its folder and by all its backups.

    Raises:
        ArtifactError: a list is damaged, or is of another state.
    """
    lists = [erasure.read_entities(settings.home)]
    for name in list_backups(source, backup.state):
        if kept := read_backup(source, name).files.get(erasure.ENTITIES):
            text = source.read(object_name(kept.sha256)) or b""
            lists.append(erasure.parse_entities(text, f"{source}/{name}/{erasure.ENTITIES}"))
    return erasure.merged(filter(None, lists))


def erase_restored(
    settings: Settings, entities: erasure.ErasedEntities | None, scratch: Path
) -> None:
    """Take out of a restored state what was erased after its backup was made.

    The next refresh fills its online store again: nobody can tell whose the values there are.
    """
    if entities is None:
        return
    erasure.write_entities(settings.home, entities)
    eraser = Eraser(settings, Theirs(entities), (), scratch)
    eraser.learn(Folder(settings.home))
    eraser.erase(Folder(settings.home))
    for file in settings.home.rglob(f"{ONLINE}*"):
        file.unlink()
    if settings.location is not None:
        erase_builds(eraser, settings.location)
