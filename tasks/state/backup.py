"""Backups: the whole state at one moment, by content; and the way back, into any place or store.

What names something is read before it, and everything is written before what names it. So a backup
that is made while the loop runs names nothing that it lacks. Its list is written last: a backup is
whole, or it is not there. What a cut-off one has sent, the next one does not send again.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from itertools import count
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ValidationError

from tasks.governance import signing
from tasks.governance.erasure import FOLDER
from tasks.kernel import files
from tasks.kernel.errors import ArtifactError, ConfigurationError, TransientError
from tasks.kernel.keys.choice import TRUSTED, trusted_keys
from tasks.kernel.keys.store import MODELS
from tasks.kernel.location import OBJECTS, Location, object_name
from tasks.kernel.settings import VALUE, Build, Settings
from tasks.kernel.tenants import has_tenants
from tasks.metadata.database import held_everywhere
from tasks.metadata.identity import FILE, check_tenant
from tasks.state import contents as state
from tasks.state import databases as db

LOCK = f"{state.BACKUPS}.lock"
KILLED_AFTER_S = {"backup": 86_400, "prune": 3600}
"""Without a sign. A backup gives none while it sends one file, which may take hours."""
SIGN_EVERY_S = 60
NUM_THREADS, LISTINGS = 8, 10
SETTLED_S = 10
"""A file is read again that changed so shortly before the last backup: it may have changed since
within one tick of its clock."""
SIGNED = re.compile(r"mlflow/artifacts/.+/artifacts/model/(model|variants)\.json")
"""Files of models that are signed."""
Say = Callable[[str], None]
Sign = Callable[..., None]


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
    state: str = ""
    """Whose it is, as `name_of_state` says."""

    @property
    def name(self) -> str:
        """As commands name it."""
        return f"{self.made:%Y%m%dT%H%M%S.%fZ}-{self.state}".removesuffix("-")

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(kept.num_bytes for kept in self.files.values())


@contextmanager
def under_way(location: Location, kind: str) -> Iterator[Sign]:
    """Keep prunes of a location out while a backup is made there, and everybody during a prune.

    A place of backups may have no database with locks, so each writes its name and a moment into
    one object there, again and again. One that was killed does not, and counts no more after a
    while. One that was taken for killed finds its name gone before it relies on anything.

    Yields:
        What gives a sign where one is due; to be called before each step, and with `True` before
        what must be sure.

    Raises:
        TransientError: others are at work, or took this one for killed; also when a sign is given.
    """
    me, due = f"{kind} of {os.uname().nodename}, {os.urandom(4).hex()}", 0.0

    def noted(old: bytes | None, *, stays: bool = True) -> bytes:
        now, there = time.time(), json.loads(old or b"{}")
        there = {n: at for n, at in there.items() if now - at < KILLED_AFTER_S[n.split()[0]]}
        mine = there.pop(me, None)
        other = next((n for n in there if "prune" in (kind, n.split()[0])), None)
        if stays and (other or (due and not mine)):
            raise TransientError(
                f"{location.url}: a {other or 'prune'} is under way or was, expected none beside "
                f"this {kind}, which ended; what it did is whole. Run it again after the other; "
                f"after one that was killed, wait an hour (a day: a backup) or remove {LOCK} there"
            )
        return json.dumps({**there, me: now} if stays else there).encode()

    def sign(now: bool = False) -> None:
        nonlocal due
        if now or time.monotonic() >= due:
            location.change(LOCK, noted)
            due = time.monotonic() + SIGN_EVERY_S

    sign(True)
    try:
        yield sign
    finally:
        location.change(LOCK, lambda old: noted(old, stays=False))


def list_backups(location: Location, of: str | None = None) -> list[str]:
    """Names of the backups of a location, oldest first.

    Args:
        of: only those of this state, and those that do not say whose they are.
    """
    names = sorted(PurePosixPath(name).stem for name in location.entries(state.BACKUPS))
    return [name for name in names if of is None or name.partition("-")[2] in ("", of)]


def read_backup(location: Location, name: str | None = None, of: str | None = None) -> Backup:
    """A backup by its name; the newest where it is None.

    Args:
        of: as of `list_backups`.

    Raises:
        ConfigurationError: there is none, or several states have some and none is named.
        ArtifactError: its list was changed.
    """
    names = list_backups(location, of if name is None else None)
    if of is name is None and len({n.partition("-")[2] for n in names} - {""}) > 1:
        raise ConfigurationError(
            f"{location.url} has backups of several states; name one: --backup. Nothing was done"
        )
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
    prepare: Mapping[str, db.Prepare],
    say: Say,
    *,
    secrets: bool = False,
) -> Backup:
    """Bring all that a state holds into a location, and name it there.

    Raises:
        ConfigurationError: the state holds nothing.
        TransientError, StorageError: one of the stores or databases does not answer, or refuses;
            or a prune removes content of the target.
    """
    _check_filled(settings)
    last, made, name = None, datetime.now(UTC), db.name_of_state(settings)
    with (
        under_way(target, "backup") as sign,
        files.scratch_folder("falaj-backup") as scratch,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        with suppress(ConfigurationError, ArtifactError):  # there is none, or its list is damaged
            last = read_backup(target, of=name)
            made = max(made, last.made + timedelta.resolution)  # the clock of another may be ahead
        backup = Backup(made=made, release=version("falaj"), secrets=secrets, files={}, state=name)
        sender = _Sender(target, last, scratch, sign)
        for wanted in range(state.BUILDS + 1):
            # What operation names is in MLflow's database, so that is read later.
            backwards = wanted == state.DATABASES
            for _ in range(LISTINGS):  # what was removed meanwhile may be in another file now
                found = dict(state.contents(settings, wanted, secrets=secrets))
                for name, url in db.servers(settings).items() if backwards else ():
                    found[name] = copy = scratch / PurePosixPath(name).name
                    db.dump(name, url, copy, prepare)
                lacking = sorted(found.keys() - backup.files.keys(), reverse=backwards)
                with ExitStack() as held:
                    for folder in {(settings.home / n).parent for n in found if "audit/" in n}:
                        # Its head and its lines belong together.
                        held.enter_context(held_everywhere(folder / "lock", shared=True))
                    sources = [found[name] for name in lacking]
                    sent = (map if backwards else pool.map)(sender.send, lacking, sources)
                    backup.files |= {n: k for n, k in zip(lacking, sent, strict=True) if k}
                if found.keys() <= backup.files.keys():
                    break
            else:
                raise TransientError(
                    f"{settings.home}/{min({*found} - {*backup.files})} is listed but absent; if "
                    "it is a link, mount where it leads to. No backup was made; run again"
                )
            say(f"{len(backup.files)} files, {sender.num_sent} bytes sent")
        sign(True)
        target.create(f"{state.BACKUPS}/{backup.name}.json", backup.model_dump_json().encode())
    return backup


def _check_filled(settings: Settings) -> None:
    place, known = settings.location, settings.home / FILE
    # Where this machine has worked on a location, that has a name.
    lost = place and place.read(FILE) is None and known.exists() and " of " in known.read_text()
    shared = (n for n, _ in _held(settings) if not state.LOCAL & {*n.split("/")})
    if lost or (next(shared, None) is None and db.is_empty(settings)):
        raise ConfigurationError(
            f"{place or settings.home} holds no state; expected one. Is its disk mounted, and its "
            "name right (--home, project, FALAJ_STATE)? No backup was made"
        )


class _Sender:
    """Sends the content of files that a location lacks."""

    def __init__(self, target: Location, last: Backup | None, scratch: Path, sign: Sign) -> None:
        self.target, self.num_sent, self.sign = target, 0, sign
        self.last = last.files if last else {}
        self.settled = last.made.timestamp() - SETTLED_S if last else 0
        self.there = {name: e.num_bytes for name, e in target.entries(OBJECTS).items()}
        self.scratch, self.numbers = scratch, count()

    def send(self, name: str, source: state.Source) -> Kept | None:
        """None where the file was removed meanwhile."""
        self.sign()
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
        database = not fixed and db.is_sqlite(path)  # what changed may be in a file beside it
        known = self._known(name, seen.st_size, seen.st_mtime, seen.st_ctime, fixed=fixed)
        if known and not database:
            return known.model_copy(update={"mode": seen.st_mode & 0o777})
        if database:
            db.copy_sqlite(path, aside)
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
    """Read all content of a backup, and compare it with its digests and signatures.

    Raises:
        ArtifactError: some of it is absent or was changed.
        SignatureError: see `check_signatures`.
    """
    check_signatures(location, backup)
    with files.scratch_folder("falaj-verify") as scratch:
        for _ in _brought(location, backup, scratch):
            pass


def _brought(location: Location, backup: Backup, folder: Path) -> Iterator[tuple[list[str], Path]]:
    """Bring content, each once and checked; it is removed when the next is asked for."""

    def fault(sha256: str) -> ArtifactError:
        return ArtifactError(
            f"{location.url}/{object_name(sha256)}, the content of {found[sha256][0]}, is absent, "
            f"changed or damaged; expected it for {backup.name}. Remove it, run `falaj backup` "
            "where the state still is, and this again; or use another backup, for an empty place"
        )

    def bring(sha256: str) -> tuple[list[str], Path]:
        try:
            location.bring(object_name(sha256), folder / sha256, sha256=sha256)
        except (FileNotFoundError, ArtifactError) as exc:
            raise fault(sha256) from exc
        return found[sha256], folder / sha256

    found: dict[str, list[str]] = {}
    for name in (name for name, kept in backup.files.items() if not kept.link):
        found.setdefault(backup.files[name].sha256, []).append(name)
    wanted, there = [*found], location.entries(OBJECTS)
    for sha256, (name, *_) in found.items():  # before anything gets its name
        if not (e := there.get(object_name(sha256))) or e.num_bytes != backup.files[name].num_bytes:
            raise fault(sha256)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for first in range(0, len(wanted), NUM_THREADS):  # no more than these take space twice
            for names, path in pool.map(bring, wanted[first : first + NUM_THREADS]):
                yield names, path
                path.unlink()


def check_signatures(source: Location, backup: Backup) -> None:
    """See that keys of `FALAJ_TRUSTED_KEYS` signed the models of a backup, before any is used.

    Without that folder nothing is asked here: the only keys would be those of the backup itself.
    Models are asked about again whenever they are loaded.

    Raises:
        SignatureError: one is not signed, is of other content, or by no key that is trusted.
    """
    if not os.environ.get(TRUSTED):
        return
    trusted, found = trusted_keys(Path(), MODELS), backup.files.items()
    for name, kept in ((name, kept) for name, kept in found if SIGNED.fullmatch(name)):
        bundle = backup.files.get(f"{name}{signing.END}", Kept())
        text = (source.read(object_name(bundle.sha256)) or b"").decode(errors="replace")
        subject, file = signing.subject_in(text), PurePosixPath(name)
        subject = subject if subject.endswith(f"/{file.parts[-4]}") else name  # of the run
        signing.verify(trusted, subject, text, {file.name: kept.sha256})


def restore(
    settings: Settings,
    source: Location,
    backup: Backup,
    prepare: Mapping[str, db.Prepare],
    say: Say,
    *,
    only_shared: bool = False,
    then: Callable[[Path], None] = lambda _: None,
) -> None:
    """Bring a backup into an empty state: folder, location and databases as the settings say.

    Content is checked while it comes, and is renamed into place when all of it is there. A restore
    that was cut off goes on.

    Args:
        only_shared: what each machine has for itself is left as it is.
        then: called when all is in place, with a folder for its files, before the state is used.

    Raises:
        ConfigurationError: the state is not empty, or the backup is another tenant's.
        ArtifactError: content is absent, or was changed.
        SignatureError: see `check_signatures`. Nothing was restored.
    """
    aside, mark = settings.home / state.RESTORING, settings.home / state.RESTORING / ".backup"
    if backup.state and has_tenants(settings.home):
        check_tenant(settings.home, backup.state, f"{backup.name} of {source.url}")
    if not only_shared:
        goes_on = mark.exists() and mark.read_text() == backup.name
        check_empty(settings, backup.files if goes_on else None)
        check_signatures(source, backup)
        files.private_folder(settings.home)
        files.private_folder(aside)
        mark.write_text(backup.name)
    shared, databases = settings.location, db.servers(settings)
    local = {n for n in backup.files if shared is None or state.LOCAL & {*n.split("/")}}
    local -= databases.keys()
    builds: dict[str, Build] = {}
    with files.scratch_folder("falaj-restore", None if only_shared else aside) as scratch:
        for names, path in _brought(source, backup, scratch):
            for name in names:
                if name in databases:
                    counts = db.load(name, path, databases[name], prepare)
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
        then(aside)
        shutil.rmtree(aside, ignore_errors=True)
    say(f"{len(backup.files)} files, {backup.num_bytes} bytes, each with its digest")


def check_empty(settings: Settings, brought: Mapping[str, Kept] | None = None) -> None:
    """See that nothing would be overwritten.

    Args:
        brought: what a restore that was cut off may have put there.

    Raises:
        ConfigurationError: a folder, location or database holds state.
    """
    for name, seen in _held(settings):
        if brought is None or not _is_brought(name, seen, brought.get(name)):
            where = seen.location.url if isinstance(seen, state.Shared) else settings.home
            raise ConfigurationError(
                f"{where} holds state already, such as {name}; expected an empty one. Nothing was "
                "changed; name another with --home, or move this one away"
            )
    if brought is None and not db.is_empty(settings):
        raise ConfigurationError(
            "the database of FALAJ_DATABASE_URL holds rows already; expected an empty one. "
            "Nothing was changed; name another one"
        )


def _held(settings: Settings) -> Iterator[tuple[str, state.Source]]:
    """What a restore would write over; the list of erased entities it adds to."""
    for wanted in range(state.BUILDS + 1):
        found = state.contents(settings, wanted)
        yield from (each for each in found if not each[0].startswith(f"{FOLDER}/"))


def _is_brought(name: str, at: state.Source, was: Kept | None) -> bool:
    if was is None or not isinstance(at, Path):  # a location has files where a folder has links
        return was is not None or PurePosixPath(name).name in state.LINKS.values()
    return state.link_of(at, name) == was.link if was.link else files.digest_of(at) == was.sha256


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
        elif (settings.home / state.RESTORING / name).exists():  # else it was moved before
            (settings.home / state.RESTORING / name).replace(target)
