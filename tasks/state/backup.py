"""Backups: the whole state at one moment, by content; and the way back, into any place or store.

What names something is read before it, and everything is written before what names it. So a backup
that is made while the loop runs names nothing that it lacks. Its list is written last: a backup is
whole, or it is not there. What a cut-off one has sent, the next one does not send again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ValidationError

from tasks.kernel import files
from tasks.kernel.errors import ArtifactError, ConfigurationError, TransientError
from tasks.kernel.location import OBJECTS, Location, object_name
from tasks.kernel.settings import VALUE, Build, Settings
from tasks.metadata.database import held_everywhere
from tasks.state import contents as state
from tasks.state.databases import Prepare, copy_sqlite, dump, is_empty, is_sqlite, load, servers

RESTORING = ".restoring"
NUM_THREADS, LISTINGS = 8, 10
SETTLED_S = 10
"""A file is read again that changed so shortly before the last backup: it may have changed since
within one tick of its clock."""
Say = Callable[[str], None]


class Kept(BaseModel):
    """One file of a backup; of a link, where it leads to."""

    sha256: str = ""
    num_bytes: int = 0
    mode: int = 0o644
    changed: float = 0
    noted: float = 0
    """When its inode was last changed: a file that was rewritten may keep its old time."""
    link: str = ""


class Backup(BaseModel):
    """What was in a state at one moment, by name."""

    made: datetime
    release: str
    secrets: bool
    files: dict[str, Kept]

    @property
    def name(self) -> str:
        """As commands name it."""
        return f"{self.made:%Y%m%dT%H%M%S.%fZ}"

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(kept.num_bytes for kept in self.files.values())


def list_backups(location: Location) -> list[str]:
    """Names of the backups of a location, oldest first."""
    return sorted(PurePosixPath(name).stem for name in location.entries(state.BACKUPS))


def read_backup(location: Location, name: str | None = None) -> Backup:
    """A backup by its name; the newest where it is None.

    Raises:
        ConfigurationError: there is none.
        ArtifactError: its list was changed.
    """
    names = list_backups(location)
    chosen = name or (names[-1] if names else "")
    if chosen not in names or (text := location.read(f"{state.BACKUPS}/{chosen}.json")) is None:
        raise ConfigurationError(
            f"{location.url} has no backup {chosen or 'yet'}; expected one of `falaj backup "
            f"{location.url} --list` ({len(names)}). Nothing was changed"
        )
    try:
        backup = Backup.model_validate_json(text)
        wrong = [n for n, k in backup.files.items() if not files.is_inside(n, k.link)]
        reason = f"{wrong[0]} leads out of the state" if wrong else ""
    except ValidationError as exc:
        reason = exc.errors()[0]["msg"]
    if reason:
        raise ArtifactError(
            f"{location.url}: the list of {chosen} was changed, or another release wrote it "
            f"({reason}). Nothing was done; use another backup"
        )
    return backup


def back_up(
    settings: Settings,
    target: Location,
    prepare: Mapping[str, Prepare],
    say: Say,
    *,
    secrets: bool = False,
) -> Backup:
    """Bring all that a state holds into a location, and name it there.

    Raises:
        TransientError, StorageError: one of the stores or databases does not answer, or refuses.
    """
    last = None
    with suppress(ConfigurationError, ArtifactError):  # there is none, or its list is damaged
        last = read_backup(target)
    sender = _Sender(target, last)
    backup = Backup(made=datetime.now(UTC), release=version("falaj"), secrets=secrets, files={})
    with files.scratch_folder("falaj-backup") as scratch, ThreadPoolExecutor(NUM_THREADS) as pool:
        sender.scratch = scratch
        for wanted in range(state.BUILDS + 1):

            def listed(wanted: int = wanted) -> dict[str, state.Source]:
                found = dict(state.contents(settings, wanted, secrets=secrets))
                if wanted == state.DATABASES:
                    for name, url in servers(settings).items():
                        found[name] = copy = scratch / PurePosixPath(name).name
                        dump(name, url, copy, prepare)
                return found

            ordered = wanted == state.DATABASES
            backup.files |= sender.send_all(listed, settings.home, None if ordered else pool)
            say(f"{len(backup.files)} files, {sender.num_sent} bytes sent")
    target.create(f"{state.BACKUPS}/{backup.name}.json", backup.model_dump_json().encode())
    return backup


class _Sender:
    """Sends the content of files that a location lacks."""

    def __init__(self, target: Location, last: Backup | None) -> None:
        self.target, self.num_sent = target, 0
        self.last = last.files if last else {}
        self.settled = last.made.timestamp() - SETTLED_S if last else 0
        self.there = {name: e.num_bytes for name, e in target.entries(OBJECTS).items()}
        self.scratch, self.numbers = Path(), count()

    def send_all(
        self,
        listed: Callable[[], dict[str, state.Source]],
        home: Path,
        pool: ThreadPoolExecutor | None,
    ) -> dict[str, Kept]:
        """Send what is listed; where some was removed meanwhile, also what has come in its place.

        Args:
            pool: None: one after the other.

        Raises:
            TransientError: some was removed each time.
        """
        kept: dict[str, Kept] = {}
        for _ in range(LISTINGS):
            found = listed()
            # What operation names is in MLflow's database, so that is read later.
            lacking = sorted(found.keys() - kept.keys(), reverse=pool is None)
            with ExitStack() as held:
                for folder in {str(PurePosixPath(n).parent) for n in found if "audit/" in n}:
                    # Its head and its lines belong together.
                    held.enter_context(held_everywhere(home / folder / "lock", shared=True))
                sent = (pool.map if pool else map)(lambda n, of=found: self.send(n, of[n]), lacking)
                new = {name: each for name, each in zip(lacking, sent, strict=True) if each}
            kept = {name: each for name, each in kept.items() if name in found} | new
            if not (gone := found.keys() - kept.keys()):
                return kept
        raise TransientError(
            f"{home}: of what was listed, some was removed {LISTINGS} times, such as {min(gone)}; "
            "expected all of it. No backup was made; run again"
        )

    def send(self, name: str, source: state.Source) -> Kept | None:
        """None where the file was removed meanwhile."""
        aside = self.scratch / str(next(self.numbers))
        try:
            if isinstance(source, Path):
                return self._file(name, source, aside)
            if isinstance(source, bytes):
                aside.write_bytes(source)
                return self._content(aside)
            if source.sha256 and self.there.get(object_name(source.sha256)) == source.num_bytes:
                return Kept(sha256=source.sha256, num_bytes=source.num_bytes)
            if known := self._known(name, source.num_bytes, source.changed):
                return known
            wanted = object_name(source.sha256) if source.sha256 else source.name
            source.location.bring(wanted, aside, sha256=source.sha256 or None)
            return self._content(aside).model_copy(update={"changed": source.changed})
        except FileNotFoundError:
            if isinstance(source, state.Shared) and source.sha256:
                raise ArtifactError(
                    f"{source.location.url}/{source.name} names content that is absent; expected "
                    "all of it. No backup was made; run the stage that makes it again"
                ) from None
            return None
        finally:
            aside.unlink(missing_ok=True)

    def _file(self, name: str, path: Path, aside: Path) -> Kept:
        if link := state.link_of(path, name):
            return Kept(link=link)
        seen = path.stat()
        fixed = state.order(name) in (state.MODELS, state.BUILDS) and name.count("/") > 2
        database = not fixed and is_sqlite(path)  # what changed may be in a file beside it
        known = self._known(name, seen.st_size, seen.st_mtime, seen.st_ctime, fixed=fixed)
        if known and not database:
            return known.model_copy(update={"mode": seen.st_mode & 0o777})
        if database:
            copy_sqlite(path, aside)
        elif not fixed:  # others may write to it
            shutil.copyfile(path, aside)
        kept = self._content(path if fixed else aside)
        times = {"changed": seen.st_mtime, "noted": seen.st_ctime}
        return kept.model_copy(update={"mode": seen.st_mode & 0o777, **times})

    def _known(
        self, name: str, num_bytes: int, changed: float, noted: float = 0, *, fixed: bool = False
    ) -> Kept | None:
        """What the last backup says of a file that has not changed since."""
        last = self.last.get(name)
        seen = num_bytes, changed, noted
        if last is None or (last.num_bytes, last.changed, last.noted) != seen:
            return None
        is_there = self.there.get(object_name(last.sha256)) == num_bytes
        return last if is_there and changed and (fixed or changed < self.settled) else None

    def _content(self, path: Path) -> Kept:
        digest, size = files.digest_of(path), path.stat().st_size
        if self.there.get(object_name(digest)) != size:
            self.target.write(object_name(digest), path)
            self.there[object_name(digest)] = size
            self.num_sent += size
        return Kept(sha256=digest, num_bytes=size)


def verify(location: Location, backup: Backup) -> None:
    """Read all content of a backup, and compare it with its digests.

    Raises:
        ArtifactError: some of it is absent or was changed.
    """
    with files.scratch_folder("falaj-verify") as scratch:
        for _ in _brought(location, backup, scratch, [*backup.files]):
            pass


def _brought(
    location: Location, backup: Backup, folder: Path, names: list[str]
) -> Iterator[tuple[str, Path]]:
    """Bring content, each once and checked; it is removed when the next is asked for."""

    def bring(item: tuple[str, str]) -> tuple[str, Path]:
        sha256, name = item
        try:
            location.bring(object_name(sha256), folder / sha256, sha256=sha256)
        except FileNotFoundError as exc:
            raise ArtifactError(
                f"{location.url}/{object_name(sha256)}, the content of {name}, is absent; expected "
                f"it for the backup {backup.name}. Nothing was changed; use another backup"
            ) from exc
        return sha256, folder / sha256

    found = {kept.sha256: name for name in names if not (kept := backup.files[name]).link}
    wanted = [*found.items()]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for first in range(0, len(wanted), NUM_THREADS):  # no more than these take space twice
            for sha256, path in pool.map(bring, wanted[first : first + NUM_THREADS]):
                yield sha256, path
                path.unlink()


def restore(
    settings: Settings,
    source: Location,
    backup: Backup,
    prepare: Mapping[str, Prepare],
    say: Say,
    *,
    only_shared: bool = False,
) -> None:
    """Bring a backup into an empty state: folder, location and databases as the settings say.

    Content is checked while it comes, and is renamed into place when all of it is there. A restore
    that was cut off goes on.

    Args:
        only_shared: what each machine has for itself is left as it is.

    Raises:
        ConfigurationError: the state is not empty.
        ArtifactError: content is absent, or was changed.
    """
    aside = settings.home / RESTORING
    if not only_shared:
        check_empty(settings, going_on=backup.name if aside.exists() else None)
        files.private_folder(settings.home)
        files.private_folder(aside)
        (aside / ".backup").write_text(backup.name)
    shared, databases = settings.location, servers(settings)
    local = {n for n in backup.files if shared is None or state.LOCAL & {*n.split("/")}}
    local -= databases.keys()
    places: dict[str, list[str]] = {}
    for name, kept in backup.files.items():
        places.setdefault(kept.sha256, []).append(name)
    chosen = [name for names in places.values() for name in names]
    builds: dict[str, Build] = {}
    with files.scratch_folder("falaj-restore", None if only_shared else aside) as scratch:
        for sha256, path in _brought(source, backup, scratch, chosen):
            for name in places[sha256]:
                if name in databases:
                    counts = load(name, path, databases[name], prepare)
                    say(f"{name}: {sum(n for n, _ in counts.values())} rows, compared")
                    continue
                if name in local and not only_shared:
                    _place(path, aside, name, backup.files[name])
                if shared is not None and name.split("/")[0] not in state.PRIVATE:
                    _share(shared, name, path, backup.files[name], builds, backup.made)
    if shared is not None:
        for name, build in builds.items():
            shared.create(name, build.model_dump_json().encode())
        _share_links(shared, backup)
    if not only_shared:
        _move_in(settings, backup, local)
    say(f"{len(chosen)} files, {backup.num_bytes} bytes, each with its digest")


def check_empty(settings: Settings, going_on: str | None = None) -> None:
    """See that nothing would be overwritten.

    Raises:
        ConfigurationError: a folder, location or database holds state.
    """
    marker = settings.home / RESTORING / ".backup"
    if going_on is not None and marker.exists() and marker.read_text() == going_on:
        return
    for wanted in range(state.BUILDS + 1):
        for name, seen in state.contents(settings, wanted):
            where = seen.location.url if isinstance(seen, state.Shared) else settings.home
            raise ConfigurationError(
                f"{where} holds state already, such as {name}; expected an empty one. Nothing was "
                "changed; name another with --home, or move this one away"
            )
    if not is_empty(settings):
        raise ConfigurationError(
            "the database of FALAJ_DATABASE_URL holds rows already; expected an empty one. "
            "Nothing was changed; name another one"
        )


def _place(path: Path, aside: Path, name: str, kept: Kept) -> None:
    target, fixed = aside / name, state.order(name) == state.BUILDS
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target.unlink(missing_ok=True)
    # Months of feature tables that are the same in several versions take space once.
    (os.link if fixed else shutil.copyfile)(path, target)
    target.chmod(kept.mode)
    if kept.changed:
        os.utime(target, (kept.changed, kept.changed))


def _share(
    shared: Location, name: str, path: Path, kept: Kept, builds: dict[str, Build], made: datetime
) -> None:
    if (found := state.build_of(name)) is None:
        shared.write(name, path)
        return
    build = builds.setdefault(found[0], Build(value={}, files={}, finished=made))
    if found[1] == VALUE:
        build.value.update(json.loads(path.read_text()))
    else:
        build.files[found[1]] = shared.send_content(path)


def _share_links(shared: Location, backup: Backup) -> None:
    for name, kept in backup.files.items():
        for link, file in state.LINKS.items():
            pointer = str(PurePosixPath(name).with_name(file))
            if kept.link and name.endswith(link) and pointer not in backup.files:
                parts = PurePosixPath(kept.link).parts
                shared.write(pointer, (parts[-2] if "features" in parts else parts[-1]).encode())


def _move_in(settings: Settings, backup: Backup, names: set[str]) -> None:
    """Rename what came into place; databases last, since nothing begins without them."""
    for name in sorted(names, key=lambda n: (state.order(n) == state.DATABASES, n)):
        kept, target = backup.files[name], settings.home / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if kept.link:
            target.unlink(missing_ok=True)
            target.symlink_to(kept.link)
        elif (settings.home / RESTORING / name).exists():  # else it was moved before
            (settings.home / RESTORING / name).replace(target)
    shutil.rmtree(settings.home / RESTORING, ignore_errors=True)
